"""The difference between two versions of a run of elements, to the bit: positions and differences, compressed.

Elements are compared as unsigned integers of their size, so a NaN keeps its payload and -0.0 is not 0.0. Of those that
changed are written: the gap to the one before (uint32), and the difference of the integers, modulo their range, with
its sign in the lowest bit (zigzag). An optimizer step at a small learning rate moves a bfloat16 to its neighbour or not
at all: the differences are 1 and 2, and zstd makes about 0.6 bytes of each changed element. Bytes of equal weight stand
together (planes), or it would find nothing.

A file of one rank:

    magic, length of the header   8 + 8 bytes
    header                        JSON: names of the version's files
    table                         a row a chunk (`CHUNK`), their number first (8 bytes)
    frames                        one a chunk that changed, in the table's order
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from prime_hpc.store.errors import ArtifactError, StoreError
from prime_hpc.store.io import zstd

CHUNK_BYTES = 4 << 20
"""Of a version, at most; a chunk's temporary arrays take up to 20 times as much where all elements changed."""
LEVEL = 1
"""Higher ones find nothing more in these planes, and take ten times as long."""
MAGIC = b"PHDELTA1"
CHUNK = np.dtype(
    [
        ("file", "<u4"),  # index into the header's names
        ("itemsize", "<u4"),  # bytes of an element
        ("offset", "<u8"),  # in that file, in bytes
        ("nbytes", "<u8"),
        ("changed", "<u8"),  # elements
        ("frame", "<u8"),  # bytes of the compressed frame; 0 where nothing changed
        ("xxh3", "<u8"),  # of the new content
    ]
)
_GAP_BYTES = 4
_WORD = np.dtype("<u8")
"""Compared at once: few words differ, and only those are looked at closely."""
_LOG = {1: 0, 2: 1, 4: 2, 8: 3}
"""Shifts: numpy divides integers slowly."""
_FEW = 4
"""Below this share (1 in so many) of words of a mask that hold something, its empty words are passed over."""
_TYPES: dict[int, np.dtype[Any]] = {size: np.dtype(f"<u{size}") for size in (1, 2, 4, 8)}
Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class Change:
    """How one chunk changed."""

    num_changed: int
    frame: memoryview
    xxh3: int


def encode(old: Bytes, new: Bytes, itemsize: int) -> Change:
    """Return how a chunk changed, and bring `old` to the new values.

    Args:
        old: its bytes in the version before, [n], writable.
        new: in this one, [n].
        itemsize: bytes of an element: 1, 2, 4 or 8; n is a multiple of it.
    """
    dtype = _TYPES[itemsize]
    changed = _differing(old, new, itemsize)
    total = xxhash.xxh3_64_intdigest(new.data)
    if not len(changed):
        return Change(0, memoryview(b""), total)
    before = old.view(dtype)
    gaps = changed.astype("<u4")
    gaps[1:] -= gaps[:-1].copy()
    values = new.view(dtype)[changed]
    difference = values - before[changed]
    before[changed] = values
    sign = difference >> (8 * itemsize - 1)
    zigzag = (difference << np.array(1, dtype)) ^ (np.array(0, dtype) - sign)
    planes = np.concatenate([_planes(gaps, _GAP_BYTES), _planes(zigzag, itemsize)])
    return Change(len(changed), zstd.compress(planes, LEVEL), total)


def count_differing(old: Bytes, new: Bytes, itemsize: int) -> int:
    """Return how many elements differ."""
    dtype = _TYPES[itemsize]
    return int(np.count_nonzero(old.view(dtype) != new.view(dtype)))


def _differing(old: Bytes, new: Bytes, itemsize: int) -> npt.NDArray[np.int64]:
    """Return the indices of the elements that differ, ascending."""
    dtype, per_word, end = _TYPES[itemsize], _WORD.itemsize // itemsize, len(old) // _WORD.itemsize * _WORD.itemsize
    before, after = old[:end].view(_WORD), new[:end].view(_WORD)
    words = _true(before != after)
    inner = np.flatnonzero(before[words].view(dtype) != after[words].view(dtype))
    elements = (words[inner >> _LOG[per_word]] << _LOG[per_word]) + (inner & (per_word - 1))
    if end == len(old):
        return elements
    rest = np.flatnonzero(old[end:].view(dtype) != new[end:].view(dtype)) + end // itemsize
    return np.concatenate([elements, rest])


