"""Talk between the trainer's ranks: small objects, and failures of one that become all ranks'.

A rank that leaves alone makes the others wait in a collective until its deadline, or, where its error is contained,
meet it in the wrong one. So what may fail is done by `on_all` or `from_first`: all ranks raise it, with the same words.
"""

import datetime
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from prime_hpc.config import ConfigError
from prime_hpc.store.errors import NoRoom, StoreError, Unreadable
from prime_hpc.store.io.retry_reads import as_unreadable

T = TypeVar("T")
Told = tuple[type[Exception], ...]
ANY: Told = (Exception,)
OF_FILES: Told = (StoreError, OSError)
"""Troubles of files, nodes and disks, where any other error is to end its process, and so the trainer, as it is."""
OF_A_RUN: Told = (*OF_FILES, ConfigError, ValueError, TypeError, AttributeError, ImportError)
"""Errors of one run's files, config and own code, where the trainer goes on with the others."""


class RankGroup:
    """All ranks, over one process group. Every method is collective; a rank that is alone talks to nobody."""

    def __init__(self, timeout_s: float | None = None) -> None:
        """Args:
        timeout_s: makes a gloo group of its own, whose collectives never mix with others', and in which a rank that
            waits sleeps: longest wait for the slowest rank. None: the default group.
        """
        self.rank, self.world_size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        self._group: dist.ProcessGroup | None = None
        if timeout_s is not None and self.world_size > 1:
            self._group = dist.new_group(backend="gloo", timeout=datetime.timedelta(seconds=timeout_s))

    def close(self) -> None:
        """Nothing more is said over a group of its own."""
        if self._group is not None:
            dist.destroy_process_group(self._group)
            self._group = None

    def broadcast(self, value: T) -> T:
        """Rank 0's value on every rank."""
        box = [value]
        if self.world_size > 1:
            dist.broadcast_object_list(box, src=0, group=self._group)
        return box[0]

    def gather(self, value: T) -> list[T] | None:
        """Every rank's value, in their order, on rank 0; None elsewhere."""
        if self.world_size == 1:
            return [value]
        rows: list[Any] | None = [None] * self.world_size if self.rank == 0 else None
        dist.gather_object(value, rows, dst=0, group=self._group)
        return rows

    def gather_all(self, value: T) -> list[T]:
        """Every rank's value, in their order, on every rank."""
        rows: list[Any] = [value]
        if self.world_size > 1:
            rows = [None] * self.world_size
            dist.all_gather_object(rows, value, group=self._group)
        return rows

    def swap(self, outgoing: Sequence[NDArray[np.uint8]], incoming: Sequence[int]) -> list[NDArray[np.uint8]]:
        """Send `outgoing[r]` to each rank r and receive `incoming[r]` bytes from it."""
        if self.world_size == 1:
            return [outgoing[0]]
        received = torch.empty(sum(incoming), dtype=torch.uint8)
        sent = torch.from_numpy(np.concatenate(list(outgoing)))
        dist.all_to_all_single(received, sent, list(incoming), [len(o) for o in outgoing], group=self._group)
        return np.split(received.numpy(), np.cumsum(incoming)[:-1])

    def on_all(self, action: Callable[[], T], told: Told = ANY) -> T:
        """Run `action` on every rank; returns this rank's value when all are done.

        Args:
            action: without collectives, or failing after its last one.
            told: errors of which the others hear. Any other leaves its rank at once, as it is. An action that has
                something done by all in its turn tells no more than that does: they would wait for each other.

        Raises:
            Unreadable: it failed on some rank, and wherever it did, only because something cannot be read now.
            NoRoom: it failed on some rank, and wherever it did, only because a disk is full or a quota used up, or on
                others for what cannot be read now.
            StoreError: it failed on some rank; on all with the same words.
        """
        value, failure = _tried(action, told)
        rows = self.gather_all(_said(failure))
        found = {rank: said for rank, said in enumerate(rows) if said is not None}
        if len(found) < len(rows):
            found = {rank: replace(said, words=f"rank {rank}: {said.words}") for rank, said in found.items()}
        _raise(list(found.values()), failure)
        return value  # type: ignore[return-value]

    def from_first(self, action: Callable[[], T], told: Told = ANY) -> T:
        """Run `action` on rank 0 alone; returns its value on every rank. Arguments and errors as of `on_all`."""
        value, failure = _tried(action, told) if self.rank == 0 else (None, None)
        value, said = self.broadcast((value, _said(failure)))
        _raise([said] if said is not None else [], failure)
        return value  # type: ignore[return-value]


@dataclass(frozen=True)
class _Said:
    """A failure as the other ranks are told of it."""

    words: str
    unread: tuple[Path, str, int | None] | None
    """Of an `Unreadable`, what it is made of."""
    needs: int | None
    """Of a `NoRoom`."""


def _tried(action: Callable[[], T], told: Told) -> tuple[T | None, Exception | None]:
    try:
        return action(), None
    except told as error:
        return None, error


def _said(failure: Exception | None) -> _Said | None:
    if failure is None:
        return None
    words = str(failure) if isinstance(failure, StoreError | ConfigError) else f"{type(failure).__name__}: {failure}"
    unread = as_unreadable(failure)
    needs = failure.needs if isinstance(failure, NoRoom) else None
    return _Said(words, None if unread is None else (unread.file, unread.why, unread.errno), needs)


def _raise(found: list[_Said], own: Exception | None) -> None:
    if not found:
        return
    unread = [said.unread for said in found if said.unread is not None]
    needs = [said.needs for said in found if said.needs is not None]
    words = "; ".join(list(dict.fromkeys(said.words for said in found))[:3])
    error: StoreError = StoreError()
    if len(needs) == len(found):  # of one disk: its name and remedy do for all
        words = found[0].words
    if len(unread) == len(found):
        error = Unreadable(*unread[0])
    elif len(needs) + len(unread) == len(found):  # both pass, and are waited for alike
        error = NoRoom(words, max(needs))
    error.args = (words,)
    raise error from own
