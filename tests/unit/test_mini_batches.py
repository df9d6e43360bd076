"""Several updates by one batch: against the formulas in float64, refused, and how prompts are dealt."""

import itertools
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from prime_hpc.config import ConfigError, Experiment
from prime_hpc.config.sections.parallel import ParallelDims
from prime_hpc.config.sections.sampling import SamplingConfig
from prime_hpc.config.sections.trainer import KLConfig
from prime_hpc.config.sources.load import load_experiment
from prime_hpc.orchestrator.batching.batch_builder import TrainSample, build_ranks, deal_mini_batches
from prime_hpc.store.batch.rank_batch import RankBatch
from prime_hpc.trainer.batching.mini_batches import metrics_of_updates, mini_batches
from prime_hpc.trainer.model.load_policy import load_policy
from prime_hpc.trainer.objectives import loss_of
from prime_hpc.trainer.objectives.kl import KLCoefficient
from prime_hpc.trainer.parallel import build_parallel
from prime_hpc.trainer.parallel.tensor import local
from prime_hpc.trainer.train_step import MismatchError, NonFiniteError, TrainStep
from prime_hpc.trainer.trainer import Base, build_train_step
from tests.proofs.reference_ppo import Ppo, Sample, logprobs_of, train
from tests.support.episodes import make_result
from tests.support.tiny_model import make_tiny_model
from tests.unit.test_critic import batch_of, experiment_of
from tests.unit.test_reward_model import published

CPU = torch.device("cpu")
MICROS, DEALT = [[0, 1], [2], [3], [4, 5]], [0, 0, 1, 0, 1, 1]
OPTIM = {"optim": {"lr": 2e-3, "eps": 1e-3, "weight_decay": 0.0, "max_norm": 0.5}}


@dataclass(frozen=True)
class Case:
    """A config, and what it is to the reference."""

    trainer: dict[str, Any]
    ppo: Ppo
    critic: dict[str, Any] | None = None


CASES = {
    "mini-batches and epochs": Case(
        {"num_mini_batches": 2, "epochs_per_batch": 3, "loss": {"type": "ppo_clip"}}, Ppo(3, 0.2, 2e-3, 0.5)
    ),
    "a ratio to the policy of before": Case(
        {
            "num_mini_batches": 2,
            "epochs_per_batch": 3,
            "loss": {"type": "ppo_clip", "correction": {"type": "truncate", "high": 1.05}},
        },
        Ppo(3, 0.2, 2e-3, 0.5, truncate=1.05),
    ),
    "weights whose mean over the batch is 1": Case(
        {
            "num_mini_batches": 2,
            "epochs_per_batch": 2,
            "loss": {"type": "ppo_clip", "correction": {"high": 0.97, "batch_normalize": True}},
        },
        Ppo(2, 0.2, 2e-3, 0.5, truncate=0.97, normalized="token"),
    ),
    "weights of sequences whose mean over the batch is 1": Case(
        {
            "num_mini_batches": 2,
            "epochs_per_batch": 2,
            "loss": {"type": "ppo_clip", "correction": {"level": "sequence", "high": 1.1, "batch_normalize": True}},
        },
        Ppo(2, 0.2, 2e-3, 0.5, truncate=1.1, normalized="sequence"),
    ),
    "a KL in the loss": Case(
        {"num_mini_batches": 2, "epochs_per_batch": 2, "loss": {"type": "ppo_clip", "kl": {"coef": 0.3}}},
        Ppo(2, 0.2, 2e-3, 0.5, kl_loss=0.3),
    ),
    "a critic and a KL in the rewards": Case(
        {
            "num_mini_batches": 2,
            "epochs_per_batch": 3,
            "loss": {"type": "ppo_clip", "kl": {"coef": 0.2, "estimator": "k1", "in_rewards": True}},
        },
        Ppo(3, 0.2, 2e-3, 0.5, kl_rewards=0.2, gamma=0.98, lam=0.9, critic_lr=2e-2, value_clip=0.05),
        {"gamma": 0.98, "lam": 0.9, "lr": 2e-2, "value_clip": 0.05},
    ),
}


