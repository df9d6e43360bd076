"""Rows by number, wherever they lie: JSON lines by an index of offsets, Parquet and hub data sets memory-mapped.

Nothing is read whole: a row costs 8 bytes of (memory-mapped) index, and a rank reads the rows that it tokenises. What
must be made once (line indices, unpacked files, Parquet as Arrow) goes into a cache directory under a name made of the
file's path, size and time of change; rank 0 makes it, the others open it.

    jsonl           <key>.npy     int64[rows + 1], where each line begins
    jsonl.gz, .zst  <key>.jsonl   unpacked, then indexed
    parquet         <key>.arrow   uncompressed Arrow with the columns that are used, 256 rows a batch; needs pyarrow
    hub             the cache of `datasets` itself (HF_HOME)
"""

import gzip
import io
import os
import shlex
import shutil
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import numpy as np
import xxhash
from loguru import logger
from numpy.typing import NDArray

from prime_hpc.config.sections.sft import COLUMNS, SFTSourceConfig
from prime_hpc.store.dataset.files import (
    HISTORY,
    INSTRUCTION,
    DataFiles,
    has_columns,
    is_compressed,
    missing_columns,
    no_json_lines,
    used_columns,
    without_nulls,
)
from prime_hpc.store.dataset.media_columns import ParquetMedia, filled
from prime_hpc.store.dataset.row_images import MEDIA_COLUMNS, shows_other_media
from prime_hpc.store.errors import PROOFS
from prime_hpc.store.io import files
from prime_hpc.store.io.new_file import new_file
from prime_hpc.store.io.retry_reads import patiently
from prime_hpc.trainer.data.messages import SFTDataError, parse_line
from prime_hpc.trainer.data.patient_file import PatientFile, open_patiently, version_of

_BLOCK = 16 * 2**20
_ARROW_ROWS = 256
"""Rows of an Arrow batch: what is decoded to read one of them."""
_LOOKED_AT = 256
"""Rows of a hub's data set, evenly spread, that tell it from another one."""
_OPEN_DEADLINE_S = 60.0


class Rows(Protocol):
    """Numbered rows. `row` may be called from one thread at a time."""

    num_rows: int
    fingerprint: int
    """Changes when rows come, go or change their lengths; of a hub's data set, when one of the rows is another
that are looked at."""

    def row(self, index: int) -> Any:
        """Return the parsed row. Raises SFTDataError."""

    def where(self, index: int) -> str:
        """File and line of a row, for people."""

    def folder(self, index: int) -> Path | None:
        """Return the folder of a row's file, from which the paths in it are meant; None: it lies in none."""


def former_fingerprint(rows: Rows) -> int:
    """Return what checkpoints of versions before know the rows by: of a hub's, not yet their content."""
    former: int = getattr(rows, "former", rows.fingerprint)
    return former


def by_all_columns(rows: Rows) -> int | None:
    """Return what checkpoints of the version before know a hub's rows by: what does not train counted too."""
    return rows.by_all_columns() if isinstance(rows, HubRows) else None


def fingerprint_of(*parts: Any) -> int:
    """63 bits of what identifies something."""
    return xxhash.xxh3_64_intdigest("\x00".join(map(str, parts)).encode()) >> 1


def _cached(cache: Path, path: Path, *also: Any) -> Path:
    """Return the cache's path for a file, without a suffix."""
    key = fingerprint_of(path.absolute(), *version_of(path), *also)
    return cache / f"{path.name.split('.')[0]}-{key:016x}"


class JsonLines:
    """The non-empty lines of one file."""

    def __init__(self, path: Path, cache: Path) -> None:
        """Args:
            path: the file, possibly compressed.
            cache: directory of indices; made here where it is missing.
        Raises SFTDataError: the file is not there, or a JSON array."""
        self._shown = path
        self._path = _decompressed(path, cache) if is_compressed(path) else path
        self._file = PatientFile(self._path)
        index = _cached(cache, self._path).with_suffix(".npy")
        if not index.exists():
            _write_array(index, patiently(lambda: _line_starts(self._path), self._path))
        self._starts = _open_array(index)
        self.num_rows = len(self._starts) - 1
        self.fingerprint = xxhash.xxh3_64_intdigest(np.ascontiguousarray(self._starts).data) >> 1

    def row(self, index: int) -> Any:
        """Return the parsed line. Raises OSError: it cannot be read now; SFTDataError: it is no JSON; DataChangedError:
        another file has the path now."""
        begin, end = int(self._starts[index]), int(self._starts[index + 1])
        return parse_line(self._file.pread(end - begin, begin), self._shown)

    def where(self, index: int) -> str:
        """file:line; counts the lines before it, which only an error asks for."""
        left, number = int(self._starts[index]), 1
        with self._path.open("rb") as file:
            while left > 0:
                if not (block := file.read(min(_BLOCK, left))):
                    break
                number, left = number + block.count(b"\n"), left - len(block)
        return f"{self._shown}:{number}"

    def folder(self, index: int) -> Path | None:
        """Return that of the file."""
        return self._shown.parent


