"""Counts of what became rows and what did not, and why: as JSON and as a table."""

import shlex
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from prime_hpc.config.sections.synthesize import SynthesizeConfig
from prime_hpc.evals.episodes import FAILED
from prime_hpc.evals.summary import commonest_failure, failures_of, too_many_failed
from prime_hpc.evals.synthesis.sampled import Sampled
from prime_hpc.evals.synthesis.select import REASONS, Selection
from prime_hpc.observe.table import align

SCHEMA = 1
FILTERS = (
    *("min_reward", "min_metrics", "parsed", "finished", "min_completion_tokens", "max_completion_tokens"),
    *("drop_duplicates", "n_best"),
)


def report(
    records: Sequence[Sampled], found: Selection, config: SynthesizeConfig, settings: Mapping[str, Any], model: str
) -> dict[str, Any]:
    """Return the whole report. `records`: the episodes that were asked for and are there."""
    environments = {}
    for env in (env.label for env in config.environments):
        own = [record for record in records if record.env == env]
        scored = [float(record.reward or 0.0) for record in own if record.is_scored]
        dropped = found.dropped[env]
        environments[env] = {
            "num_tasks": len({record.task for record in own}),
            "num_tasks_with_rows": len({key.task for key, _ in found.kept if key.env == env}),
            "num_episodes": len(own),
            "num_failed": sum(record.state == FAILED for record in own),
            "failures": failures_of(own),
            "commonest_failure": commonest_failure(own),
            "num_conversations": found.kept_of[env] + sum(dropped.values()),
            "num_rows": found.kept_of[env],
            "dropped": {reason: dropped[reason] for reason in REASONS if dropped.get(reason)},
            "mean_reward": sum(scored) / len(scored) if scored else None,
            "completion_tokens": sum(record.completion_tokens for record in own),
        }
    summary = {
        "schema": SCHEMA,
        "model": model,
        "settings": dict(settings),
        "filters": {name: getattr(config, name) for name in FILTERS},
        "num_rows": len(found.kept),
        "environments": environments,
    }
    versions = {"versions": [{"label": "synthesize", "environments": environments}]}
    return summary | {"too_many_failed": too_many_failed(versions, config.max_failed_share)}


def table(summary: Mapping[str, Any]) -> list[str]:
    """Lines for the console: a row an environment, then what was dropped and why."""
    rows = [["environment", "tasks", "episodes", "conversations", "rows", "dropped", "mean reward"]]
    reasons: dict[str, list[str]] = defaultdict(list)
    for name, env in summary["environments"].items():
        reward = "-" if env["mean_reward"] is None else f"{env['mean_reward']:.4f}"
        dropped = env["num_conversations"] - env["num_rows"]
        numbers = (env["num_tasks"], env["num_episodes"], env["num_conversations"], env["num_rows"], dropped)
        rows.append([name, *map(str, numbers), reward])
        for reason, count in env["dropped"].items():
            reasons[reason].append(f"{count} of {name}")
    lines = align(rows)
    lines += [f"dropped: {', '.join(reasons[r])}: {REASONS[r]}" for r in REASONS if r in reasons]
    if summary.get("data"):
        train = f"prime-hpc sft --model.name MODEL --data.path {shlex.quote(summary['data'])}"
        lines.append(f"{summary['num_rows']} rows: {train}")
    return lines


def words(summary: Mapping[str, Any]) -> str:
    """Why there is no row, in one line."""
    total: Counter[str] = Counter()
    for env in summary["environments"].values():
        total.update(env["dropped"])
    return "; ".join(f"{total[reason]} {REASONS[reason]}" for reason in REASONS if reason in total) or "nothing came"
