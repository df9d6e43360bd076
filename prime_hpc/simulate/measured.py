"""Figures of a finished run, one under way, or a `--bench`, step by step, as far as a calibration wants them."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from prime_hpc.config import ConfigError, Experiment
from prime_hpc.config.run_files import ATTEMPTS_JSONL, LOCK_JSON, RUN_YAML
from prime_hpc.config.snapshot import read_experiment
from prime_hpc.launch.monitor.run_progress import tail_rows
from prime_hpc.observe.bench import NUM_WARM, read_report
from prime_hpc.observe.metric_files import metrics_file
from prime_hpc.report.series import number_of
from prime_hpc.simulate.setting import Setting, setting_of
from prime_hpc.store.run_dirs import read_json, read_rows

TAIL_BYTES = 4 << 20
"""Read of a metrics file: the newest steps are what the next ones will be like."""
LEAST_MEASURED = 2

Row = Mapping[str, Any]


@dataclass
class Measured:
    """One run. Lists have a value a step; seconds."""

    path: Path
    name: str
    experiment: Experiment
    setting: Setting
    host: str
    is_bench: bool = False
    is_over: bool = True
    steps: tuple[int, int] | None = None
    """First and last that count: not those that warm up, nor the last ones, when engines have nothing left to do."""
    episodes: list[tuple[float, float, float, int]] = field(default_factory=list)
    """Seconds, sampled tokens, requests in flight at one engine meanwhile, and the row that told of it."""
    step_s: list[float] = field(default_factory=list)
    wait_s: list[float] = field(default_factory=list)
    idle: list[float] = field(default_factory=list)
    lag: list[float] = field(default_factory=list)
    train: list[tuple[float, float]] = field(default_factory=list)
    """Of an update in the mean: tokens of one rank, seconds of forward and backward."""
    optim_s: list[float] = field(default_factory=list)
    """Of an update."""
    other_s: list[float] = field(default_factory=list)
    publish_s: list[float] = field(default_factory=list)
    save_s: list[float] = field(default_factory=list)
    write_s: list[float] = field(default_factory=list)
    """From the state that is saved until its checkpoint is whole."""
    handover_s: list[float] = field(default_factory=list)
    load_s: list[float] = field(default_factory=list)
    pause_s: list[float] = field(default_factory=list)
    trained_per_sampled: list[float] = field(default_factory=list)
    groups: float = 0.0
    groups_dropped: float = 0.0
    truncated: float = 0.0
    """Episodes that a limit cut short."""
    start_s: float | None = None
    """From an attempt's begin until its roles were ready."""
    num_broken: int = 0
    """Rows with a value that is no finite number where one is needed."""


def read_measured(path: Path, name: str) -> Measured:
    """Read a run directory; metrics that are absent, torn or not finite are left out.
    Raises ConfigError: it has no `run.yaml` that this version can read, or is no run of `kind: rl`."""
    try:
        experiment = read_experiment(path / RUN_YAML)
    except ConfigError as error:
        raise ConfigError(
            f"{path} cannot calibrate: its config is not whole, or of another version: {error}"
        ) from error
    try:
        setting = setting_of(experiment)
    except ConfigError as error:
        raise ConfigError(f"{path} cannot calibrate: {error}") from error
    host = (read_json(path / LOCK_JSON) or {}).get("host")
    found = Measured(path, name, experiment, setting, host if isinstance(host, str) else "unknown host")
    attempts = read_rows(path / ATTEMPTS_JSONL)
    found.is_over = bool(attempts) and attempts[-1].get("ended") is not None
    found.start_s = next(
        (start for row in reversed(attempts) if (start := _number(row.get("seconds") or {}, "start")) is not None), None
    )
    hosts = sorted({str(node) for row in attempts for nodes in (row.get("nodes") or {}).values() for node in nodes})
    if hosts:
        found.host = hosts[0] + (f" and {len(hosts) - 1} more" if len(hosts) > 1 else "")
    trained, served = _rows(path, "trainer"), _rows(path, "orchestrator")
    reports = {role: read_report(path, role) for role in ("trainer", "orchestrator")}
    if any(reports.values()) and not served:  # a bench's orchestrator writes no metrics into the run directory
        found.is_bench, found.is_over = True, True
        trained, served = (_bench_rows(reports[role]) for role in ("trainer", "orchestrator"))
    else:
        first = {int(row.get("resume_step") or 0) + NUM_WARM for row in attempts}
        trained, served = _steady(found, trained, first), _steady(found, served, first)
    for row in trained:
        _take_trained(found, row)
    for row in served:
        _take_served(found, row)
    return found


