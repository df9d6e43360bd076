"""Losses of pairs against their formulas in float64: values, gradients, figures, and those of a whole model."""

import math
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from prime_hpc.config.sections.common import ModelConfig
from prime_hpc.config.sections.parallel import ParallelDims
from prime_hpc.config.sections.sft import PreferenceConfig
from prime_hpc.config.sections.trainer import TrainerConfig
from prime_hpc.trainer.batching.micro_batches import batch_facts, build_rank_batch
from prime_hpc.trainer.model.load_policy import load_policy
from prime_hpc.trainer.objectives import preference_loss, target_weights
from prime_hpc.trainer.optim import build_optimizer
from prime_hpc.trainer.parallel import build_parallel
from prime_hpc.trainer.train_step import TrainStep
from tests.support.tiny_model import make_tiny_model

CONFIGS: dict[str, dict[str, Any]] = {
    "dpo": {},
    "dpo, beta": {"beta": 0.7},
    "cdpo": {"label_smoothing": 0.2},
    "dpo_norm": {"length_normalized": True, "beta": 5.0},
    "simpo": {"reference": False, "length_normalized": True, "beta": 2.0, "margin": 1.5},
    "rpo": {"nll_weight": 0.5},
    "ipo": {"type": "ipo", "beta": 0.3},
    "hinge": {"type": "hinge", "beta": 0.2},
}
LENGTHS = [(3, 5), (4, 1), (2, 2), (7, 6)]
"""Trained tokens of the two sides of each pair."""
FACTS = (
    "rewards/chosen",
    "rewards/rejected",
    "rewards/margins",
    "rewards/accuracies",
    "logps/chosen",
    "logps/rejected",
)


def by_hand(config: PreferenceConfig, sides: list[Any], reference: Any) -> tuple[Any, dict[str, float]]:
    """The mean loss over pairs, and the figures: `sides` has the float64 log-probabilities of each sequence."""
    total: Any = 0.0
    facts = dict.fromkeys(FACTS, 0.0)
    for i in range(0, len(sides), 2):
        sums = [side.sum() for side in sides[i : i + 2]]
        r = [s - float(ref) if config.reference else s for s, ref in zip(sums, reference[i : i + 2], strict=True)]
        if config.length_normalized:
            r = [value / len(side) for value, side in zip(r, sides[i : i + 2], strict=True)]
        d = r[0] - r[1]
        z = config.beta * d - config.margin
        loss = {
            "dpo": (1 - config.label_smoothing) * torch.log1p((-z).exp())
            + config.label_smoothing * torch.log1p(z.exp()),
            "ipo": (d - 0.5 / config.beta) ** 2,
            "hinge": torch.relu(1 - config.beta * d),
        }[config.type]
        total = total + loss - config.nll_weight * sides[i].mean()
        values = (config.beta * r[0], config.beta * r[1], config.beta * d, float(d > 0), *sums)
        for name, value in zip(FACTS, values, strict=True):
            facts[name] += float(torch.as_tensor(value).detach()) / (len(sides) / 2)
    return total / (len(sides) / 2), facts


def micro_of(lengths: list[int], reference: torch.Tensor) -> Any:
    counts = torch.tensor(lengths)
    sequence = torch.repeat_interleave(torch.arange(len(lengths)), counts)
    return SimpleNamespace(sequence=sequence, targets_of_sequence=counts, reference_sums=reference)


@pytest.mark.parametrize("name", CONFIGS)
def test_value_gradient_and_figures_are_those_of_the_formula(name: str) -> None:
    config, generator = PreferenceConfig(**CONFIGS[name]), torch.Generator().manual_seed(3)
    lengths = [n for pair in LENGTHS for n in pair]
    logprobs = -torch.rand(sum(lengths), generator=generator) * 4
    sums = [part.double().sum() for part in logprobs.split(lengths)]
    reference = torch.stack(sums) + torch.randn(len(lengths), generator=generator, dtype=torch.float64)

    exact = logprobs.double().requires_grad_()
    expected, facts = by_hand(config, list(exact.split(lengths)), reference)
    (gradient,) = torch.autograd.grad(expected, exact)

    found, totals, at = [], dict.fromkeys(FACTS, 0.0), 0
    loss_of_step = 0.0
    for own in ([0, 1], [2], [], [3]):  # pairs of four micro-batches, one of them empty
        part = [n for i in own for n in LENGTHS[i]] or [0]
        leaf = logprobs[at : at + sum(part)].clone().requires_grad_()
        micro = micro_of(part, torch.cat([reference[2 * i : 2 * i + 2] for i in own] or [torch.zeros(1)]))
        at += sum(part)
        weights = target_weights(micro.sequence, micro.targets_of_sequence, "sequence", 0, len(lengths))
        loss, stats = preference_loss(config, micro, leaf, weights)
        found.append(torch.autograd.grad(loss, leaf)[0])
        loss_of_step += float(loss)
        totals = {key: value + float(stats.totals[key]) for key, value in totals.items()}
    assert loss_of_step == pytest.approx(float(expected), rel=1e-6)
    torch.testing.assert_close(torch.cat(found).double(), gradient, rtol=1e-5, atol=1e-9)
    assert totals == pytest.approx(facts, rel=1e-6, abs=1e-12)
    assert gradient.abs().sum() > 0


