"""One attempt of an evaluation: servers, environments, one version after another, the summary after each."""

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack
from typing import Any

from loguru import logger

from prime_hpc.config import Experiment
from prime_hpc.evals.connect import connect
from prime_hpc.evals.episodes import EpisodeLog, Key
from prime_hpc.evals.errors import EvalError
from prime_hpc.evals.play import Player, wanted_keys
from prime_hpc.evals.progress import Progress
from prime_hpc.evals.settings import record as record_settings
from prime_hpc.evals.settings import refuse_others
from prime_hpc.evals.summary import draw, summarize, table, write_summary
from prime_hpc.evals.versions import Version, find_versions
from prime_hpc.observe.metrics import MetricsWriter
from prime_hpc.observe.role_status import RoleStatus
from prime_hpc.runtime.process_memory import freeze_gc
from prime_hpc.runtime.role_context import RoleContext
from prime_hpc.store.messaging.bus import BusClient
from prime_hpc.store.run_paths import RunPaths


async def evaluate(experiment: Experiment, context: RoleContext, bus: BusClient, status: RoleStatus) -> None:
    """Play what is missing, write the scores.

    Raises:
        EvalError: it cannot go on.
        ConfigError: the directory holds episodes that were played in another way.
        EnvError: an environment is not as configured.
        StoreError: the results cannot be written.
    """
    config, paths = experiment.eval, RunPaths(context.run_dir)
    await asyncio.to_thread(refuse_others, experiment, context.run_dir)  # rows may be many
    versions = find_versions(config)
    settings = await asyncio.to_thread(record_settings, experiment, context.run_dir)
    async with AsyncExitStack() as stack:
        log = EpisodeLog(paths, context.incarnation)
        stack.callback(log.close)
        found = await connect(stack, experiment, context, bus, versions)
        status.ready(servers=found.urls, versions=len(versions))
        metrics = MetricsWriter(paths.metrics("eval"))
        stack.callback(metrics.close)
        keys = {version: wanted_keys(version.step, found.pool.sources, config) for version in versions}
        todo = {v: log.missing(wanted, retry_failed=config.retry_failed) for v, wanted in keys.items()}
        freeze_gc()  # environments and their packages are alive now, and stay
        total, left = sum(map(len, keys.values())), sum(map(len, todo.values()))
        found.log_start(total, left, f" of {', '.join(version.label for version in versions)}")
        progress = Progress(metrics, total, total - left)
        player = Player(
            found.pool,
            found.servers,
            log,
            max_concurrent=config.max_concurrent,
            is_api=found.is_api,
            on_end=progress.ended,
        )
        done: list[tuple[Version, Sequence[Key]]] = []
        summary: dict[str, Any] = {}
        for version in versions:
            if todo[version]:
                if not await found.servers.load_unless_gone(version):
                    continue
                progress.begin(version.label, [log.records[k] for k in keys[version] if k in log.records])
                await player.play(version, todo[version])
                progress.ended_all()
            done.append((version, keys[version]))
            log.sync()
            known = summary.get("versions", ())
            summary = summarize(done, log.records, config, settings, experiment.model.name, known)
            write_summary(context.run_dir, summary, table(summary))
            status.beat(step=progress.done)
        if not done:
            raise EvalError("no version is there any more: their run has removed them")
        last, wanted = done[-1]
        progress.begin(last.label, [log.records[k] for k in wanted])
    _conclude(context, summary)


def _conclude(context: RoleContext, summary: dict[str, Any]) -> None:
    logger.info("\n" + "\n".join(table(summary)))
    try:
        logger.info(f"picture: {draw(context.run_dir, summary)}")
    except (ImportError, OSError, ValueError, RuntimeError) as error:
        logger.warning(f"the picture could not be drawn: {error}")
    for what in summary["too_many_failed"]:
        logger.error(f"too many episodes failed (eval.max_failed_share): {what}; --retry-failed plays them again")
