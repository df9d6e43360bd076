"""The cut of a version that both ends of a transfer make alike: tensors of an image, in buckets sent at once."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from prime_hpc.store.errors import StoreError
from prime_hpc.store.manifest import Manifest

KEY = "network"
"""In the `meta` of a version's manifest."""
HEADER_SUFFIX = ".header"
"""Of a file that holds the beginning of a safetensors file: names, dtypes, shapes and places, without the values."""
BUCKET_BYTES = 64 << 20
_MAX_HEADER = 100_000_000  # the format's own limit


@dataclass(frozen=True)
class Part:
    """One rank's share of a version."""

    file: str
    """Name of the safetensors file that it would be."""
    address: str
    """Of the rank's listener, `host:port`."""
    size: int
    """Bytes of the image, header included."""
    xxh3: str
    """Of the image without its header."""


@dataclass(frozen=True)
class Sent:
    """A version that the trainer's ranks hold, as its manifest says it."""

    backend: str
    """Of the process groups: `gloo` or `nccl`."""
    session: str
    """Of the trainer's attempt: what joined another must join anew."""
    parts: tuple[Part, ...]

    def as_json(self) -> dict[str, Any]:
        """For the manifest's `meta`."""
        return {"backend": self.backend, "session": self.session, "parts": [vars(part) for part in self.parts]}


def sent_of(manifest: Manifest) -> Sent | None:
    """Return how a version can be had over the network; None where it cannot.
    Raises StoreError: the manifest says something else there."""
    said = manifest.meta.get(KEY)
    if said is None:
        return None
    try:
        parts = tuple(Part(str(p["file"]), str(p["address"]), int(p["size"]), str(p["xxh3"])) for p in said["parts"])
        return Sent(str(said["backend"]), str(said["session"]), parts)
    except (KeyError, TypeError, ValueError) as error:
        raise StoreError(f"version {manifest.version} does not say from where it comes ({error!r})") from error


@dataclass(frozen=True)
class Entry:
    """One tensor of an image."""

    name: str
    dtype: str
    """As safetensors writes it."""
    shape: tuple[int, ...]
    begin: int
    """Bytes from the image's beginning."""
    end: int


def read_layout(path: Path) -> list[Entry]:
    """Return the tensors of a safetensors file, or of the header of one, in their order.
    Raises StoreError: it cannot be read, or is no such header."""
    try:
        with path.open("rb") as handle:
            return read_header(handle, str(path))
    except OSError as error:
        raise StoreError(f"{path} cannot be read: {error}") from error


def read_header(handle: BinaryIO, where: str) -> list[Entry]:
    """Return the tensors that a safetensors header names, in their order; `where` it is, for messages.
    Raises StoreError: it is no such header."""
    try:
        length = int.from_bytes(handle.read(8), "little")
        if length > _MAX_HEADER:
            raise ValueError(f"a header of {length} bytes")
        found = []
        for name, said in json.loads(handle.read(length)).items():
            if name != "__metadata__":
                begin, end = (8 + length + offset for offset in said["data_offsets"])
                found.append(Entry(name, said["dtype"], tuple(said["shape"]), begin, end))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise StoreError(f"{where} has no readable safetensors header: {error!r}") from error
    return sorted(found, key=lambda entry: entry.begin)


def buckets(entries: Sequence[Entry], limit: int = BUCKET_BYTES) -> Iterator[list[Entry]]:
    """Cut an image: tensors that follow one another and go at once, at most `limit` bytes; a larger one goes alone."""
    found: list[Entry] = []
    for entry in entries:
        if entry.end == entry.begin:
            continue
        if found and entry.end - found[0].begin > limit:
            yield found
            found = []
        found.append(entry)
    if found:
        yield found
