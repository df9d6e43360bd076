"""When `ckpt.interval = auto` saves: from what steps, saves and failures of this run were seen to cost.

Held by rank 0 alone (`trainer.py`), which tells the others. The arithmetic is `store.checkpoint.optimal_interval`'s.
"""

from collections.abc import Callable, Mapping
from typing import Any

from loguru import logger

from prime_hpc.config import Experiment
from prime_hpc.config.site import read_site
from prime_hpc.store.attempts import read_attempts
from prime_hpc.store.checkpoint.optimal_interval import NO_EVENTS, Events, IntervalPlan, learn, mtbf_s, plan_interval
from prime_hpc.store.run_paths import RunPaths
from prime_hpc.trainer.checkpointing.checkpointer import SaveFigures

GUESSED_BYTES_PER_S = 0.5e9
"""Of one rank, before a save was measured."""
FIRST_SAVE_S = 600.0
"""The first save comes after this at the latest: until then its cost is a guess."""
_WEIGHT = 0.2
"""Of the newest value in the running means."""


class SaveSchedule:
    """Decides at each step boundary whether to save. Times are seconds of `clock`."""

    def __init__(
        self,
        *,
        mtbf: float,
        restart_s: float,
        guessed_save_s: float,
        clock: Callable[[], float],
        walltime_s: float | None = None,
        notice_s: float | None = None,
        events: Events = NO_EVENTS,
    ) -> None:
        """See `optimal_interval.plan_interval`; `guessed_save_s` stands in until the first save was measured."""
        self._facts: dict[str, Any] = {
            "mtbf": mtbf,
            "restart_s": restart_s,
            "walltime_s": walltime_s,
            "notice_s": notice_s,
            "events": events,
        }
        self._clock = clock
        self._saved_at = self._boundary = clock()
        self._step_s: float | None = None
        self._save_s, self._write_s = guessed_save_s, guessed_save_s
        self._measured = False
        self._told = 0
        self.plan: IntervalPlan | None = None
        """The newest decision."""

    def due(self) -> bool:
        """At a step boundary: whether to save now. To be called once a step."""
        now = self._clock()
        took, self._boundary = now - self._boundary, now
        self._step_s = took if self._step_s is None else (1 - _WEIGHT) * self._step_s + _WEIGHT * took
        self.plan = plan_interval(save_s=self._save_s, write_s=self._write_s, step_s=self._step_s, **self._facts)
        interval = self.plan.interval_s if self._measured else min(self.plan.interval_s, FIRST_SAVE_S)
        return now - self._saved_at + self._step_s / 2 >= interval

    def began(self) -> None:
        """Note that a save began, whoever asked for it."""
        self._saved_at = self._clock()

    def measured(self, figures: SaveFigures) -> None:
        """Note that a save ended."""
        weight = _WEIGHT if self._measured else 1.0
        self._save_s += weight * (figures.stall_s - self._save_s)
        self._write_s += weight * (figures.write_s - self._write_s)
        self._measured = True
        self._boundary = max(self._boundary, self._saved_at)

    def news(self) -> str | None:
        """One line about the interval when it is new or has changed by half."""
        plan = self.plan
        if plan is None or not self._measured or 2 / 3 < plan.num_steps / max(self._told, 1e-9) < 3 / 2:
            return None
        self._told = plan.num_steps
        return (
            f"ckpt.interval = auto: every {plan.interval_s:.0f} s, about {plan.num_steps} steps; expected loss "
            f"{plan.loss_percent:.2f} % ({plan.why})"
        )


def build_schedule(
    experiment: Experiment, paths: RunPaths, num_bytes: int, clock: Callable[[], float], environ: Mapping[str, str]
) -> SaveSchedule:
    """Return the schedule from the site profile, the attempts so far and Slurm's environment.
    `num_bytes`: that one rank writes in a save, roughly."""
    site = read_site(paths.root)
    rows = read_attempts(paths.attempts)
    events = learn(rows)
    hosts = {host for names in ((rows[-1].get("nodes") or {}) if rows else {}).values() for host in names}
    nodes = len(hosts) or int(environ.get("SLURM_JOB_NUM_NODES", "1"))
    start, end = (environ.get(f"SLURM_JOB_{name}_TIME") for name in ("START", "END"))
    mtbf = mtbf_s(nodes, site.failures_per_1000_node_days, events)
    logger.debug(f"failures: {events}, {nodes} nodes, one every {mtbf:.0f} s")
    return SaveSchedule(
        mtbf=mtbf,
        restart_s=events.restart_s if events.restart_s is not None else site.startup_s,
        guessed_save_s=num_bytes / GUESSED_BYTES_PER_S,
        clock=clock,
        walltime_s=float(end) - float(start) if start and end else None,
        notice_s=experiment.slurm.restart.signal_lead_s if environ.get("SLURM_JOB_ID") else None,
        events=events,
    )
