"""Objectives at their corners; what they compute is proved in `tests/proofs`. Denominators and micro-batches."""

import math
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

from prime_hpc.config.errors import ConfigError
from prime_hpc.config.named_code import Bounds
from prime_hpc.config.sections.trainer import LossConfig
from prime_hpc.trainer.batching.micro_batches import MicroBatch, make_micro_batch
from prime_hpc.trainer.objectives import Targets, Terms, get_objective, normalization, rl_loss, sft_loss, target_weights
from prime_hpc.trainer.ops.logprobs import token_logprobs
from tests.support.tiny_model import random_rank_batch

KINDS = ["aipo", "reinforce", "ppo_clip", "grpo", "dr_grpo", "gspo", "gmpo", "sapo", "vespo", "cispo", "dppo", "ipo"]
OPTIONS = {
    "none": {},
    "truncate": {"correction": {"type": "truncate", "high": 2.0}},
    "mask": {"correction": {"type": "mask", "low": 0.5, "high": 2.0}},
}


def micro_of(mu: list[float], advantages: list[float], lengths: list[int] | None = None) -> MicroBatch:
    """A micro-batch whose targets have these values, `lengths[i]` of them in sequence i."""
    counts = lengths or [len(mu)]
    micro = make_micro_batch(random_rank_batch([[3]], seed=0), 0)
    micro.behaviour_logprobs, micro.advantages = torch.tensor(mu), torch.tensor(advantages)
    micro.targets_of_sequence = torch.tensor(counts)
    micro.sequence = torch.repeat_interleave(torch.arange(len(counts)), micro.targets_of_sequence)
    return micro


def gradient(log_pi: list[float], mu: list[float], advantages: list[float], **config: object) -> torch.Tensor:
    """Gradient of the loss with every target's weight 1."""
    policy = torch.tensor(log_pi, requires_grad=True)
    loss, _ = rl_loss(LossConfig.model_validate(config), micro_of(mu, advantages), policy, torch.ones(len(log_pi)))
    loss.backward()
    assert policy.grad is not None
    return policy.grad


def test_aipo_clips_the_ratio_from_above_only() -> None:
    mu = [-1.0, -1.0 - math.log(10), -1.0 + math.log(10), -math.inf]
    grad = gradient([-1.0] * 4, mu, [1.0, 1.0, 1.0, -1.0], type="aipo", delta=2.0)
    # ratio 1: as it is; 10: clipped to delta; 0.1: not clipped from below; infinite: delta, never NaN
    torch.testing.assert_close(grad, torch.tensor([-1.0, -2.0, -0.1, 2.0]))


def test_ppo_stops_where_a_step_would_leave_the_region() -> None:
    up, down = -1.0 - math.log(1.5), -1.0 + math.log(2)  # ratios 1.5 and 0.5
    grad = gradient([-1.0] * 4, [up, up, down, down], [1.0, -1.0, 1.0, -1.0], type="ppo_clip")
    torch.testing.assert_close(grad, torch.tensor([0.0, 1.5, -0.5, 0.0]))
    dual = gradient([-1.0] * 2, [up, up], [1.0, -1.0], type="ppo_clip", dual_clip=1.2)
    assert dual.tolist() == [0.0, 0.0]


def test_dppo_lets_a_token_come_back_and_ipo_does_not() -> None:
    log_pi, mu = [math.log(0.6)] * 2, [math.log(0.3)] * 2  # probability rose by 0.3
    assert gradient(log_pi, mu, [1.0, -1.0], type="dppo").tolist() == pytest.approx([0.0, 2.0])
    assert gradient(log_pi, mu, [1.0, -1.0], type="ipo").tolist() == [0.0, 0.0]
    rare = gradient([-11.0], [-13.0], [1.0], type="dppo")  # ratio 7, but no change of the policy to speak of
    assert rare.item() == pytest.approx(-math.exp(2), rel=1e-5)


