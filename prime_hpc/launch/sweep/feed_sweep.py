"""`sweep submit --feed`: more points than Slurm takes at once, sent as the user's slots come free, in the foreground.

Each round is an ordinary submit of as many points as there is room for: killed at any moment, the same command goes on
and sends no point twice. A throttle (or lanes) is kept by not sending more, so that no job waits for another one.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from prime_hpc.launch.sweep.feed import Feed
from prime_hpc.launch.sweep.progress import RERUN
from prime_hpc.launch.sweep.report import Report
from prime_hpc.launch.sweep.resolve import Base
from prime_hpc.launch.sweep.submit import submit_sweep
from prime_hpc.slurm.sbatch_errors import SlurmRefused
from prime_hpc.slurm.submission_record import SubmissionUnderWay

EVERY_S = 30.0
"""Between two looks at the queue."""
OUTAGE_S = 1800.0
"""A controller that is away for longer ends the command; nothing is lost."""

Say = Callable[[str], None]


def feed_sweep(
    base: Base,
    *,
    states: Sequence[str] = RERUN,
    every_s: float = EVERY_S,
    say: Say,
    dry_run: bool = False,
    pause: Callable[[float], None] = time.sleep,
) -> Report:
    """Send every point that is missing or failed now; returns when the last one is sent.

    Args:
        states: points in these are sent; one that fails meanwhile is not sent again.
        every_s: pause between two looks at the queue.
        dry_run: say what the first round would send; write nothing.

    Raises:
        ConfigError: as `submit_sweep`; or a point can never fit.
        SlurmRefused: as `submit_sweep`, in the first round; later, Slurm was away for `OUTAGE_S`.
    """
    feed = Feed(base.spec.file)
    total: Report | None = None
    answered = time.monotonic()
    try:
        while True:
            try:
                report = submit_sweep(base, states=states, dry_run=dry_run, feed=feed)
                answered = time.monotonic()
            except (SlurmRefused, SubmissionUnderWay) as error:
                if total is None or time.monotonic() - answered > OUTAGE_S:
                    raise
                _tell(feed, f"asked again every {every_s:g} s: {error}", say)
                pause(every_s)
                continue
            if report.is_local or dry_run or feed.todo is None:
                return report
            total = _added(total, feed.settle(report))
            if not feed.todo:
                break
            _tell_and_wait(feed, total, say, lambda: pause(every_s))
    except KeyboardInterrupt:
        say(f"interrupted: not sent yet: {_points(len(feed.todo or ()))}; the same command goes on")
        raise
    if feed.is_cancelled:
        say("the sweep was cancelled meanwhile: nothing more is sent; the same command goes on with what is missing")
    return total


def _tell_and_wait(feed: Feed, total: Report, say: Say, pause: Callable[[], None]) -> None:
    """Pause, at least once, and until Slurm has room."""
    feed.is_full()  # what was sent a moment ago counts
    while True:
        sent, left = _points(len(total.jobs)), len(feed.todo or ())
        words = f"{sent} sent, {left} to come when there is room: {feed.held_by or feed.room_is}"
        _tell(feed, words, say)
        pause()
        if not feed.is_full():
            return


def _points(count: int) -> str:
    return f"{count} point{'' if count == 1 else 's'}"


def _tell(feed: Feed, words: str, say: Say) -> None:
    """Say what was not said last."""
    if words != feed.said:
        say(words)
        feed.said = words


def _added(total: Report | None, report: Report) -> Report:
    """Return both rounds as one report, with the points as they were at the beginning."""
    if total is None:
        return report
    warnings = list(dict.fromkeys([*total.warnings, *report.warnings]))
    parts, jobs = [*total.parts, *report.parts], [*total.jobs, *report.jobs]
    return replace(report, views=total.views, parts=parts, jobs=jobs, warnings=warnings)
