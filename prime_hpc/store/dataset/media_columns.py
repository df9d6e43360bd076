"""Videos and sounds beside the rows of a table: whether a row has some, told without reading them.

Their columns are not read with the rows: to decode them costs time and memory. A row whose text shows one (`<video>`)
is looked up here; of a column that holds files inside the table, their names alone are read.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any

from prime_hpc.store.dataset.row_images import MEDIA_COLUMNS, shows_other_media

_ROWS = 64
"""Read at a time: of a column that holds nothing but the files, so many are in memory."""


class ParquetMedia:
    """The videos and sounds of one Parquet file, which is read when the first row shows one."""

    def __init__(self, path: Path, open_file: Callable[[Path], IO[bytes]] = lambda path: path.open("rb")) -> None:
        """`open_file`: opens it, for reads of the caller's patience."""
        self._path, self._open = path, open_file
        self._filled: dict[str, list[bool]] | None = None

    def beside(self, index: int, row: Mapping[str, Any]) -> dict[str, bool]:
        """Return the columns that hold something for a row whose text shows it, each with True.
        Raises OSError, ValueError: the file cannot be read."""
        if not shows_other_media(row):
            return {}
        if self._filled is None:
            self._filled = self._read()
        return {column: True for column, rows in self._filled.items() if rows[index]}

    def _read(self) -> dict[str, list[bool]]:
        from pyarrow import parquet

        with self._open(self._path) as opened, parquet.ParquetFile(opened) as file:
            found: dict[str, list[bool]] = {}
            for column in [name for name in file.schema_arrow.names if name in MEDIA_COLUMNS]:
                batches = file.iter_batches(batch_size=_ROWS, columns=[_smallest_part(file, column)])
                found[column] = [row for batch in batches for row in filled(batch.column(0))]
            return found


def filled(column: Any) -> list[bool]:
    """Return of each value of an Arrow array whether it holds something, as Python has it of a value of JSON."""
    import pyarrow as pa
    import pyarrow.compute as pc

    kind, is_there = column.type, column.is_valid()
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        is_there = pc.fill_null(pc.greater(pc.list_value_length(column), 0), False)
    elif pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_binary(kind):
        is_there = pc.fill_null(pc.greater(pc.binary_length(column), 0), False)
    rows: list[bool] = is_there.to_pylist()
    return rows


def _smallest_part(file: Any, column: str) -> str:
    """Return the part of a column that is quickest to read: of files with their names, the names."""
    groups = [file.metadata.row_group(number) for number in range(file.metadata.num_row_groups)]
    sizes = {
        part.path: sum(group.column(number).total_compressed_size for group in groups)
        for number, part in ((number, file.schema.column(number)) for number in range(len(file.schema)))
        if part.path.split(".")[0] == column
    }
    return min(sizes, key=lambda path: sizes[path])