def _true(mask: npt.NDArray[np.bool_]) -> npt.NDArray[np.int64]:
    """Return the indices of what is true, ascending: where that is little, by a look at eight values at once."""
    size = _WORD.itemsize
    end = len(mask) // size * size
    groups = np.flatnonzero(mask[:end].view(_WORD) != 0)
    if len(groups) * _FEW > end // size:
        return np.flatnonzero(mask)
    inner = np.flatnonzero(mask[:end].view(_WORD)[groups].view(np.bool_))
    found = (groups[inner >> _LOG[size]] << _LOG[size]) + (inner & (size - 1))
    return found if end == len(mask) else np.concatenate([found, np.flatnonzero(mask[end:]) + end])


def apply(content: Bytes, row: Any, frame: memoryview) -> bool:
    """Bring a chunk to the next version, in place; False where it is not what was published then.

    Args:
        content: its bytes in the version before, [row.nbytes], writable.
        row: of the table (`CHUNK`).
        frame: its part of the file.

    Raises:
        StoreError: the frame is none.
    """
    itemsize, num = int(row["itemsize"]), int(row["changed"])
    if num:
        planes = np.frombuffer(zstd.decompress(frame, num * (_GAP_BYTES + itemsize)), np.uint8)
        gaps = _values(planes[: num * _GAP_BYTES], _GAP_BYTES)
        zigzag = _values(planes[num * _GAP_BYTES :], itemsize)
        one, zero = np.array(1, zigzag.dtype), np.array(0, zigzag.dtype)
        changed = np.cumsum(gaps, dtype=np.int64)
        elements = content.view(_TYPES[itemsize])
        if changed[-1] >= len(elements):
            return False
        elements[changed] += (zigzag >> one) ^ (zero - (zigzag & one))
    return bool(xxhash.xxh3_64_intdigest(content.data) == int(row["xxh3"]))


def _planes(values: npt.NDArray[Any], itemsize: int) -> Bytes:
    """First bytes of all values, then their second ones, ...: [itemsize * n]."""
    return np.ascontiguousarray(values.view(np.uint8).reshape(-1, itemsize).T).reshape(-1)


def _values(planes: Bytes, itemsize: int) -> npt.NDArray[Any]:
    return np.ascontiguousarray(planes.reshape(itemsize, -1).T).view(_TYPES[itemsize]).reshape(-1)


def file_head(names: Sequence[str], rows: Sequence[tuple[int, ...]]) -> bytes:
    """Return what stands before the frames."""
    header = json.dumps({"files": list(names)}).encode()
    table = np.array(list(rows), CHUNK)
    lengths = [np.array(len(part), "<u8").tobytes() for part in (header, rows)]
    return b"".join([MAGIC, lengths[0], header, lengths[1], table.tobytes()])


@dataclass(frozen=True)
class DeltaFile:
    """A rank's file in memory."""

    names: list[str]
    table: npt.NDArray[Any]
    frames: memoryview

    def chunks(self) -> Iterator[tuple[Any, memoryview]]:
        """Rows of the table with their frames."""
        begin = 0
        for row in self.table:
            end = begin + int(row["frame"])
            yield row, self.frames[begin:end]
            begin = end


def parse(content: bytes, path: Path) -> DeltaFile:
    """Take a file apart. Raises ArtifactError: it is none of these, or cut short."""
    view = memoryview(content)
    try:
        if bytes(view[:8]) != MAGIC:
            raise ValueError("it begins with something else")
        begin = 16 + int.from_bytes(view[8:16], "little")
        names = json.loads(bytes(view[16:begin]))["files"]
        count = int.from_bytes(view[begin : begin + 8], "little")
        end = begin + 8 + count * CHUNK.itemsize
        table = np.frombuffer(view[begin + 8 : end], CHUNK)
        found = DeltaFile(names, table, view[end:])
        if len(table) != count or int(table["frame"].sum()) != len(found.frames):
            raise ValueError("its table promises another length")
        if count and int(table["file"].max()) >= len(names):
            raise ValueError("its table names a file that is none")
    except (ValueError, KeyError, TypeError, StoreError) as error:
        raise ArtifactError(path, "changes of a weight version", f"something else ({error})") from error
    return found
