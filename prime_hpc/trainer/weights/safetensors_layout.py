"""The form of a safetensors file: header and places of the tensors.

The library's own `save_file` wants all tensors at once, in one process's memory, and says a full disk with an error of
its own. Here every rank writes what it holds of a tensor to its place, through the store.
"""

import itertools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from prime_hpc.store.io import files as store_files
from prime_hpc.store.io.files import FileEntry

_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
DTYPES = {name: dtype for dtype, name in _NAMES.items()}
"""By the format's names."""
_ALIGNMENT = 8  # of the header's end; tensors go by falling size of their elements, so that each is aligned


@dataclass(frozen=True)
class TensorSpec:
    """A tensor before its values are here."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of its values."""
        return math.prod(self.shape) * self.dtype.itemsize


def in_file_order(specs: Sequence[TensorSpec]) -> list[TensorSpec]:
    """Return the order in which tensors stand in a file."""
    return sorted(specs, key=lambda spec: -spec.dtype.itemsize)


def header(specs: Sequence[TensorSpec]) -> bytes:
    """Return the beginning of a file that holds these tensors in this order.
    Raises ValueError: a dtype that the format does not know."""
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    begin = 0
    for spec in specs:
        if spec.dtype not in _NAMES:
            raise ValueError(f"{spec.name} is {spec.dtype}, which a safetensors file cannot hold")
        end = begin + spec.nbytes
        entries[spec.name] = {"dtype": _NAMES[spec.dtype], "shape": list(spec.shape), "data_offsets": [begin, end]}
        begin = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


class SafetensorsLayout:
    """The layout of a file that holds these tensors in this order."""

    def __init__(self, specs: Sequence[TensorSpec]) -> None:
        """Check the arguments. Raises ValueError: a dtype that the format does not know."""
        self.specs = {spec.name: spec for spec in specs}
        self.header = header(specs)
        self._offsets: dict[str, int] = {}
        end = len(self.header)
        for spec in specs:
            self._offsets[spec.name] = end
            end += spec.nbytes
        self.size = end
        """Of the whole file in bytes."""

    def offset(self, name: str, row: int = 0) -> int:
        """Of a tensor's row (index of the first dimension), in bytes from the file's beginning."""
        spec = self.specs[name]
        return self._offsets[name] + (row * spec.nbytes // spec.shape[0] if row else 0)


def host_bytes(tensor: torch.Tensor) -> npt.NDArray[np.uint8]:
    """Return a tensor's values as a file holds them; its own memory where that is the host's and contiguous."""
    return tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()


def write_tensors(path: Path, tensors: Mapping[str, torch.Tensor]) -> FileEntry:
    """Write whole tensors to a new file, durably; its entry.

    Raises:
        StoreError: disk full, not writable, I/O error.
        ValueError: a dtype that the format does not know.
    """
    specs = in_file_order([TensorSpec(name, tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()])
    values = (host_bytes(tensors[spec.name]) for spec in specs)
    return store_files.write_file(path, itertools.chain([header(specs)], values))
