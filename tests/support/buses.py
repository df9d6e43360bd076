"""Waiting for what happens in other threads, for tests of the bus."""

import time
from collections.abc import Callable

WAIT_S = 200


def until(condition: Callable[[], object]) -> None:
    """Return once it holds. Raises AssertionError: not within `WAIT_S`."""
    end = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < end, "the condition never became true"
        time.sleep(0.005)
