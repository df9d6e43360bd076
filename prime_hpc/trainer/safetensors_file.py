"""One safetensors file written tensor by tensor, summed on the way. Used by `publish.py`.

The library's own `save_file` wants all tensors at once, in host memory, and the file read again for its sum. Here a
rank holds one tensor at a time, and what was written is on its way to the disk while the next one is gathered.
"""

import json
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from prime_hpc.store.summed import SummedFile, open_summed

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
    """The order in which tensors stand in a file."""
    return sorted(specs, key=lambda spec: -spec.dtype.itemsize)


def header(specs: Sequence[TensorSpec]) -> bytes:
    """The beginning of a file that holds these tensors in this order.

    Raises:
        ValueError: a dtype that the format does not know.
    """
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


class SafetensorsWriter:
    """From `open_safetensors`; `add` every announced tensor, in order."""

    def __init__(self, file: SummedFile, specs: Sequence[TensorSpec]) -> None:
        self.file = file
        self._rest = list(reversed(specs))
        file.write(header(specs))

    def add(self, tensor: torch.Tensor) -> None:
        """The next tensor's values, from any device."""
        spec = self._rest.pop()
        assert (tuple(tensor.shape), tensor.dtype) == (spec.shape, spec.dtype), f"{spec} announced, {tensor.shape} came"
        if tensor.numel():
            self.file.write(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy())

    def check(self) -> None:
        """Nothing is missing."""
        assert not self._rest, f"{len(self._rest)} announced tensors did not come"


@contextmanager
def open_safetensors(path: Path, specs: Sequence[TensorSpec]) -> Iterator[SafetensorsWriter]:
    """A new file for these tensors; leaving the block makes it durable and fills `writer.file.entry`.

    Raises:
        StoreError: disk full, not writable, I/O error.
    """
    with open_summed(path, cached=True) as file:
        writer = SafetensorsWriter(file, specs)
        yield writer
        writer.check()
