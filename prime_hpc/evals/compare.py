"""`eval --compare A B`: two evaluations on the tasks that both have, task by task.

A and B are runs, by their directories or names, each with `@STEP` where it holds several versions (`outputs/eval@40`;
without: the last).
For login nodes: numpy alone.
"""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from prime_hpc.config import ConfigError
from prime_hpc.evals.episodes import Record, read_records, results_file
from prime_hpc.evals.settings import NEWER, is_of, recorded
from prime_hpc.evals.statistics import bootstrap_interval, sign_flip_test
from prime_hpc.observe.table import align
from prime_hpc.store.run_dirs import find_run

_ROUNDING = 1e-9
"""Rewards of 0.1, 0.2 and 0.3 have another mean in another order: no task that B is better at."""


@dataclass(frozen=True)
class Side:
    """One version of one evaluation."""

    name: str
    step: int
    settings: Mapping[str, Any]
    tasks: Mapping[str, Mapping[str, float]]
    """Environment -> task id -> mean reward of its scored rollouts."""
    rollouts: Mapping[str, float]
    """Environment -> scored rollouts of a task, mean."""
    behind: Mapping[str, int]
    """Environment -> tasks with fewer scored rollouts than others of it have: they failed, or are still to come."""


def read_side(text: str) -> Side:
    """Read one side. Raises ConfigError: no such run, no evaluation there, no such version, or no score."""
    name, at, number = text.rpartition("@")
    word = name if at and number.isdecimal() else text
    folder = Path(word).expanduser()
    run_dir = folder if results_file(folder).exists() else find_run(word)
    records, _ = read_records(results_file(run_dir))
    if not records:
        raise ConfigError(f"{run_dir} holds no episodes of an evaluation ({results_file(run_dir)})")
    steps = sorted({record.step for record in records.values()})
    step = int(number) if at and number.isdecimal() else steps[-1]
    if step not in steps:
        raise ConfigError(f"{run_dir} has no episodes of step {step}; there are {', '.join(map(str, steps))}")
    rewards: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for record in records.values():
        if record.step == step and record.is_scored:
            rewards[record.env][_identity(record)].append(float(record.reward or 0.0))
    if not rewards:
        message = f"{run_dir}: all episodes of step {step} have failed, none has a score"
        raise ConfigError(f"{message}: the same command with --retry-failed plays them again")
    tasks = {env: {task: float(np.mean(values)) for task, values in found.items()} for env, found in rewards.items()}
    counts = {env: np.array([len(values) for values in found.values()]) for env, found in rewards.items()}
    means = {env: float(found.mean()) for env, found in counts.items()}
    behind = {env: int((found < found.max()).sum()) for env, found in counts.items()}
    return Side(text, step, recorded(run_dir) or {}, tasks, means, behind)


def _identity(record: Record) -> str:
    """Identify a task by its data; tasks of equal data are told apart by their number."""
    return f"{record.task_id} {record.task}"


def compare(a: Side, b: Side, *, confidence: float = 0.95, num_resamples: int = 10_000) -> dict[str, Any]:
    """Paired differences, B minus A, by environment. Raises ConfigError: no environment of both has a task of both."""
    rows = {}
    for env in sorted(a.tasks.keys() & b.tasks.keys()):
        common = sorted(a.tasks[env].keys() & b.tasks[env].keys())
        if not common:
            continue
        before = np.array([a.tasks[env][task] for task in common])
        after = np.array([b.tasks[env][task] for task in common])
        difference = after - before
        difference[np.abs(difference) < _ROUNDING] = 0.0
        low, high = bootstrap_interval(difference, confidence=confidence, num_resamples=num_resamples)
        rows[env] = {
            "num_tasks": len(common),
            "num_unpaired": len(a.tasks[env].keys() ^ b.tasks[env].keys()),
            "num_rollouts": [a.rollouts[env], b.rollouts[env]],
            "num_tasks_behind": [a.behind[env], b.behind[env]],
            "a": float(before.mean()),
            "b": float(after.mean()),
            "difference": float(difference.mean()),
            "interval": [low, high],
            "p": sign_flip_test(difference),
            "num_better": int((difference > 0).sum()),
            "num_worse": int((difference < 0).sum()),
        }
    if not rows:
        said = "have no task in common (another seed draws others): nothing can be paired"
        raise ConfigError(f"{a.name} and {b.name} {said}")
    keys = dict.fromkeys([*a.settings, *b.settings])
    compared = [key for key in keys if is_of(key, rows, a.step if a.step == b.step else None)]
    differing = [
        key
        for key in compared
        if a.settings.get(key) != b.settings.get(key)
        and not (key.endswith(NEWER) and (key not in a.settings or key not in b.settings))  # not recorded before
    ]
    return {
        "a": {"name": a.name, "step": a.step},
        "b": {"name": b.name, "step": b.step},
        "confidence": confidence,
        "test": "sign-flip permutation test over tasks, two-sided",
        "settings_that_differ": differing,
        "environments": rows,
        "left_out": sorted((a.tasks.keys() | b.tasks.keys()) - rows.keys()),
    }


def lines(comparison: Mapping[str, Any]) -> list[str]:
    """For the console."""
    a, b = comparison["a"], comparison["b"]
    rows = [
        ["environment", "tasks", "A", "B", "B - A", f"{comparison['confidence']:.0%} interval", "p", "B better/worse"]
    ]
    for env, row in comparison["environments"].items():
        low, high = row["interval"]
        scores = [f"{row['a']:.4f}", f"{row['b']:.4f}", f"{row['difference']:+.4f}", f"[{low:+.4f}, {high:+.4f}]"]
        rows.append([env, str(row["num_tasks"]), *scores, f"{row['p']:.4g}", f"{row['num_better']}/{row['num_worse']}"])
    notes = [f"{env}: {row['num_unpaired']} tasks are in one of the two only, and left out"
             for env, row in comparison["environments"].items() if row["num_unpaired"]]  # fmt: skip
    notes += [
        f"{env}: {count} tasks of {side} have fewer scored rollouts than its others: they failed, or are still to come"
        for env, row in comparison["environments"].items()
        for side, count in zip("AB", row["num_tasks_behind"], strict=True)
        if count
    ]
    if comparison["left_out"]:
        notes.append(f"no task of both, and left out: {', '.join(comparison['left_out'])}")
    if comparison["settings_that_differ"]:
        notes.append(f"settings that differ: {', '.join(comparison['settings_that_differ'])}")
    return [f"A = {a['name']} (step {a['step']}), B = {b['name']} (step {b['step']})", *align(rows), *notes]
