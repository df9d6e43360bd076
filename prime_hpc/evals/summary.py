"""From episodes to scores: the summary as JSON, the table for people, the picture over steps.

Counting: a timeout is reward 0 (the model did not come to an end), a truncated episode is scored as it is, a failed one
(server, API, environment) has no score: it is left out of means and counted apart.
"""

import json
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from prime_hpc.config.sections.standalone_eval import StandaloneEvalConfig
from prime_hpc.evals.episodes import FAILED, RESULTS, TIMEOUT, Key, Record
from prime_hpc.evals.statistics import bootstrap_interval, estimate
from prime_hpc.evals.versions import Version
from prime_hpc.observe.pass_at_k import task_pass
from prime_hpc.observe.report import save_picture
from prime_hpc.observe.table import align
from prime_hpc.store.io.files import write_atomic

SUMMARY, TABLE, PICTURE = "summary.json", "table.txt", "scores.png"
SCHEMA = 1
_MOST_CHARACTERS = 300
"""Of an episode's reason for failing."""


def summarize_environment(records: Sequence[Record], config: StandaloneEvalConfig, ks: Sequence[int]) -> dict[str, Any]:
    """Scores of one environment under one version.

    Returns:
        counts; `avg` (mean over tasks of the mean over a task's rollouts, with its interval), `pass` by k (over the
        tasks with at least k scored rollouts); tokens of completions and prompts; the environment's own metrics.
    """
    interval = partial(bootstrap_interval, confidence=config.confidence, num_resamples=config.num_resamples)
    scored = [record for record in records if record.is_scored]
    by_task: dict[int, list[float]] = defaultdict(list)
    for record in scored:
        by_task[record.task].append(float(record.reward or 0.0))
    found: dict[str, Any] = {
        "num_tasks": len({record.task for record in records}),
        "num_episodes": len(records),
        "num_scored": len(scored),
        "num_failed": sum(record.state == FAILED for record in records),
        "num_timeout": sum(record.state == TIMEOUT for record in records),
        "num_truncated": sum(record.truncated for record in scored),
        "failures": failures_of(records),
        "commonest_failure": commonest_failure(records),
    }
    if not scored:
        return found
    tasks = sorted(by_task)
    found["avg"] = estimate([float(np.mean(by_task[task])) for task in tasks], interval)
    found["pass"] = {}
    for k in ks:
        values = [task_pass(by_task[task], k, config.pass_threshold) for task in tasks if len(by_task[task]) >= k]
        if values:
            found["pass"][str(k)] = estimate(values, interval) | {"num_tasks": len(values)}
    found["completion_tokens"] = _lengths([record.completion_tokens for record in scored])
    found["prompt_tokens"] = _lengths([record.prompt_tokens for record in scored])
    found["seconds"] = _lengths([record.seconds for record in scored])
    names = sorted({name for record in scored for name in record.metrics})
    found["metrics"] = {n: float(np.mean([r.metrics[n] for r in scored if n in r.metrics])) for n in names}
    return found


def failures_of(records: Sequence[Record]) -> dict[str, int]:
    """Count the episodes that have failed, by the class of the failure."""
    return dict(sorted(Counter(record.error or "unknown" for record in records if record.has_failed).items()))


def commonest_failure(records: Sequence[Record]) -> str:
    """Words of the first episode that failed as most of those that failed did; empty where none says why."""
    failed = [record for record in records if record.has_failed and record.reason]
    kinds = Counter(record.error for record in failed)
    words = next((record.reason for record in failed if record.error == kinds.most_common(1)[0][0]), "")
    return words if len(words) <= _MOST_CHARACTERS else f"{words[: _MOST_CHARACTERS - 3]}..."


def _lengths(values: Sequence[float]) -> dict[str, float]:
    array = np.asarray(values, dtype=np.float64)
    low, high = np.quantile(array, [0.5, 0.95])
    return {"mean": float(array.mean()), "median": float(low), "p95": float(high), "sum": float(array.sum())}


def summarize(
    versions: Sequence[tuple[Version, Sequence[Key]]],
    records: Mapping[Key, Record],
    config: StandaloneEvalConfig,
    settings: Mapping[str, Any],
    model: str,
    known: Sequence[dict[str, Any]] = (),
) -> dict[str, Any]:
    """Return the whole summary.

    Args:
        versions: those done, each with the episodes that were asked of it.
        known: `versions` of the summary before, of the first of them: intervals take seconds a version.
    """
    rows = list(known)
    for version, keys in versions[len(known) :]:
        there: dict[str, list[Record]] = defaultdict(list)
        for record in (records[key] for key in keys if key in records):
            there[record.env].append(record)
        environments = {
            env.label: summarize_environment(there[env.label], config, config.ks(config.num_rollouts(env)))
            | {"num_rollouts": config.num_rollouts(env)}
            for env in config.environments
        }
        rows.append({"step": version.step, "label": version.label, "environments": environments})
    found = {
        "schema": SCHEMA,
        "model": model,
        "settings": dict(settings),
        "pass_threshold": config.pass_threshold,
        "confidence": config.confidence,
        "num_resamples": config.num_resamples,
        "counting": "timeouts are reward 0, failed episodes are left out",
        "versions": rows,
    }
    return found | {"too_many_failed": too_many_failed(found, config.max_failed_share)}


