"""Episodes that a run without a trainer asks for, and whether all of them are on disk.

    results/tasks.json      {"reverse-text": 2048, "calculator": null}: tasks of each environment; null: without end

Written as soon as the environments are open. With it the episodes are known without them: a run that is started again
when all have been played, for other filters or intervals, opens no environment and starts no engine.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Protocol

from loguru import logger

from prime_hpc.config import ConfigError, Experiment
from prime_hpc.config.sections.standalone_eval import EpisodesConfig, StandaloneEnvConfig
from prime_hpc.evals.episodes import RESULTS, EpisodeLog, Key, Record, read_lines, results_file
from prime_hpc.evals.versions import Version, versions_of
from prime_hpc.store.io.files import write_atomic

FILE = "tasks.json"
ENDLESS_TASKS = 128


class Counted(Protocol):
    """The part of `envs.task_sources.EnvSource` that is needed here."""

    @property
    def name(self) -> str:
        """Label of the environment."""

    @property
    def num_tasks(self) -> int | None:
        """Tasks that it has; None: without end."""


@dataclass(frozen=True)
class CountedBefore:
    """An environment that has been opened before."""

    name: str
    num_tasks: int | None


def num_tasks_of(source: Counted, env: StandaloneEnvConfig, config: EpisodesConfig) -> int:
    """How many tasks of an environment are played."""
    wanted = env.num_examples or config.num_examples
    if source.num_tasks is None:
        return wanted or ENDLESS_TASKS
    return min(wanted or source.num_tasks, source.num_tasks)


def wanted_keys(step: int, sources: Sequence[Counted], config: EpisodesConfig) -> list[Key]:
    """All episodes of one version; environments take turns, so that all of them are under way at once."""

    def of(source: Counted, env: StandaloneEnvConfig) -> Iterator[Key]:
        for task in range(num_tasks_of(source, env, config)):
            for rollout in range(config.num_rollouts(env)):
                yield Key(step, source.name, task, rollout)

    columns = [of(source, env) for source, env in zip(sources, config.environments, strict=True)]
    return [key for row in zip_longest(*columns) for key in row if key is not None]


@dataclass(frozen=True)
class Asked:
    """The episodes of each version."""

    keys: Mapping[Version, Sequence[Key]]
    todo: Mapping[Version, Sequence[Key]]

    @classmethod
    def of(
        cls, versions: Sequence[Version], sources: Sequence[Counted], config: EpisodesConfig, log: EpisodeLog
    ) -> "Asked":
        """Return those that `config` asks for; `log` has those that were played."""
        keys = {version: wanted_keys(version.step, sources, config) for version in versions}
        return cls(keys, {v: log.missing(wanted, retry_failed=config.retry_failed) for v, wanted in keys.items()})

    @property
    def num(self) -> int:
        """Of all versions."""
        return sum(map(len, self.keys.values()))

    @property
    def num_left(self) -> int:
        """Still to be played."""
        return sum(map(len, self.todo.values()))


def record_tasks(run_dir: Path, sources: Sequence[Counted], config: EpisodesConfig) -> None:
    """Write down how many tasks the environments have, and warn of those that have fewer than are asked for.
    Raises StoreError: the directory cannot be written."""
    for source, env in zip(sources, config.environments, strict=True):
        asked = env.num_examples or config.num_examples
        if asked is not None and source.num_tasks is not None and asked > source.num_tasks:
            logger.warning(f"{source.name} has {source.num_tasks} tasks, {asked} are asked for: all are played")
    counts = {source.name: source.num_tasks for source in sources}
    write_atomic(run_dir / RESULTS / FILE, json.dumps(counts, ensure_ascii=False).encode() + b"\n")


def recorded_sources(run_dir: Path, config: EpisodesConfig) -> list[CountedBefore] | None:
    """Return the environments as they were counted; None where one of them has not been.
    Raises OSError: the file cannot be read."""
    path = run_dir / RESULTS / FILE
    try:
        counts = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        return [CountedBefore(name, counts[name]) for name in (env.label for env in config.environments)]
    except (ValueError, KeyError, TypeError):
        return None


def is_all_played(experiment: Experiment, run_dir: Path) -> bool:
    """Return whether the episodes that a run without a trainer asks for are all on disk.
    Raises OSError: the files cannot be read."""
    config = experiment.episodes
    sources = None if experiment.trains else recorded_sources(run_dir, config)
    if sources is None:
        return False
    try:
        steps = [version.step for version in versions_of(experiment)]
    except ConfigError:
        return False  # whoever plays them says so
    wanted = {key for step in steps for key in wanted_keys(step, sources, config)}
    for record, _, _ in read_lines(results_file(run_dir), Record, texts=False):
        if record is not None and not (record.has_failed and config.retry_failed):
            wanted.discard(record.key)
    return not wanted