def built(experiment: Experiment) -> TrainStep:
    """The step of a run; a critic's head drawn at random."""
    source = Path(experiment.model.name)
    parallel = build_parallel(ParallelDims(), "cpu")
    policy = load_policy(experiment.model, source, parallel, CPU, reshard_after_forward=True, chunk_tokens=64)
    none: Any = None
    step = build_train_step(Base(policy, source, CPU, 1.0, none, none), experiment)
    if step.critic is not None:
        head = local(step.critic.policy.hf.score.weight)
        with torch.no_grad():
            head.copy_(torch.randn(head.shape, generator=torch.Generator().manual_seed(3)))
    return step


def config_of(case: Case, source: Path, **changes: Any) -> Experiment:
    experiment = experiment_of(source, case.critic, trainer=OPTIM | case.trainer | changes)
    if case.critic is None:
        trainer = experiment.trainer.model_copy(update={"critic": None})
        experiment = experiment.model_copy(update={"trainer": trainer})
    return experiment


def weights_of(step: Any) -> dict[str, torch.Tensor]:
    return {name: p.full_tensor().clone() for name, p in step.policy.hf.named_parameters()}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The policy's, and another one, the reference."""
    other = make_tiny_model(tmp_path_factory.mktemp("reference"))
    hf = AutoModelForCausalLM.from_pretrained(other, dtype=torch.float32)
    with torch.no_grad():
        for p in hf.parameters():
            p.add_(0.05 * torch.randn(p.shape, generator=torch.Generator().manual_seed(1)))
    hf.save_pretrained(other)
    return make_tiny_model(tmp_path_factory.mktemp("model")), other


def scripted(policy: Any) -> RankBatch:
    """Six samples in two mini-batches, sampled by a policy near this one."""
    batch = replace(batch_of(MICROS), mini_batches=np.array(DEALT, np.int32))
    logprobs, rng = np.zeros(batch.num_tokens, np.float32), np.random.default_rng(2)
    for sample, own in samples_of(batch):
        with torch.no_grad():
            found = logprobs_of(policy, sample).numpy()
        logprobs[own.start + sample.at.numpy()] = found + rng.normal(0, 0.1, len(found))
    return replace(batch, logprobs=logprobs)


def samples_of(batch: RankBatch) -> list[tuple[Sample, slice]]:
    found = []
    for i, number in enumerate(batch.values("mini_batches").tolist()):
        own = slice(*batch.seq_offsets[i : i + 2].tolist())
        at = np.flatnonzero(batch.target_mask()[own])
        mu, gains = (
            torch.from_numpy(array[own][at].astype(np.float64)) for array in (batch.logprobs, batch.advantages)
        )
        ids = torch.from_numpy(batch.token_ids[own].astype(np.int64))
        found.append((Sample(ids, torch.from_numpy(at), mu, gains, number), own))
    return found


def moved(step: Any, before: dict[str, torch.Tensor], hf: Any) -> float:
    """Greatest error of a weight, relative to how far those of its tensor have moved."""
    after, theirs = weights_of(step), dict(hf.named_parameters())
    names = [name for name in after if (after[name] != before[name]).any()]
    assert len(names) == len(after)
    return max(
        float((after[name] - theirs[name]).detach().abs().max() / (after[name] - before[name]).abs().max())
        for name in names
    )


