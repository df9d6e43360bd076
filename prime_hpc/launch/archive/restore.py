"""Bring a run back from its archive: every file is compared before the run directory has its name.

The run goes on with `prime-hpc resume`: its checkpoints lie in the run directory itself now, wherever they were.
"""

import os
import shutil
import tarfile
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import IO, Any

from prime_hpc.config.errors import ConfigError
from prime_hpc.config.run_files import RUN_YAML
from prime_hpc.config.sources.files import dump_yaml, parse_yaml
from prime_hpc.launch.archive.archive import compare, read_folder, read_index
from prime_hpc.launch.archive.contents import INDEX
from prime_hpc.launch.archive.links import stays_within
from prime_hpc.launch.archive.packed_file import CHUNK, SUFFIXES, opened
from prime_hpc.store.attempts import read_attempts, saved_claims
from prime_hpc.store.checkpoint.newest import expected_step
from prime_hpc.store.errors import StoreError
from prime_hpc.store.io import files
from prime_hpc.store.io.disk import disk_errors
from prime_hpc.store.io.files import FileEntry
from prime_hpc.store.io.tree import list_tree
from prime_hpc.store.run_dirs import is_run
from prime_hpc.store.run_paths import RunPaths


@dataclass
class Restored:
    """Result of bringing a run back."""

    path: str
    num_files: int
    checkpoints: list[int]
    notes: list[str] = field(default_factory=list)
    lacks_newest: bool = False
    """The run saved a later checkpoint, which was damaged: it goes on from an older one only where that is named."""


def restore(archive: Path, folder: Path) -> Restored:
    """Unpack an archive.

    Args:
        archive: a packed file, or a folder that is one.
        folder: becomes the run directory; where it exists, the run directory is made in it under the run's name.

    Raises:
        StoreError: the archive is damaged, not whole, or of another version; the disk is full; something is in the way.
    """
    if not archive.exists():
        raise StoreError(f"{archive}: there is no such file or folder")
    if archive.is_file() and not archive.name.endswith(SUFFIXES):
        raise StoreError(f"{archive}: is no archive of a run (one ends in {', '.join(SUFFIXES)}, or is a folder)")
    parent = folder if folder.is_dir() else folder.parent
    part = parent / f".restore-{archive.name}.part"
    with disk_errors(part):
        files.remove_tree(part) if part.exists() else None
        part.mkdir(mode=0o700, parents=True)
    try:
        return _restore(archive, folder, part)
    except BaseException:  # another try begins anew, and has need of the room
        files.clear_away(part)
        raise


def _restore(archive: Path, folder: Path, part: Path) -> Restored:
    with disk_errors(part):
        skipped = _copy_folder(archive, part) if archive.is_dir() else _unpack(archive, part)
    if not (part / INDEX).is_file():
        raise StoreError(f"{archive}: holds no {INDEX}: it is no archive of a run, or was broken off")
    index = read_index((part / INDEX).read_bytes(), archive)
    links = {name: target for name, target in index["links"].items() if name not in skipped}
    compare(archive, {name: FileEntry(*entry) for name, entry in index["files"].items()} | links, read_folder(part))
    final = folder / str(index["run"]) if folder.is_dir() and not is_run(folder) else folder
    if final.exists():
        raise StoreError(f"{final}: is there already; name another folder")
    _bring_home(part)
    steps = list(index["checkpoints"])
    lacks_newest = bool(steps) and _saved_step(part) > max(steps)
    os.chmod(part, 0o755)  # noqa: PTH101 - a directory of our own making
    files.rename(part, final)
    files.fsync_dir(final.parent)
    notes = [f"{name} skipped: a link out of the run ({target})" for name, target in skipped.items()]
    return Restored(str(final), len(index["files"]), steps, [*index["left_out"], *notes], lacks_newest)


def _saved_step(run_dir: Path) -> int:
    """Return the step of the newest checkpoint that the run saved, by its own word; 0 where that cannot be told."""
    paths = RunPaths(run_dir)
    try:
        return expected_step(paths, saved_claims(read_attempts(paths.attempts)))
    except (StoreError, OSError):  # whoever resumes it hears of that
        return 0


def _unpack(archive: Path, part: Path) -> dict[str, str]:
    """Unpack it; returns the links that were skipped, with their targets: they lead out of the run.

    Links are made last, so that nothing is ever written through one. `tarfile`'s own filter does too little here and
    too much: Python 3.11.2 has none, newer ones shorten `a/../b`.
    """
    links: dict[str, str] = {}
    names = []
    with opened(archive, archive.name) as members:
        for info in members:
            _refuse_outside(info, archive)
            names.append(info.name)
            content = None if info.issym() else members.extractfile(info)
            if content is None:
                links[info.name] = info.linkname
            else:
                _write(content, part / info.name, info)
    below = next((name for name in names if any(str(above) in links for above in PurePosixPath(name).parents)), None)
    if below is not None or len(set(names)) < len(names):
        what = "a name twice" if below is None else f"{below!r} below a link"
        raise StoreError(f"{archive}: holds {what}, which no archive of a run does")
    for name, target in links.items():
        (part / name).parent.mkdir(parents=True, exist_ok=True)
        (part / name).symlink_to(target)
    # looked at when all are there, for one may be on another's way
    skipped = {name: target for name, target in links.items() if not stays_within(part / name, part)}
    for name in skipped:
        (part / name).unlink()
    return skipped


def _write(content: IO[bytes], path: Path, info: tarfile.TarInfo) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        shutil.copyfileobj(content, file, CHUNK)
    path.chmod(info.mode & 0o755 | 0o600)
    os.utime(path, (info.mtime, info.mtime))


def _refuse_outside(info: tarfile.TarInfo, archive: Path) -> None:
    pure = PurePosixPath(info.name)
    if pure.is_absolute() or ".." in pure.parts or not (info.isreg() or info.issym()):
        raise StoreError(f"{archive}: holds {info.name!r}, which no archive of a run does")


def _copy_folder(archive: Path, part: Path) -> dict[str, str]:
    """Copy it; returns what `_unpack` does."""
    shutil.copytree(archive, part, symlinks=True, dirs_exist_ok=True)
    leading_out = [path for path in list_tree(part) if path.is_symlink() and not stays_within(path, part)]
    skipped = {path.relative_to(part).as_posix(): str(path.readlink()) for path in leading_out}
    for path in leading_out:
        path.unlink()
    return skipped


def _bring_home(run_dir: Path) -> None:
    """Have the config say that the checkpoints lie in the run directory."""
    path = run_dir / RUN_YAML
    if not path.is_file():
        return
    try:
        tree: dict[str, Any] = parse_yaml(path.read_text(encoding="utf-8"), str(path))[0]
    except (ConfigError, UnicodeDecodeError):
        return  # as it was: whoever reads it says what is wrong
    ckpt = tree.get("ckpt")
    if isinstance(ckpt, dict) and ckpt.get("path"):
        ckpt["path"] = None
        files.write_atomic(path, dump_yaml(tree).encode())
