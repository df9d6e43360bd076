"""Hours of a run by what they were spent on, attempt by attempt.

Of each attempt the trainer's time is split into start-up, training, waiting, publishing, saving, steps that a later
attempt did again, and the end; the engines' into start-up, sampling, loading weights, tails of batches, and idling.
Times the devices of each role these are device-hours; devices that the job held without a role are named too, so that
the sum is that of the allocation. Effective training time is training that lasted, over all the time from the first
submission to the end. The idle shares suggest another split of the run's GPUs.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from prime_hpc.report.phases import AttemptSums, ready_at
from prime_hpc.report.series import number_of, section_of
from prime_hpc.report.spans import Held, held_spans
from prime_hpc.slurm.queue_facts.job_lives import JobLife
from prime_hpc.supervisor.attempt.device_split import best_split

TRAINER_PARTS = ("start", "train", "lost", "wait", "publish", "save", "other", "end")
ENGINE_PARTS = ("start", "sample", "load", "tail", "idle", "end")


@dataclass(frozen=True)
class Devices:
    """Devices of a run's roles."""

    kind: str
    """`GPU`, or `process` where a rank or an engine computes on CPUs."""
    trainer: int
    engines: int
    only_evaluate: bool = False
    """The engines, of SFT."""


def devices_of(config: Mapping[str, Any], attempts: Sequence[Mapping[str, Any]]) -> Devices:
    """Count ranks and the engines' devices in a resolved config, of this version or an older one."""
    kind = config.get("kind")
    trainer = _whole(section_of(config, "trainer").get("num_ranks")) if kind in ("rl", "sft") else 0
    samples = kind != "sft" or bool(section_of(section_of(config, "orchestrator"), "eval"))
    engines = 0
    for name in ("inference", "teacher_inference", "judge_inference"):
        section = section_of(config, name)
        if section and samples:
            widths = ("num_replicas", "data_parallel_size", "tensor_parallel_size", "pipeline_parallel_size")
            count = 1
            for width in widths:
                count *= _whole(section.get(width)) or 1
            engines += count
    held = [section_of(row, "allocated").get("gpus") for row in attempts]
    is_gpu = any(_whole(gpus) for gpus in held) or config.get("device") == "cuda"
    return Devices("GPU" if is_gpu else "process", trainer, engines, only_evaluate=kind == "sft" and samples)


def _whole(value: Any) -> int:
    number = number_of(value)
    return int(number) if number is not None and 0 < number < 1e9 else 0


def account(
    attempts: Sequence[Mapping[str, Any]],
    trainer: Sequence[AttemptSums],
    orchestrator: Sequence[AttemptSums],
    devices: Devices,
    *,
    submitted: float | None,
    until: float,
    goes_on: bool,
    ready: Mapping[int, float],
    lives: Sequence[JobLife] = (),
) -> dict[str, Any]:
    """Split the time of every attempt.

    Args:
        attempts: rows of `attempts.jsonl`.
        trainer, orchestrator: sums of their steps, one an attempt.
        submitted: of the first submission, as far as that is known, epoch seconds.
        until: when the last attempt was last seen alive, if it has written no end, epoch seconds; 0: nobody says.
        ready: when all roles of an attempt were ready, for those that did not live to write it.
        lives: of the run's jobs, where Slurm's accounting says; of `own_lives`.

    Returns:
        `rows` one an attempt, `total`, the facts of the devices, and `slurm`: what Slurm accounted for, or None.
    """
    rows: list[dict[str, Any]] = []
    previous_end: float | None = None
    spans = held_spans(attempts, lives)
    for index, attempt in enumerate(attempts):
        began, ended = number_of(attempt.get("began")), number_of(attempt.get("ended"))
        is_last = index + 1 == len(attempts)
        last = ended
        if last is None:
            later = None if is_last else number_of(attempts[index + 1].get("began"))
            last = _last_sign(trainer, orchestrator, index, later)
            last = max(last, until) if is_last else last
        began = last if began is None else began  # nobody says when: it is charged for nothing
        end = ended if ended is not None else max(began, last)
        began, end = spans[index].widened(began, end)
        if previous_end is None:
            waited = max(0.0, began - submitted) if submitted is not None and submitted <= began else 0.0
        else:
            waited = max(0.0, began - previous_end)
        previous_end = end
        sums = trainer[index] if index < len(trainer) else AttemptSums()
        served = orchestrator[index] if index < len(orchestrator) else AttemptSums()
        is_open = is_last and goes_on and ended is None and spans[index].until is None
        rows.append(_row(attempt, began, end, is_open, waited, sums, served, devices, ready, spans[index]))
    return {
        "rows": rows,
        "total": _total(rows),
        "slurm": _slurm(rows, lives, spans, devices),
        "unit": devices.kind,
        "trainer_devices": devices.trainer,
        "engine_devices": devices.engines,
        "trainer_parts": TRAINER_PARTS,
        "engine_parts": ENGINE_PARTS,
    }


