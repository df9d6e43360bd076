"""Checks of a weight version, before an engine touches it, and its way onto this node (`receive_version`).

Checks read headers only (a few kilobytes a file), so a version of any size is checked in milliseconds.
"""

import contextlib
import json
import os
import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from loguru import logger

from prime_hpc.inference.policy import UnavailableError
from prime_hpc.store.errors import PROOFS, ArtifactError, StoreError, Unreadable
from prime_hpc.store.io.files import await_name
from prime_hpc.store.manifest import Manifest, read_manifest, verify_artifact
from prime_hpc.store.model import files as model_files
from prime_hpc.weight_transport.transport import VersionReader, transport_of

MAX_HEADER_BYTES = 100_000_000  # the format's own limit
LM_HEAD = "lm_head.weight"
ADAPTER = "adapter_model.safetensors"
_PEFT = re.compile(r"base_model\.model\.(.+)\.lora_([AB])\.weight")

NAME_VISIBLE_S = 10.0
"""How long a shared file system may take to show this node the name that another one just gave a version."""
VISIBLE_S = 2.0
"""How long it may take to show what is below that name: all of it is older than the name."""

Signature = dict[str, tuple[int, ...]]
"""Tensor name to shape."""


class BadVersionError(ValueError):
    """A weight version that must not be loaded; the message says what is wrong."""


def weight_files(path: Path) -> list[Path]:
    """Return the safetensors files of a Hugging Face model folder, in the order of their names.
    Raises BadVersionError: no such folder, no weights in it, or a file that its index names is missing."""
    if not path.is_dir():
        raise BadVersionError(f"{path} is not a directory on this node")
    try:
        found = model_files.weight_files(path) or [path / model_files.SINGLE]
    except ValueError as error:
        raise BadVersionError(str(error)) from error
    for file in found:
        if not file.is_file():
            raise BadVersionError(f"{file} is missing")
    return found


def read_signature(path: Path) -> Signature:
    """Names and shapes of all tensors of a model folder.
    Raises BadVersionError: as `weight_files`, or a file is not whole safetensors."""
    signature: Signature = {}
    for file in weight_files(path):
        for name, entry in read_header(file).items():
            if name != "__metadata__":
                signature[name] = tuple(entry["shape"])
    return signature


def base_weights(model: str) -> Path | None:
    """Folder of the base model's safetensors on this node, or None where it has none (another format)."""
    folder = Path(model)
    if not folder.is_dir():
        from huggingface_hub import snapshot_download

        folder = Path(snapshot_download(model, local_files_only=True, allow_patterns=["*.safetensors*", "*.json"]))
    try:
        weight_files(folder)
    except BadVersionError as error:
        logger.warning(f"updates cannot be compared with the base model: {error}")
        return None
    return folder.absolute()


def server_scratch() -> Path:
    """Return where a server's processes on this node keep what they fetch: its temporary directory, deleted with it."""
    # not `tempfile`: what it found first, before the server had a directory of its own, it says for ever
    return Path(os.environ.get("TMPDIR", "/tmp")) / "weights"


@dataclass(frozen=True)
class Received:
    """A version that every process of a server can open."""

    published: Path
    """Its folder in the run directory."""
    transport: str
    folder: Path
    """The whole of it on this node."""
    digest: str | None = None
    """Of its manifest, from before anything else was read; None: the base model, which has none."""


def receive_version(
    reader: VersionReader, path: Path, version: int, expected: Signature | None, tied: bool
) -> Received:
    """Bring a version onto this node while the engines sample.

    Args:
        version: number that the caller gives it; the manifest must agree where it names one.
        expected: the base model's signature; None skips the comparison (base not in safetensors).
        tied: input and output embeddings are one tensor, so `lm_head.weight` may be there or not.

    Raises:
        BadVersionError: it is incomplete or belongs to another model; says what is wrong, and with which file or
            tensor.
        UnavailableError: it cannot be read now.
    """
    manifest = verify_version(path, version)
    if ADAPTER in manifest.files:
        raise BadVersionError(f"{path} is an adapter, and this server serves none (model.lora is not set)")
    transport = transport_of(manifest)
    with reading(path):
        folder = reader.fetch(path, transport)
        found = read_signature(folder)
    if expected is not None:
        compare_signatures(found, expected, tied, path)
    return Received(path, transport, folder, manifest.digest)