def test_where_nothing_differs_the_loss_is_that_of_a_coin() -> None:
    reference = torch.tensor([-300.123456789, -250.987654321], dtype=torch.float64)
    logprobs = torch.full((60,), -5.0)
    micro = micro_of([30, 30], torch.tensor([-150.0, -150.0], dtype=torch.float64))
    loss, stats = preference_loss(PreferenceConfig(), micro, logprobs, torch.full((60,), 1 / 60))
    assert float(loss) == pytest.approx(math.log(2)) and float(stats.totals["rewards/accuracies"]) == 0
    sure = micro_of([30, 30], reference)  # of the farthest: no exponential overflows
    loss, _ = preference_loss(PreferenceConfig(beta=100.0), sure, logprobs, torch.full((60,), 1 / 60))
    assert math.isfinite(float(loss))


def pairs_of(num: int) -> tuple[list[Any], list[Any], np.ndarray[Any, Any]]:
    """Tokens and masks of pairs whose sides begin alike; the reference's sums."""
    rng = np.random.default_rng(5)
    ids, masks = [], []
    for i in range(num):
        prompt = rng.integers(0, 90, 4 + i)
        for extra in (3 + i, 6 - i):
            ids.append(np.concatenate([prompt, rng.integers(0, 90, extra)]).astype(np.int32))
            masks.append(np.arange(len(ids[-1])) >= len(prompt))
    return ids, masks, -rng.uniform(5, 30, (num, 2))


def step_of(folder: Path, row_tokens: int = 0, *, share_prefixes: bool = True) -> TrainStep:
    policy = load_policy(
        ModelConfig(name=str(folder), dtype="float32"), folder, build_parallel(ParallelDims(dp_shard=1), "cpu"),
        torch.device("cpu"), reshard_after_forward=True, chunk_tokens=512,
    )  # fmt: skip
    config = TrainerConfig(no_sync=False, share_prefixes=share_prefixes)
    return TrainStep(
        policy, build_optimizer(policy, config.optim), config, max_steps=9,
        normalize="sequence", device=torch.device("cpu"), peak_flops=1.0, with_entropy=False, together=2,
        row_tokens=row_tokens,
    )  # fmt: skip


@pytest.mark.parametrize("layout", ["packed", "packed, no shared prompt", "a pair a micro-batch", "a row a side"])
def test_a_model_learns_what_the_formula_says(group: None, tmp_path: Path, layout: str) -> None:
    folder, config = make_tiny_model(tmp_path / "model"), PreferenceConfig(beta=0.4)
    ids, masks, reference = pairs_of(4)
    hf = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()
    sides = []
    for tokens, mask in zip(ids, masks, strict=True):
        logits = hf(torch.from_numpy(tokens.astype(np.int64))[None]).logits[0].log_softmax(-1)
        at = np.flatnonzero(mask)
        sides.append(logits[at - 1, tokens[at].astype(np.int64)])
    expected, facts = by_hand(config, sides, reference.ravel())
    expected.backward()

    train_step = step_of(folder, 40, share_prefixes=layout == "packed")
    train_step.policy.single_rows = layout == "a row a side"
    micros = [[2 * i, 2 * i + 1] for i in range(4)] if layout == "a pair a micro-batch" else [list(range(8))]
    batch = build_rank_batch(micros, ids, masks)
    rows = np.repeat(np.arange(4), 2)
    batch = replace(batch, sample_ids=rows, group_ids=rows.copy(), reference_sums=reference.ravel())
    laid_out = train_step.lay_out(batch)
    if layout == "a row a side":
        assert laid_out.num_micro_batches > 1
        assert (
            all(np.diff(laid_out.micro_offsets) % 2 == 0)
            and (laid_out.sample_ids[::2] == laid_out.sample_ids[1::2]).all()
        )
    stats, num_shared = train_step.accumulate(laid_out, partial(preference_loss, config), batch_facts(batch, 1))
    assert (num_shared > 0) is (layout == "packed")
    assert float(stats.totals["loss"]) == pytest.approx(float(expected), rel=1e-5)
    assert {name: float(stats.totals[name]) for name in FACTS} == pytest.approx(facts, rel=1e-4, abs=1e-5)
    theirs = dict(hf.named_parameters())
    for name, mine in train_step.policy.hf.named_parameters():
        grad: Any = mine.grad
        torch.testing.assert_close(grad.full_tensor().double(), theirs[name].grad, rtol=2e-3, atol=2e-6)
