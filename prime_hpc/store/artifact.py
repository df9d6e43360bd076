"""Artifacts: directories that are whole or not there.

An artifact is written in a hidden sibling, its files are fsynced and summed, `manifest.json` comes last, then ONE
rename gives it its name. The trainer (weights, checkpoints) and the orchestrator (batches) write them, everybody
reads them. One process per directory: `ArtifactWriter`. Many ranks: rank 0 calls `prepare_stage`, after a barrier
every rank writes into `stage_dir(...)` and sums its own files with `hash_files`, rank 0 gathers the sums and calls
`commit_stage`.
"""

import contextlib
import errno
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

from loguru import logger

from prime_hpc.store.errors import ArtifactError, ArtifactExists, FencedError, StoreError, Unreadable
from prime_hpc.store.io import files, lustre
from prime_hpc.store.io.disk import disk_error, disk_errors
from prime_hpc.store.io.files import FileEntry
from prime_hpc.store.manifest import MANIFEST, Manifest, read_manifest
from prime_hpc.store.run_paths import RunPaths, check_incarnation

SET_ASIDE = "set-aside-"
"""Prefix of what bore an artifact's name and was none, or was whole and above the step that an attempt went back to."""
IN_THE_WAY_S = files.VISIBLE_S
"""How long to look for the manifest of what is in the way before it is called somebody else's."""
_HIDDEN = (".stage-", ".trash-", ".tmp-")
_STAGE_INCARNATION = re.compile(r"\.stage-.*?-i(\d+)(?:-|$)")


def stage_dir(final: Path, incarnation: int = 0) -> Path:
    """Return the hidden sibling where all ranks of one attempt write what will become `final`. A name only: nothing is
    made."""
    return final.with_name(f".stage-{final.name}-i{incarnation:04d}")


def prepare_stage(
    final: Path, incarnation: int = 0, *, run: RunPaths | None = None, file_bytes: int | None = None
) -> Path:
    """Rank 0: an empty `stage_dir(final, incarnation)`; what an interrupted try left there is removed.

    Args:
        run: whose incarnations fence it; default: the run directory two levels up.
        file_bytes: about the size of its largest file, for the stripes on Lustre.

    Raises:
        FencedError: a newer attempt has begun.
        StoreError: disk full, not writable, or the run directory is gone.
    """
    _check_writer(run or RunPaths(final.parent.parent), incarnation)
    stage = stage_dir(final, incarnation)
    if stage.exists():
        with contextlib.suppress(FileNotFoundError):  # another node's clean-up was first
            files.discard(stage)
    files.make_dir(stage)
    if file_bytes is not None:
        lustre.set_stripes(stage, file_bytes)
    return stage


def _check_writer(run: RunPaths, incarnation: int) -> None:
    """Raise FencedError for an artifact of an old attempt, StoreError for one of a run whose directory is gone: that is
    not made again."""
    with disk_errors(run.incarnation):
        newest = check_incarnation(run, incarnation)
    if newest < incarnation and not run.root.is_dir():
        raise StoreError(f"{run.root} was deleted or moved under the run: nothing more is written there")


def hash_files(directory: Path, names: Iterable[str]) -> dict[str, FileEntry]:
    """Make files durable (fsync, mode 0644 & ~umask) and sum them. Each rank calls it for the files that it wrote.

    Args:
        names: relative posix names, sub-directories allowed.

    Raises:
        StoreError: disk full, I/O error.
        FileNotFoundError: a name is not there.
    """
    # The stage was made with 0777 & ~umask: that tells the umask without touching the process's own.
    mode = files.FILE_MODE & directory.stat().st_mode
    return {name: files.finalize_file(directory / name, mode) for name in sorted(names)}


