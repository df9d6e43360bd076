"""Echo beside an objective x property: the weighted cross-entropy on tokens that no policy sampled, and that neither
spoils the other.

The same checks as `prove_objectives`, over random batches of which some tokens outside the loss mask have a weight. The
reference adds, token by token in float64, -w_t log pi(t) over their number in the whole batch.
"""

from collections.abc import Callable, Iterable

import numpy as np
import torch

from prime_hpc.trainer.batching.micro_batches import redistribute
from tests.proofs import Proof
from tests.proofs.objective_cases import Case, cases, ours, pack, random_batch
from tests.proofs.prove_objectives import BOUND, FLOAT32_BOUND, random_packing, relative
from tests.proofs.reference import Sequence, central_differences, echo, loss, size

BESIDE = ("aipo", "reinforce", "nll / sequence", "grpo", "gspo", "dr_grpo", "grpo + k3 reference")
ALONE = "nothing else trains"
Batch = tuple[list[Sequence], np.ndarray, np.ndarray]
"""Sequences, the policy's log-probabilities, the weights of all tokens."""


def random_echo(case: Case, seed: int, *, alone: bool) -> Batch:
    """A ragged batch; about half of the tokens that the objective does not train have a weight."""
    batch, theta = random_batch(case, seed)
    if alone:
        batch = [Sequence(s.index, np.zeros_like(s.trained), s.mu, s.advantages, s.reference) for s in batch]
    rng = np.random.default_rng([seed, 11])
    untrained = ~np.concatenate([s.trained for s in batch])
    chosen = untrained & (rng.random(len(theta)) < 0.6)
    return batch, theta, np.where(chosen, rng.uniform(0.1, 2, len(theta)), 0).astype(np.float32).astype(np.float64)


def wanted(case: Case, batch: Batch, theta: np.ndarray) -> float:
    """The reference's loss; `theta` may be moved from the batch's own."""
    sequences, at, weights = batch
    return loss(case.setting, sequences, theta, at) + echo(sequences, weights, theta)


def errors(case: Case, batch: Batch, rng: np.random.Generator) -> dict[str, float]:
    """Of one batch, by property."""
    sequences, theta, weights = batch
    scale = size(case.setting, sequences, theta) + abs(echo(sequences, weights, theta))
    whole = [pack(sequences, [list(range(len(sequences)))], ce_weights=weights)]

    def found(ranks: list, dtype: torch.dtype = torch.float64) -> tuple[float, np.ndarray]:
        return ours(case, ranks, sequences, theta, dtype)[:2]

    value, grad = found(whole)
    slope = central_differences(lambda moved: wanted(case, batch, moved), theta, 1e-5)
    peak, off = float(np.abs(slope).max(initial=0.0)), float(np.abs(grad - slope).max(initial=0.0))
    micros = random_packing(len(sequences), rng)
    split = pack(sequences, micros, ce_weights=weights)
    padded = [m for micro in micros for m in ([], micro, [])]
    layouts: dict[str, list] = {
        "packing": [pack(sequences, [rng.permutation(len(sequences)).tolist()], ce_weights=weights)],
        "split": [split],
        "padding": [pack(sequences, padded, garbage=7, ce_weights=weights)],
        "ranks": [redistribute([split], rank, 3) for rank in range(3)],
    }
    return {
        "value": abs(value - wanted(case, batch, theta)) / max(scale, 1e-300),
        "gradient": off / peak if peak > 1e-12 else off,
        **{name: relative(found(ranks), (value, grad), scale) for name, ranks in layouts.items()},
        "float32": relative(found(whole, torch.float32), (value, grad), scale),
    }


def subjects() -> dict[str, Callable[[int], tuple[Case, Batch]]]:
    """Name -> seed -> objective and batch."""
    known = {case.name: case for case in cases()}

    def one(name: str, alone: bool) -> Callable[[int], tuple[Case, Batch]]:
        return lambda seed: (known[name], random_echo(known[name], seed, alone=alone))

    return {ALONE: one("reinforce", True), **{f"beside {name}": one(name, False) for name in BESIDE}}


def prove(trials: int) -> Iterable[Proof]:
    """Every subject against every property, `trials` random batches each."""
    for name, draw in subjects().items():
        rows = [errors(*draw(seed), np.random.default_rng([seed, 7])) for seed in range(trials)]
        for claim in rows[0]:
            bound = FLOAT32_BOUND if claim == "float32" else BOUND
            yield Proof(name, claim, len(rows), float(np.max([row[claim] for row in rows])), bound)
