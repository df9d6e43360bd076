"""Objective x property: values and gradients against the reference, and what must not change the result.

Every check returns a relative error: of the loss against the sum of its terms' sizes, of a gradient against its
largest entry, or against what a gate leaves of it where all of them are saturated.
"""

from collections.abc import Callable, Iterable

import numpy as np
import torch

from prime_hpc.trainer.batching.micro_batches import redistribute
from tests.proofs import Proof
from tests.proofs.objective_cases import Case, cases, ours, pack, random_batch
from tests.proofs.reference import Sequence, gradient, loss, size

BOUND = 1e-6
FLOAT32_BOUND = 5e-5
"""Float32 arithmetic over up to a hundred terms, through an exponential of up to e^4: 5e-6 in the worst of 7,000 draws,
1.1e-5 of many more. A wrong term shows in the first digits."""

SATURATED = 1e-4
"""A gradient of less than this share of the loss's terms (`sapo` far off-policy) is held against this: differences of
those terms, and float32, tell no more of it."""

Result = tuple[float, np.ndarray]


def relative(found: Result, wanted: Result, scale: float) -> float:
    """The greater relative error of loss and gradient."""
    (value, grad), (right, right_grad) = found, wanted
    peak = max(float(np.abs(right_grad).max(initial=0.0)), SATURATED * scale)
    error = float(np.abs(grad - right_grad).max(initial=0.0))
    return max(abs(value - right) / max(scale, 1e-300), error / peak if peak else error)


def random_packing(num: int, rng: np.random.Generator) -> list[list[int]]:
    """The sequences 0..num-1 in any order, cut into any number of micro-batches."""
    order = rng.permutation(num).tolist()
    cuts = sorted(rng.integers(0, num + 1, int(rng.integers(0, 4))).tolist())
    return [order[a:b] for a, b in zip([0, *cuts], [*cuts, num], strict=True)]


def _whole(case: Case, batch: list[Sequence], theta: np.ndarray) -> Result:
    value, grad, _ = ours(case, [pack(batch, [list(range(len(batch)))])], batch, theta)
    return value, grad


def value_error(case: Case, seed: int, lengths: list[int] | None = None) -> float:
    """Our loss against the reference's."""
    batch, theta = random_batch(case, seed, lengths)
    value, _ = _whole(case, batch, theta)
    wanted = loss(case.setting, batch, theta, theta)
    return abs(value - wanted) / max(size(case.setting, batch, theta), 1e-300)


def gradient_error(case: Case, seed: int, lengths: list[int] | None = None) -> float:
    """Our gradient against central differences of the reference."""
    batch, theta = random_batch(case, seed, lengths)
    _, grad = _whole(case, batch, theta)
    wanted = gradient(case.setting, batch, theta)
    peak = max(float(np.abs(wanted).max(initial=0.0)), SATURATED * size(case.setting, batch, theta))
    error = float(np.abs(grad - wanted).max(initial=0.0))
    return error / peak if peak > 1e-12 else error


def float32_error(case: Case, seed: int, lengths: list[int] | None = None) -> float:
    """The same loss and gradient computed in float32, as training does."""
    batch, theta = random_batch(case, seed, lengths)
    packed = [pack(batch, [list(range(len(batch)))])]
    value, grad, _ = ours(case, packed, batch, theta, torch.float32)
    return relative((value, grad), _whole(case, batch, theta), size(case.setting, batch, theta))


def _changed(case: Case, seed: int, lengths: list[int] | None, change: Callable[..., list]) -> float:
    """The error of a batch laid out by `change(batch, rng)` against the same in one micro-batch of one rank."""
    batch, theta = random_batch(case, seed, lengths)
    ranks = change(batch, np.random.default_rng([seed, 7]))
    value, grad, _ = ours(case, ranks, batch, theta)
    return relative((value, grad), _whole(case, batch, theta), size(case.setting, batch, theta))


def packing_error(case: Case, seed: int, lengths: list[int] | None = None) -> float:
    """Sequences in another order."""
    return _changed(case, seed, lengths, lambda b, rng: [pack(b, [rng.permutation(len(b)).tolist()])])


def split_error(case: Case, seed: int, lengths: list[int] | None = None) -> float:
    """Cut into micro-batches at random places, some of them empty."""
    return _changed(case, seed, lengths, lambda b, rng: [pack(b, random_packing(len(b), rng))])


def padding_error(case: Case, seed: int, lengths: list[int] | None = None) -> float:
    """Empty micro-batches in between, and junk in every value of a token that does not train."""

    def change(batch: list[Sequence], rng: np.random.Generator) -> list:
        micros = [m for micro in random_packing(len(batch), rng) for m in ([], micro, [])]
        return [pack(batch, micros, garbage=seed)]

    return _changed(case, seed, lengths, change)


def sharding_error(case: Case, seed: int, lengths: list[int] | None = None) -> float:
    """Spread over 2 and 4 ranks by the trainer's own redistribution; a rank may get nothing."""

    def change_to(num_ranks: int) -> Callable[..., list]:
        def change(batch: list[Sequence], rng: np.random.Generator) -> list:
            whole = pack(batch, random_packing(len(batch), rng))
            return [redistribute([whole], rank, num_ranks) for rank in range(num_ranks)]

        return change

    return max(_changed(case, seed, lengths, change_to(n)) for n in (1, 2, 4))


PROPERTIES: dict[str, tuple[Callable[..., float], float]] = {
    "value": (value_error, BOUND),
    "gradient": (gradient_error, BOUND),
    "packing": (packing_error, BOUND),
    "padding": (padding_error, BOUND),
    "split": (split_error, BOUND),
    "ranks": (sharding_error, BOUND),
    "float32": (float32_error, FLOAT32_BOUND),
}


def prove(trials: int) -> Iterable[Proof]:
    """Every case against every property, `trials` random batches each."""
    for case in cases():
        for name, (check, bound) in PROPERTIES.items():
            errors = [check(case, seed) for seed in range(trials)]
            yield Proof(case.name, name, len(errors), float(np.max(errors)), bound)
