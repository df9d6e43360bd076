"""The beginning of an attempt: a new incarnation, the step to resume from, and a run directory that agrees with it.

Called by the supervisor before any role starts. It alone decides; roles are told.
"""

from pathlib import Path

from loguru import logger

from prime_hpc.config import ConfigError, Experiment
from prime_hpc.store.artifact import clean_stale_stages
from prime_hpc.store.batches import remove_batches_after
from prime_hpc.store.checkpoints import list_checkpoints, remove_checkpoints_after, resolve_resume
from prime_hpc.store.errors import StoreError
from prime_hpc.store.layout import RunPaths, claim_incarnation
from prime_hpc.store.leases import clear_leases
from prime_hpc.store.weights import list_versions, remove_versions_after
from prime_hpc.supervisor.attempts import Attempt, begin, is_held, read_attempts


def run_paths(experiment: Experiment, run_dir: Path) -> RunPaths:
    """The run's paths, with the checkpoint directory that its config names."""
    return RunPaths(run_dir, experiment.ckpt.path if experiment.ckpt else None)


def newest_saved_step(paths: RunPaths) -> int | None:
    """Step of the newest whole checkpoint, if any."""
    whole = list_checkpoints(paths.checkpoints)
    return whole[-1].step if whole else None


def begin_attempt(
    experiment: Experiment, run_dir: Path, *, job_id: str | None = None, restarts: int | None = None
) -> Attempt:
    """Claim a life of the run and bring its directory back to the step from which this life goes on.

    Args:
        experiment, run_dir: the run.
        job_id, restarts: of the Slurm job, if any.

    Raises:
        ConfigError: another process holds the run, or the checkpoint asked for does not exist or is broken.
    """
    paths = run_paths(experiment, run_dir)
    earlier = read_attempts(paths.attempts)
    for row in earlier:
        if is_held(row):
            raise ConfigError(
                f"{run_dir}: attempt {row['attempt']} still runs here (process {row['pid']}); end it first, "
                "or choose another --name"
            )
    incarnation = claim_incarnation(paths)
    step = _resume_step(experiment, paths, again=bool(earlier))
    if step is not None and experiment.kind == "rl" and step not in list_versions(paths):
        raise ConfigError(
            f"{paths.weights_step(step)}: the weights of checkpoint {step} are missing; engines could not serve them. "
            f"Whole versions there: {list_versions(paths) or 'none'}"
        )
    _rewind(paths, step or 0)
    why = "first start" if not earlier else f"resumes at step {step}" if step is not None else "starts over"
    return begin(
        paths.attempts,
        incarnation=incarnation,
        why=why,
        resume_step=step,
        job_id=job_id,
        restarts=restarts,
    )


def _resume_step(experiment: Experiment, paths: RunPaths, again: bool) -> int | None:
    """The step this life goes on from: what the config asks for, else (a later life) the newest whole checkpoint."""
    if experiment.ckpt is None:
        return None
    asked = experiment.ckpt.resume_step
    if asked is None:
        whole = list_checkpoints(paths.checkpoints) if again else []
        return whole[-1].step if whole else None
    try:
        info = resolve_resume(paths.checkpoints, asked)
    except StoreError as error:
        raise ConfigError(f"ckpt.resume_step = {asked}: {error}") from error
    if info.step >= experiment.max_steps:
        raise ConfigError(
            f"ckpt.resume_step = {asked} is step {info.step}, but max_steps = {experiment.max_steps}: nothing is left "
            "to do; raise --max-steps"
        )
    return info.step


def _rewind(paths: RunPaths, step: int) -> None:
    """Remove what comes after `step`, and the leftovers of earlier lives.

    Checkpoints go first: killed half-way, no checkpoint is left whose weights are gone.
    """
    removed = {
        "checkpoints": remove_checkpoints_after(paths.checkpoints, step),
        "batches": remove_batches_after(paths, step),
        "weights": remove_versions_after(paths, step),
    }
    for what, steps in removed.items():
        if steps:
            logger.info(f"removed {what} of {len(steps)} steps after step {step}")
    for parent in (paths.checkpoints, paths.rollouts, paths.weights):
        clean_stale_stages(parent)
    clear_leases(paths)