def test_gspo_spreads_one_ratio_over_its_sequence() -> None:
    config = LossConfig(type="gspo", clip_low=0.5, clip_high=0.5)
    policy = torch.tensor([-1.0, -2.0, -1.0], requires_grad=True)
    micro = micro_of([-1.2, -2.2, -4.0], [1.0, 1.0, 1.0], [2, 1])
    loss, stats = rl_loss(config, micro, policy, torch.tensor([0.25, 0.25, 0.5]))
    loss.backward()
    ratio = math.exp(0.2)  # of the first sequence; the second one, e^3, is clipped
    torch.testing.assert_close(policy.grad, torch.tensor([-0.25 * ratio, -0.25 * ratio, 0.0]))
    assert stats.sums["clipped"].item() == 1
    assert loss.item() == pytest.approx(-0.5 * ratio - 0.5 * 1.5)


def test_gmpo_clips_a_token_where_gspo_clips_its_sequence() -> None:
    log_pi, mu = [-1.0, -1.0, -1.0], [-1.0, -1.0, -4.0]  # two tokens as they were, one outlier: e^3
    assert gradient(log_pi, mu, [1.0] * 3, type="gspo").tolist() == [0.0] * 3
    ratio = math.exp(0.4 / 3)  # the outlier counts as e^0.4
    assert gradient(log_pi, mu, [1.0] * 3, type="gmpo").tolist() == pytest.approx([-ratio, -ratio, 0.0])
    lost = gradient(log_pi, mu, [-1.0] * 3, type="gmpo")  # a bad token that came up: it is to go down, unclipped
    assert lost.tolist() == pytest.approx([math.e] * 3)


def test_sapo_lets_go_smoothly_and_sooner_of_negative_advantages() -> None:
    ratios = [1.0, 1.5, 3.0, 0.2]
    mu = [-1.0 - math.log(r) for r in ratios]

    def weights(sign: float) -> list[float]:
        return (-sign * gradient([-1.0] * 4, mu, [sign] * 4, type="sapo")).tolist()

    for sign, tau in ((1.0, 1.0), (-1.0, 1.05)):
        gates = [1 / (1 + math.exp(-tau * (r - 1))) for r in ratios]
        wanted = [4 * gate * (1 - gate) * r for gate, r in zip(gates, ratios, strict=True)]
        assert weights(sign) == pytest.approx(wanted, rel=1e-5)
    assert all(bad < good for good, bad in zip(weights(1.0)[1:], weights(-1.0)[1:], strict=True))


def test_off_policy_masking_leaves_out_bad_sequences_that_the_policy_left() -> None:
    mu, lengths = [-1.0, -1.0, -1.0, -1.0, -3.0, -3.0], [2, 2, 2]
    policy = torch.tensor(
        [-1.2, -2.4] * 2 + [-1.0, -1.0], requires_grad=True
    )  # 0.8 nats a token below mu; the last above
    config = LossConfig.model_validate({"type": "reinforce", "off_policy_mask": 0.5})
    micro = micro_of(mu, [-1.0, -1.0, 1.0, 1.0, -1.0, -1.0], lengths)
    loss, stats = rl_loss(config, micro, policy, torch.ones(6))
    loss.backward()
    assert policy.grad is not None and policy.grad.tolist() == [0.0, 0.0, -1.0, -1.0, 1.0, 1.0]
    assert stats.sums["off_policy_masked"].item() == 2


def test_the_two_sides_of_a_clip_are_told_apart() -> None:
    up, down = -1.0 - math.log(1.5), -1.0 + math.log(2)
    micro = micro_of([up, up, down, down], [1.0, -1.0, 1.0, -1.0])
    _, stats = rl_loss(LossConfig(type="ppo_clip"), micro, torch.full((4,), -1.0), torch.ones(4))
    assert [stats.sums[k].item() for k in ("clipped", "clipped_high", "clipped_low")] == [2, 1, 1]
    rising = micro_of([-1.0, -5.0], [1.0, 1.0])  # the first token fell, its sequence rose
    _, stats = rl_loss(LossConfig(type="gspo"), rising, torch.tensor([-1.5, -1.0]), torch.ones(2))
    assert [stats.sums[k].item() for k in ("clipped", "clipped_high", "clipped_low")] == [2, 2, 0]


