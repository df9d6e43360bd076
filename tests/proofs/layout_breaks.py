"""Ways to break a layout on purpose, each one line of the product that is left out or done twice."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch

from prime_hpc.trainer.ops.collectives import all_to_all


@contextmanager
def broken(name: str | None) -> Iterator[None]:
    """Run with the named mistake; None: without any."""
    with ExitStack() as stack:
        if name is not None:
            target, attribute, replacement = BREAKS[name]
            stack.enter_context(patch(f"prime_hpc.trainer.{target}.{attribute}", replacement))
        yield


def _same(x: torch.Tensor, *_: Any) -> torch.Tensor:
    return x


def _own_only(x: torch.Tensor, own: slice, num: int, _: Any) -> torch.Tensor:
    whole = x.new_zeros((num, *x.shape[1:]))
    whole[own] = x
    return whole


def _twice(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    return 2 * grad[ctx.own], None, None, None


def _nothing_back(*args: Any) -> torch.Tensor:
    rows = all_to_all(*args)
    if rows.requires_grad:
        rows.register_hook(torch.zeros_like)
    return rows


BREAKS: dict[str, tuple[str, str, Any]] = {
    "split rows are not summed": ("parallel.tensor", "leave_parallel", _same),
    "gradients that leave split columns are not summed": ("parallel.tensor", "enter_parallel", _same),
    "norms of a head learn from one rank's heads": ("train_step", "sum_over", lambda *_: None),
    "probabilities are of one rank's tokens": ("ops.logprobs.VocabShard", "total", lambda self, x: x),
    "the norm counts what two ranks hold twice": ("parallel.gradients", "num_holders", lambda _: 1),
    "parts of the batch are counted once a rank": ("parallel.mesh.Parallel", "leads", property(lambda self: True)),
    "sequences are judged by one rank's tokens": ("model.policy", "gather_targets", _own_only),
    "every rank's gradient is of all targets": ("ops.context_parallel._Gather", "backward", staticmethod(_twice)),
    "no gradient comes back from experts": ("parallel.expert", "all_to_all", _nothing_back),
}
"""Mistake -> module (and class) below `prime_hpc.trainer`, name in it, what takes its place."""
