"""When a rank saves, and who is told: the config's interval, requests over the bus, and what saves cost.

Between the loops (through `trainer.py`) and `checkpointer.py`. Rank 0 decides; the loops carry its word to the others.

Messages: "save" {"id": n} asks everyone to checkpoint at the next step boundary and to go on, once per id. "saved"
{"step", "path", "ids"} says that a checkpoint is whole and which requests it answers (step 0: nothing was trained yet).
"""

from collections.abc import Callable
from pathlib import Path

from loguru import logger

from prime_hpc.config.sections.common import CkptConfig
from prime_hpc.store.messaging.run_bus import Bus
from prime_hpc.store.run_paths import RunPaths
from prime_hpc.trainer.checkpointing.checkpointer import Checkpointer, SaveFigures
from prime_hpc.trainer.checkpointing.save_interval import SaveSchedule
from prime_hpc.trainer.rank_group import RankGroup
from prime_hpc.trainer.slow_ranks import SlowRanks


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
    ) -> None:
        """Args:
        bus: requests come and answers go over it.
        config: None: saves are on request only.
        max_steps: the last step is always saved.
        schedule: of `ckpt.interval = auto`, on rank 0.
        slow_ranks: hears what each save took.
        """
        self.checkpointer = checkpointer
        self.saved_step: int | None = None
        """Newest step whose checkpoint exists or is being written."""
        self._paths, self._bus = paths, bus
        self._ranks = RankGroup()
        self._config, self.max_steps, self._schedule = config, max_steps, schedule
        self._slow_ranks = slow_ranks
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
        """Return whether the config wants a checkpoint after `step`. `agree`: rank 0's yes or no on every rank."""
        if self._config is None:
            return False
        if isinstance(self._config.interval, int):
            return step % self._config.interval == 0 or step == self.max_steps
        due = self._schedule is not None and self._schedule.due()
        return agree(due or step == self.max_steps)

    def save(self, step: int, *, progress: dict[str, int], batch_dir: Path | None) -> None:
        """Save a checkpoint, or begin to, unless this step's exists.
        Raises StoreError: this save, or one that was still in flight, failed."""
        if self.saved_step != step and step:
            if self.in_flight is not None:
                if self._ranks.rank == 0:
                    logger.warning(f"the checkpoint of step {self.in_flight} is still being written: waiting for it")
                self.finish()
            self.checkpointer.save(step, progress=progress, batch_dir=batch_dir)
            self.saved_step = step
            if self._schedule is not None:
                self._schedule.began()
        self._answered_ids, self._waiting_ids = self._answered_ids + self._waiting_ids, []
        if step == 0:
            self._answer(0)
        elif self.in_flight is None:
            self._take_note()

    def wait_for_save(self) -> None:
        """Rank 0's save in flight has ended: take note of it everywhere. Raises StoreError: it failed."""
        self.checkpointer.wait_for_save()
        self._take_note()

    def finish(self) -> None:
        """Wait until nothing is being written any more. Raises StoreError: the save failed."""
        if self.in_flight is not None:
            self.checkpointer.finish()
            self._take_note()

    def _take_note(self) -> None:
        """Note that the newest save is whole."""
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
