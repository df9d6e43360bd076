"""Ways to break a layout on purpose, each one line of the product that is left out or done twice."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch


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


BREAKS: dict[str, tuple[str, str, Any]] = {
    "no sum after split rows": ("parallel.tensor", "leave_parallel", _same),
    "no sum where gradients leave split columns": ("parallel.tensor", "enter_parallel", _same),
    "norms of a head see their own heads only": ("engine", "sum_over", lambda *_: None),
    "gradient norm counts what several ranks hold": ("parallel.gradients", "num_holders", lambda _: 1),
}