def _open_array(path: Path) -> NDArray[np.int64]:
    """Memory-mapped; patient with a file system that shows a new file late."""
    return files.retry_read(lambda: np.load(path, mmap_mode="r"), deadline_s=_OPEN_DEADLINE_S)


def _line_starts(path: Path) -> list[NDArray[np.int64]]:
    """Offsets of the non-empty lines, and of the end."""
    starts: list[NDArray[np.int64]] = []
    with path.open("rb") as file:
        head = file.read(4096)
        if wrong := no_json_lines(path, head):
            raise SFTDataError(wrong)
        file.seek(0)
        offset, pending = 0, 0  # of the block, and of the line that began last
        while block := file.read(_BLOCK):
            ends = np.flatnonzero(np.frombuffer(block, np.uint8) == 10) + offset
            begins = np.concatenate([[pending], ends[:-1] + 1]) if len(ends) else np.zeros(0, np.int64)
            starts.append(_without_blank(begins, ends, file, offset, block))
            pending = int(ends[-1]) + 1 if len(ends) else pending
            offset += len(block)
        if pending < offset:
            file.seek(pending)
            if file.read().strip():
                starts.append(np.array([pending], np.int64))
    starts.append(np.array([offset], np.int64))
    return starts


def _write_array(target: Path, parts: list[NDArray[np.int64]]) -> None:
    """One .npy file of several arrays, never joined in memory, in one rename."""
    header = io.BytesIO()
    shape = (sum(len(part) for part in parts),)
    np.lib.format.write_array_header_1_0(header, {"descr": "<i8", "fortran_order": False, "shape": shape})
    with new_file(target, durable=False) as partial:
        files.write_file(partial, [header.getvalue(), *(np.ascontiguousarray(part, np.int64) for part in parts)])


def _without_blank(
    begins: NDArray[np.int64], ends: NDArray[np.int64], file: Any, offset: int, block: bytes
) -> NDArray[np.int64]:
    """Return the beginnings of lines that hold more than white space: those that begin with it are looked at."""
    keep = np.ones(len(begins), bool)
    first = np.frombuffer(block, np.uint8)[np.maximum(begins - offset, 0)]
    for i in np.flatnonzero((first <= ord(" ")) | (begins < offset)):
        begin, end = int(begins[i]) - offset, int(ends[i]) - offset
        line = block[begin:end] if begin >= 0 else os.pread(file.fileno(), end - begin, int(begins[i]))
        keep[i] = bool(line.strip())
    return begins[keep]


def _decompressed(path: Path, cache: Path) -> Path:
    """Return the file's content as a plain file in the cache."""
    target = _cached(cache, path).with_suffix(".jsonl")
    if target.exists():
        return target
    logger.info(f"unpacking {path} into {target}")
    with new_file(target, durable=False) as partial, partial.open("wb") as plain:
        (_unpack_gzip if path.suffix == ".gz" else _unpack_zstd)(path, plain)
    return target


def _unpack_gzip(path: Path, plain: BinaryIO) -> None:
    try:
        with open_patiently(path) as raw, gzip.open(raw) as compressed:
            shutil.copyfileobj(compressed, plain, _BLOCK)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise SFTDataError(f"{path} is no whole gzip file ({error})") from error


def _unpack_zstd(path: Path, plain: BinaryIO) -> None:
    try:
        import zstandard
    except ImportError as error:
        raise SFTDataError(
            f"{path}: needs the package zstandard (pip install 'prime-hpc[data]'), or unpack it: "
            f"zstd -d {shlex.quote(path.name)}"
        ) from error
    frame = None
    try:
        with open_patiently(path) as compressed:
            while block := compressed.read(_BLOCK):
                while block:  # zstandard's own reader ends with the first frame, and silently where that is torn
                    frame = frame or zstandard.ZstdDecompressor().decompressobj()
                    plain.write(frame.decompress(block))
                    block = frame.unused_data if frame.eof else b""
                    frame = None if frame.eof else frame
    except zstandard.ZstdError as error:
        raise SFTDataError(f"{path} is no whole zstd file ({error})") from error
    if frame is not None:
        raise SFTDataError(f"{path} is no whole zstd file (it ends within a frame)")


