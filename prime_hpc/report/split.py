"""The split of a run's GPUs between trainer and engines that their measured idle shares suggest.

A role's work is its devices times the time for which they were busy, and is taken to be the same however many share it.
Where both sides work at once (`async_level` 1 or more) a step takes as long as the slower side, least where both are
busy all the time: devices in proportion to the work. Where they take turns (level 0) it takes w_t / g_t + w_e / g_e for
work w and devices g, least at g_e / g_t = sqrt(w_e / w_t).
"""

import math
from collections.abc import Mapping
from typing import Any

from prime_hpc.report.series import number_of

NODE = 8
"""Devices by which many are shared out."""
MIN_GAIN = 0.02
"""Of the step: less is not worth a change."""


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
    trainer: int, engines: int, *, trainer_idle: float, engines_idle: float, overlap: bool, unit: int = 1
) -> tuple[int, int, float]:
    """Return the devices of trainer and engines, and by what share a step would be shorter.

    Args:
        trainer, engines: devices as they were.
        trainer_idle, engines_idle: shares of the time in which they waited.
        overlap: both sides work at once.
        unit: devices of one engine.
    """
    total = trainer + engines
    works = trainer * max(0.0, 1 - trainer_idle), engines * max(0.0, 1 - engines_idle)
    choices = [(total - used, used) for used in range(unit, total, unit)]
    if not choices or min(works) <= 0:
        return trainer, engines, 0.0
    best = min(choices, key=lambda pair: step_share(pair, works, overlap))
    now = step_share((trainer, engines), works, overlap)
    gain = 1 - step_share(best, works, overlap) / now
    return (*best, gain) if gain >= MIN_GAIN and math.isfinite(gain) else (trainer, engines, 0.0)


def suggest_split(config: Mapping[str, Any], spent: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the split for the page and its JSON form; None where a run has not both sides, or no step yet.

    Args:
        config: the resolved tree, of this version or an older one.
        spent: of `accounting.account`.
    """
    trainer, engines = int(spent["trainer_devices"]), int(spent["engine_devices"])
    total = spent["total"]
    running = total["wall"] - total["trainer"]["start"] - total["trainer"]["end"]
    serving = total["wall"] - total["engines"]["start"] - total["engines"]["end"]
    if config.get("kind") != "rl" or config.get("teacher_inference") or not trainer or not engines:
        return None
    if not total["steps"] or running <= 0 or serving <= 0:
        return None
    level = number_of(config.get("async_level"))
    inference = config.get("inference")
    widths = inference if isinstance(inference, Mapping) else {}
    unit = 1
    for key in ("tensor_parallel_size", "pipeline_parallel_size"):
        unit *= int(number_of(widths.get(key)) or 1)
    idle = {
        "trainer_idle": min(1.0, total["trainer"]["wait"] / running),
        "engines_idle": min(1.0, (total["engines"]["idle"] + total["engines"]["load"]) / serving),
    }
    overlap = level is None or level > 0
    best = best_split(trainer, engines, overlap=overlap, unit=max(1, unit), **idle)
    return {
        **{name: round(share, 4) for name, share in idle.items()},
        "trainer": trainer,
        "engines": engines,
        "suggested_trainer": best[0],
        "suggested_engines": best[1],
        "step_gain": round(best[2], 4),
        "overlap": overlap,
        "unit": spent["unit"],
    }
