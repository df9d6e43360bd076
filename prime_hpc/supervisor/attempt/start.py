"""The beginning of an attempt: a new incarnation, the step to resume from, and a run directory that agrees with it."""

import errno
import os
import time
from pathlib import Path

from loguru import logger

from prime_hpc.config import ConfigError, Experiment, Problem
from prime_hpc.config.child_config import is_parent
from prime_hpc.evals.episodes import num_episodes
from prime_hpc.evals.versions import find_versions
from prime_hpc.store.attempts import Attempt, begin, is_held, read_attempts, saved_claims
from prime_hpc.store.checkpoint.checkpoints import newest_first
from prime_hpc.store.checkpoint.failed_reads import FailedReads, clear_failed_reads
from prime_hpc.store.checkpoint.import_checkpoint import claim_root, point_to_root
from prime_hpc.store.checkpoint.newest import expected_step
from prime_hpc.store.checkpoint.rollback import rewind
from prime_hpc.store.child_runs import list_children
from prime_hpc.store.dataset.files import NothingThereError, find_data
from prime_hpc.store.errors import FencedError, NoRoom, StoreError, Unreadable
from prime_hpc.store.io import disk, files
from prime_hpc.store.io.retry_reads import Patience
from prime_hpc.store.model.config import is_local_path
from prime_hpc.store.run_dirs import AttemptRow
from prime_hpc.store.run_paths import (
    RunPaths,
    check_incarnation,
    claim_incarnation,
    incarnation_starts,
    is_late,
    newest_incarnation,
    record_start,
    refuse_other_owner,
)
from prime_hpc.store.tinker_files import count_saves, forget_address
from prime_hpc.supervisor.attempt.resume import Reading, Start, choose_start, record_resume_choice, take_over

MADE_WITHIN_S, MADE_POLL_S = 30.0, 0.5
"""So much later may be seen here what another node has just written."""
NOT_MADE = "the job that this one waited for (slurm.dependency) has not made it"


def run_paths(experiment: Experiment, run_dir: Path) -> RunPaths:
    """Return the run's paths, with the checkpoint directory that its config names."""
    return RunPaths(run_dir, experiment.ckpt.path if experiment.ckpt else None)


def newest_saved_step(paths: RunPaths) -> int | None:
    """Step of the newest whole checkpoint, if any; of a run with runs below it, the sum of theirs; of a service, the
    adapters' saves; of an evaluation its episodes. Raises Unreadable, OSError: that cannot be told now."""
    children = [saved_step_if_known(RunPaths(paths.root / name)) for name in list_children(paths.root)]
    if any(children):
        return sum(step or 0 for step in children)
    if saves := count_saves(paths.root):
        return saves
    starts = incarnation_starts(paths)
    whole = newest_first(paths.checkpoints)
    steps = (info.step for info in whole if not is_late(info.step, info.manifest.incarnation, starts))
    return next(steps, None) or num_episodes(paths.root) or None


def saved_step_if_known(paths: RunPaths, known: int | None = None) -> int | None:
    """`newest_saved_step`, or what is known where that cannot be told now."""
    try:
        return newest_saved_step(paths)
    except (StoreError, OSError) as error:
        logger.warning(f"which checkpoint of {paths.root.name} is the newest cannot be told now: {error}")
        return known


def await_made(experiment: Experiment, within_s: float = MADE_WITHIN_S) -> None:
    """Wait for what the job before this one (`slurm.dependency`) was to make: the model, the data, the versions.
    Raises ConfigError: it has not been made: no attempt would find it."""
    until = time.monotonic() + within_s
    while problems := _not_made(experiment):
        if time.monotonic() > until:
            raise ConfigError(problems)
        time.sleep(MADE_POLL_S)


def _not_made(experiment: Experiment) -> list[Problem]:
    """List what is not there. What cannot be looked at is left to the roles, which say why."""
    problems, name = [], experiment.model.name
    if is_local_path(name) and not os.path.isdir(Path(name).expanduser()):  # noqa: PTH112 - Path's raises on EACCES
        problems.append(Problem(f"{name} is not there: {NOT_MADE}", "model.name"))
    try:
        find_versions(experiment.eval) if experiment.kind == "eval" else None
    except ConfigError as error:
        problems += [Problem(f"{said.message}: {NOT_MADE}", said.key) for said in error.problems]
    except OSError:
        return problems
    for key, source in experiment.sft.sources.items() if experiment.kind == "sft" else ():
        try:
            find_data(source)
        except NothingThereError as error:
            problems.append(Problem(f"{error}: {NOT_MADE}", f"{key}.path"))
        except (OSError, ValueError):
            continue
    return problems


