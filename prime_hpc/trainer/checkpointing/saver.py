"""When a rank saves, and who is told: the config's interval, requests over the bus, and what saves cost.

Between the loops (through `trainer.py`) and `checkpointer.py`. Rank 0 decides; the loops carry its word to the others.

Messages: "save" {"id": n} asks everyone to checkpoint at the next step boundary and to go on, once per id. "saved"
{"step", "path", "ids"} says that a checkpoint is whole and which requests it answers (step 0: nothing was trained yet).

A checkpoint that has no room, or cannot be written now, does not end the training: one after a later step takes its
place. Only the last one waits.
"""

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from loguru import logger

from prime_hpc.config.sections.common import CkptConfig
from prime_hpc.runtime import activity
from prime_hpc.store.errors import NoRoom, Unreadable
from prime_hpc.store.io.room import RoomWait
from prime_hpc.store.messaging.run_bus import Bus
from prime_hpc.store.run_paths import RunPaths
from prime_hpc.trainer.checkpointing.checkpointer import Checkpointer, SaveFigures
from prime_hpc.trainer.checkpointing.save_interval import SaveSchedule
from prime_hpc.trainer.rank_group import RankGroup
from prime_hpc.trainer.slow_ranks import SlowRanks
from prime_hpc.trainer.until_room import until_room

RETRY_S = 60.0
"""From a save for which there was no room to the next one, at the end of a step."""
_CHECKPOINT = "checkpoint"


