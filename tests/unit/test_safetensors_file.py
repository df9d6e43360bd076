"""Weight files that are written in ranges are what safetensors reads, and ranks share them out evenly."""

import errno
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from prime_hpc.store.errors import StoreError
from prime_hpc.store.io import files, shared_writer
from prime_hpc.store.io.shared_writer import open_ranges
from prime_hpc.trainer.weights.safetensors_layout import (
    SafetensorsLayout,
    TensorSpec,
    header,
    host_bytes,
    in_file_order,
)
from prime_hpc.trainer.weights.write_plan import balance_writes


def test_the_library_reads_it_back_and_the_sum_is_right(tmp_path: Path) -> None:
    torch.manual_seed(0)
    tensors = {
        "flags": torch.tensor([True, False, True]),
        "half": torch.randn(3, 5).bfloat16(),
        "weight": torch.randn(700, 901),
        "count": torch.tensor(7),
        "none": torch.empty(0, 4),
        "turned": torch.randn(4, 6).T,
    }
    specs = in_file_order([TensorSpec(name, tuple(t.shape), t.dtype) for name, t in tensors.items()])
    path = tmp_path / "model.safetensors"
    layout = SafetensorsLayout(specs)
    with open_ranges(path) as file, open_ranges(path) as another:  # as two ranks do
        another.write_at(layout.offset("weight", 300), host_bytes(tensors["weight"][300:]))
        file.write_at(0, layout.header)
        file.write_at(layout.offset("weight"), host_bytes(tensors["weight"][:300]))
        for name in tensors.keys() - {"weight"}:
            another.write_at(layout.offset(name), host_bytes(tensors[name]))
        entry = file.finalize(layout.size)
    read = load_file(path)
    assert read.keys() == tensors.keys()
    assert all(torch.equal(read[name], tensor) and read[name].dtype == tensor.dtype for name, tensor in tensors.items())
    assert entry == files.hash_file(path)
    assert path.stat().st_mode & 0o777 == 0o644


def test_each_changing_operation_can_be_seen_and_interrupted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_writer, "WRITE_BYTES", 1000)
    seen: list[str] = []
    with files.observe_operations(lambda operation, path: seen.append(operation)), open_ranges(tmp_path / "x") as file:
        for begin in (0, 400, 800, 1100):  # what is small is told once
            file.write_at(begin, bytes(400))
        file.finalize(1500)
    assert seen == ["create", "write", "torn", "write", "torn", "fsync"]
    with open_ranges(tmp_path / "y") as file, pytest.raises(StoreError, match="1499 bytes arrived, 1500 were written"):
        file.write_at(0, bytes(1499))
        file.finalize(1500)


def test_short_writes_go_on_and_a_full_disk_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, content = os.pwrite, os.urandom(3000)
    with monkeypatch.context() as patch, open_ranges(tmp_path / "x") as file:
        patch.setattr(shared_writer.os, "pwrite", lambda fd, data, offset: real(fd, data[: len(data) // 2 + 1], offset))
        file.write_at(7, content)
    assert (tmp_path / "x").read_bytes() == bytes(7) + content

    def full(fd: int, data: memoryview, offset: int) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(shared_writer.os, "pwrite", full)
    with pytest.raises(StoreError, match="disk full"), open_ranges(tmp_path / "x") as file:
        file.write_at(0, content)


def test_a_dtype_that_no_file_can_hold_is_named() -> None:
    with pytest.raises(ValueError, match="odd is torch.complex128"):
        header([TensorSpec("odd", (1,), torch.complex128)])


def test_ranks_write_about_as_much_and_small_models_leave_some_out() -> None:
    owners = balance_writes([1000, 10, 10, 990, 500, 500], 2)
    load = [sum(s for s, o in zip([1000, 10, 10, 990, 500, 500], owners, strict=True) if o == r) for r in (0, 1)]
    assert abs(load[0] - load[1]) <= 20
    assert balance_writes([5, 0], 4) == [0, 1] and balance_writes([0, 0, 0], 2) == [0, 1, 0]
