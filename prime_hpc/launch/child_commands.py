"""The runs below a run whose trainer trains many: made, listed, stopped and brought back.

A child appears by one rename with all that belongs to it; the trainer finds it at one of its next looks. A parent that
was not submitted yet is named by its experiment file: its children wait in its directory.
"""

import os
import shlex
import shutil
import sys
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from prime_hpc.config import ConfigError, Experiment, Problem, load_experiment, load_run, write_snapshot
from prime_hpc.config.child_config import as_child, check_child, is_parent, with_shared
from prime_hpc.config.run_files import ATTEMPTS_JSONL, RUN_YAML, STOP
from prime_hpc.config.snapshot import read_experiment, share
from prime_hpc.config.sources.load import Loaded
from prime_hpc.launch.monitor.status import status_of
from prime_hpc.store.checkpoint.checkpoints import newest_first
from prime_hpc.store.child_runs import PREFIX, STATE, ChildState, child_name, list_children, read_state
from prime_hpc.store.errors import StoreError
from prime_hpc.store.io import files
from prime_hpc.store.run_dirs import find_run, outputs_folder
from prime_hpc.store.run_paths import RunPaths
from prime_hpc.supervisor.attempt.resume import mismatches

POLL_S = 0.5
_EXPERIMENTS = (".yaml", ".yml", ".toml")


@dataclass(frozen=True)
class Parent:
    """The directory of child runs."""

    directory: Path
    experiment: Experiment
    source: Path
    """The file that states what children inherit."""


def find_parent(word: str) -> Parent:
    """Return the parent that a word means: a run (directory, name, job id), or an experiment file not submitted yet.
    Raises ConfigError: there is none, or its trainer trains one run only."""
    file = Path(word).expanduser()
    if file.suffix in _EXPERIMENTS and file.is_file():
        experiment = load_experiment([str(file)], "submit").experiment
        source, directory = file.absolute(), experiment.run_dir.resolve()
    else:
        try:
            directory = find_run(word).resolve()
        except ConfigError as error:
            folder = outputs_folder(os.environ) / word
            if list_children(folder):
                message = f"{word} has not been submitted yet, though runs wait in {folder}: name its experiment file"
                raise ConfigError(message) from error
            raise
        source, experiment = directory / RUN_YAML, load_run(directory)
    if not is_parent(experiment):
        message = f"{word} trains one run; to train several, set it to how many may train at once"
        raise ConfigError(message, "trainer.max_concurrent_runs")
    return Parent(directory, experiment, source)


def load_child(parent: Parent, arguments: list[str], identifier: str | None) -> Loaded:
    """Return a child's experiment: its own file and flags over what the parent states.

    Args:
        arguments: the child's file (`child.yaml`) and `--key value` flags.
        identifier: its id; None: the `name` that its file states, else the file's name.

    Raises:
        ConfigError: it is no experiment that could share the parent's trainer.
    """
    files = [a for a in arguments if not a.startswith("-") and Path(a).suffix in _EXPERIMENTS][:1]
    own = "--trainer.max-concurrent-runs=1"
    loaded = load_experiment([str(parent.source), own, *_without_resume(parent.experiment), *arguments], "submit")
    if identifier is None:
        stated = loaded.experiment.name
        is_own = stated != parent.experiment.name
        identifier = stated if is_own else Path(files[0]).stem if files else ""
    name = child_name(identifier)
    if name is None:
        message = f"{identifier!r} names no child: letters, digits, dot, dash and underscore; give it with --id"
        raise ConfigError(message, "name")
    child = as_child(loaded.experiment, parent.directory, name)
    check_child(parent.experiment, child)
    return replace(loaded, experiment=child)


def _without_resume(parent: Experiment) -> list[str]:
    return ["--ckpt.resume-step=none"] if parent.ckpt is not None and parent.ckpt.resume_step is not None else []


