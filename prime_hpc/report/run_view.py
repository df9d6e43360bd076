"""One run as the plain data that its page shows: state, figures, curves, timeline, accounting, rollouts, config."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prime_hpc.config.run_files import ATTEMPTS_JSONL, LOCK_JSON
from prime_hpc.config.secret import MASK, Secret
from prime_hpc.launch.monitor.diff import flatten
from prime_hpc.launch.monitor.run_facts import RunStatus
from prime_hpc.observe.metric_files import metrics_file
from prime_hpc.observe.metric_names import evaluated, held_out_set
from prime_hpc.report.accounting import charged_hours, suggest_split, without
from prime_hpc.report.phases import Phases
from prime_hpc.report.rollouts import Chosen, choose_rollouts
from prime_hpc.report.run_hours import attempt_identities, read_config, read_hours
from prime_hpc.report.series import Curves, section_of
from prime_hpc.report.timeline import job_lanes, role_lanes
from prime_hpc.slurm.queue_facts.job_lives import JobLife
from prime_hpc.store.child_runs import parent_of
from prime_hpc.store.run_dirs import read_json, read_rows
from prime_hpc.store.run_paths import RunPaths

KEY_METRICS = (
    "reward/mean",
    "loss",
    "kl",
    "entropy",
    "ratio",
    "grad_norm",
    "lr",
    "completion/tokens_mean",
    "lag/mean",
    "tokens_per_s",
    "tokens_per_s_overall",
    "tokens/sampled_per_second",
    "mfu",
    "time/step",
)
"""All that is kept of each of many runs."""
_TABLE_CHARACTERS = 20_000


@dataclass(frozen=True)
class Limits:
    """How much of a run goes into the page."""

    points: int
    """Of a curve."""
    blocks: int
    """Of a lane of the timeline."""
    rollout_bytes: int
    all_metrics: bool
    """False: `KEY_METRICS` alone."""


def limits_for(num_runs: int) -> Limits:
    """Return the limits with which a page of so many runs stays within some megabytes."""
    if num_runs <= 1:
        return Limits(2000, 12_000, 1_800_000, True)
    if num_runs <= 4:
        return Limits(1000, 6000, 1_800_000 // num_runs, True)
    if num_runs <= 12:
        return Limits(400, 2000, 1_200_000 // num_runs, True)
    return Limits(150, 300, 0, False)


def view_run(
    path: Path,
    status: RunStatus,
    limits: Limits,
    lives: Sequence[JobLife] = (),
    counted: dict[tuple[Any, ...], str] | None = None,
) -> dict[str, Any]:
    """Return the run's data, JSON-able. Whatever is absent or broken is left out, and named in `notes`.

    Args:
        lives: of the run's jobs, where Slurm's accounting says.
        counted: attempts (`attempt_identities`) of the page's runs so far -> their names, told this one's: sums count
            each once. Of copies the one that went on comes first.
    """
    notes: list[str] = []
    config = read_config(path, notes)
    attempts = read_rows(path / ATTEMPTS_JSONL)
    trained, served = Curves(), Curves()
    both = {"trainer": trained, "orchestrator": served}
    known, original = _counted_before(
        attempt_identities(path, attempts), status.name, {} if counted is None else counted, notes
    )
    goes_on = status.is_under_way and not status.is_between
    hours = read_hours(path, config, attempts, is_under_way=goes_on, lives=lives, curves=both)
    trainer, orchestrator, spent = hours.trainer, hours.orchestrator, hours.spent
    for role, curves in both.items():
        notes += _faults(role, curves)
    origin = _origin(spent, hours.submitted, trainer)
    chosen = Chosen()
    if limits.rollout_bytes and config.get("kind") != "sft":
        model = str(section_of(config, "model").get("name") or "")
        chosen = choose_rollouts(RunPaths(path), _env_names(config), model, limits.rollout_bytes)
        notes += chosen.problems
    parent = parent_of(path)
    figures, sums = _figures(trained, served, spent, shares=parent is not None), None
    if known and original is None:
        new = without(spent, known)
        sums = {"figures": _figures(trained, served, new, shares=parent is not None), "total": new["total"]}
    tables = {"trainer": trained.table(limits.points), "orchestrator": served.table(limits.points)}
    if not limits.all_metrics:
        tables = {role: _only_key_metrics(table) for role, table in tables.items()}
    return {
        "name": status.name,
        "parent": parent.name if parent is not None else None,
        "copy_of": original,
        "path": str(path),
        "kind": config.get("kind"),
        "status": _status_facts(status),
        "figures": figures,
        "sums": sums,
        "config": {key: _plain(value) for key, value in flatten(config).items()},
        "made": _made(path),
        "curves": tables,
        "points": {
            key: sorted([version, value] for version, value in values.items())
            for key, values in (trained.points | served.points).items()
        },
        "origin": origin,
        "lanes": {
            "job": job_lanes(spent, attempts, origin),
            "roles": role_lanes(metrics_file(path, "roles"), spent, origin),
            "trainer": trainer.lane(origin, limits.blocks),
            "orchestrator": orchestrator.lane(origin, limits.blocks),
        },
        "accounting": spent,
        "split": suggest_split(config, spent) if parent is None else None,
        "rollouts": chosen.rollouts,
        "rollout_facts": {
            "stored_steps": chosen.num_steps,
            "looked_at": chosen.num_stored,
            "left_out": chosen.left_out,
        },
        "results": _results(path),
        "notes": notes,
    }


def _counted_before(
    own: Sequence[tuple[Any, ...]], name: str, counted: dict[tuple[Any, ...], str], notes: list[str]
) -> tuple[list[int], str | None]:
    """Return which of a run's attempts a copy has, and whose copy it is itself, where that has all of them; all are
    counted from now on."""
    known = [number for number, identity in enumerate(own) if identity in counted]
    original = counted[own[-1]] if own and len(known) == len(own) else None
    if original is not None:
        notes.append(f"a copy of {original}, whose hours are counted")
        return known, original
    if known:
        notes.append(f"went on from a copy of {counted[own[known[-1]]]}, whose hours are counted")
    counted |= dict.fromkeys(own, name)
    return known, None


def _plain(value: Any) -> Any:
    if isinstance(value, Secret):
        return MASK
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, float):
        return value if abs(value) < float("inf") else str(value)
    return value if isinstance(value, str | int | bool) or value is None else str(value)


def _env_names(config: Mapping[str, Any]) -> list[str]:
    envs = section_of(config, "orchestrator").get("env")
    listed = envs if isinstance(envs, list) else []
    return [str(env.get("name") or env.get("id")) for env in listed if isinstance(env, Mapping)]


def _made(path: Path) -> dict[str, Any]:
    """Code, packages and command of the run."""
    lock = read_json(path / LOCK_JSON) or {}
    git = section_of(lock, "git")
    command = lock.get("command")
    return {
        "sha": git.get("sha"),
        "changed": len(git.get("status") or []),
        "python": lock.get("python"),
        "host": lock.get("host"),
        "time": lock.get("time"),
        "command": " ".join(map(str, command)) if isinstance(command, list) else None,
        "packages": section_of(lock, "packages"),
    }


def _status_facts(status: RunStatus) -> dict[str, Any]:
    keys = ("state", "note", "step", "max_steps", "cause", "outcome", "job_id", "checkpoint", "eta_s", "time_left_s")
    return {key: getattr(status, key) for key in keys}


def _figures(trained: Curves, served: Curves, spent: Mapping[str, Any], *, shares: bool) -> dict[str, float]:
    """Numbers that a run came to, by their names in tables; of one that shares trainer and engines with others no
    device-hours, which are its parent's."""
    last = trained.last_values() | {k: v for k, v in served.last_values().items() if k not in ("time/step",)}
    total = spent["total"]
    found: dict[str, float | None] = {
        "steps": float(trained.last_step or served.last_step),
        "reward (last step)": last.get("reward/mean", last.get("reward")),
        "loss (last step)": last.get("loss"),
        "KL to the engine (last step)": last.get("kl"),
        "entropy (last step)": last.get("entropy"),
    }
    for key, points in sorted((trained.points | served.points).items()):
        if points and (env := evaluated(key)):
            found[f"held-out {env} (last)"] = points[max(points)]
        elif points and key == "eval/loss":
            found["held-out loss (last)"] = points[max(points)]
        elif points and key in trained.points and (name := held_out_set(key)):
            found[f"held-out loss of {name} (last)"] = points[max(points)]
    trained_s = total["trainer"]["train"]
    found |= {
        "training tokens/s (while training)": total["tokens"] / trained_s if trained_s else None,
        "hours": total["wall"] / 3600,
        "hours in the queue or down": total["waited"] / 3600,
        f"{spent['unit']}-hours": None if shares else total["device_hours"],
        f"{'GPU' if spent['unit'] == 'GPU' else 'CPU'}-hours charged": None if shares else charged_hours(spent),
        "effective training time": total["effective"],
        "attempts": float(len(spent["rows"])),
    }
    return {key: value for key, value in found.items() if value is not None}