@pytest.mark.parametrize(
    ("kind", "option"), [(k, o) for k in KINDS for o in OPTIONS if o == "none" or k not in ("dppo", "ipo")]
)
def test_extreme_ratios_never_make_nan(kind: str, option: str) -> None:
    config = {"type": kind, "kl": {"target": "behaviour", "estimator": "k3"}} | OPTIONS[option]
    log_pi, mu = [-90.0, -1e-8, -1.0, -1.0, 0.0], [-1e-8, -90.0, -math.inf, -1.0, 0.0]
    for sign in (1.0, -1.0):
        for divergence in ("tv", "kl"):
            grad = gradient(log_pi, mu, [sign] * 5, divergence=divergence, **config)
            assert torch.isfinite(grad).all()


@pytest.mark.parametrize("kind", KINDS)
def test_on_policy_every_objective_has_the_plain_policy_gradient(kind: str) -> None:
    log_pi, advantages = [-1.0, -0.2, -3.0, -0.7], [1.0, -2.0, 0.5, 0.0]
    torch.testing.assert_close(gradient(log_pi, log_pi, advantages, type=kind), -torch.tensor(advantages))
    if kind not in ("dppo", "ipo"):
        corrected = gradient(log_pi, log_pi, advantages, type=kind, correction={})
        torch.testing.assert_close(corrected, -torch.tensor(advantages))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_not_finite_shows_in_the_loss(bad: float) -> None:
    micro = micro_of([-1.0, -1.0], [1.0, bad])
    loss, _ = rl_loss(LossConfig(), micro, torch.tensor([-1.0, -1.0]), torch.ones(2))
    assert not math.isfinite(loss.item())


def test_statistics_describe_the_mismatch_whatever_the_objective() -> None:
    rng = np.random.default_rng(0)
    log_pi, mu = -rng.random(40) * 3, -rng.random(40) * 3
    for kind in KINDS:
        micro = micro_of(mu.tolist(), [1.0] * 40)
        _, stats = rl_loss(LossConfig(type=kind), micro, torch.tensor(log_pi, dtype=torch.float32), torch.ones(40))
        d = log_pi - mu
        assert stats.sums["kl"].item() == pytest.approx((np.exp(d) - 1 - d).sum(), rel=1e-4)
        assert stats.sums["ratio"].item() == pytest.approx(np.exp(d).sum(), rel=1e-4)
        assert stats.sums["logprob_diff"].item() == pytest.approx(np.abs(d).sum(), rel=1e-4)
        assert stats.maxima["ratio_max"].item() == pytest.approx(np.exp(d).max(), rel=1e-4)
        assert stats.maxima["logprob_diff_max"].item() == pytest.approx(np.abs(d).max(), rel=1e-4)


def test_kl_to_a_reference_needs_its_logprobs() -> None:
    micro = micro_of([-1.0], [0.0])
    config = LossConfig.model_validate({"kl": {"coef": 0.5, "estimator": "k2"}})
    with pytest.raises(ConfigError, match=r"trainer\.loss\.kl\.target.*reference model"):
        rl_loss(config, micro, torch.tensor([-1.0]), torch.ones(1))
    micro.reference_logprobs = torch.tensor([-3.0])
    loss, stats = rl_loss(config, micro, torch.tensor([-1.0]), torch.ones(1))
    assert loss.item() == pytest.approx(0.5 * 2.0) and stats.sums["kl_penalty"].item() == pytest.approx(2.0)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_an_unbiased_kl_of_stale_tokens_has_the_gradient_of_the_kl(estimator: str) -> None:
    """In expectation over all tokens of a vocabulary, each as often as the policy that sampled gives it."""
    draws = torch.Generator().manual_seed(0)
    logits, mu, reference = (torch.randn(7, generator=draws).log_softmax(0) for _ in range(3))
    log_pi = logits.requires_grad_().log_softmax(0)
    micro = micro_of(mu.tolist(), [0.0] * 7)
    micro.reference_logprobs = reference
    kl = {"coef": 1.0, "estimator": estimator, "unbiased": True}
    loss, _ = rl_loss(LossConfig.model_validate({"kl": kl}), micro, log_pi, mu.exp())
    exact = (log_pi.exp() * (log_pi - reference)).sum()
    found, wanted = (torch.autograd.grad(x, logits, retain_graph=True)[0] for x in (loss, exact))
    torch.testing.assert_close(found, wanted)
    assert estimator == "k2" or loss.item() == pytest.approx(exact.item(), rel=1e-5)


