"""The opening of an attempt of `eval` or `synthesize`: its records, what is still to be played, the connection."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from loguru import logger

from prime_hpc.config import Experiment
from prime_hpc.evals.connect import Connected, connect
from prime_hpc.evals.episodes import EpisodeLog
from prime_hpc.evals.progress import Progress
from prime_hpc.evals.settings import record, refuse_others
from prime_hpc.evals.versions import versions_of
from prime_hpc.evals.wanted import Asked, record_tasks, recorded_sources
from prime_hpc.observe.metrics import MetricsWriter
from prime_hpc.observe.role_status import RoleStatus
from prime_hpc.runtime.process_memory import freeze_gc
from prime_hpc.runtime.role_context import RoleContext
from prime_hpc.store.messaging.bus import BusClient
from prime_hpc.store.run_paths import RunPaths

Log = TypeVar("Log", bound=EpisodeLog)


@dataclass(frozen=True)
class Attempt(Generic[Log]):
    """The episodes of an attempt, and where they are written."""

    log: Log
    asked: Asked
    found: Connected | None
    """None: all has been played."""
    progress: Progress
    settings: dict[str, Any]
    """Those that are recorded beside the episodes."""


@asynccontextmanager
async def open_attempt(
    experiment: Experiment, context: RoleContext, bus: BusClient, status: RoleStatus, log_type: type[Log]
) -> AsyncIterator[Attempt[Log]]:
    """Open what an attempt needs, and say that it is ready.

    Raises:
        ConfigError: the directory holds episodes that were played in another way.
        StoreError: the directory cannot be written.
        EvalError, EnvError: as of `connect`.
    """
    paths = RunPaths(context.run_dir)
    await asyncio.to_thread(refuse_others, experiment, context.run_dir)  # rows or prompts may be many
    versions = versions_of(experiment)
    settings = await asyncio.to_thread(record, experiment, context.run_dir)
    async with AsyncExitStack() as stack:
        log = log_type(paths, context.incarnation)
        stack.callback(log.close)
        metrics = MetricsWriter(paths.metrics(experiment.kind))
        stack.callback(metrics.close)
        config, found = experiment.episodes, None
        known = await asyncio.to_thread(recorded_sources, context.run_dir, config)
        asked = Asked.of(versions, known, config, log) if known is not None else None
        if asked is None or asked.num_left:
            first = [v for v in versions if asked is None or asked.todo[v]]
            order = [*first, *(v for v in versions if v not in first)]
            found = await connect(stack, experiment, context, bus, order)
            record_tasks(context.run_dir, found.pool.sources, config)
            asked = Asked.of(versions, found.pool.sources, config, log)
        _announce(experiment, asked, found)
        status.ready(servers=found.urls if found is not None else [], versions=len(versions))
        freeze_gc()  # environments and their packages are alive now, and stay
        yield Attempt(log, asked, found, Progress(metrics, asked.num, asked.num - asked.num_left), settings)


def _announce(experiment: Experiment, asked: Asked, found: Connected | None) -> None:
    of = f" of {', '.join(version.label for version in asked.keys)}" if experiment.kind == "eval" else ""
    there = f", {asked.num - asked.num_left} of them there already" if asked.num_left < asked.num else ""
    who = "nobody is asked"
    if found is not None:
        kind = "API" if found.is_api else "inference server(s)"
        who = f"{len(found.urls)} {kind}: {', '.join(found.urls)}"
    logger.info(f"{asked.num} episodes{of}{there}; {who}")
