"""How often to save: Young/Daly's interval from the cost of a save and the rate of failures. Pure.

    plan = plan_interval(save_s=30, write_s=90, step_s=60, mtbf_s=mtbf_s(64, 6.5))
    plan.interval_s, plan.loss_percent, plan.why

With a save that delays training by d seconds every tau seconds, and a failure every M seconds on average that costs
half an interval and the restart R, the share of time lost is

    d / tau + (tau / 2 + R) / M

Young (CACM 17(9), 1974) and Daly (FGCS 22(3), 2006): least at tau = sqrt(2 d M). Saxena et al. (arXiv 2410.18124) add
the save itself and the restart: tau = d + sqrt(2 (M + R) d + d^2), which is used here. M of N nodes that each fail at
rate r is 1 / (N r); Kokolis et al. (arXiv 2410.21680) count 6.5 failures in 1000 node-days.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from prime_hpc.observe.console import in_seconds

DAY_S = 86_400.0
HOUR_S = 3600.0
CHEAP_SHARE = 1 / 200
"""Saving every hour is worth it anyway while it costs less than this share of the time: software fails too."""

_FAILURES = ("failed", "node_lost")
_WARNED = ("preempted", "requeued")


@dataclass(frozen=True)
class Events:
    """Failures in a run's attempts."""

    num_failures: int = 0
    """Attempts that ended without warning."""
    num_warned: int = 0
    """Attempts that ended after a notice: preemption, time limit."""
    seconds: float = 0.0
    """Time observed."""
    restart_s: float | None = None
    """Median time from an attempt's begin until its roles were ready."""


NO_EVENTS = Events()


@dataclass(frozen=True)
class IntervalPlan:
    """How often to save, and what that costs."""

    interval_s: float
    """Seconds between the beginnings of two saves."""
    num_steps: int
    """The same in steps, at least 1."""
    loss_percent: float
    """Share of the time that saves, repeated work and restarts take."""
    mtbf_s: float
    """Mean time between ends without a saved step, seconds; infinite where nothing ever fails."""
    why: str


def mtbf_s(num_nodes: int, failures_per_1000_node_days: float, events: Events = NO_EVENTS) -> float:
    """Mean time between failures of a job in seconds.

    The site's rate counts like one failure seen in the time in which it predicts one (a gamma prior of shape 1); what
    the run's own attempts show shifts it: with k failures in T seconds, M = (M_site + T) / (1 + k).
    `failures_per_1000_node_days`: of the site; 0: never.
    """
    if failures_per_1000_node_days <= 0:
        is_seen = events.num_failures and events.seconds > 0  # an attempt that failed at once says nothing of a rate
        return events.seconds / events.num_failures if is_seen else math.inf
    prior = 1000 * DAY_S / (failures_per_1000_node_days * max(num_nodes, 1))
    return (prior + events.seconds) / (1 + events.num_failures)


def learn(attempts: Sequence[Mapping[str, Any]]) -> Events:
    """Count the ends in the rows of `attempts.jsonl`. An attempt without an end that is not the last was killed."""
    failures = warned = 0
    seconds, starts = 0.0, []
    for index, row in enumerate(attempts):
        began, ended, outcome = row.get("began"), row.get("ended"), row.get("outcome")
        if ended is None:
            if index == len(attempts) - 1:
                continue  # lives
            ended, outcome = attempts[index + 1].get("began"), "failed"
        if began is not None and ended is not None:  # where nobody says when, it counts for no time
            seconds += max(0.0, ended - began)
        failures += outcome in _FAILURES and row.get("exit_code") != 2
        warned += outcome in _WARNED
        if (row.get("seconds") or {}).get("start"):
            starts.append(float(row["seconds"]["start"]))
    return Events(failures, warned, seconds, median(starts) if starts else None)


def best_interval_s(save_s: float, mtbf: float, restart_s: float = 0.0) -> float:
    """Return the interval with the least loss, seconds (Saxena et al.); infinite where nothing ever fails."""
    if math.isinf(mtbf):
        return math.inf
    return save_s + math.sqrt(2 * (mtbf + restart_s) * save_s + save_s**2)


def expected_loss_percent(
    interval_s: float, save_s: float, mtbf: float, restart_s: float = 0.0, write_s: float = 0.0
) -> float:
    """Share of the time that is lost, 0..100.

    Args:
        save_s: by how much a save delays training.
        mtbf: mean time between failures, seconds.
        restart_s: from a failure until training goes on.
        write_s: from the state that is saved until its checkpoint is whole; a failure before that repeats the work
            since the checkpoint before.
    """
    repeated = 0.0 if math.isinf(mtbf) else (interval_s / 2 + max(write_s - save_s, 0.0) + restart_s) / mtbf
    return min(100.0, 100 * (save_s / max(interval_s, 1e-9) + repeated))


def plan_interval(
    *,
    save_s: float,
    step_s: float,
    mtbf: float,
    write_s: float | None = None,
    restart_s: float = 0.0,
    walltime_s: float | None = None,
    notice_s: float | None = None,
    events: Events = NO_EVENTS,
) -> IntervalPlan:
    """Return the interval to use.

    A time limit or a preemption costs nothing but the restart when its notice is long enough for one more step and a
    save; otherwise each counts as a failure. Never rarer than once an hour while that costs less than 0.5 %.

    Args:
        save_s: by how much a save delays training.
        write_s: from the state that is saved until its checkpoint is whole; default `save_s`.
        restart_s: from a failure until training goes on.
        walltime_s: length of the job; None: unlimited.
        notice_s: warning before the time limit or a preemption; None: none.
        events: warned ends seen so far, from `learn`.
    """
    write_s = save_s if write_s is None else write_s
    rate, why = 1 / mtbf, [f"a failure every {_span(mtbf)}"]
    if notice_s is None or step_s + write_s > notice_s:
        unwarned = (1 / walltime_s if walltime_s else 0.0) + (
            events.num_warned / events.seconds if events.num_warned and events.seconds > 0 else 0.0
        )
        if unwarned:
            rate += unwarned
            notice = "no notice" if notice_s is None else f"a notice of {notice_s:.0f} s"
            why.append(f"{notice} is too short for a step and a save ({step_s + write_s:.0f} s): its end counts too")
    mean = 1 / rate if rate > 0 else math.inf
    best = best_interval_s(save_s, mean, restart_s)
    limit = max(HOUR_S, save_s / CHEAP_SHARE)
    if best > limit:
        why.append(f"at least every {_span(limit)}")
    interval = max(min(best, limit), write_s, step_s)
    why.append(f"a save delays training by {in_seconds(save_s)}")
    num_steps = max(1, round(interval / max(step_s, 1e-9)))
    loss = expected_loss_percent(interval, save_s, mean, restart_s, write_s)
    return IntervalPlan(interval, num_steps, loss, mean, "; ".join(why))


def _span(seconds: float) -> str:
    if math.isinf(seconds):
        return "never"
    for unit, name in ((DAY_S, "days"), (HOUR_S, "h"), (60.0, "min")):
        if seconds >= 2 * unit:
            return f"{seconds / unit:.1f} {name}"
    return f"{seconds:.0f} s"