class ArrowRows:
    """The rows of one Parquet file, unpacked once into memory-mapped Arrow."""

    def __init__(self, path: Path, cache: Path, source: SFTSourceConfig, *, images: bool = False) -> None:
        """Args:
            cache: directory of the Arrow files.
            images: whether the column of images is read.
        Raises SFTDataError: no pyarrow, not Parquet, or without the expected columns (names those it has)."""
        try:
            import pyarrow as pa
            import pyarrow.parquet as pq
        except ImportError as error:
            raise SFTDataError(f"{path}: Parquet needs pyarrow (pip install 'prime-hpc[data]')") from error
        self._path = path
        also = [*(["images"] if images else []), *([HISTORY] if INSTRUCTION in source.columns.values() else [])]
        also += ["pairs"] if source.holds_pairs else []
        also += ["margin"] if source.scores else []
        key = _ARROW_ROWS, COLUMNS, sorted(source.columns.items()), *also
        target = _cached(cache, path, *key).with_suffix(".arrow")
        if not target.exists():
            try:
                with open_patiently(path) as file, pq.ParquetFile(file) as parquet:
                    _write_arrow(parquet, path, target, source, images)
            except (pa.ArrowInvalid, OSError) as error:
                if isinstance(error, OSError) and error.errno not in (None, *PROOFS):
                    raise  # nothing is known of it
                raise SFTDataError(f"{path} cannot be read as Parquet ({error})") from error
        self._reader = files.retry_read(
            lambda: pa.ipc.open_file(pa.memory_map(str(target), "r")), deadline_s=_OPEN_DEADLINE_S
        )
        self._batch: tuple[int, Any] = (-1, None)
        self._media = ParquetMedia(path, open_patiently)
        full = max(self._reader.num_record_batches - 1, 0) * _ARROW_ROWS
        last = self._reader.num_record_batches - 1
        self.num_rows = full + (self._reader.get_batch(last).num_rows if last >= 0 else 0)
        self.fingerprint = fingerprint_of(self.num_rows, target.stat().st_size)

    def row(self, index: int) -> Any:
        """Return the row as plain Python, without the nulls that Arrow fills in; of videos and sounds beside it, which
        its text shows, that they are there."""
        number, place = divmod(index, _ARROW_ROWS)
        if self._batch[0] != number:
            self._batch = (number, self._reader.get_batch(number))
        row = without_nulls(self._batch[1].slice(place, 1).to_pylist()[0])
        return {**row, **self._media.beside(index, row)}

    def where(self, index: int) -> str:
        """file: row number, from 1."""
        return f"{self._path}: row {index + 1}"

    def folder(self, index: int) -> Path | None:
        """Return that of the file."""
        return self._path.parent


def _write_arrow(parquet: Any, path: Path, target: Path, source: SFTSourceConfig, images: bool) -> None:
    """Row group by row group, so that one of them is in memory at a time."""
    import pyarrow as pa

    names = parquet.schema_arrow.names
    if not has_columns(names, source):
        raise SFTDataError(f"{path}: {missing_columns(names, source)}")
    wanted = used_columns(names, source, images)
    used = [name for name in names if name in wanted]
    schema = pa.schema([parquet.schema_arrow.field(name) for name in used])
    logger.info(f"unpacking {path} ({', '.join(used)}) into {target}")
    with (
        new_file(target, durable=False) as partial,
        pa.OSFile(str(partial), "wb") as sink,
        pa.ipc.new_file(sink, schema) as writer,
    ):
        for batch in _evenly(parquet.iter_batches(batch_size=_ARROW_ROWS, columns=used), schema):
            writer.write_batch(batch)


def _evenly(batches: Iterator[Any], schema: Any) -> Iterator[Any]:
    """Batches of exactly `_ARROW_ROWS` rows, the last one aside."""
    import pyarrow as pa

    pending = schema.empty_table()
    for batch in batches:
        pending = pa.concat_tables([pending, pa.Table.from_batches([batch]).cast(schema)])
        while pending.num_rows >= _ARROW_ROWS:
            yield from pending.slice(0, _ARROW_ROWS).combine_chunks().to_batches()
            pending = pending.slice(_ARROW_ROWS)
    if pending.num_rows:
        yield from pending.combine_chunks().to_batches()


def _plain_row(row: Any) -> Any:
    """Return a row of `datasets`, which may be an Arrow table, as plain Python."""
    return without_nulls(row if isinstance(row, dict) else row.to_pylist()[0])