def table(summary: Mapping[str, Any]) -> list[str]:
    """Lines for the console."""
    head = ["version", "environment", "tasks", "avg@k", f"{summary['confidence']:.0%} interval", "pass@k", "tokens"]
    rows = [[*head, "trunc", "timeout", "failed"]]
    for version in summary["versions"]:
        for name, env in version["environments"].items():
            rows.append([version["label"], name, str(env["num_tasks"]), *_scores(env), str(env["num_failed"])])
    return align(rows)


def _scores(env: Mapping[str, Any]) -> list[str]:
    if "avg" not in env:
        return ["-", "-", "-", "-", "-", str(env["num_timeout"])]
    low, high = env["avg"]["interval"]
    passed = " ".join(f"@{k} {value['value']:.3f}" for k, value in env["pass"].items())
    return [
        f"{env['avg']['value']:.4f} (k={env['num_rollouts']})",
        f"[{low:.4f}, {high:.4f}]",
        passed or "-",
        f"{env['completion_tokens']['mean']:.0f}",
        str(env["num_truncated"]),
        str(env["num_timeout"]),
    ]


def write_summary(run_dir: Path, summary: Mapping[str, Any], lines: Sequence[str]) -> None:
    """`summary.json`, and `table.txt` with these lines. Raises StoreError where they cannot be written."""
    folder = run_dir / RESULTS
    text = json.dumps(summary, indent=1, ensure_ascii=False)
    write_atomic(folder / SUMMARY, text.encode(errors="replace") + b"\n")  # a metric's name may be half a character
    write_atomic(folder / TABLE, "\n".join([*lines, ""]).encode(errors="replace"))


def draw(run_dir: Path, summary: Mapping[str, Any]) -> Path:
    """Return the scores as PNG: over steps, or of one version as bars.
    Raises ImportError: matplotlib is not installed."""
    from matplotlib.figure import Figure  # no pyplot: no global state, no display

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.add_subplot()
    series: dict[str, list[tuple[int, dict[str, Any]]]] = defaultdict(list)
    for version in summary["versions"]:
        for name, env in version["environments"].items():
            if "avg" in env:
                series[name].append((version["step"], env["avg"]))
    over_steps = any(len(points) > 1 for points in series.values())
    for number, (name, points) in enumerate(series.items()):
        values = np.array([point["value"] for _, point in points])
        errors = np.abs(np.array([point["interval"] for _, point in points]).T - values)
        where = [step for step, _ in points] if over_steps else [number]
        axes.errorbar(where, values, yerr=errors, fmt="o-" if over_steps else "o", capsize=4, label=name)
    if not over_steps:
        axes.set_xticks(range(len(series)), list(series))
    axes.set_xlabel("step (0 is the base model)" if over_steps else "environment")
    axes.set_ylabel("mean reward")
    axes.set_title(str(summary["model"]))
    axes.grid(alpha=0.3)
    if series:
        axes.legend(frameon=False)
    path = run_dir / RESULTS / PICTURE
    save_picture(figure, path)
    return path


def too_many_failed(summary: Mapping[str, Any], max_share: float) -> list[str]:
    """Of which version and environment more than this share of the episodes failed."""
    found = []
    for version in summary["versions"]:
        for name, env in version["environments"].items():
            failed = sum(env["failures"].values())
            if env["num_episodes"] and failed / env["num_episodes"] > max_share:
                kinds = ", ".join(f"{kind} x{count}" for kind, count in env["failures"].items())
                reason = f", such as: {env['commonest_failure']}" if env.get("commonest_failure") else ""
                found.append(f"{version['label']}, {name}: {failed} of {env['num_episodes']} ({kinds}){reason}")
    return found


def ended_badly(run_dir: Path) -> list[str]:
    """Return what a run that is complete, an evaluation or `synthesize`, says against its results, as sentences."""
    path = run_dir / RESULTS / SUMMARY
    try:
        summary = json.loads(path.read_text(encoding="utf-8"))
        failed = summary["too_many_failed"]
        found = [f"the results leave too many failed episodes out: {'; '.join(failed)}"] if failed else []
        return [*found, *summary.get("against", [])]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return []