def check_adapter(path: Path, version: int, expected: Signature | None, max_rank: int) -> None:
    """Refuse an adapter that is incomplete or belongs to another model.

    Args:
        version: number that the caller gives it; the manifest must agree where it names one.
        expected: the base model's signature; None skips the comparison.
        max_rank: largest rank that the engines have room for.

    Raises:
        BadVersionError: what is wrong, and with which file or tensor.
        UnavailableError: it cannot be read now.
    """
    if ADAPTER not in verify_version(path, version).files:
        raise BadVersionError(f"{path} holds no adapter ({ADAPTER}), and this server serves adapters (model.lora)")
    with reading(path):
        header = read_header(path / ADAPTER)
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        matched, shape = _PEFT.fullmatch(name), tuple(entry["shape"])
        if matched is None or len(shape) != 2:
            raise BadVersionError(f"{path}: {name} {list(shape)} is no matrix of a LoRA adapter")
        rank, outer, dim = (shape[0], shape[1], 1) if matched[2] == "A" else (shape[1], shape[0], 0)
        if rank > max_rank:
            raise BadVersionError(f"{path} has rank {rank}, the server was started for {max_rank} (model.lora.rank)")
        if expected is None:
            continue
        base = expected.get(f"{matched[1]}.weight")
        if base is None or len(base) != 2:
            raise BadVersionError(f"{path} is not this model's: it adapts {matched[1]}, which the model does not have")
        if base[dim] != outer:
            raise BadVersionError(f"{path}: {name} has shape {list(shape)}, the model's {matched[1]} is {list(base)}")


@contextlib.contextmanager
def reading(path: Path) -> Iterator[None]:
    """While a version is read that is complete.

    Raises:
        BadVersionError: it cannot be.
        UnavailableError: it cannot be read now.
    """
    try:
        yield
    except (StoreError, OSError) as error:
        kind = UnavailableError if says_nothing(error) else BadVersionError
        raise kind(f"{path} cannot be had on this node: {error}") from error


def says_nothing(error: Exception) -> bool:
    """Return whether a failure tells nothing of what was to be read: another try, or another node, may well have it. So
    does a disk of this node that is full, or over its quota, when the version is to be written there."""
    is_of_disk = isinstance(error, StoreError) and not isinstance(error, ArtifactError)
    cause = error.__cause__ if is_of_disk and error.__cause__ is not None else error
    return isinstance(error, Unreadable) or (isinstance(cause, OSError) and cause.errno not in (None, *PROOFS))


def verify_version(path: Path, version: int) -> Manifest:
    """Return the manifest of a version that is complete.

    Args:
        version: number that the manifest must not contradict.

    Raises:
        BadVersionError: it is incomplete, or another version.
        UnavailableError: it cannot be read now, which says nothing of the version: another node may well read it.
    """
    try:
        if path.parent.is_dir():  # by a listing: a look-up that comes too early would be remembered as a miss
            with contextlib.suppress(ArtifactError, Unreadable):  # what is wrong is said below
                await_name(path, deadline_s=NAME_VISIBLE_S)
        manifest = verify_artifact(path, deadline_s=VISIBLE_S)
    except Unreadable as error:
        raise UnavailableError(f"version {version}: {error}") from error
    except (ArtifactError, OSError) as error:
        raise BadVersionError(f"{path} is not a complete weight version: {error}") from error
    if manifest.version is not None and manifest.version != version:
        raise BadVersionError(f"{path} holds version {manifest.version}, not {version}")
    return manifest


def digest_of(path: Path) -> str | None:
    """Return the digest of a version's manifest, which tells it from another one of the same name that a run has made
    anew; None where it cannot be read now."""
    try:
        return read_manifest(path).digest
    except (ArtifactError, Unreadable):
        return None


def compare_signatures(found: Signature, expected: Signature, tied: bool, path: Path) -> None:
    """Check that a version's tensors are the base model's; arguments as of `receive_version`.
    Raises BadVersionError: they are not; says which."""
    optional = {LM_HEAD} if tied else set()
    missing = sorted(expected.keys() - found.keys() - optional)
    unknown = sorted(found.keys() - expected.keys() - optional)
    if missing or unknown:
        raise BadVersionError(
            f"{path} is not this model's: missing tensors {missing[:3]} ({len(missing)} in all), "
            f"unknown tensors {unknown[:3]} ({len(unknown)} in all)"
        )
    for name in expected.keys() & found.keys():
        if found[name] != expected[name]:
            raise BadVersionError(
                f"{path}: {name} has shape {list(found[name])}, the model's is {list(expected[name])}"
            )


def read_header(file: Path) -> dict:
    """Return the JSON header of a safetensors file; checks that the file holds every byte that it promises."""
    size = file.stat().st_size
    with file.open("rb") as handle:
        prefix = handle.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else MAX_HEADER_BYTES + 1
        if length > min(MAX_HEADER_BYTES, size - 8):
            raise BadVersionError(f"{file} is not a safetensors file ({size} bytes)")
        try:
            header = json.loads(handle.read(length))
            end = max((entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"), default=0)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise BadVersionError(f"{file} has no readable safetensors header: {error}") from error
    if size != 8 + length + end:
        raise BadVersionError(f"{file} has {size} bytes, its header promises {8 + length + end}")
    return header
