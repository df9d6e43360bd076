"""One attempt of an evaluation: servers, environments, one version after another, the summary after each."""

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack
from typing import Any

from loguru import logger

from prime_hpc.config import Experiment
from prime_hpc.evals.connect import connect_to_play
from prime_hpc.evals.episodes import EpisodeLog, Key
from prime_hpc.evals.errors import EvalError
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
        metrics = MetricsWriter(paths.metrics("eval"))
        stack.callback(metrics.close)
        asked, found = await connect_to_play(stack, experiment, context, bus, versions, log)
        status.ready(servers=found.urls if found is not None else [], versions=len(versions))
        freeze_gc()  # environments and their packages are alive now, and stay
        progress = Progress(metrics, asked.num, asked.num - asked.num_left)
        done: list[tuple[Version, Sequence[Key]]] = []
        summary: dict[str, Any] = {}
        for version in versions:
            keys = asked.keys[version]
            if found is not None and asked.todo[version]:
                if not await found.servers.load_unless_gone(version):
                    continue
                progress.begin(version.label, [log.records[k] for k in keys if k in log.records])
                player = found.player(log, on_end=progress.ended)
                await player.play(version, asked.todo[version])
                progress.ended_all()
            done.append((version, keys))
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
