"""A critic beside the policy: advantages and gradients against the formulas in float64, refusals, what is kept."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForSequenceClassification

from prime_hpc.config import ConfigError, Experiment
from prime_hpc.config.sections.parallel import ParallelDims
from prime_hpc.config.sections.slurm import SiteConfig
from prime_hpc.config.sources.load import load_experiment
from prime_hpc.launch.checks import reward_models, trained_names
from prime_hpc.launch.lint.lint import lint
from prime_hpc.orchestrator.batching.batch_builder import zero_groups
from prime_hpc.runtime.failures import NodeError
from prime_hpc.store.batch.rank_batch import RankBatch
from prime_hpc.store.checkpoint.checkpoints import resolve_resume
from prime_hpc.store.run_paths import RunPaths
from prime_hpc.supervisor.attempt.resume import mismatches
from prime_hpc.trainer.batching.micro_batches import build_rank_batch
from prime_hpc.trainer.batching.mini_batches import mini_batches
from prime_hpc.trainer.critic import ActorCriticStep, load_critic
from prime_hpc.trainer.critic.gae import WHITEN_EPS
from prime_hpc.trainer.model.load_policy import load_policy
from prime_hpc.trainer.objectives import loss_of
from prime_hpc.trainer.optim import build_optimizer
from prime_hpc.trainer.parallel import build_parallel
from prime_hpc.trainer.parallel.tensor import local
from prime_hpc.trainer.train_step import NonFiniteError
from tests.proofs.reference_algorithms import gae
from tests.support.checkpoints import make_checkpoint
from tests.support.tiny_model import make_tiny_model
from tests.unit.test_reward_model import loaded, published

CPU = torch.device("cpu")


def experiment_of(source: Path, critic: dict[str, Any] | None = None, **changes: Any) -> Experiment:
    trainer = {"loss": {"type": "ppo_clip"}, "critic": critic or {}, "no_sync": False} | changes.pop("trainer", {})
    tree = {
        "max_steps": 9,
        "seq_len": 64,
        "model": {"name": str(source), "dtype": "float32"} | changes.pop("model", {}),
        "orchestrator": {"sampling": {"max_tokens": 16}, "advantage": {"type": "gae"}},
        "trainer": trainer,
    }
    return Experiment.model_validate(tree | changes)


def step_of(experiment: Experiment, *, head: int | None = 3) -> ActorCriticStep:
    """A step of both models, the critic with a head drawn from a seed; None: the one that it begins with."""
    source, config = Path(experiment.model.name), experiment.trainer
    policy = load_policy(
        experiment.model,
        source,
        build_parallel(ParallelDims(), "cpu"),
        CPU,
        reshard_after_forward=True,
        chunk_tokens=64,
    )
    critic = load_critic(experiment, policy, CPU)
    assert critic is not None
    if head is not None:
        with torch.no_grad():
            local(critic.policy.hf.score.weight).copy_(  # of one rank
                torch.randn(1, critic.policy.hf.config.hidden_size, generator=torch.Generator().manual_seed(head))
            )
    adapter = None
    if policy.adapters is not None:
        policy.adapters.reset(0, 0)
        adapter = policy.adapters.parameters(0)
    return ActorCriticStep(
        policy, build_optimizer(policy, config.optim, adapter), config, critic=critic, max_steps=9, normalize="token",
        device=CPU, peak_flops=1.0, row_tokens=40,
    )  # fmt: skip


def batch_of(micros: list[list[int]], *, echo: bool = False) -> RankBatch:
    """Six samples in pairs of one prompt, replies of one to three turns, with rewards on their way and at the end."""
    rng = np.random.default_rng(5)
    ids, masks, rewards, prompt = list[Any](), list[Any](), list[Any](), rng.integers(3, 90, 4)
    for i in range(6):
        prompt = prompt if i % 2 else rng.integers(3, 90, 4 + i)
        reply = rng.integers(3, 90, 5 + 2 * i)
        ids.append(np.concatenate([prompt, reply]).astype(np.int32))
        mask = np.arange(len(ids[-1])) >= len(prompt)
        mask[len(prompt) + 2 : len(prompt) + 2 + i] = False  # what a tool says
        masks.append(mask)
        rewards.append(np.where(mask, rng.standard_normal(len(mask)) * (rng.random(len(mask)) < 0.3), 0))
        rewards[-1][np.flatnonzero(mask)[-1]] = i - 2
    batch = build_rank_batch(micros, ids, masks)
    order = [i for micro in micros for i in micro]
    tokens = np.concatenate([rewards[i] for i in order]).astype(np.float32)
    batch = replace(batch, advantages=tokens, group_ids=np.array(order) // 2)
    if echo:
        batch = replace(batch, ce_weights=np.where(batch.loss_mask, 0, 0.5).astype(np.float32))
    return batch


@pytest.mark.parametrize("layout", ["packed", "packed, no shared prompt", "a row a sample", "with words to predict"])
def test_advantages_and_gradients_are_those_of_the_formulas(group: None, tmp_path: Path, layout: str) -> None:
    source = make_tiny_model(tmp_path / "model")
    critic = {"gamma": 0.98, "lam": 0.9, "critic_lam": 0.7}
    experiment = experiment_of(source, critic, trainer={"share_prefixes": layout == "packed"})
    step, config = step_of(experiment), experiment.trainer.critic
    assert config is not None
    step.policy.single_rows = step.critic.policy.single_rows = layout == "a row a sample"
    hf = AutoModelForSequenceClassification.from_pretrained(
        published(step.critic.policy, source, tmp_path / "run"), dtype=torch.float64
    ).eval()
    batch = batch_of([[0, 1, 2], [3, 4, 5]], echo=layout == "with words to predict")
    expected, losses = [], []
    for i in range(6):
        own = slice(*batch.seq_offsets[i : i + 2])
        ids, at = torch.from_numpy(batch.token_ids[own].astype(np.int64)), np.flatnonzero(batch.loss_mask[own])
        values = (hf.model(ids[None]).last_hidden_state[0] @ hf.score.weight[0])[at - 1]
        rewards = batch.advantages[own][at].tolist()
        advantages, returns = gae(values.tolist(), rewards, config.gamma, config.lam, config.critic_lam, None)
        expected.append(advantages)
        losses.append((values - torch.tensor(returns, dtype=torch.float64)).square() / 2)
    loss = torch.cat(losses).mean()
    loss.backward()
    every = np.concatenate(expected)
    whitened = (every - every.mean()) / np.sqrt(every.var() + WHITEN_EPS)

    laid_out = step.lay_out(batch)
    change = step._changes(1, laid_out)
    assert change is not None
    found = []
    for i in range(laid_out.num_micro_batches):
        micro = change(i, step.micro_batch(laid_out, i))
        found.append(micro.advantages if micro.trained is None else micro.advantages[micro.trained])
        assert micro.trained is None or int((micro.advantages != 0).sum()) <= len(micro.trained)
    np.testing.assert_allclose(np.sort(torch.cat(found).numpy()), np.sort(whitened), rtol=1e-3, atol=1e-4)
    if layout != "a row a sample":  # where samples are dealt out anew
        np.testing.assert_allclose(torch.cat(found).numpy(), whitened, rtol=1e-3, atol=1e-4)
    (part,) = mini_batches(laid_out, 1, CPU)
    learned = step.critic.learn(1, part, step._found)
    assert learned["loss"] == pytest.approx(float(loss.detach()), rel=1e-4)
    assert (learned["shared_tokens"] > 0) == (layout == "packed")  # prompts that are computed once
    theirs = dict(hf.named_parameters())
    mine: dict[str, Any] = {n: p.grad.full_tensor().double() for n, p in step.critic.policy.hf.named_parameters()}
    assert mine.keys() == theirs.keys() and mine["score.weight"].abs().sum() > 0
    for name, grad in mine.items():
        torch.testing.assert_close(grad, theirs[name].grad, rtol=2e-3, atol=2e-5)


def weights_of(step: Any) -> dict[str, torch.Tensor]:
    return {name: p.full_tensor().clone() for name, p in step.policy.hf.named_parameters()}


@pytest.mark.parametrize("whose", ["the policy", "the critic"])
def test_a_step_that_is_refused_changes_neither_model(group: None, tmp_path: Path, whose: str) -> None:
    step = step_of(experiment := experiment_of(make_tiny_model(tmp_path / "model")))
    batch = batch_of([[0, 1, 2, 3, 4, 5]])
    rewards, logprobs, last = batch.advantages.copy(), batch.logprobs.copy(), np.flatnonzero(batch.loss_mask)[-1]
    if whose == "the critic":
        rewards[last] = 1e30  # whitened it is a number like others, its square is none
    else:
        logprobs[last] = np.nan
    before = weights_of(step), weights_of(step.critic)
    words = (
        r"the critic's loss = inf.*trainer\.critic\.lr"
        if whose == "the critic"
        else r"1: loss = nan.*trainer\.optim\.lr"
    )
    with pytest.raises(NonFiniteError, match=words):
        step.run(1, replace(batch, advantages=rewards, logprobs=logprobs), loss_of(experiment))
    for old, new in zip(before, (weights_of(step), weights_of(step.critic)), strict=True):
        assert all(torch.equal(old[name], new[name]) for name in old)
    assert all(p.grad is None for each in (step, step.critic) for p in each.policy.parameters())


def test_a_batch_without_a_target_changes_neither_model(group: None, tmp_path: Path) -> None:
    step = step_of(experiment := experiment_of(make_tiny_model(tmp_path / "model")))
    batch, before = batch_of([[0, 1], [2, 3, 4, 5]]), (weights_of(step), weights_of(step.critic))
    nothing = replace(batch, loss_mask=np.zeros_like(batch.loss_mask))
    metrics = step.run(1, nothing, loss_of(experiment))
    assert metrics["critic/loss"] == metrics["critic/return"] == metrics["critic/explained_variance"] == 0
    for old, new in zip(before, (weights_of(step), weights_of(step.critic)), strict=True):
        assert all(torch.equal(old[name], new[name]) for name in old)


def test_a_batch_of_words_to_predict_leaves_the_critic_as_it_is(group: None, tmp_path: Path) -> None:
    optim = {"optim": {"lr": 1e-2}}
    step = step_of(experiment := experiment_of(make_tiny_model(tmp_path / "model"), {"lr": 1e-2}, trainer=optim))
    batch, objective = batch_of([[0, 1], [2, 3, 4, 5]], echo=True), loss_of(experiment)
    step.run(1, batch, objective)  # from now on its optimizer has momentum
    policy, critic = weights_of(step), weights_of(step.critic)
    step.run(2, replace(batch, loss_mask=np.zeros_like(batch.loss_mask)), objective)
    assert all(torch.equal(old, weights_of(step.critic)[name]) for name, old in critic.items())
    assert any(not torch.equal(old, weights_of(step)[name]) for name, old in policy.items())


def test_an_adapter_trains_beside_a_whole_critic_in_half_precision(group: None, tmp_path: Path) -> None:
    model = {"dtype": "bfloat16", "lora": {"rank": 4}}
    optim = {"optim": {"lr": 1e-2}}
    step = step_of(
        experiment := experiment_of(make_tiny_model(tmp_path / "model"), {"lr": 1e-2}, model=model, trainer=optim)
    )
    assert step.policy.adapters is not None and step.critic.policy.adapters is None
    before, objective = weights_of(step.critic), loss_of(experiment)
    rows = [step.run(number, batch_of([[0, 1], [2, 3, 4, 5]]), objective) for number in range(1, 9)]
    after = weights_of(step.critic)
    assert all(not torch.equal(before[name], after[name]) for name in before)
    assert rows[-1]["critic/loss"] < 0.8 * rows[0]["critic/loss"] and rows[0]["grad_norm"] > 0
    assert rows[-1]["critic/explained_variance"] > 0.5  # of the same batch


def test_a_new_head_says_nothing_and_a_reward_models_is_kept(group: None, tmp_path: Path) -> None:
    source = make_tiny_model(tmp_path / "model")
    fresh = step_of(experiment_of(source), head=None)
    assert not fresh.critic.policy.hf.score.weight.full_tensor().any()
    reward = loaded(source, 7)
    folder = published(reward, source, tmp_path / "run")
    experiment = experiment_of(source, {"name": str(folder)})
    kept = step_of(experiment, head=None)
    assert torch.equal(kept.critic.policy.hf.score.weight.full_tensor(), reward.hf.score.weight.full_tensor())
    assert trained_names(experiment)["trainer.critic.name"] == str(folder) and not list(reward_models(experiment))


def test_a_critic_of_another_vocabulary_is_refused(group: None, tmp_path: Path) -> None:
    source, other = make_tiny_model(tmp_path / "model"), make_tiny_model(tmp_path / "other")
    hf = AutoModelForSequenceClassification.from_pretrained(other, num_labels=1)
    hf.resize_token_embeddings(400)
    hf.save_pretrained(other)
    with pytest.raises(ConfigError, match=r"trainer\.critic\.name: .* has 400 tokens, the policy has 341"):
        step_of(experiment_of(source, {"name": str(other)}), head=None)


def test_a_critic_that_cannot_be_loaded_is_named_by_its_key(group: None, tmp_path: Path) -> None:
    source, bare = make_tiny_model(tmp_path / "model"), make_tiny_model(tmp_path / "bare")
    for file in bare.glob("tokenizer*"):
        file.unlink()
    for name, words in ((bare, "no tokenizer"), (tmp_path / "gone", "no such directory")):
        with pytest.raises((ValueError, NodeError), match=f"trainer.critic.name = {name}: {words}"):
            step_of(experiment_of(source, {"name": str(name)}), head=None)


GAE = ["--orchestrator.advantage.type", "gae"]
CRITIC = ["--trainer.critic.lam", "0.9"]
IN_REWARDS = ["--trainer.loss.kl.in-rewards"]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (GAE, "gae gives tokens rewards, of which a critic makes advantages: state trainer.critic too"),
        (CRITIC, "orchestrator.advantage.type = grpo gives advantages: state gae"),
        (
            [*GAE, *CRITIC, "--orchestrator.env.0.algorithm", "rae"],
            "orchestrator.advantage.type = rae gives advantages",
        ),
        ([*GAE, *CRITIC, "--orchestrator.advantage.scale", "batch"], "trainer.critic.whiten scales those"),
        ([*GAE, *CRITIC, "--orchestrator.advantage.zero", "drop"], "would hide rewards of 0 from the critic"),
        ([*GAE, *CRITIC, "--trainer.loss.type", "nll"], "is not used by trainer.loss.type = nll"),
        (
            [*GAE, *CRITIC, "--trainer.max-concurrent-runs", "2", "--model.lora.rank", "4"],
            "cannot be shared by the runs",
        ),
        ([*GAE, *CRITIC, "--model.vision", "frozen"], "reads text alone"),
        (["--trainer.loss.kl.in-rewards"], "rewards of tokens are a critic's: state trainer.critic, or leave"),
        ([*GAE, *CRITIC, *IN_REWARDS, "--trainer.loss.kl.target", "behaviour"], "is at no distance from itself"),
        ([*GAE, *CRITIC, *IN_REWARDS, "--trainer.loss.kl.unbiased"], "rewards are of the policy that sampled"),
        ([*GAE, "--trainer.critic.warmup-steps", "9", "--max-steps", "9"], "alone in all of the run's 9 steps"),
    ],
)
def test_what_does_not_go_together_is_refused(flags: list[str], words: str) -> None:
    with pytest.raises(ConfigError) as refused:
        load_experiment(["--orchestrator.env.0.id", "reverse-text", *flags], "rl", {})
    assert words in str(refused.value)


def test_a_critic_takes_single_rollouts_and_those_without_a_reward() -> None:
    flags = ["--orchestrator.env.0.id", "reverse-text", *GAE, *CRITIC, "--orchestrator.rollouts-per-example", "1"]
    assert zero_groups(load_experiment(flags, "rl", {}).experiment) == "keep"


def test_gae_may_be_stated_of_each_environment() -> None:
    flags = ["--orchestrator.env.0.id", "reverse-text", "--orchestrator.env.0.algorithm", "gae", *CRITIC]
    assert load_experiment(flags, "rl", {}).experiment.orchestrator.advantage_of(0).type == "gae"


def test_keys_that_nothing_reads_are_told() -> None:
    idle = ["--trainer.critic.length-adaptive-alpha", "0.05", "--trainer.critic.value-clip", "0.2"]
    idle += ["--trainer.loss.kl.target-kl", "0.1", "--trainer.loss.kl.horizon", "99"]
    flags = ["--orchestrator.env.0.id", "reverse-text", *GAE, *CRITIC, *idle]
    experiment = load_experiment(flags, "rl", {}).experiment
    found = {finding.key for finding in lint(experiment, SiteConfig(name="here")) if finding.code == "PH241"}
    of_kl = {f"trainer.loss.kl.{name}" for name in ("target_kl", "horizon")}
    assert found == {"trainer.critic.lam", "trainer.critic.value_clip"} | of_kl


@pytest.mark.parametrize(
    ("saved", "config", "words"),
    [(True, None, "holds a critic, and this run has none"), (False, {}, "holds no critic, and this run has one")],
)
def test_a_checkpoint_of_another_kind_is_refused(
    tmp_path: Path, saved: bool, config: dict[str, Any] | None, words: str
) -> None:
    source = make_tiny_model(tmp_path / "model")
    paths = RunPaths(tmp_path / "run")
    make_checkpoint(paths, 2, meta={"critic": saved})
    info = resolve_resume(paths.checkpoints, 2, deep=False)
    experiment = experiment_of(source)
    trainer = experiment.trainer.model_copy(update={"critic": None if config is None else experiment.trainer.critic})
    wrong = mismatches(experiment.model_copy(update={"trainer": trainer}), info)
    (found,) = [line for line in wrong if "critic" in line]
    assert words in found