def begin_attempt(
    experiment: Experiment,
    run_dir: Path,
    *,
    job_id: str | None = None,
    restarts: int | None = None,
    patience: Patience | None = None,
) -> Attempt:
    """Claim an attempt of the run and bring its directory back to the step from which this attempt goes on.

    Args:
        patience: with what cannot be read; default: what the config says.

    Raises:
        ConfigError: another process holds the run, it is another user's, or the checkpoint asked for does not exist or
            is broken.
        Unreadable: something could not be read until the deadline; no checkpoint, batch or version was touched.
        FencedError: a newer attempt of the run has begun meanwhile.
    """
    paths, config = run_paths(experiment, run_dir), experiment.supervisor
    patience = patience or Patience(config.read_timeout_s)
    earlier: list[AttemptRow] = []
    try:
        patience(lambda: refuse_other_owner(run_dir))
        earlier = patience(lambda: _earlier(paths))
        incarnation = patience(lambda: _claim(paths, earlier))
        start = None
        if experiment.trains and not is_parent(experiment):
            failed_reads = FailedReads(config.recheck_s)
            start = patience(lambda: choose_start(experiment, paths, _read(paths, earlier, incarnation), failed_reads))
        step = start.info.step if start is not None else None
        patience(lambda: _roll_back(experiment, paths, start, incarnation))
        saved_before = patience(lambda: newest_saved_step(paths))
        patience(lambda: check_incarnation(paths, incarnation))  # all this may have taken long
    except (Unreadable, NoRoom, FencedError):
        raise
    except StoreError as error:
        cause = error.__cause__
        if earlier and isinstance(cause, OSError) and cause.errno == errno.EROFS:  # it was written to before
            raise Unreadable(paths.root, str(error), errno.EROFS) from error
        raise ConfigError(str(error)) from error
    why = "first start" if not earlier else f"resumes at step {step}" if step is not None else "starts over"
    if not experiment.trains and saved_before:
        why = f"goes on after {saved_before} episodes"
    if is_parent(experiment) and earlier:
        why = "goes on with its runs" if experiment.trainer.tinker is None else "serves again"
    if start is not None and start.is_foreign:
        why = f"starts from {start.info.path}"
    try:
        return patience(
            lambda: begin(
                paths.attempts,
                incarnation=incarnation,
                why=why,
                resume_step=step,
                saved_before=saved_before,
                job_id=job_id,
                restarts=restarts,
            )
        )
    except (StoreError, FileNotFoundError):
        check_incarnation(paths, incarnation)  # a newer attempt sweeps up what it finds unfinished
        raise


def _earlier(paths: RunPaths) -> list[AttemptRow]:
    """Return the attempts so far, none of which may still run here."""
    earlier = read_attempts(paths.attempts)
    for row in earlier:
        refuse_held(paths.root, row)
    return earlier


def refuse_full(run_dir: Path, min_free_gib: float) -> None:
    """Raise NoRoom where all nodes would fail preflight for the run directory's file system. It is waited for before
    there is an attempt, which would end as one that crashed."""
    free = disk.free_bytes(run_dir)
    if free != disk.UNSTATED and free < min_free_gib * 2**30:
        raise NoRoom(
            f"{run_dir} has {disk.size_text(free)} free, {min_free_gib:g} GiB are needed "
            "(slurm.preflight.min_free_gib): free some space"
        )


def refuse_held(run_dir: Path, row: AttemptRow) -> None:
    """Raise a ConfigError where an attempt of the run is still at work on this host."""
    if is_held(row):
        raise ConfigError(
            f"{run_dir}: attempt {row['attempt']} still runs here (process {row['pid']}); end it first, or choose "
            "another --name"
        )


def _claim(paths: RunPaths, earlier: list[AttemptRow]) -> int:
    """Return a new attempt, of a run whose attempts and checkpoints can be seen."""
    newest = newest_incarnation(files.list_dir(paths.incarnation))
    known = max((row["incarnation"] for row in earlier), default=0)
    if newest < known:
        raise Unreadable(paths.incarnation, f"incarnation {known} of this run is not listed there: is it mounted here?")
    claim_root(paths, again=bool(earlier) or newest > 0)
    return claim_incarnation(paths, after=newest)


def _read(paths: RunPaths, earlier: list[AttemptRow], incarnation: int) -> Reading:
    return Reading(
        again=bool(earlier) or incarnation > 1,
        expected=expected_step(paths, saved_claims(earlier), incarnation),
        incarnation=incarnation,
    )


def _roll_back(experiment: Experiment, paths: RunPaths, start: Start | None, incarnation: int) -> None:
    """Everything that changes the directory; the same again does no harm."""
    step = start.info.step if start is not None else 0
    record_start(paths, incarnation, step)
    point_to_root(paths)
    if experiment.trainer.tinker is not None:
        forget_address(paths.root)
    rewind(paths, step, incarnation, keep=start is not None and start.passed_over)
    clear_failed_reads(paths)
    if start is not None:
        take_over(start, experiment, paths, incarnation)
        record_resume_choice(experiment, paths, start)
    if experiment.kind == "rl" and not is_parent(experiment):
        # Roles of different nodes meet in these: none may look for one before it is there.
        for directory in (paths.rollouts, paths.weights, paths.leases, paths.metrics("trainer").parent):
            files.make_dir(directory)
