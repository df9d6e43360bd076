"""One packed file that can be broken off and gone on with: a tar whose members are compressed each by itself.

    tar     header, content, padding of member 1 | the same of member 2 | ... | two blocks of zeros
    .zst    a frame a member; .gz: a gzip member a member. Both formats allow several in a row: `tar -xf` reads them

Beside the file that grows (`.part`) lies a journal: a line a member with its sum and where it ends. What stands there
is on the disk. Whoever goes on cuts the file behind the last member whose source is still the same.
"""

import gzip
import importlib.util
import io
import json
import os
import tarfile
import zlib
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import xxhash

from prime_hpc.config.errors import ConfigError
from prime_hpc.store.errors import ArtifactError, StoreError
from prime_hpc.store.io.disk import disk_errors
from prime_hpc.store.io.files import FileEntry

SUFFIXES = (".tar.zst", ".tar.gz", ".tgz", ".tar")
CHUNK = 4 << 20
SYNC_BYTES = 64 << 20
"""So much may have to be written again after a power cut."""
_LEVEL = 3


def best_suffix() -> str:
    """Return the suffix of what compresses best here."""
    return ".tar.zst" if importlib.util.find_spec("zstandard") else ".tar.gz"


@contextmanager
def compressed(file: IO[bytes], name: str) -> Iterator[IO[bytes]]:
    """Yield what is written to for one member."""
    if name.endswith(".zst"):
        with _zstandard().ZstdCompressor(level=_LEVEL).stream_writer(file, closefd=False) as stream:
            yield stream
    elif name.endswith((".gz", ".tgz")):
        with gzip.GzipFile(fileobj=file, mode="wb", compresslevel=1, mtime=0) as stream:
            yield stream  # type: ignore[misc]
    else:
        yield file


@contextmanager
def opened(path: Path, name: str) -> Iterator[tarfile.TarFile]:
    """Open a packed file, compressed as its final name says, to read its members in order.
    Raises StoreError: it is no archive, or ends too early."""
    try:
        with path.open("rb") as file:
            stream: Any = file
            if name.endswith(".zst"):
                stream = _zstandard().ZstdDecompressor().stream_reader(file, read_across_frames=True, closefd=False)
            elif name.endswith((".gz", ".tgz")):
                stream = gzip.GzipFile(fileobj=file)
            with tarfile.open(fileobj=io.BufferedReader(stream, CHUNK), mode="r|") as members:
                yield members
    except _damage(name) as error:
        raise StoreError(f"{path}: is no whole archive ({error})") from error


def _damage(name: str) -> tuple[type[Exception], ...]:
    """Return what readers of a damaged file raise."""
    own = (_zstandard().ZstdError,) if name.endswith(".zst") else ()
    return (tarfile.TarError, EOFError, gzip.BadGzipFile, zlib.error, *own)


def _zstandard() -> Any:
    try:
        import zstandard
    except ImportError as error:
        raise ConfigError(
            ".tar.zst needs the package zstandard: pip install 'prime-hpc[data]', or name a .tar.gz"
        ) from error
    return zstandard


@dataclass(frozen=True)
class Member:
    """A line of the journal."""

    name: str
    entry: FileEntry
    modified_ns: int
    end: int
    """Offset in the packed file."""

    def to_json(self) -> str:
        """Return the line."""
        return json.dumps([self.name, self.entry.size, self.entry.xxh3, self.modified_ns, self.end])

    @classmethod
    def of(cls, line: str) -> "Member":
        """Read a line. Raises a ValueError where it is torn."""
        name, size, xxh3, modified_ns, end = json.loads(line)
        return cls(name, FileEntry(size, xxh3), modified_ns, end)


