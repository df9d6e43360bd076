"""The split of a run's GPUs between trainer and engines that their measured idle shares suggest.

A role's work is its devices times the time for which they were busy, and is taken to be the same however many share it.
Of the engines that is the share of their seats that episodes held (`orchestrator.rollouts.seats`): one long reply in
the place of many is little work. The time for which both sides wait for such replies is the same with any split.
Where both sides work at once (`async_level` 1 or more) a step takes as long as the slower side, least where both are
busy all the time: devices in proportion to the work. Where they take turns (level 0) it takes w_t / g_t + w_e / g_e for
work w and devices g, least at g_e / g_t = sqrt(w_e / w_t).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prime_hpc.config import Experiment
from prime_hpc.config.engine_groups import engine_roles
from prime_hpc.observe.metric_files import metrics_file
from prime_hpc.observe.metrics import read_metrics
from prime_hpc.slurm.shared_gpus import gpus_in_common

NODE = 8
"""Devices by which many are shared out."""
MIN_GAIN = 0.02
"""Of the step: less is not worth a change."""
TOLD_TAIL = 0.05
"""Of the time: a smaller tail is not worth a word."""
_READ = {
    "time",
    "time/step",
    "time/wait",
    "time/wait_weights",
    "time/wait_servers",
    "time/weight_pause",
    "queue/empty_seats",
    "queue/empty_tail",
}


def split_choices(trainer: int, engines: int, unit: int, most: int) -> list[tuple[int, int]]:
    """Return other ways to share out as many devices, spread evenly over all there are, without the present one.

    Args:
        trainer, engines: devices as they are shared out now.
        unit: devices of one engine.
        most: ways at most.
    """
    total = trainer + engines
    step = unit * max(1, NODE // unit) if total >= 8 * NODE else unit
    every = [(total - used, used) for used in range(step, total, step) if used != engines]
    if len(every) <= most:
        return sorted(every)
    picked = {round(i * (len(every) - 1) / (most + 1)) for i in range(1, most + 1)}
    return sorted(every[index] for index in picked)


def step_share(split: tuple[int, int], works: tuple[float, float], overlap: bool) -> float:
    """Return seconds of a step, in the work's unit over devices of trainer and engines; see the module."""
    times = works[0] / split[0], works[1] / split[1]
    return max(times) if overlap else sum(times)


def best_split(
    trainer: int,
    engines: int,
    *,
    trainer_idle: float,
    engines_idle: float,
    overlap: bool,
    unit: int = 1,
    tail: float = 0.0,
) -> tuple[int, int, float]:
    """Return the devices of trainer and engines, and by what share a step would be shorter.

    Args:
        trainer, engines: devices as they were.
        trainer_idle, engines_idle: shares of the time in which they waited.
        overlap: both sides work at once.
        unit: devices of one engine.
        tail: share of the time in which the engines waited for the last replies of a batch, part of `engines_idle`.
    """
    total = trainer + engines
    works = trainer * max(0.0, 1 - trainer_idle), engines * max(0.0, 1 - engines_idle)
    choices = [(total - used, used) for used in range(unit, total, unit)]
    if not choices or min(works) <= 0:
        return trainer, engines, 0.0
    best = min(choices, key=lambda pair: step_share(pair, works, overlap))
    now = step_share((trainer, engines), works, overlap)
    gain = (now - step_share(best, works, overlap)) / (now + min(tail, max(0.0, 1 - now)))
    return (*best, gain) if gain >= MIN_GAIN and math.isfinite(gain) else (trainer, engines, 0.0)


@dataclass(frozen=True)
class IdleShares:
    """Of an attempt's time."""

    trainer: float
    """In which the trainer waited for a batch."""
    engines: float
    """For which the engines' seats were empty, and in which they paused to load weights."""
    tail: float
    """Of that, what was empty while a batch waited for its last replies."""


def idle_shares(trainer: Sequence[Mapping[str, Any]], orchestrator: Sequence[Mapping[str, Any]]) -> IdleShares | None:
    """Return the idle shares of an attempt; None where it has no step that counts.
    `trainer`, `orchestrator`: rows of the attempt's steps. The first ones are left out: they waited for the start."""
    trained, served = (
        [row for row in rows if isinstance(row.get("time/step"), int | float)][1:] for rows in (trainer, orchestrator)
    )
    if not (_sum(trained, "time/step") > 0 and _sum(served, "time/step") > 0):
        return None
    engines = sum(map(engines_idle_s, served)) / _sum(served, "time/step")
    tail = sum(_value(row, "queue/empty_tail") * _value(row, "time/step") for row in served) / _sum(served, "time/step")
    return IdleShares(
        min(1.0, _sum(trained, "time/wait") / _sum(trained, "time/step")), min(1.0, engines), min(1.0, tail)
    )


def engines_idle_s(row: Mapping[str, Any]) -> float:
    """Return the seconds of an orchestrator's step for which the engines were idle. Rows of versions that counted no
    seats tell of waits alone."""
    pause, empty = _value(row, "time/weight_pause"), row.get("queue/empty_seats")
    if isinstance(empty, int | float):
        return float(empty) * _value(row, "time/step") + (1 - float(empty)) * pause
    return _value(row, "time/wait_weights") + _value(row, "time/wait_servers") + pause


def _value(row: Mapping[str, Any], key: str) -> float:
    return float(row.get(key) or 0)


def _sum(rows: Sequence[Mapping[str, Any]], key: str) -> float:
    return sum(_value(row, key) for row in rows)


def split_line(experiment: Experiment, run_dir: Path, ready: float) -> str | None:
    """Return the word at the end of a job on how its last attempt's devices were shared; None where that says nothing.
    `ready`: when all roles of the attempt were, epoch seconds: before that they wait for each other's start."""
    engines = experiment.inference
    if experiment.kind != "rl" or engines is None or engine_roles(experiment) != ["inference"]:
        return None  # GPUs of others are not counted here
    if experiment.engines_sleep:
        return None
    if gpus_in_common(experiment):
        return None  # what both have in common is not split
    files = [metrics_file(run_dir, role) for role in ("trainer", "orchestrator")]
    rows = [[row for row in read_metrics(file, _READ.__contains__) if _value(row, "time") >= ready] for file in files]
    idle = idle_shares(*rows)
    if idle is None:
        return None
    now, overlap = (experiment.trainer.num_ranks, engines.num_gpus), experiment.async_level > 0
    words = f"the trainer waited for {idle.trainer:.0%} of this attempt, the engines for {idle.engines:.0%}"
    if idle.tail >= TOLD_TAIL:
        words += f" ({idle.tail:.0%} for the last replies of a batch, whatever the split)"
    found = best_split(
        *now,
        trainer_idle=idle.trainer,
        engines_idle=idle.engines,
        overlap=overlap,
        unit=engines.gpus_per_engine,
        tail=idle.tail,
    )
    if found[2] <= 0:
        return f"{words}: no other split of {sum(now)} devices would be much quicker"
    return (
        f"{words}: {found[0]} trainer ranks and {found[1]} for engines, not {now[0]} and {now[1]}, would make a step "
        f"about {found[2]:.0%} shorter (prime-hpc simulate)"
    )
