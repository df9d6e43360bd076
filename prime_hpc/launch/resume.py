"""Start a run again from its newest checkpoint."""

import os
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from prime_hpc.config import ConfigError, Experiment, Loaded, load_experiment
from prime_hpc.config.child_config import is_parent
from prime_hpc.config.run_files import ATTEMPTS_JSONL, LOCK_JSON, RUN_YAML, STATUS_JSON
from prime_hpc.slurm.options import SlurmRole
from prime_hpc.slurm.script import command_tail
from prime_hpc.store.attempts import read_attempts, saved_claims
from prime_hpc.store.errors import StoreError
from prime_hpc.store.run_dirs import known_json

if TYPE_CHECKING:
    from prime_hpc.store.run_paths import RunPaths


def load_to_resume(run_dir: Path, overrides: list[str]) -> Loaded:
    """Return the run's experiment as it was, with overrides, set to go on from its newest (or the named) whole
    checkpoint.

    Relative paths count from the directory in which the run was first submitted: this process goes there.

    Args:
        overrides: command line, e.g. `--ckpt.resume-step 40 --max-steps 200`.

    Raises:
        ConfigError: it holds no run, has no checkpoint, is done, or the overrides are wrong.
        OSError: it cannot be read now.
    """
    from prime_hpc.config.snapshot import load_run

    run_dir = run_dir.resolve()
    tail = command_tail(overrides)
    before = load_run(run_dir)
    first = (known_json(run_dir / LOCK_JSON) or {}).get("cwd")
    if first and Path(first).is_dir():
        os.chdir(first)
    # where checkpoints are off, one that a signal asked for may lie there all the same: the supervisor finds it
    switch_on = ["--ckpt.resume-step=latest"] if before.ckpt is not None else []
    home = [f"--output-dir={run_dir.parent}", f"--name={run_dir.name}", "--no-clean"]
    loaded = load_experiment([str(run_dir / RUN_YAML), *switch_on, *home, *tail], "submit", is_begun=True)
    experiment = loaded.experiment
    if experiment.run_dir.resolve() != run_dir:
        raise ConfigError(
            "a run goes on in its own directory; to start another from its config: submit RUN/run.yaml", "name"
        )
    if experiment.clean:
        raise ConfigError("resume and clean contradict each other", "clean")
    if is_parent(experiment) != is_parent(before):
        then = "many runs" if is_parent(before) else "one run"
        words = f"it was {before.trainer.max_concurrent_runs}, and {run_dir} holds {then}: start another under a --name"
        raise ConfigError(words, "trainer.max_concurrent_runs")
    last, key = experiment.num_steps, "max_steps"
    if last is None:  # of the same data: what the trainer counted
        key, word = "sft.data.num_epochs", (known_json(run_dir / STATUS_JSON) or {}).get("max_steps")
        last = word if isinstance(word, int) and experiment.sft.data == before.sft.data else None
    _check_checkpoint(experiment, run_dir, last, key)
    return loaded


def without_dependency(experiment: Experiment, run_dir: Path) -> Experiment:
    """Return the experiment as its job is sent: without what the run waited for if it has begun, which is over, and
    Slurm may know it no more. What it is told to wait for now stays.

    Its `run.yaml` keeps what was waited for, so that another submit tells it from what is stated anew.
    `run_dir`: its run directory, whose `run.yaml` says what it was told before.
    """
    from prime_hpc.config.snapshot import load_run

    if not experiment.slurm.waits or not (run_dir / ATTEMPTS_JSONL).exists():
        return experiment
    try:
        before = load_run(run_dir)
    except ConfigError:  # damaged: nothing says that it is the same
        return experiment
    slurm = experiment.slurm
    for role in get_args(SlurmRole):
        now, then = getattr(slurm, role), getattr(before.slurm, role)
        if now is not None and then is not None and now.dependency == then.dependency:
            slurm = slurm.model_copy(update={role: now.model_copy(update=_lasting(now.dependency))})
    if slurm.dependency == before.slurm.dependency:
        slurm = slurm.model_copy(update=_lasting(slurm.dependency))
    return experiment.model_copy(update={"slurm": slurm})


def _lasting(dependency: str | None) -> dict[str, str | None]:
    """Return what is left of it: `singleton` names no job that could be over."""
    return {"dependency": "singleton" if "singleton" in (dependency or "").split(",") else None}


def _check_checkpoint(experiment: Experiment, run_dir: Path, last: int | None, key: str) -> None:
    """Raise a ConfigError where there is nothing to go on from."""
    from prime_hpc.store.checkpoint.checkpoints import newest_first, resolve_resume
    from prime_hpc.supervisor.attempt.start import run_paths

    if is_parent(experiment) or not experiment.trains:  # its runs have their own; an evaluation has its episodes
        return
    again = f"start over with `prime-hpc submit {shlex.quote(f'{run_dir}/run.yaml')} --clean`"
    paths = run_paths(experiment, run_dir)
    try:  # sizes alone: a login node is no place to read a checkpoint
        newest = next(newest_first(paths.checkpoints), None)
    except (StoreError, OSError) as error:
        words = f"{paths.checkpoints}: {error}; nothing was changed: try again when the file system answers"
        raise ConfigError(words, "ckpt.resume_step") from error
    if newest is None:
        _refuse_unmounted(paths)
        why = "holds no whole checkpoint"
        why += "" if experiment.ckpt else " (the run has checkpoints off, and no signal or file asked for one)"
        raise ConfigError(f"{paths.checkpoints} {why}; {again}", "ckpt.resume_step")
    asked = experiment.ckpt.resume_step if experiment.ckpt else "latest"
    if asked is None or isinstance(asked, Path):
        return
    try:
        step = newest.step if asked == "latest" else resolve_resume(paths.checkpoints, asked, deep=False).step
    except (StoreError, OSError) as error:
        raise ConfigError(str(error), "ckpt.resume_step") from error
    if last is not None and step >= last:
        past = "is the last one" if step == last else "lies beyond the end"
        raise ConfigError(f"checkpoint {step} {past} (of {last} steps): raise it", key)


def _refuse_unmounted(paths: "RunPaths") -> None:
    """Raise a ConfigError where checkpoints are missing that were saved."""
    from prime_hpc.store.checkpoint.newest import expected_step, read_pointer

    try:
        step = expected_step(paths, saved_claims(read_attempts(paths.attempts)))
        known = read_pointer(paths)
    except (StoreError, OSError) as error:
        raise ConfigError(str(error), "ckpt.resume_step") from error
    if step:
        where = f" (the run's checkpoints lie in {known})" if known not in (None, paths.checkpoints) else ""
        words = (
            f"{paths.checkpoints} holds no whole checkpoint, but the run saved one of step {step}{where}: is its file "
            "system mounted here? Nothing was changed"
        )
        raise ConfigError(words, "ckpt.resume_step")