def add_child(parent: Parent, loaded: Loaded) -> Path:
    """Make a child's directory; returns it.
    Raises ConfigError: there is a child of this id, its environments are not installed, or the disk is full."""
    from prime_hpc.launch.checks import check

    final = loaded.experiment.run_dir
    if os.path.lexists(final):
        raise ConfigError(f"{final} exists already; choose another --id, or remove it first", "name")
    check(loaded, "orchestrator")
    stage = final.with_name(f".adding-{final.name}-{files.unique_suffix()}")
    try:
        stage.mkdir(parents=True)
        write_snapshot(loaded.experiment, stage, sys.argv)
        stage.rename(final)
    except OSError as error:
        shutil.rmtree(stage, ignore_errors=True)
        raise ConfigError(f"{final} cannot be made: {error.strerror}", "name") from error
    return final


def follow_parent(parent: Experiment, parent_dir: Path) -> None:
    """Give the runs below a parent that is about to start what they share with it as it is stated now: the ranks, the
    engines. A link or a copy, which is no run of this parent, and one whose config is none are left to the trainer,
    which says so.
    Raises ConfigError: one that has not ended cannot go on with it, and nothing was changed."""
    try:
        changed, problems = _followers(parent, parent_dir)
    except OSError as error:
        raise ConfigError(f"{error.filename or parent_dir} cannot be read: {error.strerror}", "output_dir") from error
    if problems:
        ways = "state it as before, or leave the run out: prime-hpc runs remove"
        raise ConfigError([replace(problem, message=f"{problem.message}; {ways}") for problem in problems])
    lock = share(sys.argv) if changed else None
    for path, child in changed.items():
        write_snapshot(child, path, sys.argv, lock)


def _followers(parent: Experiment, parent_dir: Path) -> tuple[dict[Path, Experiment], list[Problem]]:
    """Return the runs whose config is another one now, and what keeps those from going on that are not over."""
    changed: dict[Path, Experiment] = {}
    problems: list[Problem] = []
    for name in list_children(parent_dir):
        path = parent_dir / name
        try:
            before = read_experiment(path / RUN_YAML)
        except ConfigError:
            continue
        if path.is_symlink() or before.name != name:
            continue
        child = with_shared(parent, before)
        wrong = _misfits(parent, child, path)
        if not wrong and child != before:
            changed[path] = child
        state = read_state(path)
        if not (path / STOP).exists() and not (state is not None and state.has_ended):
            problems += [replace(problem, message=f"{name}: {problem.message}") for problem in wrong]
    return changed, problems


def _misfits(parent: Experiment, child: Experiment, path: Path) -> list[Problem]:
    """In which respects a child cannot go on below its parent, from its newest checkpoint."""
    try:
        check_child(parent, child)
        newest = next(newest_first(RunPaths(path).checkpoints), None)
        words = mismatches(child, newest) if newest is not None else []
    except ConfigError as error:
        return error.problems
    except (StoreError, OSError, ValueError):  # the trainer tries again, and says what it finds
        return []
    return [Problem(f"it cannot go on from {newest.path}: {'; '.join(words)}")] if newest is not None and words else []


@dataclass(frozen=True)
class Row:
    """A child as `runs list` shows it."""

    name: str
    path: str
    state: ChildState | None
    is_at_rest: bool
    """It has not ended, and its trainer does not run: the state is that one's last word."""
    is_to_stop: bool
    """It was removed, and ends at its trainer's next look."""

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        state = asdict(self.state) if self.state else {"phase": "new"}
        return {"name": self.name, "path": self.path, "at_rest": self.is_at_rest, "to_stop": self.is_to_stop, **state}


def list_rows(parent_dir: Path) -> list[Row]:
    """All children of a run directory."""
    states = {name: read_state(parent_dir / name) for name in list_children(parent_dir)}
    going = [name for name, state in states.items() if state is None or not state.has_ended]
    at_rest = going if going and _is_away(parent_dir) else []
    to_stop = [name for name in going if states[name] is not None and (parent_dir / name / STOP).exists()]
    return [
        Row(name, str(parent_dir / name), state, name in at_rest, name in to_stop) for name, state in states.items()
    ]


