"""One attempt of `synthesize`: servers, environments, the episodes that are missing, then filters and rows."""

from collections.abc import Sequence

from loguru import logger

from prime_hpc.config import Experiment
from prime_hpc.evals.attempt import Attempt, open_attempt
from prime_hpc.evals.episodes import Key, Record
from prime_hpc.evals.errors import EvalError
from prime_hpc.evals.summary import write_summary
from prime_hpc.evals.synthesis.report import report, table, words
from prime_hpc.evals.synthesis.rows import DATA, withdraw_rows, write_rows
from prime_hpc.evals.synthesis.sampled import Sampled, SampledLog, sampled
from prime_hpc.evals.synthesis.select import num_passing, select
from prime_hpc.evals.versions import Version
from prime_hpc.observe.role_status import RoleStatus
from prime_hpc.runtime.role_context import RoleContext
from prime_hpc.store.messaging.bus import BusClient
from prime_hpc.store.run_paths import RunPaths

MODEL = Version(0)
"""All is played by `model.name` as it is."""


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
    async with open_attempt(experiment, context, bus, status, SampledLog) as attempt:
        try:
            await _play(experiment, attempt)
        except NothingPassesError as error:
            logger.error(str(error))
        attempt.log.sync()
        status.beat(step=attempt.progress.done)
    _conclude(experiment, context, attempt)


async def _play(experiment: Experiment, attempt: Attempt[SampledLog]) -> None:
    """Play the missing episodes. Raises NothingPassesError: `synthesize.give_up_after` episodes, and no row."""
    config, progress = experiment.synthesize, attempt.progress
    there = _there(attempt.log, attempt.asked.keys[MODEL])
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
    if attempt.found is not None:
        player = attempt.found.player(attempt.log, on_end=ended, make_record=sampled)
        await player.play(MODEL, attempt.asked.todo[MODEL])
    progress.say()


def _there(log: SampledLog, keys: Sequence[Key]) -> list[Sampled]:
    return [record for key in keys if isinstance(record := log.records.get(key), Sampled)]


def _in_order(experiment: Experiment, keys: Sequence[Key]) -> list[Key]:
    """Environments as they are configured, then tasks and rollouts, whatever ended first."""
    place = {env.label: number for number, env in enumerate(experiment.synthesize.environments)}
    return sorted(keys, key=lambda key: (place[key.env], key.task, key.rollout))


def _conclude(experiment: Experiment, context: RoleContext, attempt: Attempt[SampledLog]) -> None:
    """Filter, write the rows and the report."""
    config, paths = experiment.synthesize, RunPaths(context.run_dir)
    log, settings = attempt.log, attempt.settings
    records = _there(log, _in_order(experiment, attempt.asked.keys[MODEL]))
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
