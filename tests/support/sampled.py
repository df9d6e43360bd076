"""Parameters of which every test run takes some and `tools/test --all` takes all."""

from collections.abc import Iterable
from typing import Any

import pytest


def sampled(parameters: Iterable[Any], every: int) -> list[Any]:
    """The first and each `every`-th one after it as they are; the others marked `exhaustive`."""

    def marked(one: Any) -> Any:
        row = one if isinstance(one, tuple) else (one,)
        return pytest.param(*row, marks=pytest.mark.exhaustive)

    return [one if i % every == 0 else marked(one) for i, one in enumerate(parameters)]