def without(spent: Mapping[str, Any], known: Collection[int]) -> dict[str, Any]:
    """Return what a run cost but for some of its attempts, by their places: a copy of it has counted them."""
    rows, slurm = spent["rows"], spent["slurm"]
    if slurm is not None:
        others = sum(rows[i]["held_hours"] or 0.0 for i in known if rows[i]["by_slurm"])
        slurm = {**slurm, "hours": max(0.0, slurm["hours"] - others)}
    own = [row for i, row in enumerate(rows) if i not in known]
    return {**spent, "rows": own, "total": _total(own), "slurm": slurm}


def charged_hours(spent: Mapping[str, Any]) -> float | None:
    """Return the device-hours of a run: what Slurm accounted for, and of attempts that it does not know those of
    `attempt_hours`; None: nothing says what its jobs held."""
    slurm, rows = spent["slurm"], spent["rows"]
    held = [row["held_hours"] is not None for row in rows]
    if not (slurm is not None or any(held)) or (spent["unit"] != "GPU" and not all(held)):
        return None
    hours = zip(rows, attempt_hours(spent), strict=True)
    rest = sum(own for row, own in hours if slurm is None or not row["by_slurm"])
    return float(rest) + (slurm["hours"] if slurm is not None else 0.0)


def attempt_hours(spent: Mapping[str, Any]) -> list[float]:
    """Return the hours of each attempt: what its job held, or where that is not known what its roles had. Hours of CPUs
    are not added to those of processes: there all attempts are counted in one of both."""
    rows = spent["rows"]
    if spent["unit"] != "GPU" and any(row["held_hours"] is None for row in rows):
        return [row["device_hours"] for row in rows]
    return [row["device_hours"] if row["held_hours"] is None else row["held_hours"] for row in rows]


def _last_sign(
    trainer: Sequence[AttemptSums], orchestrator: Sequence[AttemptSums], index: int, later: float | None
) -> float:
    """End of an attempt that wrote none: the next one's begin bounds it, its last step is what is known."""
    signs = [sums[index].last for sums in (trainer, orchestrator) if index < len(sums)]
    known = [sign for sign in signs if sign is not None]
    return max(known) if known else (later or 0.0)


def _row(
    attempt: Mapping[str, Any],
    began: float,
    end: float,
    is_open: bool,
    waited: float,
    sums: AttemptSums,
    served: AttemptSums,
    devices: Devices,
    ready: Mapping[int, float],
    span: Held,
) -> dict[str, Any]:
    wall = max(0.0, end - began)
    first = sums.first - began if sums.first is not None else wall
    were_ready = ready_at(attempt, ready)
    start = min(wall, max(0.0, were_ready - began if were_ready is not None else first))
    parts = {name: sums.seconds.get(name, 0.0) for name in ("train", "wait", "publish", "save", "other")}
    parts["lost"], parts["start"] = sums.lost, start
    # the first step's wait began before all roles were ready: that part is start-up; and a job that is told to end goes
    # on for some seconds that Slurm does not charge
    overlap = max(0.0, start - first, sum(parts.values()) - wall)
    for name in ("wait", "other", "save", "publish", "train", "lost", "start"):
        parts[name] -= min(parts[name], overlap)
        overlap = max(0.0, sum(parts.values()) - wall)
    rest, parts["end"] = max(0.0, wall - sum(parts.values())), 0.0
    parts["other" if is_open else "end"] += rest  # of a step that is under way
    started = 0.0 if "orchestrator" in (attempt.get("kept") or []) else start  # episodes went on meanwhile
    load = min(wall - started, served.seconds.get("pause", 0.0))
    waits = served.seconds.get("wait_weights", 0.0) + served.seconds.get("wait_servers", 0.0)
    idle = min(max(0.0, wall - started - load), served.seconds.get("empty_other", waits))
    tail = min(max(0.0, wall - started - load - idle), served.seconds.get("empty_tail", 0.0))
    if devices.only_evaluate:
        idle = max(0.0, wall - started - served.evaluated)
    rest = max(0.0, end - served.last) if served.last is not None and not is_open else 0.0
    rest = min(rest, max(0.0, wall - started - load - idle - tail))
    engines = {"start": started, "load": load, "tail": tail, "idle": idle, "end": rest}
    engines["sample"] = max(0.0, wall - sum(engines.values()))
    allocated = section_of(attempt, "allocated")
    held = number_of(allocated.get("gpus" if devices.kind == "GPU" else "cpus"))
    if held is None and span.life is not None:  # the environment of a heterogeneous job does not tell its GPUs
        held = span.life.gpus if devices.kind == "GPU" else span.life.cpus
    used = devices.trainer + devices.engines
    return {
        "attempt": attempt.get("attempt"),
        "job": attempt.get("job_id"),
        "why": attempt.get("why"),
        "outcome": attempt.get("outcome") or ("under way" if is_open else None),
        "cause": attempt.get("cause"),
        "exit_code": attempt.get("exit_code"),
        "resume_step": attempt.get("resume_step"),
        "saved_step": attempt.get("saved_step"),
        "next": attempt.get("next"),
        "nodes": sorted({host for hosts in section_of(attempt, "nodes").values() for host in hosts})
        or ([attempt["host"]] if attempt.get("host") else []),
        "lost_nodes": attempt.get("lost_nodes") or [],
        "began": began,
        "ended": None if is_open else end,
        "waited": waited,
        "wall": wall,
        "steps": sums.num_steps,
        "lost_steps": sums.num_lost,
        "tokens": sums.tokens,
        "trainer": {name: round(parts[name], 3) for name in TRAINER_PARTS},
        "engines": {name: round(engines[name], 3) for name in ENGINE_PARTS},
        "device_hours": wall * used / 3600,
        "held": held,
        "held_hours": None if held is None else wall * held / 3600,
        "held_nodes": number_of(allocated.get("nodes")),
        "by_slurm": span.life is not None,
    }


