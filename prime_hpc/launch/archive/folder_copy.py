"""The files of an archive as a plain folder: what is there, with its source's size and time, is not copied again.

The counterpart of `packed_file`.
"""

import os
from collections.abc import Collection
from pathlib import Path

import xxhash

from prime_hpc.launch.archive.packed_file import CHUNK
from prime_hpc.store.errors import ArtifactError, StoreError
from prime_hpc.store.io.disk import disk_errors
from prime_hpc.store.io.files import FileEntry, hash_file
from prime_hpc.store.io.tree import list_tree

COARSEST_NS = 2 * 10**9
"""A file system may round a file's time down, to whole seconds (ext4 with small inodes) or to two (FAT)."""


class FolderCopy:
    """A folder that is filled, or gone on with."""

    def __init__(self, part: Path) -> None:
        self._part = part
        self.damaged: list[str] = []
        """After `write`: files that were left out."""

    def write(
        self, files: dict[str, Path], sums: dict[str, FileEntry], may_lack: Collection[str] = ()
    ) -> dict[str, FileEntry]:
        """Copy what is missing; returns the sums of all files, by name, but those that are `damaged`.

        Raises:
            ArtifactError: a source is damaged, and not one of those that the archive may lack.
            StoreError: the disk is full, or a source changed while it was copied.
        """
        found: dict[str, FileEntry] = {}
        with disk_errors(self._part):
            self._part.mkdir(mode=0o700, parents=True, exist_ok=True)
            # what an earlier try copied besides goes, and links, so that nothing is written through one
            for path in reversed(list_tree(self._part)):
                if path.is_symlink() or (path.is_file() and path.relative_to(self._part).as_posix() not in files):
                    path.unlink()
                elif path.is_dir() and not any(path.iterdir()):
                    path.rmdir()
            for name, source in files.items():
                target = self._part / name
                made, wanted = _known(source, target) or _copy(source, target), sums.get(name)
                if wanted is None or wanted == made:
                    found[name] = made
                    continue
                target.unlink(missing_ok=True)
                error = ArtifactError(source, f"xxh3 {wanted.xxh3}", f"xxh3 {made.xxh3}")
                if name not in may_lack:
                    raise error
                self.damaged.append(str(error))
        return found

    def finish(self, small: dict[str, bytes], links: dict[str, str]) -> None:
        """Write links and small files."""
        with disk_errors(self._part):
            for name, target in links.items():
                path = self._part / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.symlink_to(target)
            for name, data in small.items():
                (self._part / name).write_bytes(data)


def _known(source: Path, target: Path) -> FileEntry | None:
    """Return the sum of a file that an earlier try has copied whole: its time is set last."""
    try:
        ours, its = target.stat(), source.stat()
    except FileNotFoundError:
        return None
    is_its = ours.st_size == its.st_size and 0 <= its.st_mtime_ns - ours.st_mtime_ns < COARSEST_NS
    return hash_file(target) if is_its else None


def _copy(source: Path, target: Path) -> FileEntry:
    target.parent.mkdir(parents=True, exist_ok=True)
    digest, size = xxhash.xxh3_64(), 0
    with source.open("rb", buffering=0) as file, target.open("wb") as out:
        about = os.fstat(file.fileno())
        while data := file.read(CHUNK):
            digest.update(data)
            out.write(data)
            size += len(data)
        after = os.fstat(file.fileno())
        out.flush()
        os.fsync(out.fileno())
    if (size, after.st_mtime_ns) != (about.st_size, about.st_mtime_ns):
        raise StoreError(f"{source}: changed while it was copied: does something still write there?")
    os.utime(target, ns=(about.st_atime_ns, about.st_mtime_ns))
    return FileEntry(size, digest.hexdigest())