class Saver:
    """One rank's saves. `save`, `wait_for_save`, `finish`, `prepare` and `is_due` are collective."""

    def __init__(
        self,
        checkpointer: Checkpointer,
        paths: RunPaths,
        bus: Bus,
        *,
        config: CkptConfig | None,
        max_steps: int,
        schedule: SaveSchedule | None = None,
        slow_ranks: SlowRanks | None = None,
        room_s: float | None = 0.0,
    ) -> None:
        """Args:
        bus: requests come and answers go over it.
        config: None: saves are on request only.
        max_steps: the last step is always saved.
        schedule: of `ckpt.interval = auto`, on rank 0.
        slow_ranks: hears what each save took.
        room_s: longest that the last save waits for room, `supervisor.write_timeout_s`; None: it raises at once.
        """
        self.checkpointer = checkpointer
        self.saved_step: int | None = None
        """Newest step whose checkpoint exists or is being written."""
        self._paths, self._bus = paths, bus
        self._ranks = RankGroup()
        self._config, self.max_steps, self._schedule = config, max_steps, schedule
        self._slow_ranks, self.room_s = slow_ranks, room_s
        self._newest: int | None = None
        """Step of the newest save, whatever became of it."""
        self._again_at: float | None = None
        """When to try again a save for which there was no room, `time.monotonic()`; the same on no two ranks."""
        self._seen_request_id: int | None = None
        self._waiting_ids: list[int] = []
        """Requests that were taken up, and are answered by the next save."""
        self._answered_ids: list[int] = []
        """Those that the newest save answers once it is whole."""
        self._figures: SaveFigures | None = None

    @property
    def in_flight(self) -> int | None:
        """Step whose checkpoint is being written in the background."""
        return self.checkpointer.in_flight

    @property
    def steps_in_flight(self) -> list[int]:
        """That step, or none: what it belongs to must not be removed yet."""
        return [] if self.in_flight is None else [self.in_flight]

    @property
    def is_asked(self) -> bool:
        """On rank 0: whether a "save" waits to be taken up."""
        return self._request() is not None

    def _request(self) -> int | None:
        number = (self._bus.latest("save") or {}).get("id")
        return number if isinstance(number, int) and number != self._seen_request_id else None

    def take_up(self) -> None:
        """On rank 0: the pending "save" counts as heard, and is answered by the next `save`."""
        number = self._request()
        if number is not None:
            self._seen_request_id = number
            self._waiting_ids.append(number)

    def prepare(self) -> None:
        """After a step: take the memory for asynchronous saves, unless it is there.
        Raises StoreError: there is too little."""
        if self._config is not None:
            self.checkpointer.prepare()

    def is_due(self, step: int, agree: Callable[[bool], bool]) -> bool:
        """Return whether the config wants a checkpoint after `step`, or there was no room for the last one.
        `agree`: rank 0's yes or no on every rank."""
        if self._again_at is not None and agree(time.monotonic() >= self._again_at):
            return True
        if self._config is None:
            return False
        if isinstance(self._config.interval, int):
            return step % self._config.interval == 0 or step == self.max_steps
        due = self._schedule is not None and self._schedule.due()
        return agree(due or step == self.max_steps)

    def save(self, step: int, *, progress: dict[str, int], batch_dir: Path | None, is_last: bool = False) -> None:
        """Save a checkpoint, or begin to, unless this step's exists. Without room for it, training goes on.

        Args:
            is_last: of the run, as that of the last step is, or before a stop: it waits for room, and is whole when
                this returns.

        Raises:
            NoRoom: there was none for the last one until the deadline.
            StoreError: this save, or one that was still in flight, failed.
        """
        if not is_last and step != self.max_steps:
            with self._put_off():
                self._begin(step, progress, batch_dir)
        elif self.room_s is None:
            self._save_last(step, progress, batch_dir)
        else:
            wait = RoomWait(f"the checkpoint of step {step}", self._paths.checkpoint_step(step), self.room_s)
            until_room(lambda: self._save_last(step, progress, batch_dir), self._ranks, wait)

    def _save_last(self, step: int, progress: dict[str, int], batch_dir: Path | None) -> None:
        try:
            self._begin(step, progress, batch_dir)
            if self.in_flight is not None:
                self.checkpointer.finish()
                self._take_note()
        except (NoRoom, Unreadable) as error:
            self.saved_step = None
            self._free(error)
            raise

    def _free(self, error: NoRoom | Unreadable) -> bool:
        """Delete what retention gives up with the next checkpoint, where room lacks and the file system gives no error.
        Returns whether there was something."""
        return isinstance(error, NoRoom) and self._ranks.from_first(self.checkpointer.make_room)

    def _begin(self, step: int, progress: dict[str, int], batch_dir: Path | None) -> None:
        if self.saved_step != step and step:
            if self.in_flight is not None:
                if self._ranks.rank == 0:
                    logger.warning(f"the checkpoint of step {self.in_flight} is still being written: waiting for it")
                self.finish()
            self._newest = step
            self.checkpointer.save(step, progress=progress, batch_dir=batch_dir)
            self.saved_step, self._again_at = step, None
            if self._schedule is not None:
                self._schedule.began()
        self._answered_ids, self._waiting_ids = self._answered_ids + self._waiting_ids, []
        if step == 0:
            self._answer(0)
        elif self.in_flight is None:
            self._take_note()

    @contextlib.contextmanager
    def _put_off(self) -> Iterator[None]:
        """Have a save that cannot be written now tried again after a later step; who asked for it is answered then."""
        try:
            yield
        except (NoRoom, Unreadable) as error:
            step, self.saved_step = self._newest, None
            self._waiting_ids, self._answered_ids = self._answered_ids + self._waiting_ids, []
            is_freed = self._free(error)
            self._again_at = time.monotonic() + (0.0 if is_freed else RETRY_S)
            if self._ranks.rank == 0:
                how = "retention has freed some: " if is_freed else ""
                logger.warning(
                    f"the checkpoint of step {step} was not saved: {error}. Training goes on without it; {how}the next "
                    "one is tried after a later step"
                )
                activity.blocked(_CHECKPOINT, f"training goes on without a checkpoint: {error}")

    def wait_for_save(self) -> None:
        """Rank 0's save in flight has ended: take note of it everywhere. Raises StoreError: it failed."""
        with self._put_off():
            self.checkpointer.wait_for_save()
            self._take_note()

    def finish(self) -> None:
        """Wait until nothing is being written any more. Raises StoreError: the save failed."""
        if self.in_flight is not None:
            with self._put_off():
                self.checkpointer.finish()
                self._take_note()

    def _take_note(self) -> None:
        """Note that the newest save is whole."""
        self._again_at = None
        activity.blocked(_CHECKPOINT, "")
        figures = self.checkpointer.take_figures()
        if figures is not None and self._slow_ranks is not None:
            self._slow_ranks.wrote(figures.own_s, figures.size)
        if self._ranks.rank != 0 or self.saved_step is None:
            return
        if figures is not None:
            self._figures = figures
            speed = figures.size * self._ranks.world_size / max(figures.write_s, 1e-9) / 1e9
            logger.info(
                f"saved {self._paths.checkpoint_step(self.saved_step)} ({figures.write_s:.2f} s, {speed:.2f} GB/s; "
                f"held training up for {figures.stall_s:.3f} s)"
            )
            self._learn(figures)
        self._answer(self.saved_step)

    def _learn(self, figures: SaveFigures) -> None:
        if self._schedule is not None:
            self._schedule.measured(figures)
            news = self._schedule.news()
            if news is not None:
                logger.info(news)

    def _answer(self, step: int) -> None:
        if self._ranks.rank == 0:
            self._bus.publish("saved", step=step, path=str(self._paths.checkpoint_step(step)), ids=self._answered_ids)
            self._answered_ids = []

    def take_figures(self) -> dict[str, float]:
        """Metrics of the save that ended since the last call, if one did."""
        figures, self._figures = self._figures, None
        if figures is None:
            return {}
        return {
            "ckpt/step": figures.step,
            "ckpt/stall_s": round(figures.stall_s, 4),
            "ckpt/write_s": round(figures.write_s, 4),
            "ckpt/bytes": figures.size * self._ranks.world_size,
        }