def _total(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    def of(key: str) -> float:
        return sum(row[key] or 0.0 for row in rows)

    trainer = {name: sum(row["trainer"][name] for row in rows) for name in TRAINER_PARTS}
    engines = {name: sum(row["engines"][name] for row in rows) for name in ENGINE_PARTS}
    wall, waited = of("wall"), of("waited")
    return {
        "wall": wall,
        "waited": waited,
        "trainer": trainer,
        "engines": engines,
        "steps": of("steps"),
        "lost_steps": of("lost_steps"),
        "lost_s": trainer["lost"],
        "tokens": of("tokens"),
        "device_hours": of("device_hours"),
        "held_hours": of("held_hours") if all(row["held"] is not None for row in rows) and rows else None,
        "effective": trainer["train"] / (wall + waited) if wall + waited > 0 else None,
        "effective_running": trainer["train"] / wall if wall > 0 else None,
    }


def _slurm(
    rows: Sequence[Mapping[str, Any]], lives: Sequence[JobLife], spans: Sequence[Held], devices: Devices
) -> dict[str, Any] | None:
    """Hours that Slurm charged, beside the sum of the rows that it knows; those of lives in which no attempt began
    stand apart."""
    is_gpu = devices.kind == "GPU"
    if not lives or (is_gpu and any(life.gpus is None for life in lives)):
        return None

    def hours(life: JobLife) -> float:
        return (life.gpu_s if is_gpu else life.cpu_s) / 3600

    claimed = {id(span.life) for span in spans}
    charged = sum(map(hours, lives))
    idle = sum(hours(life) for life in lives if id(life) not in claimed)
    held = sum(row["held_hours"] or 0.0 for row in rows if row["by_slurm"])
    return {
        "hours": charged,
        "without_attempt": idle,
        "difference": (held + idle) / charged - 1 if charged else None,
        "lives": len(lives),
        "unknown_attempts": sum(not row["by_slurm"] for row in rows if row["ended"] is not None),
    }


def suggest_split(config: Mapping[str, Any], spent: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the split for the page and its JSON form; None where a run has not both sides, or no step yet.
    `config`: the resolved tree, of this version or an older one."""
    trainer, engines = int(spent["trainer_devices"]), int(spent["engine_devices"])
    total = spent["total"]
    running = total["wall"] - total["trainer"]["start"] - total["trainer"]["end"]
    serving = total["wall"] - total["engines"]["start"] - total["engines"]["end"]
    if (
        config.get("kind") != "rl"
        or config.get("teacher_inference")
        or config.get("judge_inference")
        or not trainer
        or not engines
    ):
        return None
    if not total["steps"] or running <= 0 or serving <= 0:
        return None
    level = number_of(config.get("async_level"))
    widths = section_of(config, "inference")
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