def _rows(path: Path, role: str) -> list[dict[str, Any]]:
    return tail_rows(metrics_file(path, role), TAIL_BYTES)


def _bench_rows(report: Mapping[str, Any] | None) -> list[dict[str, Any]]:
    steps = report.get("steps") if report is not None else None
    rows = [row for row in steps if isinstance(row, dict)] if isinstance(steps, list) else []
    warm = report.get("num_warm", NUM_WARM) if report is not None else NUM_WARM
    return rows[warm:] or rows


def _steady(found: Measured, rows: Sequence[dict[str, Any]], first: set[int]) -> list[dict[str, Any]]:
    """Leave out the steps that warm up or fill the pipeline, and those before the end that nothing follows."""
    level, last = found.setting.async_level, found.setting.max_steps
    ramp = {step + more for step in first for more in range(level + 1)}
    kept = [row for row in rows if row["step"] not in ramp and row["step"] <= last - level]
    if len(kept) < LEAST_MEASURED:
        kept = [row for row in rows if row["step"] not in first]
    if kept:
        found.steps = (kept[0]["step"], kept[-1]["step"])
    return kept


def _number(row: Mapping[str, Any], key: str) -> float | None:
    """Return a finite value of at least 0; None: there is none."""
    number = number_of(row.get(key))
    return number if number is not None and math.isfinite(number) and number >= 0 else None


def _numbers(found: Measured, row: Row, keys: Iterable[str]) -> list[float] | None:
    values = [_number(row, key) for key in keys]
    if None in values:
        found.num_broken += any(key in row and _number(row, key) is None for key in keys)
        return None
    return [value for value in values if value is not None]


def _take_trained(found: Measured, row: Row) -> None:
    main = _numbers(found, row, ("time/step", "time/forward_backward", "time/optim", "num_tokens"))
    if main is None:
        return
    step, compute, optim, tokens = main
    wait, publish, save = (_number(row, f"time/{key}") for key in ("wait", "publish", "checkpoint"))
    setting = found.setting
    found.train.append((tokens * setting.epochs / setting.updates / setting.ranks, compute / setting.updates))
    found.optim_s.append(optim / setting.updates)
    found.other_s.append(max(0.0, step - compute - optim - (wait or 0.0) - (publish or 0.0) - (save or 0.0)))
    if found.is_bench:
        return
    found.step_s.append(step)
    if wait is not None:
        found.wait_s.append(wait)
    if publish is not None:
        found.publish_s.append(publish)
    for values, key in ((found.save_s, "ckpt/stall_s"), (found.write_s, "ckpt/write_s")):
        if (seconds := _number(row, key)) is not None:
            values.append(seconds)


def _take_served(found: Measured, row: Row) -> None:
    waits = _numbers(found, row, ("time/step", "time/wait_weights", "time/wait_rollouts", "time/wait_servers"))
    if waits is not None:
        found.handover_s.append(max(0.0, waits[0] - sum(waits[1:])))
    idle, lag = _number(row, "queue/idle_share"), _number(row, "lag/mean")
    if not found.is_bench:
        found.idle += [] if idle is None else [idle]
        found.lag += [] if lag is None else [lag]
    pause_share = 0.0
    load, pause = _number(row, "time/weight_update"), _number(row, "time/weight_pause")
    if load and (_number(row, "policy/served_version") or 0) > 0 and not found.is_bench:
        found.load_s.append(load)
        found.pause_s.append(pause or 0.0)
        if found.setting.async_level and waits is not None and waits[0] > 0:  # at level 0 nothing is in flight then
            pause_share = min(0.5, (pause or 0.0) / waits[0])
    sampled, batch = _number(row, "completion/tokens_mean"), _number(row, "batch/tokens")
    groups = _number(row, "groups/in_batch")
    if sampled and batch and groups:
        found.trained_per_sampled.append(batch / (sampled * groups * found.setting.group_size))
    ended = [_number(row, f"groups/{key}") or 0.0 for key in ("completed", "dropped", "rejected")]
    found.groups, found.groups_dropped = found.groups + sum(ended), found.groups_dropped + sum(ended[1:])
    found.truncated += _number(row, "episodes/truncated") or 0.0
    episodes = row.get("episode_sample")
    for episode in episodes if isinstance(episodes, list) else []:
        values = [number_of(value) for value in episode] if isinstance(episode, list) and len(episode) == 3 else [None]
        if any(value is None or not math.isfinite(value) or value < 0 for value in values):
            found.num_broken += 1
            continue
        seconds, tokens, in_flight = (value for value in values if value is not None)
        number = len(found.handover_s)
        found.episodes.append((seconds * (1 - pause_share), tokens, in_flight / found.setting.engines, number))