@pytest.mark.parametrize("name", CASES)
def test_updates_are_those_of_the_formulas(group: None, tmp_path: Path, models: tuple[Path, Path], name: str) -> None:
    case, (source, other) = CASES[name], models
    loss = case.trainer["loss"]
    loss = loss | ({"kl": loss["kl"] | {"model": str(other)}} if "kl" in loss else {})
    experiment = config_of(case, source, loss=loss)
    step = built(experiment)
    policy, reference = (AutoModelForCausalLM.from_pretrained(f, dtype=torch.float64).eval() for f in (source, other))
    critic = None
    if step.critic is not None:
        folder = published(step.critic.policy, source, tmp_path / "run")
        critic = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float64).eval()
    batch, before = scripted(policy), weights_of(step)
    before_critic = None if step.critic is None else weights_of(step.critic)
    metrics = step.run(1, batch, loss_of(experiment))
    losses, clipped = train(
        case.ppo, policy, [s for s, _ in samples_of(batch)], reference if "kl" in loss else None, critic
    )
    assert metrics["num_updates"] == len(losses) > 1 and metrics["num_targets"] == int(batch.target_mask().sum())
    assert metrics["loss"] == pytest.approx(np.mean(losses), rel=1e-3, abs=1e-5)
    assert metrics["clipped"] == pytest.approx(clipped, abs=0.02) and 0.02 < clipped < 0.9
    assert metrics["kl_last"] > metrics["kl"]
    assert moved(step, before, policy) < 0.01
    if step.critic is not None and before_critic is not None:
        assert moved(step.critic, before_critic, critic) < 0.01
        assert metrics["kl_coef"] == 0.2 and metrics["kl_penalty"] != 0


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
def test_in_one_update_a_batch_weights_are_divided_by_their_mean(
    group: None, models: tuple[Path, Path], level: str
) -> None:
    """The objective is linear in them, so its gradient is as many times smaller without."""
    correction = {"level": level, "type": "mask", "low": 0.95, "high": 1.02}
    plain, divided = (
        config_of(
            Case({"loss": {"type": "reinforce", "correction": correction | more}}, Ppo(1, 0.2, 2e-3, 0.5)), models[0]
        )
        for more in ({}, {"batch_normalize": True})
    )
    policy = AutoModelForCausalLM.from_pretrained(models[0], dtype=torch.float64).eval()
    batch = scripted(policy)
    with torch.no_grad():
        ratios = [(logprobs_of(policy, s) - s.mu).exp().numpy() for s, _ in samples_of(batch)]
    if level != "token":
        ratios = [np.array([r.prod() ** (1 if level == "sequence" else 1 / len(r))]) for r in ratios]
    every = np.concatenate(ratios)
    mean = float(np.where((every >= 0.95) & (every <= 1.02), every, 0).mean())
    first, second = (built(e).run(1, batch, loss_of(e)) for e in (plain, divided))
    assert 0 < mean < 0.9 and second["correction_mean"] == pytest.approx(mean, rel=1e-4)
    assert second["loss"] == pytest.approx(first["loss"] / mean, rel=1e-4)
    assert second["grad_norm"] == pytest.approx(first["grad_norm"] / mean, rel=1e-4)
    nothing = scripted(policy)
    nothing.logprobs[nothing.target_mask()] -= 5  # all are masked
    assert built(divided).run(1, nothing, loss_of(divided))["loss"] == 0


