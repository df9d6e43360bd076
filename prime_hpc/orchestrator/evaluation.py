"""Held-out evaluation, interleaved with training: its episodes go first, nothing stops for it.

Due at version 0, every `eval.interval` versions (or an environment's own) and at the last one. A version may change
while an evaluation runs (the trainer never waits for it), so each result carries the oldest and the newest version
that sampled its tokens.
"""

import math
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from prime_hpc.config.sections.orchestrator import EvalConfig
from prime_hpc.envs.samples import EpisodeResult, EpisodeState
from prime_hpc.envs.task_sources import EnvSource
from prime_hpc.observe.metric_names import evaluated
from prime_hpc.observe.pass_at_k import powers_of_two, task_pass
from prime_hpc.orchestrator.rollouts.dispatcher import Dispatcher, EpisodeRunner, Job, Lane
from prime_hpc.orchestrator.rollouts.prompts import SourceInfo


@dataclass
class EvalRun:
    """One evaluation in progress: results per environment."""

    version: int
    num_expected: int
    started: float
    results: dict[int, list[tuple[int, EpisodeResult]]] = field(default_factory=dict)
    """By source; only those that are due."""
    num_ended: int = 0


def first_due(start_version: int, interval: int, last_version: int, newest: int | None = None) -> int:
    """Return the first version to evaluate in an attempt that starts at `start_version`: that one itself if it is a
    multiple, or in place of the multiple before it, whose evaluation was under way when the attempt before ended.

    `newest`: the newest version that was evaluated, -1 where none was; None: not known.
    """
    if newest is not None and newest < start_version // interval * interval:
        return start_version
    return min(-(-start_version // interval) * interval, last_version)


def newest_evaluated(rows: Iterable[Mapping[str, Any]]) -> dict[str, int]:
    """Return the newest version of which a run's metrics hold an evaluation, by environment."""
    found: dict[str, int] = {}
    for row in rows:
        for key in row:
            if key.startswith("eval/") and key.endswith("/num_episodes"):
                name = key.removeprefix("eval/").removesuffix("/num_episodes")
                found[name] = max(int(row["step"]), found.get(name, -1))
    return found


def next_due(version: int, interval: int, last_version: int) -> int | None:
    """Return the next version to evaluate after `version`; None after the last one."""
    return None if version >= last_version else min((version // interval + 1) * interval, last_version)


@dataclass(frozen=True)
class Plan:
    """How often and how much one source is evaluated."""

    interval: int
    num_examples: int
    rollouts_per_example: int


def plans(config: EvalConfig, num_sources: int) -> list[Plan]:
    """Of every source: its own settings, else the evaluation's. Sources without a config of their own share these."""
    common = Plan(config.interval, config.num_examples, config.rollouts_per_example)
    if not config.env:
        return [common] * num_sources
    return [
        Plan(
            interval,
            env.num_examples or common.num_examples,
            env.rollouts_per_example or common.rollouts_per_example,
        )
        for env, interval in zip(config.env, config.intervals, strict=True)
    ]


class Evaluator:
    """Starts an evaluation when a due version is served, reports it when its last episode ended."""

    def __init__(
        self,
        config: EvalConfig,
        runner: EpisodeRunner,
        sources: Sequence[EnvSource | SourceInfo],
        dispatcher: Dispatcher,
        *,
        start_version: int,
        last_version: int,
        on_report: Callable[[int, dict[str, Any], list[dict[str, Any]]], None],
        newest: Mapping[str, int] | None = None,
    ) -> None:
        """`on_report(version, metrics, sample rows)` is called in the event loop. `newest`: of `newest_evaluated`, in
        an attempt that goes on after others."""
        self._config = config
        self._runner = runner
        self._sources = sources
        self._dispatcher = dispatcher
        self._last_version = last_version
        self._on_report = on_report
        self._plans = plans(config, len(sources))
        self._due: list[int | None] = [
            first_due(
                start_version, plan.interval, last_version, None if newest is None else newest.get(source.name, -1)
            )
            for plan, source in zip(self._plans, sources, strict=True)
        ]
        self._run: EvalRun | None = None

    @property
    def running(self) -> bool:
        """An evaluation of the served version runs."""
        return self._run is not None

    @property
    def pending(self) -> bool:
        """An evaluation runs, or one more is due at a version that was not served yet."""
        return self._run is not None or any(due is not None for due in self._due)

    def served(self, version: int) -> None:
        """Version `version` is served: start what is due, unless one still runs (it starts after that)."""
        chosen = [i for i, due in enumerate(self._due) if due is not None and version >= due]
        if self._run is not None or not chosen:
            return
        for source in chosen:
            self._due[source] = next_due(version, self._plans[source].interval, self._last_version)
        self._begin(version, chosen)

    def evaluate(self, version: int, chosen: Sequence[int]) -> None:
        """Evaluate these sources now, whatever is due; nothing else runs, and nothing more is due."""
        assert self._run is None, "one evaluation at a time"
        self._due = [None] * len(self._sources)
        self._begin(version, chosen)

    def _begin(self, version: int, chosen: Sequence[int]) -> None:
        self._run = run = EvalRun(version, 0, time.monotonic(), {source: [] for source in chosen})
        jobs = []
        prefers_train = self._config.prefer == "train"
        for source in chosen:
            plan = self._plans[source]
            for task in range(min(plan.num_examples, self._sources[source].num_tasks or plan.num_examples)):
                lane = Lane()
                for _ in range(plan.rollouts_per_example):
                    ended = partial(self._ended, run, source, task)
                    options = {"priority": not prefers_train, "background": prefers_train}
                    jobs.append(Job(self._runner, source, task, lane, ended, **options))
        run.num_expected = len(jobs)
        for job in jobs:
            self._dispatcher.add(job)
        self._dispatcher.pump()

    def _ended(self, run: EvalRun, source: int, task: int, result: EpisodeResult) -> None:
        run.results[source].append((task, result))
        run.num_ended += 1
        if run.num_ended == run.num_expected:
            self._run = None
            self._on_report(run.version, self._metrics(run), self._samples(run))

    def _metrics(self, run: EvalRun) -> dict[str, Any]:
        row: dict[str, Any] = {"eval/seconds": round(time.monotonic() - run.started, 3)}
        versions = [run.version]
        for source, results in ((self._sources[i], found) for i, found in run.results.items()):
            row |= {f"eval/{source.name}/{k}": v for k, v in summarize([r for _, r in results]).items()}
            of_tasks = standard_error(results) | passes(results, self._config.pass_threshold)
            row |= {f"eval/{source.name}/{k}": v for k, v in of_tasks.items()}
            versions += [version for _, result in results for version in result.versions]
        return row | {"eval/version_min": min(versions), "eval/version_max": max(versions)}

    def _samples(self, run: EvalRun) -> list[dict[str, Any]]:
        """Return the lowest task of each environment first: the same prompts every time, so that evaluations
        compare."""
        return [
            {"kind": "eval", "env": source.name, "task": task, "reward": result.reward, **texts(result)}
            for source, results in ((self._sources[i], found) for i, found in run.results.items())
            for task, result in sorted(results, key=lambda entry: entry[0])
            if result.state is EpisodeState.COMPLETED
        ]


def texts(result: EpisodeResult) -> dict[str, Any]:
    """Return the readable part of a sample row."""
    return {"prompt": result.prompt_text, "completion": result.completion_text, "truncated": result.truncated}


def summarize(results: Sequence[EpisodeResult]) -> dict[str, float]:
    """Mean reward over all episodes, and over those that completed.

    An episode that failed, timed out or has no finite reward counts as reward 0: a policy that starts to ramble must
    not score better because its long replies are not counted. Metrics are means over the episodes that completed; one
    with the name of a figure of an evaluation stands as `<name>_own`.
    """
    good = [r for r in results if r.state is EpisodeState.COMPLETED and math.isfinite(r.reward)]
    row: dict[str, float] = {
        "num_episodes": len(results),
        "num_failed": len(results) - len(good),
        "num_timeout": sum(r.state is EpisodeState.TIMEOUT for r in results),
    }
    if results:
        row["mean_reward"] = sum(r.reward for r in good) / len(results)
    if not good:
        return row
    row["mean_reward_completed"] = sum(r.reward for r in good) / len(good)
    row["completion_tokens"] = sum(r.num_completion_tokens for r in good) / len(good)
    row["truncated_share"] = sum(r.truncated for r in good) / len(good)
    for name in sorted({name for r in good for name in r.metrics}):
        values = [r.metrics[name] for r in good if name in r.metrics]
        is_taken = name in row or name == "mean_reward_se" or name.startswith("pass@") or name.endswith("/mean_reward")
        row[f"{name}_own" if is_taken else name] = sum(values) / len(values)
    return row


def standard_error(results: Sequence[tuple[int, EpisodeResult]]) -> dict[str, float]:
    """Return the standard error of the mean reward, over tasks: rollouts of one task are not independent of each other.

    s / sqrt(n) of the n tasks' means, with s their sample standard deviation; nothing of a single task.
    """
    means = list(map(statistics.fmean, _rewards_by_task(results, 0.0)))
    return {"mean_reward_se": statistics.stdev(means) / math.sqrt(len(means))} if len(means) > 1 else {}


def passes(results: Sequence[tuple[int, EpisodeResult]], threshold: float) -> dict[str, float]:
    """Return pass@k for k = 1, 2, 4, ..., the mean over tasks; nothing of one rollout a task.

    An episode that failed or timed out has not passed, whatever the threshold.
    """
    by_task = _rewards_by_task(results, -math.inf)
    most = min(map(len, by_task), default=0)
    ks = powers_of_two(most) if most > 1 else []
    return {f"pass@{k}": statistics.fmean(task_pass(rewards, k, threshold) for rewards in by_task) for k in ks}


def _rewards_by_task(results: Sequence[tuple[int, EpisodeResult]], without: float) -> list[list[float]]:
    """Rewards of each task's rollouts; `without`: of those that have none."""
    by_task: defaultdict[int, list[float]] = defaultdict(list)
    for task, result in results:
        is_good = result.state is EpisodeState.COMPLETED and math.isfinite(result.reward)
        by_task[task].append(result.reward if is_good else without)
    return list(by_task.values())


def rewards_text(row: Mapping[str, Any]) -> str:
    """Of an evaluation's metrics each environment's mean reward, for the log, with what failed of it."""
    parts = []
    for key, reward in row.items():
        if name := evaluated(key):
            failed, episodes = row[f"eval/{name}/num_failed"], row[f"eval/{name}/num_episodes"]
            parts.append(f"{name} {reward:.3f}" + (f" ({failed} of {episodes} failed or timed out)" if failed else ""))
    return ", ".join(parts)
