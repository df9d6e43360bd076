"""Reading a DCP checkpoint without running what its files say: they may be a colleague's, in a directory of a group.

DCP pickles its metadata. Here only the few classes that describe tensors may be named in it, and a checkpoint that
holds anything but tensors is refused: torch reads tensors alone without pickle's freedom (`weights_only`).
"""

import enum
import io
import pickle
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorProperties, TensorStorageMetadata

from prime_hpc.store.errors import ArtifactError

METADATA = ".metadata"
_EXPECTED = "the description of a checkpoint's tensors"
_BROKEN = (pickle.UnpicklingError, EOFError, AttributeError, ImportError, LookupError, TypeError, ValueError)
"""Whatever a pickle may raise that was made otherwise, or damaged."""
_DESCRIPTIONS = {
    "torch.distributed.checkpoint.metadata": {
        "Metadata",
        "MetadataIndex",
        "TensorStorageMetadata",
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "TensorProperties",
        "StorageMeta",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo", "_StoragePrefix"},
    "torch.serialization": {"_get_layout"},
    "torch": {"Size"},
    "pathlib": {"PosixPath", "PurePosixPath"},
    "collections": {"OrderedDict"},
}
_DTYPES = ("float", "bfloat", "int", "uint", "bool", "complex", "quint", "qint", "half", "double", "long", "short")


def _member(owner: Any, name: Any) -> Any:
    """Return a member of an enumeration: Python 3.11.0 to 3.11.3 pickle it as `getattr(enumeration, name)`."""
    if isinstance(owner, enum.EnumMeta) and isinstance(name, str) and name in owner.__members__:
        return owner.__members__[name]
    raise pickle.UnpicklingError("it names builtins.getattr of something else than an enumeration's member")


class _Properties(TensorProperties):
    """A tensor's properties as any release of torch wrote them: 2.15 appends strides, and earlier ones take no more
    fields than they know (a run that was moved to, or lent by, a cluster with a newer torch)."""

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        super().__setstate__(state[: len(TensorProperties().__getstate__())])
        self.__class__ = TensorProperties  # type: ignore[assignment]  # that it equals others


class _Unpickler(pickle.Unpickler):
    """Knows the classes of a tensor's description and no other name."""

    def find_class(self, module: str, name: str) -> Any:
        if module == "pathlib._local":  # Python 3.13's name of it, which no other version has
            module = "pathlib"
        if (module, name) == (TensorProperties.__module__, TensorProperties.__name__):
            return _Properties
        is_dtype = module == "torch" and name.startswith(_DTYPES)
        if name in _DESCRIPTIONS.get(module, ()) or is_dtype:
            return super().find_class(module, name)
        if (module, name) == ("builtins", "getattr"):
            return _member
        raise pickle.UnpicklingError(f"it names {module}.{name}")


class PlainReader(dcp.FileSystemReader):
    """As DCP's reader of files, for checkpoints of tensors."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Read what the checkpoint holds.
        Raises ArtifactError: its metadata is something else, or it holds objects that are no tensors."""
        path = Path(self.path) / METADATA
        try:
            metadata = _Unpickler(io.BytesIO(path.read_bytes())).load()
        except _BROKEN as error:
            raise ArtifactError(path, _EXPECTED, f"something else ({error})") from error
        if not isinstance(metadata, Metadata):
            raise ArtifactError(path, _EXPECTED, type(metadata).__name__)
        for name, entry in metadata.state_dict_metadata.items():
            if not isinstance(entry, TensorStorageMetadata):
                raise ArtifactError(path, "tensors only", f"{name}, which is none")
        if metadata.storage_meta is None:
            metadata.storage_meta = StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata
