"""Checkpoints of other runs: found by a path, and made artifacts of this run.

A checkpoint that this run starts from becomes its own: `checkpoints/step_<n>` and, for RL, `weights/step_<n>` appear in
this run's directories under its own incarnation. From then on nothing differs from a run that made them itself, and the
other run may be deleted. Files are never changed after their commit, so they are shared by hard links where the file
system allows it.
"""

import contextlib
import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from loguru import logger

from prime_hpc.config.run_files import RUN_YAML
from prime_hpc.store.artifact import commit_stage, prepare_stage
from prime_hpc.store.checkpoint.checkpoints import CheckpointInfo, newest_first, read_saved, resolve_resume
from prime_hpc.store.checkpoint.newest import POINTER, expected_step, read_pointer
from prime_hpc.store.errors import PROOFS, ArtifactError, StoreError, Unreadable
from prime_hpc.store.io import files
from prime_hpc.store.io.disk import disk_errors
from prime_hpc.store.io.file_age import file_age_s
from prime_hpc.store.io.files import FileEntry
from prime_hpc.store.manifest import Manifest, verify_artifact
from prime_hpc.store.run_paths import RunPaths, list_steps, parse_step

OWNER = "owner.json"
"""In a checkpoint directory outside its run directory: whose it is."""
_WRITTEN_S = 10.0
"""By when who has made that file has written it, or never will."""
_COPY_THREADS = 8
_CHUNK = 8 << 20


def find_checkpoint(path: Path) -> CheckpointInfo:
    """Return the checkpoint that a path means: a run directory's or a `checkpoints` directory's newest, or one
    `step_<n>`. A run directory says where its newest ones are; what lies inside it may be from before, or from after:
    the word may be an older attempt's. Sizes are checked, and no sums.

    `path`: absolute.
    Raises StoreError: there is none, or the one named is not whole; lists what is there."""
    step = parse_step(path.name, digits=0)
    if step is not None and not (path / RUN_YAML).exists():
        return resolve_resume(path.parent, step, deep=False)
    if not path.is_dir():
        raise StoreError(f"{path}: no such directory")
    pointed = read_pointer(RunPaths(path))
    if pointed is not None:
        return _newest_of(RunPaths(path), pointed)
    for root in (path / "checkpoints", path):
        if list_steps(root, digits=0):
            return resolve_resume(root, "latest", deep=False)
    raise StoreError(f"{path}: neither a run directory, nor a directory of checkpoints, nor one step_<n> of it")


def _newest_of(paths: RunPaths, pointed: Path) -> CheckpointInfo:
    """Return the newest checkpoint of a run that says they are in `pointed`, and may have some inside as well."""
    there = next(newest_first(pointed), None)
    inside = next(newest_first(paths.checkpoints), None)
    if there is not None and inside is not None:
        return max(there, inside, key=lambda info: (info.manifest.incarnation, info.step))
    if there is not None:
        return there
    if inside is not None and _was_saved_last(paths, inside):
        logger.warning(f"{pointed}, by {paths.root / POINTER}, has no whole checkpoint; the last was saved inside")
        return inside
    if list_steps(pointed, digits=0):
        return resolve_resume(pointed, "latest", deep=False)  # says why none is whole
    raise StoreError(
        f"{paths.root}: its checkpoints lie in {pointed}, which lists none: is its file system mounted here?"
    )


def _was_saved_last(paths: RunPaths, info: CheckpointInfo) -> bool:
    """Return whether a checkpoint is the last that its run saved and has not given up, by all that is written down."""
    saved = read_saved(paths)
    if saved is None or (saved.step, saved.incarnation) != (info.step, info.manifest.incarnation):
        return False
    return expected_step(paths) == saved.step


def run_of(info: CheckpointInfo) -> Path | None:
    """Run directory that a checkpoint belongs to; None where it lies alone."""
    root = info.path.parent
    owner = _read_owner(root)
    for candidate in (owner, root.parent):
        if candidate is not None and (candidate / "weights").is_dir():
            return candidate
    return None


def claim_root(paths: RunPaths, again: bool = False) -> None:
    """Make a checkpoint directory outside the run directory this run's own, so that nobody prunes another's.

    Args:
        again: the run has lived before: what lies there without an owner is its own.

    Raises:
        StoreError: it belongs to another run, or holds checkpoints of an unknown one.
        Unreadable: the run had it before, and it is not there, or empty: its file system is not mounted.
    """
    root = paths.checkpoints
    if root == paths.root / "checkpoints":
        return
    is_known = read_pointer(paths) == root
    steps = list_steps(root, digits=0)
    if is_known and not steps and OWNER not in files.list_dir(root):
        raise Unreadable(
            root,
            f"this run's checkpoints lie there ({paths.root / POINTER}), and it is empty: is its file system mounted "
            "here? Should it have been emptied on purpose: start over with --clean",
        )
    files.make_dir(root)
    owner, here = _read_owner(root), paths.root.resolve()
    if owner is None:
        if steps and not (again or is_known):
            raise StoreError(
                f"{root} holds checkpoints of unknown origin (steps {', '.join(map(str, steps[:5]))}): choose another "
                "ckpt.path, and start from one of them with ckpt.resume_step = PATH"
            )
        owner = _own(root, here)
    if owner != here and (owner.is_dir() or not is_known):
        raise StoreError(
            f"{root} holds the checkpoints of another run, {owner}: choose another ckpt.path, and start from one of "
            "them with ckpt.resume_step = PATH"
        )
    if owner != here:  # the run directory was moved, and its own word on where they are came along
        logger.warning(f"{root}: taken over from {owner}, which does not exist any more")
        files.write_atomic(root / OWNER, json.dumps({"run_dir": str(here)}).encode())


