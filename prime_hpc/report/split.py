"""The split of a run's GPUs that its measured idle shares suggest, for the page."""

from collections.abc import Mapping
from typing import Any

from prime_hpc.report.series import number_of
from prime_hpc.supervisor.attempt.device_split import best_split


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
        "engines_idle": min(1.0, sum(total["engines"][part] for part in ("tail", "idle", "load")) / serving),
    }
    tail = min(1.0, total["engines"]["tail"] / serving)
    overlap = level is None or level > 0
    best = best_split(trainer, engines, overlap=overlap, unit=max(1, unit), tail=tail, **idle)
    return {
        **{name: round(share, 4) for name, share in idle.items()},
        "tail": round(tail, 4),
        "trainer": trainer,
        "engines": engines,
        "suggested_trainer": best[0],
        "suggested_engines": best[1],
        "step_gain": round(best[2], 4),
        "overlap": overlap,
        "unit": spent["unit"],
    }
