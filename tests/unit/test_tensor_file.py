"""Tensors of safetensors files as servers read them, version after version."""

import gc
import json
import struct
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from prime_hpc.inference.check_version import BadVersionError
from prime_hpc.inference.tensor_file import DTYPES, TensorFile


def test_every_tensor_is_what_the_library_wrote(tmp_path: Path) -> None:
    saved = {f"of {name}": torch.arange(12).reshape(3, 4).to(dtype) for name, dtype in DTYPES.items()}
    saved |= {
        "a scalar": torch.tensor(2.5),
        "nothing": torch.empty(0, 7),
    }
    save_file(saved, tmp_path / "x.safetensors")
    file = TensorFile(tmp_path / "x.safetensors")
    (tmp_path / "x.safetensors").unlink()  # a version is pruned while it is loaded
    assert file.names == sorted(saved)
    for name, tensor in saved.items():
        found = file.get_tensor(name)
        assert found.dtype == tensor.dtype and found.shape == tensor.shape and torch.equal(found, tensor), name


def test_a_type_that_no_training_writes_is_left_to_the_library(tmp_path: Path) -> None:
    tensor = torch.arange(6.0).to(torch.float8_e5m2)
    save_file({"x": tensor}, tmp_path / "x.safetensors")
    assert torch.equal(TensorFile(tmp_path / "x.safetensors").get_tensor("x").float(), tensor.float())


def test_a_tensor_may_lie_askew(tmp_path: Path) -> None:
    entries = {"b": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}}
    entries |= {"w": {"dtype": "F32", "shape": [2], "data_offsets": [1, 9]}}
    header = json.dumps(entries).encode()
    content = struct.pack("<Q", len(header)) + header + b"\x07" + struct.pack("<2f", 1.5, -2.0)
    (tmp_path / "x.safetensors").write_bytes(content)
    assert TensorFile(tmp_path / "x.safetensors").get_tensor("w").tolist() == [1.5, -2.0]
    (tmp_path / "x.safetensors").write_bytes(content[:-1])
    with pytest.raises(BadVersionError, match="its header promises"):
        TensorFile(tmp_path / "x.safetensors")


def test_nothing_stays_of_a_version_that_was_read(tmp_path: Path) -> None:
    save_file({f"w{i}": torch.zeros(300, 300) for i in range(50)}, tmp_path / "x.safetensors")

    def read() -> int:
        file = TensorFile(tmp_path / "x.safetensors")
        for name in file.names:
            file.get_tensor(name)
        del file
        gc.collect()
        return sys.getallocatedblocks()

    read()
    first = [read() for _ in range(20)][-1]
    assert [read() for _ in range(20)][-1] - first < 20 * 50  # an object of each tensor would be as many