def _is_away(parent_dir: Path) -> bool:
    """Return whether a parent's trainer has run and is known not to now: it waits in the queue, or is over."""
    if not (parent_dir / ATTEMPTS_JSONL).exists():
        return False
    status = status_of(parent_dir, details=False)
    return status.is_final or status.state in ("submitting", "pending", "requeued")


def find_child(parent_dir: Path, word: str) -> Path:
    """Return a child's directory by its id. Raises ConfigError: there is none; names those that there are."""
    names = list_children(parent_dir)
    for name in (word, PREFIX + word):
        if name in names:
            return parent_dir / name
    raise ConfigError(f"{parent_dir} has no run {word!r}; there are {', '.join(names) or 'none'}")


def remove_child(path: Path, *, delete: bool, timeout_s: float) -> str:
    """Have a child saved and ended (and its directory deleted); returns what became of it.

    A child that no trainer has seen is deleted at once. One whose trainer does not run ends once that comes back.
    Raises ConfigError: it did not end in time.
    """
    state = read_state(path)
    if state is None:
        if (path / "incarnation").is_dir() and not delete:
            raise ConfigError(f"{path.name} was trained before and waits to be taken up: say --delete to delete it")
        delete, said = True, "no trainer had seen it"
    elif state.has_ended:
        said = f"it was {state.phase} already"
    elif _is_away(path.parent):
        said = f"it was at step {state.step}"
        if not delete:
            (path / STOP).touch()
            return f"{said} and ends when its trainer is back{_back(path)}; --delete deletes its directory now"
    else:
        said = _stop_child(path, timeout_s)
    if not delete:
        return f"{said}; its directory stays (`prime-hpc runs resume` brings it back)"
    if path.is_symlink():
        path.unlink()  # what it points at is not the parent's
    else:
        files.discard(path)
    return f"{said}; its directory is deleted"


def when_taken_up(path: Path) -> str:
    """Say when a child that was added, or is to go on, is trained."""
    if _is_away(path.parent):
        return f"it is taken up when its trainer is back{_back(path)}"
    return "the trainer takes it up when a slot is free"


def _back(path: Path) -> str:
    return f" (`prime-hpc resume {shlex.quote(str(path.parent))}`, if the job does not come back itself)"


def _stop_child(path: Path, timeout_s: float) -> str:
    (path / STOP).touch()
    end = time.monotonic() + timeout_s
    while (state := read_state(path)) is None or not state.has_ended:
        if time.monotonic() > end:
            (path / STOP).unlink(missing_ok=True)
            message = f"{path.name} did not end within {timeout_s:g} s (does the parent run?)"
            raise ConfigError(f"{message}; its directory can be deleted all the same: the trainer goes on without it")
        time.sleep(POLL_S)
    return f"{state.phase} after step {state.step}"


def resume_child(path: Path) -> str:
    """Have a child that ended be taken up again; returns what was said of it before.
    Raises ConfigError: it has not ended, or has no step left."""
    state = read_state(path)
    if state is None or not state.has_ended:
        at_rest = state is not None and _is_away(path.parent)
        if at_rest and (path / STOP).exists():
            (path / STOP).unlink(missing_ok=True)
            return "it was to end"
        phase = "new" if state is None else state.phase
        words = f", but its trainer does not run{_back(path)}" if at_rest else ""
        raise ConfigError(f"{path.name} has not ended: it is {phase}{words}")
    if state.phase == "done" and load_run(path).max_steps <= state.step:
        steps = f"{path.name} is done with its {state.step} steps"
        raise ConfigError(f"{steps}: add another run, or raise max_steps in {path / RUN_YAML}")
    (path / STOP).unlink(missing_ok=True)  # it came too late
    (path / STATE).unlink(missing_ok=True)
    return f"it was {state.phase} at step {state.step}" + (f" ({state.reason})" if state.reason else "")