def commit_stage(
    stage: Path,
    final: Path,
    manifest: Manifest,
    *,
    run: RunPaths | None = None,
) -> Manifest:
    """Give a finished stage its name: manifest last, fsync, one rename, fsync of the parent. Rank 0 only.

    Args:
        stage: from `prepare_stage`; every file in it is named in the manifest, summed by `hash_files`.
        final: the artifact's name; same parent as the stage.
        run: whose incarnations fence it; default: the run directory two levels up.

    Returns:
        The manifest under that name (an identical artifact that this attempt already committed is kept).

    Raises:
        FencedError: a newer attempt has begun, or already wrote this artifact.
        ArtifactExists: this attempt committed other content under this name.
        StoreError: disk full, I/O error; files in the stage that the manifest does not name.
    """
    run = run or RunPaths(final.parent.parent)
    with fenced_stage(stage, run, manifest.incarnation):
        strays = set(_files_in(stage)) - set(manifest.files) - {MANIFEST}
        if strays:
            raise StoreError(f"{stage}: files that the manifest does not name: {', '.join(sorted(strays)[:5])}")
        files.write_file(stage / MANIFEST, [manifest.to_bytes()])
        for directory in {(stage / name).parent for name in manifest.files} | {stage}:
            files.fsync_dir(directory)
    return _publish(stage, final, manifest, run)


