"""Publishing a weight version beside the next step: the tensors leave the device, training goes on, a thread writes.

    main thread    | step n: update | begin(n): copies are queued | step n+1 ...            | settle, begin(n+1) |
    thread                            [copies done] [own ranges, fsync] [rank 0: manifest, rename, bus]

On CUDA the casts and copies go into pinned memory on the stream of the training, so they are done before the next
update changes anything, and the host waits for nothing. What is written, by which rank, and how it becomes a version is
`publish.Publisher`'s; only who waits differs. Ranks talk about it over a gloo group of its own. One version at a time:
the next one waits for it, and so do a save, a stop and the end of the run. A failure on any rank ends all of them at
the next boundary between steps. Where a node has too little memory for the copies, the step waits for its version.
"""

import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch
from loguru import logger

from prime_hpc.store.errors import StoreError
from prime_hpc.store.io.room import RoomWait
from prime_hpc.store.manifest import Manifest
from prime_hpc.trainer.checkpointing.staging import HostStage
from prime_hpc.trainer.rank_group import RankGroup
from prime_hpc.trainer.threads import rank_thread
from prime_hpc.trainer.until_room import until_room
from prime_hpc.trainer.weights.publish import Publisher, VersionPublisher
from prime_hpc.trainer.weights.write_plan import Block


def _name(block: Block) -> str:
    return f"{block.file.name} {block.offset}"


TIMEOUT_S = 1800.0
"""Longest that a version may take."""
Announce = Callable[[Manifest], None]
IsStopped = Callable[[], bool]


@dataclass
class _Pending:
    """One version under way."""

    version: int
    blocks: list[Block]
    """The writes of this rank, in host memory."""
    copied: "torch.cuda.Event | None"
    thread: threading.Thread | None = None
    error: BaseException | None = None


def build_beside(
    publisher: VersionPublisher,
    wanted: bool | None,
    device: torch.device,
    announce: Announce,
    room_s: float,
    is_stopped: IsStopped = lambda: False,
) -> "BesidePublisher | None":
    """Build what writes a publisher's versions beside the training; None where it should not, or they are small
    (adapters). `wanted`: `trainer.publish_beside`; `room_s`: `supervisor.write_timeout_s`; `is_stopped`: see
    `until_room`."""
    if not isinstance(publisher, Publisher) or not (device.type == "cuda" if wanted is None else wanted):
        return None
    return BesidePublisher(publisher, announce, TIMEOUT_S, room_s, is_stopped)


class BesidePublisher:
    """Begins versions of one `Publisher`. `begin` and `finish` are collective."""

    def __init__(
        self,
        publisher: Publisher,
        announce: Announce,
        timeout_s: float,
        room_s: float = 0.0,
        is_stopped: IsStopped = lambda: False,
    ) -> None:
        """Open it. Collective.

        Args:
            announce: called on rank 0, in the thread, with the manifest of a version that has its name.
            timeout_s: longest that a version may take.
            room_s: longest that it may wait for room besides.
            is_stopped: on rank 0, in the thread too: it is to wait no longer.
        """
        self._publisher, self._announce, self._timeout_s = publisher, announce, timeout_s + room_s
        self._is_stopped = is_stopped
        self._room_wait = RoomWait("a weights version", publisher.paths.weights, room_s)
        self._side = RankGroup(timeout_s)
        self._room: HostStage | None = None
        self._lacks_room = False
        self._pending: _Pending | None = None

    @property
    def has_ended(self) -> bool:
        """True if the version under way has come to its end on this rank: time to `finish`."""
        return self._pending is not None and self._pending.thread is not None and not self._pending.thread.is_alive()

    def begin(self, version: int) -> None:
        """Begin `weights/step_<version>`; returns when the state may change.
        Raises StoreError: the version before it failed; or this one, where there is no room for a copy."""
        self.finish()
        if self._room is None and not self._lacks_room:
            self._take_room()
        if self._lacks_room:
            publish = partial(self._publisher.publish, version)
            manifest = until_room(publish, self._side, self._room_wait, self._is_stopped)
            if manifest is not None:
                self._announce(manifest)
            return
        pending = _Pending(version, *self._copy())
        thread = rank_thread(self._in_background, name=f"publish-{version}", args=[pending])
        pending.thread, self._pending = thread, pending
        thread.start()

    def finish(self) -> None:
        """Wait for the version under way, if any. Raises StoreError: it failed on some rank, or took too long."""
        pending = self._pending
        if pending is None:
            return
        assert pending.thread is not None
        pending.thread.join(self._timeout_s)
        if pending.thread.is_alive():
            raise StoreError(f"weights version {pending.version} was not written within {self._timeout_s:.0f} s")
        self._pending = None
        if isinstance(pending.error, StoreError):
            raise pending.error
        if pending.error is not None:
            raise StoreError(f"weights version {pending.version} was not published: {pending.error}") from pending.error
        self._publisher.tell_times()

    @torch.no_grad()
    def _take_room(self) -> None:
        """Take the host memory for this rank's blocks, if every rank's node has enough. Collective."""
        blocks = self._publisher.blocks()
        shapes = {_name(block): torch.empty_like(block.published(), device="meta") for block in blocks}
        room: HostStage | None = None
        lack = ""
        try:
            ranks_per_node = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
            room = HostStage(shapes, None, ranks_per_node, "trainer.publish_beside", "each step waits for its version")
        except (StoreError, OSError) as error:
            lack = str(error)
        # all have measured: what one has touched, another of this node would count as taken
        lacks = {rank: words for rank, words in enumerate(self._side.gather_all(lack)) if words}
        if room is None or lacks:
            self._lacks_room = True
            if self._side.rank == 0:
                rank, words = next(iter(lacks.items()))
                logger.warning(f"rank {rank}: {words}")
            return
        room.touch()
        self._room = room

    @torch.no_grad()
    def _copy(self) -> "tuple[list[Block], torch.cuda.Event | None]":
        """Copy this rank's blocks to host memory; they are there once the event has happened."""
        room, copied = self._room, list[Block]()
        event: torch.cuda.Event | None = None
        assert room is not None
        for block in self._publisher.blocks():
            event = room.put(_name(block), block.published()) or event
            copied.append(replace(block, values=room.tensors[_name(block)]))
        return copied, event

    def _in_background(self, pending: _Pending) -> None:
        """Write a version, in its thread."""
        started = time.perf_counter()
        try:
            manifest = until_room(
                lambda: self._publisher.write(pending.version, _copied(pending), self._side),
                self._side,
                self._room_wait,
                self._is_stopped,
            )
            if manifest is not None:
                self._announce(manifest)
                logger.debug(f"version {pending.version} was written in {time.perf_counter() - started:.3f} s")
        except Exception as error:  # noqa: BLE001 - raised by `finish` in the main thread
            pending.error = error


def _copied(pending: _Pending) -> Iterator[Block]:
    """Return what this rank writes, once it has left the device."""
    if pending.copied is not None:
        torch.cuda.set_device(pending.copied.device)  # a new thread's own is the first of the node
        pending.copied.synchronize()
    yield from pending.blocks