def test_coefficient_zero_measures_without_touching_the_loss() -> None:
    plain = gradient([-1.0, -2.0], [-1.5, -2.0], [1.0, -1.0], type="grpo")
    measured = gradient([-1.0, -2.0], [-1.5, -2.0], [1.0, -1.0], type="grpo", kl={"target": "behaviour", "coef": 0.0})
    assert torch.equal(plain, measured)


def test_normalisation_follows_the_paper_unless_it_is_stated() -> None:
    found = {kind: normalization(LossConfig(type=kind)) for kind in KINDS}
    assert {k for k, v in found.items() if v == "sequence"} == {"grpo", "gspo", "gmpo", "sapo"}
    assert found["dr_grpo"] == "batch" and found["aipo"] == found["dppo"] == "token"
    assert normalization(LossConfig(type="gspo", normalize="token")) == "token"


def test_own_objective_by_import_path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    module = ModuleType("my_objectives")
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "half_typed.py").write_text("def loss(:\n")
    (tmp_path / "half_thought.py").write_text("LIMITS = {}['low']\n")

    def half(targets: Targets, config: LossConfig, bounds: Bounds) -> Terms:
        return Terms(-0.5 * targets.advantages * targets.logprobs, torch.zeros_like(targets.logprobs, dtype=torch.bool))

    module.half, module.number = half, 3  # type: ignore[attr-defined]
    monkeypatch.setitem(__import__("sys").modules, "my_objectives", module)
    assert gradient([-1.0], [-1.0], [2.0], type="my_objectives:half").tolist() == [-1.0]
    for wrong, reason in [
        ("my_objectives:none", "no attribute"),
        ("no_such_package:f", "No module"),
        ("my_objectives:number", "not a function"),
        ("half_typed:loss", "SyntaxError: invalid syntax"),
        ("half_thought:loss", "KeyError: 'low'"),
    ]:
        with pytest.raises(ConfigError, match=rf"trainer\.loss\.type.*{reason}"):
            get_objective(wrong)
    with pytest.raises(ConfigError, match="aipo"):
        get_objective("aippo")