@contextlib.contextmanager
def fenced_stage(stage: Path, run: RunPaths, incarnation: int) -> Iterator[None]:
    """While this attempt writes into its stage: a newer attempt cleans up after it, and then names are missing.

    Raises:
        FencedError: a newer attempt has begun.
        StoreError: the stage is gone, and no newer attempt is to be seen.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ESTALE):
            raise
        check_incarnation(run, incarnation)
        raise StoreError(f"{stage}: was removed while it was written: does another attempt of the run?") from error


_unsynced: set[Path] = set()
"""Names that this process gave, and that may not be durable: who was told so writes the artifact again, perhaps in
another form, and nobody was told of the first one."""


def _publish(stage: Path, final: Path, manifest: Manifest, run: RunPaths) -> Manifest:
    for _ in range(3):  # a name of an older attempt is moved away at most once; the rest is racing writers
        # As late as can be: a file system has no compare-and-rename, so readers check incarnations as well.
        check_incarnation(run, manifest.incarnation)
        try:
            with fenced_stage(stage, run, manifest.incarnation):
                _take_name(stage, final, manifest)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                raise
        else:
            try:
                files.fsync_dir(final.parent)
            except (OSError, StoreError):
                _unsynced.add(final)  # not before: another thread's content would take the place of one that is whole
                raise
            _unsynced.discard(final)
            return manifest
        existing = _existing(final)
        if existing.incarnation > manifest.incarnation:
            raise FencedError(f"{final}: incarnation {existing.incarnation} has already written it")
        if existing.incarnation == manifest.incarnation:
            if existing.digest == manifest.digest:
                files.fsync_dir(final.parent)
                _unsynced.discard(final)
                files.remove_tree(stage)
                return existing
            if final not in _unsynced:
                raise ArtifactExists(f"{final}: already written by {existing.writer} with other content")
        logger.warning(
            f"{final}: replacing what incarnation {existing.incarnation} left (this is {manifest.incarnation})"
        )
        with contextlib.suppress(FileNotFoundError):
            discard(run, final, manifest.incarnation)
    raise StoreError(f"{final}: other writers keep taking this name")


def _take_name(stage: Path, final: Path, manifest: Manifest) -> None:
    """Rename a stage. A network file system that loses its answer asks once more, and is told that the stage is gone:
    then the artifact is there."""
    try:
        files.rename(stage, final)
    except FileNotFoundError:
        with contextlib.suppress(ArtifactError, Unreadable):
            found = read_manifest(final)
            if (found.incarnation, found.digest) == (manifest.incarnation, manifest.digest):
                return
        raise


def discard(run: RunPaths, path: Path, incarnation: int) -> None:
    """Delete a committed artifact: out of sight in one rename, then file by file. Readers never see a half of it.

    A process that was held up between its decision and the rename could take away what a newer attempt has made
    meanwhile under the same name: whoever finds itself fenced after the rename puts it back. And a node may see a
    directory late: so what was taken away is looked at too before it is deleted. That it is gone already does not
    matter.

    Raises:
        FencedError: a newer attempt has begun; nothing is deleted.
        Unreadable: what was taken away cannot be looked at now; it is back in its place.
        StoreError: not writable, I/O error.
    """
    check_incarnation(run, incarnation)
    try:
        trash = files.move_aside(path)
    except FileNotFoundError:  # this node still saw it
        return
    _unless_newer(run, path, trash, incarnation)
    files.remove_tree(trash)


@contextlib.contextmanager
def if_removable(what: str) -> Iterator[None]:
    """Remove what retention gives up, with a warning where that cannot be: no reason to end a run.
    `what`: is removed, for people.
    Raises FencedError: a newer attempt has begun."""
    try:
        yield
    except FencedError:
        raise
    except (StoreError, OSError) as error:
        logger.warning(f"old {what} could not be removed: {error}")


def _unless_newer(run: RunPaths, path: Path, taken: Path, incarnation: int) -> None:
    """Put back what was renamed where it is a newer attempt's, or where that cannot be told.

    Raises:
        FencedError: it is.
        Unreadable, OSError: its manifest, or the run's attempts, cannot be read now.
    """
    try:
        check_incarnation(run, incarnation)
        newer = _newer_than(incarnation, taken)
        if newer is not None:
            raise FencedError(f"{path}: belongs to incarnation {newer}, this process to {incarnation}: it must end")
    except (FencedError, Unreadable, OSError):
        with contextlib.suppress(OSError, StoreError):  # made anew meanwhile: the new one stays
            files.rename(taken, path)
        raise


def is_artifact(path: Path) -> bool:
    """Return whether a directory holds a manifest. Whatever else bears an artifact's name is somebody else's."""
    return not path.is_symlink() and MANIFEST in files.list_dir(path)


def clear_name(run: RunPaths, path: Path, incarnation: int) -> None:
    """Make an artifact's name free: `discard`, but what is no artifact is set aside, not deleted.

    It may be somebody else's, and would be in the way of what a resumed run writes.
    """
    if is_artifact(path):
        discard(run, path, incarnation)
        return
    aside = move_aside(run, path, incarnation)
    if aside is not None:
        logger.warning(f"{path} holds no manifest: no artifact of ours; set aside as {aside.name}")


def move_aside(run: RunPaths, path: Path, incarnation: int) -> Path | None:
    """Give what bears an artifact's name one that nobody lists, in one rename; its content stays, until its owner
    deletes it. Returns the new name; None where there was nothing.

    Raises:
        FencedError: a newer attempt has begun, or wrote it; it is back in its place.
        Unreadable, OSError: whose it is cannot be told now; it is back in its place.
        StoreError: not writable, I/O error.
    """
    check_incarnation(run, incarnation)
    aside = path.with_name(f"{SET_ASIDE}{path.name}-{files.unique_suffix()}")
    try:
        files.rename(path, aside)
    except FileNotFoundError:  # this node still saw it
        return None
    _unless_newer(run, path, aside, incarnation)
    return aside


def _newer_than(incarnation: int, directory: Path) -> int | None:
    """Return the incarnation that wrote an artifact where that is a newer one."""
    try:
        found = read_manifest(directory).incarnation
    except ArtifactError:
        return None  # damaged: nobody can use it
    return found if found > incarnation else None


def _existing(final: Path) -> Manifest:
    """Read what bears a name that the file server says is taken; this node may see that late."""
    try:
        return files.retry_read(lambda: read_manifest(final), deadline_s=IN_THE_WAY_S, parent=final.parent)
    except (ArtifactError, Unreadable, OSError) as error:
        raise ArtifactExists(f"{final}: something that is no whole artifact is in the way ({error})") from error


class ArtifactWriter:
    """Writes one artifact from one process.

        with ArtifactWriter(final, kind="batch", step=3, version=2, writer="orchestrator", incarnation=1) as w:
            (w.path / "data.json").write_text(...)
            w.meta["rows"] = 7

    Leaving the block commits (see `commit_stage` for its errors); an exception inside it removes everything and goes
    on, a full disk as a StoreError with the path and the free space. `manifest` holds the result afterwards.
    """

    def __init__(
        self,
        final: Path,
        *,
        kind: str,
        step: int | None = None,
        version: int | None = None,
        writer: str,
        incarnation: int = 0,
        run: RunPaths | None = None,
    ) -> None:
        self.final = final
        self.path = final.with_name(f"{stage_dir(final, incarnation).name}-{files.unique_suffix()}")
        self.meta: dict[str, Any] = {}
        self.manifest: Manifest | None = None
        self._identity = {"kind": kind, "step": step, "version": version, "writer": writer}
        self._incarnation = incarnation
        self._run = run or RunPaths(final.parent.parent)
        self._entries: dict[str, FileEntry] = {}

    def __enter__(self) -> "ArtifactWriter":
        _check_writer(self._run, self._incarnation)
        files.make_dir(self.path)
        return self

    def write(self, name: str, chunks: Iterable[Any]) -> FileEntry:
        """Write one file from buffers, summed and fsynced on the way (cheaper than writing into `path`)."""
        entry = files.write_file(self.path / name, chunks)
        self._entries[name] = entry
        return entry

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            with fenced_stage(self.path, self._run, self._incarnation):
                if error is None:
                    self.manifest = self._commit()
                    return
                if isinstance(error, OSError) and not self.path.exists():
                    raise error
            explained = disk_error(error, self.final)
            if explained is not None:
                raise explained from error
        finally:
            if self.manifest is None:
                files.clear_away(self.path)

    def _commit(self) -> Manifest:
        rest = [name for name in _files_in(self.path) if name not in self._entries]
        entries = self._entries | hash_files(self.path, rest)
        manifest = Manifest(**self._identity, incarnation=self._incarnation, files=entries, meta=self.meta)  # type: ignore[arg-type]
        return commit_stage(self.path, self.final, manifest, run=self._run)


def _files_in(stage: Path) -> list[str]:
    """Relative posix names of all files of a stage; asked for again where a server that fails over gives no answer.
    Raises StoreError: it gives none; OSError: the stage is gone."""
    with disk_errors(stage):
        return files.retry_read(lambda: _walk(stage), deadline_s=files.STALE_S)


def _walk(directory: Path) -> list[str]:
    """Relative posix names of all files below a directory, by listings alone: no file is asked for. What NFS keeps of
    files that were deleted while they were open is none."""
    names: list[str] = []
    with os.scandir(directory) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                names += [f"{entry.name}/{name}" for name in _walk(directory / entry.name)]
            elif not entry.name.startswith(".nfs"):
                names.append(entry.name)
    return sorted(names)


def clean_stale_stages(parent: Path, before_incarnation: int | None = None) -> list[str]:
    """Remove what killed writers left in a directory of artifacts. The supervisor calls it before roles start.

    Args:
        parent: `rollouts`, `weights`, `checkpoints`, `leases`.
        before_incarnation: spare stages of this attempt and newer ones; None: remove all.
    """
    removed = []
    for name in sorted(files.list_dir(parent)):
        if not name.startswith(_HIDDEN):
            continue
        match = _STAGE_INCARNATION.match(name)
        if match and before_incarnation is not None and int(match.group(1)) >= before_incarnation:
            continue
        path = parent / name
        if path.is_dir() and not path.is_symlink():
            files.remove_tree(path)
        else:
            files.remove_file(path)
        removed.append(name)
    return removed
