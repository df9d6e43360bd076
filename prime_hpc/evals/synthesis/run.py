"""One attempt of `synthesize`: servers, environments, the episodes that are missing, then filters and rows."""

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack
from typing import Any

from loguru import logger

from prime_hpc.config import Experiment
from prime_hpc.evals.connect import Connected, connect_to_play
from prime_hpc.evals.episodes import Key, Record
from prime_hpc.evals.errors import EvalError
from prime_hpc.evals.progress import Progress
from prime_hpc.evals.settings import record as record_settings
from prime_hpc.evals.settings import refuse_others
from prime_hpc.evals.summary import write_summary
from prime_hpc.evals.synthesis.report import report, table, words
from prime_hpc.evals.synthesis.rows import DATA, withdraw_rows, write_rows
from prime_hpc.evals.synthesis.sampled import Sampled, SampledLog, sampled
from prime_hpc.evals.synthesis.select import num_passing, select
from prime_hpc.evals.versions import Version
from prime_hpc.observe.metrics import MetricsWriter
from prime_hpc.observe.role_status import RoleStatus
from prime_hpc.runtime.process_memory import freeze_gc
from prime_hpc.runtime.role_context import RoleContext
from prime_hpc.store.messaging.bus import BusClient
from prime_hpc.store.run_paths import RunPaths


class NothingPassesError(EvalError):
    """So many episodes, and none of them is worth a row."""


async def synthesize(experiment: Experiment, context: RoleContext, bus: BusClient, status: RoleStatus) -> None:
    """Play what is missing, write what passes.

    Raises:
        EvalError: it cannot go on.
        ConfigError: the directory holds episodes that were played in another way.
        EnvError: an environment is not as configured.
        StoreError: the results cannot be written.
    """
    config, paths = experiment.synthesize, RunPaths(context.run_dir)
    await asyncio.to_thread(refuse_others, experiment, context.run_dir)  # prompts may be many
    settings = await asyncio.to_thread(record_settings, experiment, context.run_dir)
    async with AsyncExitStack() as stack:
        log = SampledLog(paths, context.incarnation)
        stack.callback(log.close)
        metrics = MetricsWriter(paths.metrics("synthesize"))
        stack.callback(metrics.close)
        base = Version(0)
        asked, found = await connect_to_play(
            stack, experiment, context, bus, [base], log, split=config.split, keep_messages=True
        )
        status.ready(servers=found.urls if found is not None else [], versions=1)
        keys = asked.keys[base]
        freeze_gc()  # environments and their packages are alive now, and stay
        progress = Progress(metrics, asked.num, asked.num - asked.num_left)
        try:
            await _play(experiment, found, log, asked.todo[base], keys, progress)
        except NothingPassesError as error:
            logger.error(str(error))
        log.sync()
        status.beat(step=progress.done)
    _conclude(experiment, context, log, _in_order(experiment, keys), settings)


async def _play(
    experiment: Experiment,
    found: Connected | None,
    log: SampledLog,
    todo: Sequence[Key],
    keys: Sequence[Key],
    progress: Progress,
) -> None:
    """Play the missing episodes. Raises NothingPassesError: `synthesize.give_up_after` episodes, and no row."""
    config = experiment.synthesize
    there = _there(log, keys)
    progress.figures["passed"] = sum(num_passing(record, config) for record in there)

    def ended(record: Record) -> None:
        assert isinstance(record, Sampled)
        progress.figures["passed"] += num_passing(record, config)
        progress.ended(record)
        if (
            config.give_up_after is not None
            and not progress.figures["passed"]
            and progress.done >= config.give_up_after
        ):
            raise NothingPassesError(
                f"{progress.done} episodes have ended and no conversation passes the filters: nothing more is played "
                "(synthesize.give_up_after)"
            )

    progress.begin("synthesize", there)
    if found is not None:
        player = found.player(log, kind="synthesize", on_end=ended, make_record=sampled)
        await player.play(Version(0), todo)
    progress.ended_all()


def _there(log: SampledLog, keys: Sequence[Key]) -> list[Sampled]:
    return [record for key in keys if isinstance(record := log.records.get(key), Sampled)]


def _in_order(experiment: Experiment, keys: Sequence[Key]) -> list[Key]:
    """Environments as they are configured, then tasks and rollouts, whatever ended first."""
    place = {env.name or env.id: number for number, env in enumerate(experiment.synthesize.environments)}
    return sorted(keys, key=lambda key: (place[key.env], key.task, key.rollout))


def _conclude(
    experiment: Experiment, context: RoleContext, log: SampledLog, keys: Sequence[Key], settings: dict[str, Any]
) -> None:
    """Filter, write the rows and the report."""
    config, paths = experiment.synthesize, RunPaths(context.run_dir)
    records = _there(log, keys)
    found = select(records, config)
    summary = report(records, found, config, settings, experiment.model.name)
    if found.kept:
        meta = {"environments": summary["environments"], "settings": settings, "filters": summary["filters"]}
        manifest = write_rows(
            paths, context.incarnation, experiment, found.kept, lambda place: log.read(place[0]), meta
        )
        summary |= {"data": str(context.run_dir / DATA), "files": sorted(manifest.files)}
    else:
        withdraw_rows(paths, context.incarnation)
        summary["against"] = [f"none of {len(records)} episodes gave a row: {words(summary)}"]
    lines = table(summary)
    write_summary(context.run_dir, summary, [*lines, *summary.get("against", [])])
    logger.info("\n" + "\n".join(lines))
    for what in summary["too_many_failed"]:
        said = "too many episodes failed (synthesize.max_failed_share)"
        logger.error(f"{said}: {what}; --retry-failed plays them again")
