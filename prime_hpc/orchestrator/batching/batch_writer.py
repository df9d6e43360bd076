"""Batches on their way to the trainer: committed, announced, and kept until a checkpoint has them behind it.

A trainer that crashes goes on from its newest checkpoint, in an attempt that takes the steps after it again. Where the
orchestrator outlives it, the batches of these steps are what they were: they are committed once more, for that attempt.
"""

import asyncio
import os
from collections import deque
from dataclasses import dataclass
from typing import Any

from prime_hpc.orchestrator.parts import Parts
from prime_hpc.runtime.role_context import LED
from prime_hpc.store.batch.rank_batch import RankBatch
from prime_hpc.store.batch.rank_files import write_batch
from prime_hpc.store.errors import NoRoom, StoreError
from prime_hpc.store.io.room import RoomWait, as_refused, takes
from prime_hpc.store.manifest import Manifest

MOST_BYTES = 2 << 30
"""Of the arrays of the batches that are kept. With more since a checkpoint none is kept until the next one: a
crash of the trainer meanwhile starts the orchestrator again."""


@dataclass(frozen=True)
class BatchContent:
    """All that is written of a batch."""

    step: int
    ranks: list[RankBatch]
    """One a data-parallel rank."""
    state: dict[str, Any]
    """The orchestrator's after it."""
    meta: dict[str, Any]
    """For the manifest."""

    @property
    def num_bytes(self) -> int:
        """Of all its arrays; recorded experts of a mixture take many times what tokens do."""
        return sum(array.nbytes for rank in self.ranks for array in vars(rank).values() if array is not None)


class BatchWriter:
    """Commits batches for an attempt, one at a time; from `hold` to `go_on` none."""

    def __init__(self, parts: Parts, step: int, room_s: float = 0.0) -> None:
        """Args:
        step: of the batch before the first one. Only in a job that is led can there be a next attempt.
        room_s: longest that a batch waits for room, `supervisor.write_timeout_s`.
        """
        self._room_s = room_s
        self._most_bytes = MOST_BYTES if os.environ.get(LED) else 0
        self._paths, self._bus, self._handover = parts.paths, parts.bus, parts.handover
        self._incarnation = parts.incarnation
        self._one = asyncio.Lock()
        self._recent: deque[BatchContent] = deque()
        self._newest = step
        self._full_after: int | None = None
        """The checkpoint since which there were too many."""

    async def write(self, content: BatchContent) -> Manifest:
        """Commit a batch and tell the trainer. Waits for room. Raises StoreError: there was none, fenced."""
        async with self._one:
            manifest = await self._commit(content)
            self._newest = content.step
            if self._most_bytes:
                self._keep(content, (self._bus.latest("saved") or {}).get("step", 0))
            return manifest

    def _keep(self, content: BatchContent, saved: int) -> None:
        if self._full_after is not None and saved <= self._full_after:
            return
        self._full_after = None
        self._recent.append(content)
        self._forget(saved)
        if sum(kept.num_bytes for kept in self._recent) > self._most_bytes:
            self._full_after = saved
            self._recent.clear()

    def _forget(self, saved: int) -> None:
        """Keep no batch that a checkpoint has behind it."""
        while self._recent and self._recent[0].step <= saved:
            self._recent.popleft()

    async def hold(self) -> tuple[int, int]:
        """Commit nothing from now on, once what is being written is there. Returns the first batch that can be
        committed again, and the newest one; the first is one above where there is none."""
        await self._one.acquire()
        return self._newest - len(self._recent) + 1, self._newest

    async def go_on(self, incarnation: int, step: int) -> list[int]:
        """Commit what comes after `step` for a new attempt, then as ever. Returns the steps.
        Raises StoreError: as `write`."""
        self._incarnation = incarnation
        self._forget(step)
        try:
            for content in self._recent:
                await self._commit(content)
        finally:
            self._one.release()
        return [content.step for content in self._recent]

    async def _commit(self, content: BatchContent) -> Manifest:
        path = self._paths.rollouts_step(content.step)
        wait = RoomWait(f"batch {content.step}", path, self._room_s)
        while (manifest := await self._written(content, wait)) is None:
            pass
        wait.over()
        source = self._handover.offer(path)
        self._bus.publish("batch", step=content.step, path=str(path), digest=manifest.digest, source=source)
        return manifest

    async def _written(self, content: BatchContent, wait: RoomWait) -> Manifest | None:
        """Write a batch; None after a pause where there was no room for it."""
        try:
            return await asyncio.to_thread(
                write_batch,
                self._paths,
                content.step,
                content.ranks,
                state=content.state,
                meta=content.meta,
                incarnation=self._incarnation,
            )
        except (StoreError, OSError) as raised:
            error = as_refused(raised)
            if error is None:
                raise
            error = takes(error, content.num_bytes) if isinstance(error, NoRoom) else error
            await asyncio.sleep(wait.next_pause(error))
            while not await asyncio.to_thread(lambda: wait.has_room):  # the file system may not answer
                await asyncio.sleep(wait.next_pause(error))
            return None
