"""The tensors of a safetensors file, mapped into memory: a node reads each byte once for all its processes.

The library's own way keeps two integers of every tensor that it gives out, for as long as the process lives (0.8): of a
mixture of experts a megabyte with every version, in every worker.
"""

from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from prime_hpc.inference.check_version import read_header

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""By the format's names: those of weights that are trained."""


class TensorFile:
    """One file. It stays mapped while it or one of its tensors is held, also when its name is gone."""

    def __init__(self, path: Path) -> None:
        """Map a file.

        Raises:
            BadVersionError: it is not whole safetensors.
            OSError: it cannot be read.
        """
        self._path = path
        self._entries: dict[str, Any] = read_header(path)
        self._entries.pop("__metadata__", None)
        size = path.stat().st_size
        self._content = torch.from_file(str(path), shared=False, size=size, dtype=torch.uint8)
        self.names = sorted(self._entries)
        self._start = size - max((entry["data_offsets"][1] for entry in self._entries.values()), default=0)

    def get_tensor(self, name: str) -> torch.Tensor:
        """Return a tensor: the file's own pages, unless it lies askew in them."""
        entry = self._entries[name]
        dtype = DTYPES.get(entry["dtype"])
        if dtype is None:  # of a quantised base model
            with safe_open(self._path, framework="pt", device="cpu") as handle:
                return handle.get_tensor(name)
        begin, end = (self._start + offset for offset in entry["data_offsets"])
        values = self._content[begin:end]
        return (values.clone() if begin % dtype.itemsize else values).view(dtype).view(entry["shape"])
