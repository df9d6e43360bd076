"""Choose what of a run directory goes into its archive.

Everything but the big artifacts is taken as it is: config, locks, attempts, metrics, logs, plots. Of checkpoints,
weights and rollouts only what was asked for, and whole: each of their files has a sum in its artifact's own manifest.
Secrets never go along, nor what an attempt makes anew. A link out of the run would lead nowhere once that is restored:
the file that it points at is taken instead (the log of a sweep's job lies beside its points).
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from prime_hpc.config import ConfigError, load_run
from prime_hpc.config.child_config import is_parent
from prime_hpc.config.run_files import RUN_YAML
from prime_hpc.config.secret import SECRETS
from prime_hpc.launch.archive.links import stays_within
from prime_hpc.store.artifact import SET_ASIDE
from prime_hpc.store.attempts import read_attempts, saved_claims
from prime_hpc.store.checkpoint.checkpoints import newest_first
from prime_hpc.store.checkpoint.newest import POINTER, expected_step, read_pointer
from prime_hpc.store.errors import ArtifactError, StoreError
from prime_hpc.store.io.files import FileEntry
from prime_hpc.store.manifest import MANIFEST, Manifest, verify_artifact
from prime_hpc.store.run_paths import RunPaths, list_steps, step_name
from prime_hpc.store.weights import list_versions, read_chain

Checkpoints = Literal["all", "last", "none"]
_ARTIFACTS = ("checkpoints", "weights", "rollouts", "rollouts_packed")
INDEX = "archive.json"
"""Name of the member with the sums; a run that was restored has that of the archive it came from."""
_LEFT = (*_ARTIFACTS, INDEX, SECRETS, "leases", "failed", POINTER)


@dataclass
class Chosen:
    """The content of an archive."""

    files: dict[str, Path] = field(default_factory=dict)
    """Name in the archive -> the file."""
    links: dict[str, str] = field(default_factory=dict)
    """Name in the archive -> target of a symbolic link that stays within the run."""
    sums: dict[str, FileEntry] = field(default_factory=dict)
    """Of files of artifacts: what their own manifests say."""
    batches: set[str] = field(default_factory=set)
    """Files of batches: the archive is complete enough without one that is damaged."""
    notes: list[str] = field(default_factory=list)
    """Things left out, for people."""
    checkpoints: list[int] = field(default_factory=list)
    """Steps of the run's own that go along."""
    stamps: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Size and time of change (ns) of each file."""

    @property
    def num_bytes(self) -> int:
        """Bytes of all files."""
        return sum(size for size, _ in self.stamps.values())


def choose(run_dir: Path, checkpoints: Checkpoints, *, rollouts: bool) -> Chosen:
    """Return what of a run goes into an archive; of runs below it likewise.

    Raises:
        Unreadable, OSError: something cannot be read now.
        StoreError: a checkpoint was saved and none is there.
    """
    chosen = Chosen()
    _run(run_dir, "", chosen, checkpoints, rollouts=rollouts)
    for name, path in chosen.files.items():
        about = path.stat()
        chosen.stamps[name] = (about.st_size, about.st_mtime_ns)
    return chosen


def _run(run_dir: Path, prefix: str, chosen: Chosen, checkpoints: Checkpoints, *, rollouts: bool) -> None:
    for name, path in _walk(run_dir, prefix, top=True):
        if path.is_symlink():
            _link(path, name, chosen)
        elif path.is_dir():
            _run(path, f"{name}/", chosen, checkpoints, rollouts=rollouts)
        else:
            chosen.files[name] = path
    paths = RunPaths(run_dir, read_pointer(RunPaths(run_dir)))
    steps = _checkpoints(paths, prefix, chosen, checkpoints)
    if not prefix:
        chosen.checkpoints = steps
    _weights(paths, prefix, chosen, steps)
    if rollouts:
        for folder in (paths.rollouts, paths.archived_rollouts):
            for step in list_steps(folder):
                _batch(folder / step_name(step), f"{prefix}{folder.name}/{step_name(step)}", chosen)
    elif left := len(list_steps(paths.rollouts)) + len(list_steps(paths.archived_rollouts)):
        chosen.notes.append(f"{prefix}rollouts: {left} batches left out (--rollouts takes them)")
    if (run_dir / SECRETS).is_dir() and any((run_dir / SECRETS).iterdir()):
        chosen.notes.append(f"{prefix}{SECRETS}/ left out: put it back before the restored run resumes")


def _link(path: Path, name: str, chosen: Chosen) -> None:
    """Add a link, or what it points at."""
    root = path.parents[name.count("/")]
    if stays_within(path, root):
        chosen.links[name] = str(path.readlink())
    elif path.is_file():
        chosen.files[name] = path
    else:
        what = "a directory" if path.is_dir() else "what is no file"
        chosen.notes.append(f"{name} left out: a link out of the run to {what} ({path.readlink()})")


def _walk(folder: Path, prefix: str, *, top: bool) -> Iterator[tuple[str, Path]]:
    """Yield files, links, and runs below, by their names in the archive."""
    with os.scandir(folder) as found:
        entries = sorted(found, key=lambda entry: entry.name)
    for entry in entries:
        if entry.name.startswith((".", SET_ASIDE)) or (top and entry.name in _LEFT):
            continue
        name, path = prefix + entry.name, Path(entry.path)
        if entry.is_symlink():
            yield name, path
        elif entry.is_dir(follow_symlinks=False):
            if (path / RUN_YAML).exists() and not prefix.endswith("roles/"):
                yield name, path
            else:
                yield from _walk(path, f"{name}/", top=False)
        elif entry.is_file(follow_symlinks=False):
            yield name, path


def _checkpoints(paths: RunPaths, prefix: str, chosen: Chosen, wanted: Checkpoints) -> list[int]:
    """Add checkpoints; returns their steps."""
    there = list_steps(paths.checkpoints, digits=0)
    taken: list[int] = []
    # the one that must do is read and summed before; of several each is compared while it is copied
    for info in newest_first(paths.checkpoints, deep=wanted == "last") if wanted != "none" else ():
        _add(info.path, info.manifest, f"{prefix}checkpoints/step_{info.step}", chosen)
        taken.append(info.step)
        if wanted == "last":
            break
    if not taken and wanted != "none":
        _refuse_missing(paths)
    if left := [step for step in there if step not in taken]:
        damaged = wanted == "all" or (wanted == "last" and (not taken or left[-1] > taken[0]))
        what = "which are not whole" if damaged else f"--checkpoints {wanted}"
        chosen.notes.append(f"{prefix}checkpoints: {', '.join(map(str, left))} left out ({what})")
    return taken


def _refuse_missing(paths: RunPaths) -> None:
    """Raise a StoreError where the run saved a checkpoint: none that is whole is to be seen."""
    try:
        experiment = load_run(paths.root)
    except ConfigError:
        pass  # of another version: what stands in its attempts is taken for steps
    else:
        if is_parent(experiment) or not experiment.trains:  # its attempts count the saves of others, or episodes
            return
    step = expected_step(paths, saved_claims(read_attempts(paths.attempts)))
    if step:
        raise StoreError(
            f"{paths.checkpoints} holds no whole checkpoint, but the run saved one of step {step}: is its file system "
            "mounted here? --checkpoints none archives the run without"
        )


def _weights(paths: RunPaths, prefix: str, chosen: Chosen, steps: list[int]) -> None:
    """Add the newest whole version and those of the checkpoints, each with what it stands against."""
    versions = list_versions(paths)
    has_newest = False
    for version in reversed(versions):
        if has_newest and version not in steps:
            continue
        try:
            for folder, manifest in read_chain(paths.weights_step(version)):
                _add(folder, manifest, f"{prefix}weights/{folder.name}", chosen)
            has_newest = True
        except ArtifactError as error:
            chosen.notes.append(f"{prefix}weights: version {version} left out, it is not whole: {error}")


def _batch(folder: Path, name: str, chosen: Chosen) -> None:
    try:
        manifest = verify_artifact(folder)
        _add(folder, manifest, name, chosen)
        chosen.batches.update(f"{name}/{file}" for file in manifest.files)
    except ArtifactError as error:
        chosen.notes.append(f"{name} left out, it is not whole: {error}")


def _add(folder: Path, manifest: Manifest, name: str, chosen: Chosen) -> None:
    for file, entry in manifest.files.items():
        chosen.files[f"{name}/{file}"] = folder / file
        chosen.sums[f"{name}/{file}"] = entry
    chosen.files[f"{name}/{MANIFEST}"] = folder / MANIFEST
