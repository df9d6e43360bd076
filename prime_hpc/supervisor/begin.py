"""The beginning of an attempt: a new incarnation, the step to resume from, and a run directory that agrees with it.

Called by the supervisor before any role starts. It alone decides; roles are told.
"""

from pathlib import Path

from prime_hpc.config import ConfigError, Experiment
from prime_hpc.config.children import is_parent
from prime_hpc.store import files
from prime_hpc.store.adopt import claim_root
from prime_hpc.store.checkpoints import newest_first
from prime_hpc.store.children import list_children
from prime_hpc.store.errors import StoreError
from prime_hpc.store.layout import RunPaths, claim_incarnation, current_incarnation, record_start
from prime_hpc.store.rewind import rewind
from prime_hpc.supervisor.attempts import Attempt, begin, is_held, read_attempts
from prime_hpc.supervisor.resume import choose_start, remember, take_over


def run_paths(experiment: Experiment, run_dir: Path) -> RunPaths:
    """The run's paths, with the checkpoint directory that its config names."""
    return RunPaths(run_dir, experiment.ckpt.path if experiment.ckpt else None)


def newest_saved_step(paths: RunPaths) -> int | None:
    """Step of the newest whole checkpoint, if any; of a run with runs below it, the sum of theirs."""
    children = [newest_saved_step(RunPaths(paths.root / name)) for name in list_children(paths.root)]
    if any(children):
        return sum(step or 0 for step in children)
    return next((info.step for info in newest_first(paths.checkpoints)), None)


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
    newest = current_incarnation(paths)
    earlier = read_attempts(paths.attempts)
    for row in earlier:
        if is_held(row):
            raise ConfigError(
                f"{run_dir}: attempt {row['attempt']} still runs here (process {row['pid']}); end it first, "
                "or choose another --name"
            )
    try:
        claim_root(paths, again=bool(earlier))
        incarnation = claim_incarnation(paths, after=newest)
        start = None if is_parent(experiment) else choose_start(experiment, paths, again=bool(earlier))
        step = start.info.step if start is not None else None
        record_start(paths, incarnation, step or 0)
        rewind(paths, step or 0, incarnation)
        if start is not None:
            take_over(start, experiment, paths, incarnation)
            remember(experiment, paths, start)
        if experiment.kind == "rl" and not is_parent(experiment):
            _make_places(paths)
    except StoreError as error:
        raise ConfigError(str(error)) from error
    why = "first start" if not earlier else f"resumes at step {step}" if step is not None else "starts over"
    if is_parent(experiment) and earlier:
        why = "goes on with its runs"
    if start is not None and start.is_foreign:
        why = f"starts from {start.info.path}"
    return begin(
        paths.attempts,
        incarnation=incarnation,
        why=why,
        resume_step=step,
        saved_before=newest_saved_step(paths),
        job_id=job_id,
        restarts=restarts,
    )


def _make_places(paths: RunPaths) -> None:
    """The directories in which roles of different nodes meet, before any of them could look for one too early."""
    for directory in (paths.rollouts, paths.weights, paths.leases, paths.metrics("trainer").parent):
        files.make_dir(directory)