class PackedFile:
    """A packed file that is written, or gone on with."""

    def __init__(self, part: Path, name: str) -> None:
        """Args:
        part: the growing file; the journal lies beside it.
        name: final name, whose suffix says how it is compressed.
        """
        self._part, self._name = part, name
        self._journal = part.with_name(f"{part.name}.journal")
        self._unsynced: list[Member] = []
        self.damaged: list[str] = []
        """After `write`: files that were left out."""

    def write(
        self, files: dict[str, Path], sums: dict[str, FileEntry], may_lack: Collection[str] = ()
    ) -> dict[str, Member]:
        """Write the members that are missing; returns all, by name, but those that are `damaged`.

        Args:
            files: name -> source, in the order in which they are written.
            sums: what some of them must be.

        Raises:
            ArtifactError: another one is damaged: its sum is not that of its artifact's manifest.
            StoreError: the disk is full, or a source changed while it was copied.
        """
        with disk_errors(self._part):
            done = self._go_on(files)
            end = max((member.end for member in done.values()), default=0)
            with self._part.open("r+b" if self._part.exists() else "wb") as out:
                os.fchmod(out.fileno(), 0o600)  # it holds whatever the logs say
                out.truncate(end)
                out.seek(end)
                try:
                    for name, path in files.items():
                        if name not in done:
                            begin = out.tell()
                            try:
                                done[name] = self._add(out, name, path, sums.get(name))
                            except ArtifactError as error:
                                if name not in may_lack:
                                    raise
                                out.seek(begin)
                                out.truncate()
                                self.damaged.append(str(error))
                            self._sync(out, SYNC_BYTES)
                finally:
                    self._sync(out, 0)
        return done

    def finish(self, small: dict[str, bytes], links: dict[str, str]) -> None:
        """Write links, then small files, and the end: done again in every try."""
        with disk_errors(self._part), self._part.open("r+b") as out:
            out.seek(0, os.SEEK_END)
            with compressed(out, self._name) as stream:
                for name, target in links.items():
                    info = tarfile.TarInfo(name)
                    info.type, info.linkname = tarfile.SYMTYPE, target
                    stream.write(info.tobuf(tarfile.PAX_FORMAT))
                for name, data in small.items():
                    info = tarfile.TarInfo(name)
                    info.size = len(data)
                    stream.write(info.tobuf(tarfile.PAX_FORMAT) + data + _padding(len(data)))
                stream.write(bytes(2 * tarfile.BLOCKSIZE))
            out.flush()
            os.fsync(out.fileno())

    def remove_journal(self) -> None:
        """Forget how it was written."""
        self._journal.unlink(missing_ok=True)

    def _go_on(self, files: dict[str, Path]) -> dict[str, Member]:
        """Return the members that are written and whose source has not changed since, up to the first that has."""
        try:
            lines = self._journal.read_text(encoding="utf-8").splitlines()
            size = self._part.stat().st_size
        except FileNotFoundError:
            lines, size = [], 0
        done: dict[str, Member] = {}
        for line in lines:
            try:
                member = Member.of(line)
                about = files[member.name].stat()
            except (ValueError, TypeError, KeyError, OSError):
                break
            if (about.st_size, about.st_mtime_ns) != (member.entry.size, member.modified_ns) or member.end > size:
                break
            done[member.name] = member
        self._journal.write_text("".join(f"{member.to_json()}\n" for member in done.values()), encoding="utf-8")
        return done

    def _add(self, out: IO[bytes], name: str, path: Path, wanted: FileEntry | None) -> Member:
        with path.open("rb", buffering=0) as source:
            about = os.fstat(source.fileno())
            info = tarfile.TarInfo(name)
            info.size, info.mtime, info.mode = about.st_size, int(about.st_mtime), about.st_mode & 0o777
            digest, left = xxhash.xxh3_64(), about.st_size
            with compressed(out, self._name) as stream:
                stream.write(info.tobuf(tarfile.PAX_FORMAT))
                while left and (data := source.read(min(CHUNK, left))):
                    digest.update(data)
                    stream.write(data)
                    left -= len(data)
                stream.write(_padding(about.st_size))
            after = os.fstat(source.fileno())
        if left or (after.st_size, after.st_mtime_ns) != (about.st_size, about.st_mtime_ns):
            raise StoreError(f"{path}: changed while it was copied: does something still write there?")
        entry = FileEntry(about.st_size, digest.hexdigest())
        if wanted is not None and entry != wanted:
            raise ArtifactError(path, f"xxh3 {wanted.xxh3}", f"xxh3 {entry.xxh3} ({entry.size} bytes)")
        member = Member(name, entry, about.st_mtime_ns, out.tell())
        self._unsynced.append(member)
        return member

    def _sync(self, out: IO[bytes], least: int) -> None:
        """Make durable what was written, then say so."""
        if not self._unsynced or sum(member.entry.size for member in self._unsynced) < least:
            return
        out.flush()
        os.fsync(out.fileno())
        with self._journal.open("a", encoding="utf-8") as journal:
            journal.writelines(f"{member.to_json()}\n" for member in self._unsynced)
        self._unsynced.clear()


def _padding(size: int) -> bytes:
    return bytes(-size % tarfile.BLOCKSIZE)
