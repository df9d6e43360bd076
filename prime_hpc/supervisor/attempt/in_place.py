"""The next attempt inside the same job, after a crash or a lost node that the allocation can bear.

Going back to the queue costs a wait and the start of every engine. Where the trainer or the orchestrator crashed and
its nodes are well, or a spare node can take a lost one's place, only these two start again, from the newest checkpoint;
the servers serve on, and are told which version to go back to. Of a trainer's crash the orchestrator need not hear
either: where nothing was sampled by a version that the next attempt makes anew, it commits its newest batches once more
and goes on, with all rollouts in flight. The second time in a row that nothing new was saved, the job goes back to the
queue: the nodes may be the reason.
"""

from pathlib import Path

from loguru import logger

from prime_hpc.config import ConfigError, Experiment
from prime_hpc.store.attempts import rewrite_row, rows_with
from prime_hpc.store.errors import StoreError
from prime_hpc.store.io.retry_reads import Patience
from prime_hpc.store.run_dirs import IN_PLACE, AttemptRow
from prime_hpc.supervisor.attempt.bad_nodes import record_bad_nodes
from prime_hpc.supervisor.attempt.early_end import StartEnded
from prime_hpc.supervisor.attempt.restart_policy import (
    attempts_without_progress,
    decide_for,
    mode_of_run,
    since_submitted,
)
from prime_hpc.supervisor.attempt.start import begin_attempt, run_paths
from prime_hpc.supervisor.supervisor import Supervisor

ORCHESTRATOR = "orchestrator"


def begin_in_place(ended: Supervisor, experiment: Experiment, run_dir: Path, patience: Patience) -> Supervisor | None:
    """Begin the run's next attempt with the roles that `ended` left.

    Args:
        ended: an attempt that is over and written down, with `left`.

    Returns:
        the attempt, not running yet; None: the job ends, its servers have, and the restart policy decides the rest.

    Raises:
        StartEnded: somebody wants the run to end; these roles have.
    """
    left, grace_s = ended.left, experiment.supervisor.grace_s
    assert left is not None
    why_not: str | None
    try:
        paths = run_paths(experiment, run_dir)
        rows = rows_with(paths.attempts, ended.attempt)
        why_not = "a newer attempt of the run has begun"
        if rows[-1]["attempt"] == ended.attempt.attempt:
            why_not = _reason_against(experiment, run_dir, rows)
        if why_not is None and (silent := left.hand_over(rows[-1]["incarnation"] + 1)):
            why_not = f"{', '.join(silent)} did not answer"
            if left.held is not None and silent == [ORCHESTRATOR]:
                left.release_orchestrator(why_not, grace_s)
                why_not = None
        if why_not is None:
            last = rows[-1]
            record_bad_nodes(experiment, last)
            rewrite_row(paths.attempts, {**last, "next": IN_PLACE})
            attempt = begin_attempt(
                experiment, run_dir, job_id=last.get("job_id"), restarts=last.get("restarts"), patience=patience
            )
            attempt.allocated = dict(last.get("allocated") or {})
            if left.held is not None and (reason := left.held.why_not(attempt.resume_step or 0)):
                left.release_orchestrator(reason, grace_s)
            who = "its servers and its orchestrator go on" if left.held is not None else "its servers serve on"
            where = "".join(f"; {spare} takes the place of {lost}" for lost, spare in left.swap.items())
            logger.warning(f"attempt {attempt.attempt} ({attempt.why}) begins in the same job, {who}{where}")
            return ended.follow(attempt)
    except StartEnded:  # a signal or STOP: no crash, after which the job would come back
        left.end(grace_s)
        raise
    except (StoreError, OSError, ConfigError) as error:
        why_not = str(error)
    logger.warning(f"the run does not go on inside this job: {why_not}")
    left.end(grace_s)
    return None


def _reason_against(experiment: Experiment, run_dir: Path, rows: list[AttemptRow]) -> str | None:
    """Why the job goes back to the queue, or down, instead."""
    decision = decide_for(experiment, run_dir, rows, mode_of_run(run_dir))
    if not decision.again:
        return decision.why
    is_service = experiment.trainer.tinker is not None
    idle = attempts_without_progress(since_submitted(run_dir, rows), is_service=is_service)
    return f"{idle} attempts in a row saved nothing new" if idle > 1 else None
