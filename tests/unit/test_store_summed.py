"""Files written through two buffers: what is on disk is what was written, and the sum is its sum."""

import errno
import os
from pathlib import Path
from typing import IO, cast

import numpy as np
import pytest
import torch

from prime_hpc.store.errors import StoreError
from prime_hpc.store.io import direct_writer, files
from prime_hpc.store.io.direct_writer import BUFFER_BYTES, open_summed

SMALL = (0, 1, 4095, 4096, BUFFER_BYTES + 5)
LARGE = (3 * BUFFER_BYTES, BUFFER_BYTES - 1, BUFFER_BYTES)


@pytest.mark.parametrize(
    ("place", "size"),
    [("disk", n) for n in SMALL]
    + [("memory", n) for n in SMALL[:-1]]
    + [pytest.param(place, n, marks=pytest.mark.exhaustive) for n in LARGE for place in ("disk", "memory")],
)
def test_bytes_and_sum(tmp_path: Path, place: str, size: int) -> None:
    folder = tmp_path if place == "disk" or not Path("/dev/shm").is_dir() else Path("/dev/shm")  # no O_DIRECT there
    path = folder / f"prime-hpc-summed-{os.getpid()}"
    content = np.random.default_rng(size).bytes(size)
    cuts = sorted({0, 1, size // 3, size // 2, size, *range(0, min(size, 5000), 617)} & set(range(size + 1)))
    try:
        with open_summed(path) as file:
            for begin, end in zip(cuts, [*cuts[1:], size], strict=True):
                assert file.tell() == begin
                file.write(content[begin:end])
            file.close()  # a serialiser's close does nothing
        assert path.read_bytes() == content
        assert file.entry == files.hash_file(path)
        assert path.stat().st_mode & 0o777 == 0o644
    finally:
        path.unlink(missing_ok=True)


def test_torch_reads_back_what_it_wrote(tmp_path: Path) -> None:
    tensors = [torch.randn(n) for n in (1, 1000, 3_000_001)]
    offsets = []
    with open_summed(tmp_path / "x") as file:
        for tensor in tensors:
            offsets.append(file.tell())
            torch.save(tensor, cast("IO[bytes]", file))  # `write` and `tell` are all that it uses
    raw = (tmp_path / "x").read_bytes()
    ends = [*offsets[1:], len(raw)]
    for tensor, begin, end in zip(tensors, offsets, ends, strict=True):
        (tmp_path / "one").write_bytes(raw[begin:end])
        assert torch.equal(torch.load(tmp_path / "one"), tensor)


@pytest.mark.parametrize("large", [False, True])
def test_a_full_disk_is_said_whoever_swallows_the_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, large: bool
) -> None:
    def full(fd: int, data: memoryview, offset: int) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch, pytest.raises(StoreError, match="disk full"):
        patch.setattr(direct_writer.os, "pwrite", full)
        with open_summed(tmp_path / "x") as file:
            torch.save(torch.zeros(BUFFER_BYTES if large else 1000), cast("IO[bytes]", file))


def test_a_file_system_that_accepts_the_flag_and_refuses_the_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some do, for an alignment of their own; a short write means nearly full: both go on through the page cache."""
    real = os.pwrite
    refused: list[int] = []

    def moody(fd: int, data: memoryview, offset: int) -> int:
        if not refused:
            refused.append(offset)
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(fd, data[: len(data) // 2 + 1], offset)

    content = np.random.default_rng(0).bytes(5 * BUFFER_BYTES + 77)
    monkeypatch.setattr(direct_writer.os, "pwrite", moody)
    with open_summed(tmp_path / "x") as file:
        file.write(content)
    monkeypatch.undo()
    assert refused and (tmp_path / "x").read_bytes() == content
    assert file.entry == files.hash_file(tmp_path / "x")


def test_a_refusal_for_good_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(fd: int, data: memoryview, offset: int) -> int:
        raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(direct_writer.os, "pwrite", refuse)
    with pytest.raises(OSError, match="Invalid argument"), open_summed(tmp_path / "x") as file:
        file.write(bytes(4 * BUFFER_BYTES))