class HubRows:
    """A data set of the hub (or one that `datasets` saved to disk), memory-mapped by `datasets`."""

    def __init__(self, source: SFTSourceConfig, directory: Path | None, *, images: bool = False) -> None:
        """Args:
            directory: of `save_to_disk`, instead of the hub.
            images: whether the column of images is read.
        Raises SFTDataError: no `datasets`, not to be had (offline?), or without the expected columns."""
        try:
            import datasets
        except ImportError as error:
            raise SFTDataError(
                f"{source.key}.name = {source.name}: needs the package datasets (pip install 'prime-hpc[data]')"
            ) from error
        self._name, self._directory = str(directory or source.name), directory
        try:
            loaded = (
                datasets.load_from_disk(str(directory))
                if directory is not None
                else datasets.load_dataset(self._name, source.subset, split=source.split)
            )
        except Exception as error:
            raise SFTDataError(
                f"{source.key}.name = {self._name} (subset {source.subset}, split {source.split}) is not to be had: "
                f"{type(error).__name__}: {str(error)[:300]}. Without network (HF_HUB_OFFLINE, HF_DATASETS_OFFLINE) "
                f"only what is in HF_HOME can be used: load it there once, or name local files with {source.key}.path"
            ) from error
        if isinstance(loaded, datasets.DatasetDict):
            if source.split not in loaded:
                raise SFTDataError(f"{self._name} has the splits {', '.join(loaded)}, not {source.split}")
            loaded = loaded[source.split]
        if not has_columns(loaded.column_names, source):
            raise SFTDataError(f"{self._name}: {missing_columns(loaded.column_names, source)}")
        text, used = (used_columns(loaded.column_names, source, with_images) for with_images in (False, images))
        # without the others: a picture would be decoded, and be another object at each start
        if images and "Image(" in repr(loaded.features):  # their bytes are wanted, and no pixels
            loaded = loaded.with_format("arrow")
        known, self._data = (
            loaded.select_columns([name for name in loaded.column_names if name in names]) for names in (text, used)
        )
        self._whole = loaded
        self._media = [name for name in loaded.column_names if name in MEDIA_COLUMNS]
        self.num_rows = len(loaded)
        self.former = fingerprint_of(self.num_rows, self._name, source.subset, source.split)
        # The library's own `_fingerprint` is of the commit: an edited card would be other data.
        self.fingerprint = self._content(known)

    def _content(self, data: Any) -> int:
        looked_at = range(0, self.num_rows, max(1, self.num_rows // _LOOKED_AT))
        return fingerprint_of(self.former, *(_plain_row(data[index]) for index in looked_at))

    def by_all_columns(self) -> int | None:
        """Return the fingerprint with the columns that do not train; None where one of them cannot be decoded."""
        try:
            return self._content(self._whole)
        except Exception:  # noqa: BLE001 - a decoder's own, or the one that it lacks: then no run knew the rows so
            return None

    def row(self, index: int) -> Any:
        """Return the row as plain Python; of videos and sounds beside it, which its text shows, that they are there."""
        row = _plain_row(self._data[index])
        if not self._media or not shows_other_media(row):
            return row
        table = self._whole.with_format("arrow").select_columns(self._media)[index]  # none of them is decoded
        return {**row, **{name: True for name in self._media if any(filled(table[name].combine_chunks()))}}

    def where(self, index: int) -> str:
        """name: row number, from 1."""
        return f"{self._name}: row {index + 1}"

    def folder(self, index: int) -> Path | None:
        """Return the saved data set's."""
        return self._directory


class Chain:
    """Several sources after one another."""

    def __init__(self, parts: Sequence[Rows]) -> None:
        self._parts = parts
        self._ends = np.cumsum([part.num_rows for part in parts])
        self.num_rows = int(self._ends[-1])
        self.fingerprint = fingerprint_of(*(part.fingerprint for part in parts))
        self.former = fingerprint_of(*map(former_fingerprint, parts))

    def sizes(self, per_source: Sequence[int]) -> list[int]:
        """Return the rows of sources that so many parts make up."""
        stops = np.concatenate([[0], self._ends])[np.concatenate([[0], np.cumsum(per_source)])]
        return [int(size) for size in np.diff(stops)]

    def _find(self, index: int) -> tuple[Rows, int]:
        part = int(np.searchsorted(self._ends, index, side="right"))
        return self._parts[part], index - (int(self._ends[part - 1]) if part else 0)

    def row(self, index: int) -> Any:
        """Return the row of the part that holds it."""
        part, own = self._find(index)
        return part.row(own)

    def where(self, index: int) -> str:
        """Return the part's word."""
        part, own = self._find(index)
        return part.where(own)

    def folder(self, index: int) -> Path | None:
        """Return the part's."""
        part, own = self._find(index)
        return part.folder(own)


def open_rows(source: SFTSourceConfig, found: DataFiles, cache: Path, *, images: bool = False) -> Rows:
    """Open a data set; makes what is missing in the cache. With `images` their column is read, too.
    Raises SFTDataError: names the file and what is wrong."""
    if found.kind == "hub":
        parts: list[Rows] = [HubRows(source, folder, images=images) for folder in found.files]
        parts = parts or [HubRows(source, None, images=images)]
    elif found.kind == "parquet":
        parts = [ArrowRows(path, cache, source, images=images) for path in found.files]
    else:
        parts = [JsonLines(path, cache) for path in found.files]
    rows = parts[0] if len(parts) == 1 else Chain(parts)
    if not rows.num_rows:
        raise SFTDataError(f"{source.label}: no row")
    return rows