def test_an_update_that_is_refused_is_told_and_taken_up_again(
    group: None, models: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    experiment = config_of(CASES["mini-batches and epochs"], models[0])
    batch = scripted(AutoModelForCausalLM.from_pretrained(models[0], dtype=torch.float64).eval())
    whole, step, objective = built(experiment), built(experiment), loss_of(experiment)
    calls = itertools.count()

    def spoiled(micro: Any, logprobs: torch.Tensor, weights: torch.Tensor) -> Any:
        loss, stats = objective(micro, logprobs, weights)
        return (loss * float("nan") if next(calls) == 4 else loss), stats  # of two micro-batches an update

    with pytest.raises(NonFiniteError) as refused:
        step.run(1, batch, spoiled)
    assert refused.value.updates == 2 and refused.value.batch is batch
    assert all(p.grad is None for p in step.policy.parameters())
    whole.run(1, batch, objective)
    step.run(1, batch, objective, done=2)
    assert all(torch.equal(each, weights_of(whole)[name]) for name, each in weights_of(step).items())


def test_a_gradient_that_is_not_finite_is_told_by_the_parameter_nearest_to_the_loss(
    group: None, models: tuple[Path, Path]
) -> None:
    experiment = config_of(CASES["mini-batches and epochs"], models[0])
    step, batch = (
        built(experiment),
        scripted(AutoModelForCausalLM.from_pretrained(models[0], dtype=torch.float64).eval()),
    )
    layers = step.policy.hf.model.layers
    overflow = layers[0].mlp.down_proj.register_full_backward_hook(lambda module, into, out: (into[0] * torch.inf,))
    with pytest.raises(NonFiniteError, match=r"grad_norm = (nan|inf) \(not finite are the gradients of") as refused:
        step.run(1, batch, loss_of(experiment))
    overflow.remove()
    told = re.search(r"of (\d+) of (\d+) parameters; .* is (\S+)\)", str(refused.value))
    assert told is not None and told[3].endswith("layers.0.post_attention_layernorm.weight"), refused.value
    assert len(layers) > 1 and 0 < int(told[1]) < int(told[2]) == sum(1 for _ in step.policy.parameters())
    assert all(p.grad is None for p in step.policy.parameters())


def test_a_mini_batch_without_targets_is_no_update(group: None, models: tuple[Path, Path]) -> None:
    experiment = config_of(CASES["mini-batches and epochs"], models[0])
    step, batch = built(experiment), replace(batch_of(MICROS), mini_batches=np.array(DEALT, np.int32))
    mask = batch.loss_mask & np.repeat(np.array(DEALT) == 0, np.diff(batch.seq_offsets))
    metrics = step.run(1, replace(batch, loss_mask=mask), loss_of(experiment))
    assert metrics["num_updates"] == 3 and metrics["num_targets"] == int((mask & ~batch.first_tokens()).sum())
    before = weights_of(step)
    nothing = step.run(2, replace(batch, loss_mask=np.zeros_like(mask)), loss_of(experiment))
    assert nothing["num_updates"] == 0 and all(torch.equal(before[n], w) for n, w in weights_of(step).items())


def test_the_mismatch_is_that_of_the_first_update_that_has_targets(group: None, models: tuple[Path, Path]) -> None:
    loss = {"type": "ppo_clip", "mismatch": {"warn": 1e-9, "stop": 100.0}}
    experiment = config_of(CASES["mini-batches and epochs"], models[0], loss=loss)
    batch = scripted(AutoModelForCausalLM.from_pretrained(models[0], dtype=torch.float64).eval())
    late = replace(batch, loss_mask=batch.loss_mask & np.repeat(np.array(DEALT) == 1, np.diff(batch.seq_offsets)))
    step, objective = built(experiment), loss_of(experiment)
    metrics = step.run(1, late, objective)
    assert metrics["mismatch_alarm"] == 1 and metrics["num_updates"] == 3 and metrics["kl"] < metrics["kl_last"]
    far = replace(late, logprobs=late.logprobs - 8)
    before = weights_of(step)
    with pytest.raises(MismatchError, match="KL"):
        step.run(2, far, objective)
    assert all(torch.equal(before[name], after) for name, after in weights_of(step).items())


@pytest.mark.parametrize("number", [2, 3])
def test_divisors_are_the_steps_over_the_number_of_mini_batches(group: None, number: int) -> None:
    batch = replace(batch_of(MICROS), mini_batches=np.array(DEALT, np.int32), totals=np.array([90, 9]))
    parts = mini_batches(batch, number, CPU)
    assert [part.source for part in parts] == [[0, 2], [1, 3]] if number == 2 else [[0, 1], [2, 3]]
    assert all(
        part.batch.totals is not None and part.batch.totals.tolist() == [90 / number, 9 / number] for part in parts
    )


def test_figures_of_updates_count_a_batch_once() -> None:
    first = {"num_tokens": 10.0, "num_sequences": 1.0, "num_targets": 6.0, "shared_tokens": 0.0, "step_flops": 3.0}
    first |= {"loss": 1.0, "kl": 0.1, "clipped": 0.0, "ratio_max": 2.0, "reward": 1.0}
    second = first | {"num_targets": 2.0, "num_sequences": 3.0, "loss": 2.0, "kl": 0.5, "clipped": 0.4, "reward": 0.0}
    found = metrics_of_updates([first, second, first, second], 2)
    assert (found["num_tokens"], found["num_sequences"], found["num_targets"], found["step_flops"]) == (20, 4, 8, 12)
    assert (found["loss"], found["kl"], found["kl_last"], found["num_updates"]) == (1.5, 0.1, 0.5, 4)
    assert found["clipped"] == pytest.approx(0.1) and found["reward"] == pytest.approx(0.25)


def samples(num_prompts: int, size: int) -> list[TrainSample]:
    rng = np.random.default_rng(1)
    found = []
    for prompt, i in itertools.product(range(num_prompts), range(size)):
        sample = make_result([0] * int(rng.integers(4, 9))).samples[0]
        found.append(TrainSample(sample, np.zeros(sample.num_tokens, np.float32), 0.0, 64 * prompt + i, prompt, 0))
    return found


@pytest.mark.parametrize(("prompts", "size", "counts"), [(5, 4, [8, 12]), (1, 4, [2, 2])])
def test_prompts_are_dealt_whole_and_the_same_for_any_layout(prompts: int, size: int, counts: list[int]) -> None:
    drawn = samples(prompts, size)
    sampling, found = SamplingConfig(), []
    for num_ranks, budget, single in ((1, 64, False), (3, 24, False), (2, 48, True)):
        ranks = build_ranks(
            drawn, num_ranks=num_ranks, micro_batch_tokens=budget, sampling=sampling, single_rows=single,
            num_mini_batches=2, seed=(7, 3),
        )  # fmt: skip
        dealt: dict[int, int] = {}
        for rank in ranks:
            numbers = rank.values("mini_batches")
            for i in range(rank.num_micro_batches):
                assert len(set(numbers[rank.sequences_of(i)].tolist())) <= 1
            dealt |= dict(zip(rank.sample_ids.tolist(), numbers.tolist(), strict=True))
        found.append(dealt)
    assert found[0] == found[1] == found[2] and len(found[0]) == prompts * size
    assert sorted(np.bincount(list(found[0].values())).tolist()) == counts
    if prompts > 1:
        assert all(len({k for s, k in found[0].items() if s // 64 == p}) == 1 for p in range(prompts))
    others = [deal_mini_batches(drawn, 2, (7, step)).tolist() for step in range(8)]
    assert len({tuple(each) for each in others}) > 1


@pytest.mark.parametrize("number", [1, 2])
def test_no_samples_are_refused_and_an_empty_rank_has_an_update(group: None, number: int) -> None:
    with pytest.raises(ValueError, match="nothing to deal"):
        build_ranks([], num_ranks=2, micro_batch_tokens=64, sampling=SamplingConfig(), num_mini_batches=number)
    parts = mini_batches(RankBatch.empty(1), number, CPU)
    assert [part.batch.num_micro_batches for part in parts] == [1]


def test_the_weight_of_a_kl_in_the_rewards_is_controlled() -> None:
    kl = KLCoefficient(KLConfig(in_rewards=True, coef=0.5, target_kl=0.1, horizon=100))
    kl.observe(0.11, 10)
    assert kl.value == pytest.approx(0.5 * (1 + 0.1 * 10 / 100))
    kl.observe(5.0, 10)
    kl.observe(0.0, 10)
    assert kl.value == pytest.approx(0.5 * 1.01 * 1.02 * 0.98)
    fixed = KLCoefficient(KLConfig(in_rewards=True, coef=0.5))
    fixed.observe(5.0, 10)
    assert fixed.value == 0.5


@pytest.mark.parametrize(
    ("kl", "words"),
    [
        ({"coef": 0, "target_kl": 0.1}, r"kl.target_kl: a weight of 0 .* stays 0"),
        ({"target": "behaviour"}, r"kl.target: a policy that sampled"),
        ({"unbiased": True}, r"kl.unbiased: rewards are of the policy that sampled"),
    ],
)
def test_a_kl_that_can_be_in_no_rewards_is_refused(kl: dict[str, Any], words: str) -> None:
    flags = ["--orchestrator.env.0.id", "reverse-text", "--orchestrator.advantage.type", "gae"]
    flags += ["--trainer.critic.lr", "1e-5", "--trainer.loss.kl.in-rewards"]
    for key, value in kl.items():
        flags += [f"--trainer.loss.kl.{key}", str(value).lower()]
    with pytest.raises(ConfigError, match=words):
        load_experiment(flags, "rl", {})


def test_more_mini_batches_than_samples_are_refused() -> None:
    flags = ["--orchestrator.env.0.id", "reverse-text", "--orchestrator.batch-size", "8"]
    with pytest.raises(ConfigError, match=r"num_mini_batches: 9: a batch of 8 samples .* state fewer"):
        load_experiment(
            [*flags, "--orchestrator.rollouts-per-example", "4", "--trainer.num-mini-batches", "9"], "rl", {}
        )
