"""An action that may fail on one rank alone, so that all ranks learn of it instead of waiting for one another.

What it is for: one run's broken file or full disk is an error of that run, on every rank, and the trainer goes on with
the others.
"""

from collections.abc import Callable
from typing import Any, TypeVar

from prime_hpc.config import ConfigError
from prime_hpc.store.errors import StoreError
from prime_hpc.store.io.retry_reads import as_unreadable
from prime_hpc.trainer.agreement import gather_all

T = TypeVar("T")
CONTAINED = (StoreError, ConfigError, ValueError, TypeError, AttributeError, ImportError, OSError)
"""Errors of one run's files, config and own code. Anything else is the trainer's own trouble, and ends it."""


class RunFailed(RuntimeError):
    """One run cannot go on; raised on all ranks alike.

    Args:
        words: why.
        is_unread: only because something could not be read; it may try again.
    """

    def __init__(self, words: str, is_unread: bool = False) -> None:
        super().__init__(words)
        self.is_unread = is_unread


def call_collectively(action: Callable[[], T], same: Callable[[T], Any] | None = None) -> T:
    """Run `action` on every rank. Collective; the action itself must fail outside its collectives, if it has any.

    Args:
        action: returns this rank's value.
        same: of the value, what must be equal on all ranks.

    Raises:
        RunFailed: it failed on some rank, or the values differ; on every rank, with the same words.
    """
    value: T | None = None
    said, shown, unread = None, None, False
    try:
        value = action()
        shown = None if same is None else same(value)
    except CONTAINED as error:
        unread = as_unreadable(error) is not None
        said = str(error) if isinstance(error, StoreError | ConfigError) else f"{type(error).__name__}: {error}"
    rows = gather_all((said, shown, unread))
    failed = [(rank, words) for rank, (words, *_) in enumerate(rows) if words is not None]
    if failed:
        texts = dict.fromkeys(words for _, words in failed)
        where = "" if len(failed) == len(rows) else f"rank {failed[0][0]}: "
        raise RunFailed(where + "; ".join(texts), all(row[2] for row in rows if row[0] is not None))
    if len({repr(row[1]) for row in rows}) > 1:
        raise RunFailed(f"the ranks differ: {', '.join(repr(row[1]) for row in rows)}")
    return value  # type: ignore[return-value]
