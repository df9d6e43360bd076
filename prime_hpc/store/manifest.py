"""Manifests: what an artifact says about itself, and whether it is true."""

import json
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

import xxhash

from prime_hpc.store.errors import ArtifactError, failed_read
from prime_hpc.store.io import files
from prime_hpc.store.io.files import FileEntry

MANIFEST = "manifest.json"
FORMAT = 1


def _canonical(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


@dataclass(frozen=True)
class Manifest:
    """Kind and content of an artifact.

    Args:
        kind: `batch`, `weights`, `checkpoint`, ...
        step: the training step it belongs to, if any.
        version: the policy version it holds or was made by, if any.
        writer: who wrote it, for people.
        files: relative posix names -> size and sum.
        meta: plain JSON of the kind's own.
    """

    kind: str
    step: int | None
    version: int | None
    writer: str
    incarnation: int
    files: dict[str, FileEntry]
    meta: dict[str, Any] = field(default_factory=dict)

    @property
    def total_size(self) -> int:
        """Bytes of all files, without the manifest."""
        return sum(entry.size for entry in self.files.values())

    @property
    def digest(self) -> str:
        """xxh3 of what it is and holds; who wrote it, in which attempt, does not count."""
        content = self._as_json()
        for key in ("writer", "incarnation", "format"):
            del content[key]
        return xxhash.xxh3_64_hexdigest(_canonical(content))

    def _as_json(self) -> dict[str, Any]:
        files = {name: {"size": e.size, "xxh3": e.xxh3} for name, e in self.files.items()}
        return {"format": FORMAT, **vars(self), "files": files}

    def to_bytes(self) -> bytes:
        """Return the content of manifest.json, with a sum of its own. Raises ValueError: `meta` is not plain JSON."""
        try:
            content = json.loads(_canonical(self._as_json()))
        except TypeError as error:
            raise ValueError(f"the meta of a {self.kind} artifact must be plain JSON: {error}") from error
        content["checksum"] = xxhash.xxh3_64_hexdigest(_canonical(content))
        return (json.dumps(content, indent=1, sort_keys=True) + "\n").encode()

    @classmethod
    def from_bytes(cls, data: bytes, path: Path) -> "Manifest":
        """Parse manifest.json. Raises ArtifactError: not JSON, a newer format, a changed byte, a field missing."""
        try:
            content = json.loads(data)
        except ValueError as error:
            raise ArtifactError(path, "a JSON manifest", f"{len(data)} bytes that are none ({error})") from error
        if not isinstance(content, dict) or "format" not in content:
            raise ArtifactError(path, "a manifest with a `format`", "JSON without one")
        if content["format"] != FORMAT:
            raise ArtifactError(path, f"manifest format {FORMAT}", f"format {content['format']} (another prime-hpc?)")
        found = content.pop("checksum", None)
        expected = xxhash.xxh3_64_hexdigest(_canonical(content))
        if found != expected:
            raise ArtifactError(path, f"content with sum {found}", f"content with sum {expected}")
        del content["format"]
        try:
            entries = {name: FileEntry(**entry) for name, entry in content.pop("files").items()}
            manifest = cls(files=entries, **content)
        except (TypeError, KeyError) as error:
            raise ArtifactError(path, "the fields of a manifest", f"others ({error})") from error
        for name in entries:
            pure = PurePosixPath(name)
            if pure.is_absolute() or ".." in pure.parts:
                raise ArtifactError(path, "names inside the artifact", f"{name!r}, which leads out of it")
        return manifest


def read_manifest(directory: Path, *, deadline_s: float = 0.0) -> Manifest:
    """Read and check `manifest.json`.

    Args:
        deadline_s: keep trying this many seconds.

    Raises:
        ArtifactError: it is missing, broken, or of a newer format.
        Unreadable: the file system does not give it.
    """
    path = directory / MANIFEST

    def read() -> Manifest:
        try:
            data = path.read_bytes()
        except OSError as error:
            raise failed_read(error, path, "a manifest") from error
        return Manifest.from_bytes(data, path)

    return files.retry_read(read, deadline_s=deadline_s, parent=directory.parent)


def verify_artifact(
    directory: Path, deep: bool = False, *, names: Collection[str] | None = None, deadline_s: float = 0.0
) -> Manifest:
    """Check an artifact against its manifest: sizes, and with `deep` the sum of every file.

    Args:
        names: check only these of its files; None: all.
        deadline_s: keep trying this many seconds (a network file system may show old sizes for a while).

    Raises:
        ArtifactError: names the first file that differs, what was expected and what was found.
        Unreadable: the file system does not give one of them.
    """

    def check() -> Manifest:
        manifest = read_manifest(directory)
        for name, entry in manifest.files.items():
            if names is None or name in names:
                check_file(directory / name, entry, deep=deep)
        return manifest

    return files.retry_read(check, deadline_s=deadline_s, parent=directory.parent)


def check_file(path: Path, entry: FileEntry, *, deep: bool) -> None:
    """Compare one file with its manifest entry.

    Raises:
        ArtifactError: missing, other size, other sum.
        Unreadable: the file system does not give it.
    """
    try:
        size = path.stat().st_size
        if size != entry.size:
            raise ArtifactError(path, f"{entry.size} bytes", f"{size} bytes")
        if deep:
            found = files.hash_file(path)
            if found != entry:
                raise ArtifactError(path, f"xxh3 {entry.xxh3}", f"xxh3 {found.xxh3} ({found.size} bytes)")
    except OSError as error:
        raise failed_read(error, path, f"{entry.size} bytes") from error
