"""Make the archive of a run: copy, read back, compare, name; and only then delete the run where that was asked for.

The last member of an archive, `archive.json`, holds the sums of all others and one of its own. An archive gets its name
by one rename after it was read back from the disk and compared; until then it is `NAME.part`, which the same command
goes on with.
"""

import json
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

import xxhash

from prime_hpc import __version__
from prime_hpc.launch.archive.contents import INDEX, Checkpoints, Chosen, choose
from prime_hpc.launch.archive.folder_copy import FolderCopy
from prime_hpc.launch.archive.packed_file import CHUNK, SUFFIXES, Member, PackedFile, best_suffix, opened
from prime_hpc.store.errors import ArtifactError, StoreError
from prime_hpc.store.io import files
from prime_hpc.store.io.disk import disk_errors, free_bytes, size_text
from prime_hpc.store.io.files import FileEntry
from prime_hpc.store.io.tree import list_tree

FORMAT = 1
Say = Callable[[str], None]
Content = FileEntry | str
"""Of a name: a file, or a link, by its target."""


@dataclass
class Archived:
    """Result of making an archive."""

    path: str
    num_files: int
    num_bytes: int
    packed_bytes: int
    checkpoints: list[int]
    notes: list[str] = field(default_factory=list)
    damaged: list[str] = field(default_factory=list)
    """Files of batches that are not what their manifests say: left out."""
    deleted: bool = False


def destination(word: str, run: str, *, folder: bool) -> Path:
    """Return the final path of an archive.
    `word`: as given: a file with a suffix that is known, else a directory in which the archive gets the run's name."""
    path = Path(word).expanduser().absolute()
    if folder:
        return path / run
    return path if path.name.endswith(SUFFIXES) else path / f"{run}{best_suffix()}"


def make_archive(
    run_dir: Path, path: Path, checkpoints: Checkpoints, *, rollouts: bool, folder: bool, say: Say
) -> tuple[Archived, Chosen]:
    """Copy what was chosen, read it back and compare it; the archive has its name then.

    Args:
        run_dir: a run that nothing writes to.

    Raises:
        ArtifactError: a file of the run, but of no batch, is damaged, or what was written is not what was read.
        StoreError: the disk is full, something else bears the name, or a file changed.
        OSError: something cannot be read.
    """
    if path.exists():
        raise StoreError(f"{path}: is there already; remove it, or choose another destination")
    if path.resolve().is_relative_to(run_dir.resolve()):
        raise StoreError(f"{path}: lies in the run directory itself; choose another destination")
    chosen = choose(run_dir, checkpoints, rollouts=rollouts)
    num_bytes = chosen.num_bytes
    part = path.with_name(f"{path.name}.part")
    with disk_errors(path.parent):
        path.parent.mkdir(parents=True, exist_ok=True)
    _say_room(part, num_bytes, say)
    copy: FolderCopy | PackedFile = FolderCopy(part) if folder else PackedFile(part, path.name)
    written = copy.write(dict(sorted(chosen.files.items())), chosen.sums, chosen.batches)
    chosen.notes += [f"left out, it is damaged: {said}" for said in copy.damaged]
    entries = {name: one.entry if isinstance(one, Member) else one for name, one in written.items()}
    copy.finish({INDEX: index_of(run_dir, chosen, entries)}, chosen.links)
    say(f"{len(entries)} files are copied; now they are read back")
    compare(part, {**entries, **chosen.links}, read_folder(part) if folder else read_packed(part, path.name))
    files.rename(part, path)
    files.fsync_dir(path.parent)
    if isinstance(copy, PackedFile):
        copy.remove_journal()
    packed = num_bytes if folder else path.stat().st_size
    about = str(path), len(entries), num_bytes, packed, chosen.checkpoints, chosen.notes, copy.damaged
    return Archived(*about), chosen


def _say_room(part: Path, num_bytes: int, say: Say) -> None:
    done = part.stat().st_size if part.is_file() else 0
    free = free_bytes(part.parent)
    if num_bytes - done > free:
        say(f"{part.parent} has {size_text(free)} free for {size_text(num_bytes)}: it may not be enough")


