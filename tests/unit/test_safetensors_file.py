"""Weight files that are written tensor by tensor are what safetensors reads, and ranks share them out evenly."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from prime_hpc.store import files
from prime_hpc.trainer.publish import share_out
from prime_hpc.trainer.safetensors_file import TensorSpec, header, in_file_order, open_safetensors


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
    with open_safetensors(path, specs) as writer:
        for spec in specs:
            writer.add(tensors[spec.name])
    read = load_file(path)
    assert read.keys() == tensors.keys()
    assert all(torch.equal(read[name], tensor) and read[name].dtype == tensor.dtype for name, tensor in tensors.items())
    assert writer.file.entry == files.hash_file(path)


def test_a_dtype_that_no_file_can_hold_is_named() -> None:
    with pytest.raises(ValueError, match="odd is torch.complex128"):
        header([TensorSpec("odd", (1,), torch.complex128)])


def test_ranks_write_about_as_much_and_small_models_leave_some_out() -> None:
    owners = share_out([1000, 10, 10, 990, 500, 500], 2)
    load = [sum(s for s, o in zip([1000, 10, 10, 990, 500, 500], owners, strict=True) if o == r) for r in (0, 1)]
    assert abs(load[0] - load[1]) <= 20
    assert share_out([5, 0], 4) == [0, 1] and share_out([0, 0, 0], 2) == [0, 1, 0]
