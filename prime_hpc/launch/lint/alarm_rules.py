"""Lint of alarms: metrics that nothing writes, and mails that no server takes."""

from collections.abc import Iterator

from prime_hpc.launch.lint.lint_finding import Finding, Subject
from prime_hpc.observe.metric_names import is_known, near, split_metric


def metrics(subject: Subject) -> Iterator[Finding]:
    """Yield rules whose metric is of no known name: they would never fire."""
    experiment = subject.experiment
    for number, rule in enumerate(experiment.alarms.rules):
        key = f"alarms.rules.{number}.metric"
        if not is_known(rule.metric):
            meant = near(rule.metric)
            hint = f"did you mean {', '.join(meant)}?" if meant else "see the names in metrics/*.jsonl of a run"
            severity = "error" if split_metric(rule.metric)[0] == "run" else "warning"
            text = f"{rule.metric}: no metric of this name is known, so that the rule may never fire"
            yield Finding("PH240", severity, key, text, hint)  # type: ignore[arg-type]
        elif split_metric(rule.metric)[0] == "orchestrator" and not experiment.samples:
            text = f"{rule.metric}: this run has no orchestrator"
            yield Finding("PH240", "warning", key, text, "a metric of the trainer")


CHECKS = (metrics,)