def index_of(run_dir: Path, chosen: Chosen, entries: dict[str, FileEntry]) -> bytes:
    """Return the content of `archive.json`."""
    content: dict[str, Any] = {
        "format": FORMAT,
        "run": run_dir.name,
        "from": str(run_dir.absolute()),
        "made": round(time.time(), 3),
        "prime_hpc": __version__,
        "checkpoints": chosen.checkpoints,
        "left_out": chosen.notes,
        "links": chosen.links,
        "files": {name: [entry.size, entry.xxh3] for name, entry in entries.items()},
    }
    content["checksum"] = _sum(content)
    return json.dumps(content, indent=1).encode()


def read_index(data: bytes, path: Path) -> dict[str, Any]:
    """Return what `archive.json` says.
    Raises StoreError: it is damaged, of another version, or names a run as no run is named."""
    try:
        content = json.loads(data)
        found = content.pop("checksum")
        kind, run = content["format"], str(content["run"])
    except (ValueError, KeyError, AttributeError) as error:
        raise StoreError(f"{path}: {INDEX} is damaged ({error})") from error
    if kind != FORMAT:
        raise StoreError(f"{path}: is of format {kind}, this prime-hpc reads {FORMAT}: take the one that made it")
    if found != _sum(content):
        raise StoreError(f"{path}: {INDEX} is damaged (sum {_sum(content)}, it says {found})")
    if run in ("", "..") or "\0" in run or run != PurePosixPath(run).name:
        raise StoreError(f"{path}: is of a run called {run!r}, which would be another place: name the run directory")
    return dict(content)


def _sum(content: dict[str, Any]) -> str:
    return xxhash.xxh3_64_hexdigest(json.dumps(content, sort_keys=True).encode())


def read_packed(path: Path, name: str) -> dict[str, Content]:
    """Read a packed file from the disk; returns its members.
    `name`: final name, whose suffix says how it is compressed.
    Raises StoreError: it is no whole archive."""
    _forget_cached(path)
    found: dict[str, Content] = {}
    with opened(path, name) as members:
        for info in members:
            stream = members.extractfile(info) if info.isreg() else None
            if stream is not None:
                digest = xxhash.xxh3_64()
                while data := stream.read(CHUNK):
                    digest.update(data)
                found[info.name] = FileEntry(info.size, digest.hexdigest())
            elif info.issym():
                found[info.name] = info.linkname
    return found


def read_folder(folder: Path) -> dict[str, Content]:
    """Read a folder from the disk; returns its files and links."""
    found: dict[str, Content] = {}
    for path in list_tree(folder):
        name = path.relative_to(folder).as_posix()
        if path.is_symlink():
            found[name] = str(path.readlink())
        elif path.is_file():
            _forget_cached(path)
            found[name] = files.hash_file(path)
    return found


def _forget_cached(path: Path) -> None:
    """Have what is read next come from the disk, where the kernel agrees."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


def compare(path: Path, expected: Mapping[str, Content], found: Mapping[str, Content]) -> None:
    """Raise an ArtifactError for the first file or link that is not as it must be."""
    for name, content in expected.items():
        if found.get(name) != content:
            raise ArtifactError(path / name, _words(content), _words(found.get(name)))


def _words(content: Content | None) -> str:
    if content is None:
        return "nothing"
    return f"a link to {content}" if isinstance(content, str) else f"xxh3 {content.xxh3} ({content.size} bytes)"


def delete_source(run_dir: Path, chosen: Chosen, again: Chosen) -> None:
    """Delete a run whose archive was verified.

    Args:
        run_dir: the run; of what lies outside of it (`ckpt.path`) nothing is deleted.
        again: what would be archived now.

    Raises:
        StoreError: the run has changed since, or cannot be deleted.
    """
    before, now = chosen.links | chosen.stamps, again.links | again.stamps
    if changed := sorted(name for name, stamp in now.items() if before.get(name) != stamp):
        raise StoreError(f"{run_dir}: is not deleted, {changed[0]} has changed since it was archived")
    with disk_errors(run_dir):
        files.discard(run_dir)
