"""One attempt of an evaluation: servers, environments, one version after another, the summary after each."""

from collections.abc import Sequence
from typing import Any

from loguru import logger

from prime_hpc.config import Experiment
from prime_hpc.evals.attempt import open_attempt
from prime_hpc.evals.episodes import EpisodeLog, Key
from prime_hpc.evals.errors import EvalError
from prime_hpc.evals.summary import draw, summarize, table, write_summary
from prime_hpc.evals.versions import Version
from prime_hpc.observe.role_status import RoleStatus
from prime_hpc.runtime.role_context import RoleContext
from prime_hpc.store.messaging.bus import BusClient


async def evaluate(experiment: Experiment, context: RoleContext, bus: BusClient, status: RoleStatus) -> None:
    """Play what is missing, write the scores.

    Raises:
        EvalError: it cannot go on.
        ConfigError: the directory holds episodes that were played in another way.
        EnvError: an environment is not as configured.
        StoreError: the results cannot be written.
    """
    async with open_attempt(experiment, context, bus, status, EpisodeLog) as attempt:
        asked, found, log, progress = attempt.asked, attempt.found, attempt.log, attempt.progress
        done: list[tuple[Version, Sequence[Key]]] = []
        summary: dict[str, Any] = {}
        for version, keys in asked.keys.items():
            if found is not None and asked.todo[version]:
                if not await found.servers.load_unless_gone(version):
                    continue
                progress.begin(version.label, [log.records[k] for k in keys if k in log.records])
                player = found.player(log, on_end=progress.ended)
                await player.play(version, asked.todo[version])
                progress.say()
            done.append((version, keys))
            log.sync()
            known = summary.get("versions", ())
            summary = summarize(done, log.records, experiment.eval, attempt.settings, experiment.model.name, known)
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
