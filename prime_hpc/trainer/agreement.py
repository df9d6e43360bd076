"""Failures of one rank that become all ranks': they tell each other before any waits where one will not come.

A rank that leaves alone makes the others wait in a collective until its deadline, or, where its error is contained,
meet it in the wrong one. What is no trouble of files, nodes or disks (a bug, the device's memory) is raised on its own
rank as it is: it ends that process, and so the trainer.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist

from prime_hpc.store.errors import StoreError, Unreadable
from prime_hpc.store.io.retry_reads import as_unreadable

T = TypeVar("T")


def gather_all(value: Any) -> list[Any]:
    """Every rank's value, in their order. Collective."""
    rows: list[Any] = [value]
    if dist.get_world_size() > 1:
        rows = [None] * dist.get_world_size()
        dist.all_gather_object(rows, value)
    return rows


def on_all(action: Callable[[], T]) -> T:
    """Run `action` on every rank; returns this rank's value when all are done. Collective.

    Args:
        action: without collectives, or failing after its last one.

    Raises:
        Unreadable: it failed on some rank, and wherever it did, only because something cannot be read now.
        StoreError: it failed on some rank; on all with the same words.
    """
    value, failure = _tried(action)
    rows = gather_all(_said(failure))
    found = {rank: said for rank, said in enumerate(rows) if said is not None}
    if len(rows) > 1 and len(found) < len(rows):
        found = {rank: replace(said, words=f"rank {rank}: {said.words}") for rank, said in found.items()}
    _raise(list(found.values()), failure)
    return value  # type: ignore[return-value]


def from_first(action: Callable[[], T]) -> T:
    """Run `action` on rank 0 alone; returns its value on every rank. Collective; raises as `on_all`."""
    value, failure = _tried(action) if dist.get_rank() == 0 else (None, None)
    box: list[Any] = [(value, _said(failure))]
    if dist.get_world_size() > 1:
        dist.broadcast_object_list(box, src=0)
    value, said = box[0]
    _raise([said] if said is not None else [], failure)
    return value


@dataclass(frozen=True)
class _Said:
    """A failure as the other ranks are told of it."""

    words: str
    unread: tuple[Path, str, int | None] | None
    """Of an `Unreadable`, what it is made of."""


def _tried(action: Callable[[], T]) -> tuple[T | None, Exception | None]:
    try:
        return action(), None
    except Exception as error:  # noqa: BLE001 - the other ranks must hear of it, then it is raised
        return None, error


def _said(failure: Exception | None) -> _Said | None:
    if failure is None:
        return None
    words = str(failure) if isinstance(failure, StoreError) else f"{type(failure).__name__}: {failure}"
    unread = as_unreadable(failure)
    return _Said(words, None if unread is None else (unread.file, unread.why, unread.errno))


def _raise(found: list[_Said], own: Exception | None) -> None:
    """Raise what failed, as all ranks do."""
    if own is not None and not isinstance(own, StoreError | OSError):
        raise own
    if not found:
        return
    unread = [said.unread for said in found if said.unread is not None]
    error = Unreadable(*unread[0]) if len(unread) == len(found) else StoreError()
    error.args = ("; ".join(list(dict.fromkeys(said.words for said in found))[:3]),)
    raise error from own
