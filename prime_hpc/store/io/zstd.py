"""zstd frames through pyarrow's codec: batches that were trained on (`store.batch_archive`), changes of weights."""

import importlib.util
from typing import Any

from prime_hpc.store.errors import StoreError

LEVEL = 3
SUFFIX = ".zst"


def is_there() -> bool:
    """Return whether pyarrow is installed; it is not imported."""
    return importlib.util.find_spec("pyarrow") is not None


def compress(data: Any, level: int = LEVEL) -> memoryview:
    """One frame, which the `zstd` command reads too. Runs without the interpreter's lock."""
    # as bytes: the view of a shrunk pyarrow buffer still has the length from before
    return memoryview(_codec(level).compress(data, asbytes=True))


def decompress(data: Any, size: int) -> memoryview:
    """Return the content of a frame. Raises StoreError: it is none, or holds another number of bytes."""
    try:
        return memoryview(_codec().decompress(data, decompressed_size=size))
    except (OSError, ValueError) as error:
        raise StoreError(f"not a zstd frame of {size} bytes ({error})") from error


def _codec(level: int = LEVEL) -> Any:
    try:
        import pyarrow
    except ImportError as error:
        raise StoreError("what is compressed needs pyarrow: pip install 'prime-hpc[export]'") from error
    return pyarrow.Codec("zstd", compression_level=level)