def _faults(role: str, curves: Curves) -> Iterable[str]:
    faults = curves.faults
    if faults.unreadable:
        yield f"metrics/{role}.jsonl: cannot be read: {faults.unreadable}"
    if faults.torn:
        yield f"metrics/{role}.jsonl: {faults.torn} torn or foreign lines were left out"
    if faults.not_finite:
        worst = sorted(faults.not_finite.items(), key=lambda pair: -pair[1])[:5]
        yield f"metrics/{role}.jsonl: not finite: " + ", ".join(f"{key} ({count} rows)" for key, count in worst)
    if faults.left_out:
        yield f"metrics/{role}.jsonl: {len(faults.left_out)} metrics beyond the first are not shown"


def _only_key_metrics(table: dict[str, Any]) -> dict[str, Any]:
    kept = {name: {k: v for k, v in table[name].items() if k in KEY_METRICS} for name in ("mean", "low", "high")}
    return table | kept


def _origin(spent: Mapping[str, Any], submitted: float | None, trainer: Phases) -> float:
    moments = [row["began"] - row["waited"] for row in spent["rows"]] + [sums.first for sums in trainer.sums]
    known = [moment for moment in moments if moment]
    return min(known) if known else submitted or 0.0


def _results(path: Path) -> str | None:
    try:
        with (path / "results" / "table.txt").open(encoding="utf-8", errors="replace") as file:
            return file.read(_TABLE_CHARACTERS)
    except OSError:
        return None
