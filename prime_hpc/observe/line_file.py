"""A file of lines to which one process of an attempt appends."""

from pathlib import Path


class LineFile:
    """Every line is in the file when `append` returns: nothing waits that a later call would have to write."""

    def __init__(self, path: Path) -> None:
        """Open it, and its folder where there is none. Raises as `append`."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        self._file = path.open("ab", buffering=0)
        if ends_torn(path):  # an earlier attempt was killed while it wrote: its half line stays one
            self.append("\n")

    def append(self, lines: str) -> None:
        """Write whole lines. Raises OSError: the file cannot be written, e.g. the disk is full; names it."""
        rest = memoryview(lines.encode(errors="replace"))  # half a surrogate pair is no UTF-8
        try:
            while rest:
                rest = rest[self._file.write(rest) :]
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self._path)) from error

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def ends_torn(path: Path) -> bool:
    """Return whether a file of lines ends within one: its writer was killed."""
    with path.open("rb") as file:
        if file.seek(0, 2) == 0:
            return False
        file.seek(-1, 2)
        return file.read(1) != b"\n"
