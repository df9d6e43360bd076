"""What is in the page cache is not read again; what is not, is."""

import os
from pathlib import Path

import pytest

from prime_hpc.inference.readahead import BLOCK_BYTES, read_ahead


def test_only_what_is_not_in_memory_is_read(tmp_path: Path) -> None:
    size = 2 * BLOCK_BYTES + 7
    file = tmp_path / "model.safetensors"
    file.write_bytes(os.urandom(size))
    (tmp_path / "empty").touch()
    with file.open("rb") as handle:
        os.fsync(handle.fileno())
        os.posix_fadvise(handle.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    files = [file, tmp_path / "empty", tmp_path / "absent"]
    first = read_ahead(files)
    assert 0 <= first <= size  # a file system in memory forgets nothing
    assert read_ahead(files) in (0, size)  # all of it, where the file system cannot say what is in memory


def test_a_file_that_was_just_written_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "x"
    file.write_bytes(b"1" * (BLOCK_BYTES + 1))
    asked: list[tuple[int, int]] = []

    def preadv(fd: int, buffers: list[bytearray], offset: int, flags: int = 0) -> int:
        asked.append((offset, flags))
        if flags and offset >= BLOCK_BYTES:  # the last block is not there
            raise BlockingIOError
        return len(buffers[0])

    monkeypatch.setattr(os, "preadv", preadv)
    assert read_ahead([file]) == BLOCK_BYTES  # what the stand-in says that it read
    assert [offset for offset, flags in asked if not flags] == [BLOCK_BYTES]
    assert (BLOCK_BYTES - 1, os.RWF_NOWAIT) in asked