def _own(root: Path, here: Path) -> Path:
    """Make `here` the owner of a directory that has none; returns who is: of two runs that come at once, the first.
    Raises Unreadable: what is written there names none, or none yet."""
    path, content = root / OWNER, json.dumps({"run_dir": str(here)}).encode()
    draft = root / f".tmp-{OWNER}-{files.unique_suffix()}"
    try:
        files.write_file(draft, [content])
        with disk_errors(path):
            try:
                files.link(draft, path)  # whole, or not at all
            except FileExistsError:
                if _read_owner(root) is None:  # damaged
                    files.rename(draft, path)
            except OSError as error:
                if error.errno not in files.NO_LINKS:
                    raise
                if files.create_exclusive(path):
                    files.write_file(path, [content])
                elif _read_owner(root) is None and file_age_s(path) > _WRITTEN_S:
                    files.rename(draft, path)
    finally:
        with contextlib.suppress(OSError):  # never hides the reason
            draft.unlink(missing_ok=True)
    files.fsync_dir(root)
    owner = _read_owner(root)
    if owner is None:
        raise Unreadable(root / OWNER, "it does not say whose checkpoints these are; should that stay so, delete it")
    return owner


def point_to_root(paths: RunPaths) -> None:
    """Write down in the run directory where its checkpoints are, when that is outside it. After the attempt has found
    what it goes on from: until then the file says where they were."""
    if paths.checkpoints == paths.root / "checkpoints":
        files.remove_file(paths.root / POINTER)
    else:
        files.write_atomic(paths.root / POINTER, json.dumps({"path": str(paths.checkpoints)}).encode())


def _read_owner(root: Path) -> Path | None:
    """Read the owner of a checkpoint directory; None where nobody said. Raises Unreadable: that cannot be told now."""
    try:
        return Path(json.loads((root / OWNER).read_text(encoding="utf-8"))["run_dir"])
    except OSError as error:
        if error.errno not in PROOFS:
            raise Unreadable.of(error, root / OWNER) from error
        return None
    except (ValueError, KeyError, TypeError):
        return None


def adopt_checkpoint(info: CheckpointInfo, paths: RunPaths, incarnation: int) -> CheckpointInfo:
    """Make another run's checkpoint this run's.
    Raises StoreError: disk full, fenced, or another checkpoint of this step is in the way."""
    final = paths.checkpoint_step(info.step)
    manifest = replace(
        info.manifest, incarnation=incarnation, meta={**info.manifest.meta, "adopted_from": str(info.path)}
    )
    _adopt(info.path, final, manifest, paths)
    return CheckpointInfo(info.step, final, manifest)


def adopt_weights(source: Path, version: int, paths: RunPaths, incarnation: int) -> None:
    """Make `source`, another run's artifact of weight version `version`, this run's.

    Raises:
        ArtifactError: it is not whole, or something else.
        StoreError: disk full, fenced, or another version of this number is in the way.
    """
    manifest = verify_artifact(source, deep=True)
    if manifest.kind != "weights" or manifest.version != version:
        raise ArtifactError(source, f"weights of version {version}", f"{manifest.kind} of version {manifest.version}")
    _adopt(source, paths.weights_step(version), replace(manifest, incarnation=incarnation), paths)


def _adopt(source: Path, final: Path, manifest: Manifest, paths: RunPaths) -> None:
    stage = prepare_stage(final, manifest.incarnation, run=paths)
    try:
        for directory in sorted({(stage / name).parent for name in manifest.files}):
            files.make_dir(directory)
        with ThreadPoolExecutor(_COPY_THREADS) as pool:
            pending = [pool.submit(_take, source / n, stage / n, entry) for n, entry in manifest.files.items()]
            for future in pending:
                future.result()
        commit_stage(stage, final, manifest, run=paths)
    except BaseException:
        files.clear_away(stage)
        raise
    logger.info(f"took over {source} as {final}")


def _take(source: Path, target: Path, entry: FileEntry) -> None:
    """Hard link a file, or copy it where links are refused."""
    with disk_errors(target):
        try:
            files.link(source, target)
            return
        except FileNotFoundError as error:
            raise ArtifactError(source, "the file", "none any more (does its run still prune?)") from error
        except OSError as error:
            if error.errno not in files.NO_LINKS:
                raise
    with source.open("rb") as file:
        copied = files.write_file(target, iter(lambda: file.read(_CHUNK), b""))
    if copied != entry:
        raise ArtifactError(source, f"xxh3 {entry.xxh3}", f"xxh3 {copied.xxh3} ({copied.size} bytes) while copying")