@pytest.mark.parametrize(
    ("tree", "reason"),
    [
        ({"type": "gsop"}, "did you mean gspo"),
        ({"type": "dppo", "correction": {}}, "leave correction out"),
        ({"type": "gspo", "dual_clip": 3}, "dual_clip is of ppo_clip"),
        ({"type": "nll", "off_policy_mask": 0.5}, "leave off_policy_mask out"),
        ({"type": "grpo", "dual_clip": 1}, "greater than 1"),
        ({"clip_low": 1.5}, "cannot exceed 1"),
        ({"correction": {"type": "mask", "low": 2, "high": 1}}, "below high"),
        (
            {"correction": {"geometric_low": 1.2, "geometric_high": 1.1}},
            "below geometric_high .1.1., or every sequence",
        ),
        ({"kl": {"estimator": "k4"}}, "'k1', 'k2' or 'k3'"),
        ({"normalize": "mean"}, "'batch'"),
    ],
)
def test_settings_that_cannot_work_are_refused(tree: dict, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        LossConfig.model_validate(tree)


# ------------------------------------------------------------------------------------------------- denominators


def loss_of(batch: object, normalize: str, counts: tuple[int, int], parts: range) -> tuple[float, torch.Tensor]:
    """Summed loss and gradient of a linear policy over micro-batches `parts`, with given global denominators."""
    torch.manual_seed(0)
    embedding = torch.randn(300, 8)
    head = torch.randn(300, 8, requires_grad=True)
    total = torch.zeros(())
    for i in parts:
        micro = make_micro_batch(batch, i)  # type: ignore[arg-type]
        hidden = embedding[micro.input_ids[0]][micro.target_index]
        logprobs, _ = token_logprobs(hidden, head, micro.targets, micro.temperatures)
        weights = target_weights(micro.sequence, micro.targets_of_sequence, normalize, *counts, batch_tokens=32)
        total = total + rl_loss(LossConfig(), micro, logprobs, weights)[0]
    total.backward()
    assert head.grad is not None
    return total.item(), head.grad


@pytest.mark.parametrize("normalize", ["token", "sequence", "batch"])
def test_denominator_is_global(normalize: str) -> None:
    lengths = [[5, 20], [11], [], [30, 3, 4]]
    batch = random_rank_batch(lengths, seed=1)
    together = random_rank_batch([[n for micro in lengths for n in micro]], seed=1)
    counts = (int(batch.loss_mask.sum()), 6)
    whole, whole_grad = loss_of(together, normalize, counts, range(1))
    split, split_grad = loss_of(batch, normalize, counts, range(4))
    assert split == pytest.approx(whole, rel=1e-5)
    torch.testing.assert_close(split_grad, whole_grad, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(("normalize", "total"), [("token", 1.0), ("sequence", 1.0), ("batch", None)])
def test_weights_sum_to_what_the_docs_say(normalize: str, total: float | None) -> None:
    batch = random_rank_batch([[5, 20], [11], [30, 3, 4]], seed=1)
    count, found = int(batch.loss_mask.sum()), 0.0
    for i in range(3):
        micro = make_micro_batch(batch, i)
        weights = target_weights(micro.sequence, micro.targets_of_sequence, normalize, count, 6, batch_tokens=32)
        found += weights.sum().item()
    assert found == pytest.approx(count / (6 * 32) if total is None else total, rel=1e-5)


def test_sequence_normalisation_gives_each_sequence_the_same_weight() -> None:
    micro = make_micro_batch(random_rank_batch([[5, 20]], seed=1), 0)
    weights = target_weights(micro.sequence, micro.targets_of_sequence, "sequence", 99, 2)
    per_sequence = torch.zeros(2).scatter_add_(0, micro.sequence, weights)
    torch.testing.assert_close(per_sequence, torch.tensor([0.5, 0.5]))
    with pytest.raises(ValueError, match=r"trainer\.loss\.normalize"):
        target_weights(micro.sequence, micro.targets_of_sequence, "mean", 1, 1)


def test_masked_tokens_change_nothing() -> None:
    batch = random_rank_batch([[5, 20], [11]], seed=1)
    rng = np.random.default_rng(5)
    logprobs, advantages = batch.logprobs.copy(), batch.advantages.copy()
    off = ~batch.loss_mask
    logprobs[off], advantages[off] = rng.normal(size=off.sum()), rng.normal(size=off.sum())
    other = type(batch)(**{**batch.__dict__, "logprobs": logprobs, "advantages": advantages})
    counts = (int(batch.loss_mask.sum()), 3)
    loss, grad = loss_of(batch, "token", counts, range(2))
    same_loss, same_grad = loss_of(other, "token", counts, range(2))
    assert loss == same_loss and torch.equal(grad, same_grad)
    # and trained tokens do
    advantages[np.flatnonzero(batch.loss_mask)[3]] += 1
    assert loss_of(other, "token", counts, range(2))[0] != loss


def test_a_first_token_is_never_a_target() -> None:
    batch = random_rank_batch([[5, 20], [11]], seed=1)
    everything = type(batch)(**{**batch.__dict__, "loss_mask": np.ones_like(batch.loss_mask)})
    micro = make_micro_batch(everything, 0)
    assert micro.num_targets == 4 + 19
    ids = everything.token_ids
    assert micro.targets.tolist() == ids[1:5].tolist() + ids[6:25].tolist()
    assert micro.target_index.tolist() == [*range(4), *range(5, 24)]
    assert micro.position_ids[0].tolist() == [*range(5), *range(20)]


def test_sft_loss_is_the_mean_nll() -> None:
    logprobs = torch.tensor([-1.0, -3.0], requires_grad=True)
    loss, _ = sft_loss(None, logprobs, torch.full((2,), 0.5))
    loss.backward()
    assert logprobs.grad is not None
    assert loss.item() == 2.0 and logprobs.grad.tolist() == [-0.5, -0.5]
