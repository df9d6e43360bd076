"""One file whose opening fails, as on a file system that does not answer."""

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest


@contextlib.contextmanager
def failing_reads(monkeypatch: pytest.MonkeyPatch, path: Path, times: int | None = None) -> Iterator[None]:
    """So many times in this process; None: each time."""
    opened, failed = Path.open, [0]

    def broken(self: Path, *arguments: Any, **options: Any) -> Any:
        if self == path and (times is None or failed[0] < times):
            failed[0] += 1
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(self))
        return opened(self, *arguments, **options)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "open", broken)
        yield
    assert failed[0] > 0 and (times is None or failed[0] == times)
