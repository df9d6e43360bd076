"""The protocol between the trainer's ranks, which send weight versions, and the servers, which receive them.

A version is an artifact `weights/step_<n>` of the run, whatever the transport: made in a stage by all ranks, given its
name by one rename, announced by its number. The transport says what lies in it. In words of the protocol a version is
a few safetensors files, of which each rank holds some places:

    every rank  | plan (rank 0), open the stage | write, place by place | all have written: seal | sent (rank 0)
    server      | fetch: the version as whole safetensors on this node  | engines open, pause, load

`fetch` may take its time: the engines sample meanwhile. Engines, evaluations and exports read whole safetensors alone
and need not know of transports. Which one made a version stands in its manifest (`transport`), so that one run, and one
server, may meet several.

The table is `config.named_code.TRANSPORTS`. Imports here are light.
"""

import contextlib
import errno
import fcntl
import hashlib
import socket
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

from prime_hpc.config.named_code import TRANSPORTS
from prime_hpc.config.sections.inference import WeightsConfig
from prime_hpc.store.errors import StoreError
from prime_hpc.store.io.files import FileEntry
from prime_hpc.store.manifest import Manifest

DEFAULT = "files"


@dataclass(frozen=True)
class WholeFile:
    """One of the safetensors files that make up a version, as one rank sees it."""

    name: str
    size: int
    header: bytes
    is_owned_here: bool
    """True if this rank writes the header and seals it."""


@dataclass(frozen=True)
class Place:
    """A run of elements in one of those files. One rank alone writes it, in every version."""

    file: str
    offset: int
    """Bytes from the file's beginning."""
    itemsize: int
    """Bytes of one element; offset and length are multiples of it."""


@dataclass(frozen=True)
class VersionForm:
    """The form that a version gets. Rank 0 decides, the others are told."""

    is_whole: bool = True
    """The directory is a model that Hugging Face loads: index, config and tokenizer lie in it too."""
    keeps_values: bool = False
    """The ranks keep what they write, for the next version to be compared with."""


class Sender(Protocol):
    """One rank of the trainer. One version at a time; an exception anywhere ends the attempt."""

    def plan(self, version: int, *, is_kept: bool = False) -> VersionForm:
        """On rank 0: choose the form of a version; `is_kept`: by the config it will be there for as long as the run."""

    def open(self, form: VersionForm, stage: Path, stack: contextlib.ExitStack) -> None:
        """Begin a version in a stage that exists; what is open is closed with `stack`."""

    def write(self, place: Place, values: Any) -> None:
        """Take the bytes of one place (C-contiguous), which stay as they are until `finalize`. May be called from one
        further thread. Raises StoreError: disk full, I/O error."""

    def finalize(self) -> tuple[dict[str, FileEntry], dict[str, Any]]:
        """Make this rank's files durable once all ranks have written; their entries, and facts (plain JSON) for
        `meta`."""

    def meta(self, facts: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """On rank 0: `meta` of the manifest, from the facts of all ranks."""

    def sent(self, manifest: Manifest) -> None:
        """On rank 0: the version has its name."""


class Receiver(Protocol):
    """One process of a server. Calls come one after another."""

    def fetch(self, folder: Path) -> Path:
        """Return a folder on this node with the whole version, which is as it should be until the next call.
        `folder`: a version of this transport, its own sizes checked.
        Raises StoreError: it cannot be had; says what is missing or damaged."""


class WeightTransport(Protocol):
    """Both sides."""

    @property
    def gathers(self) -> bool:
        """True if each rank hands over its whole file, and so needs what other ranks hold of it."""

    def sender(self, config: WeightsConfig, files: Sequence[WholeFile], rank: int) -> Sender:
        """Return a rank's side; `files` are those into which it writes. Every rank calls it at the same point."""

    def receiver(self, scratch: Path) -> Receiver:
        """Return a server's side; `scratch` is a directory on this node, shared by the server's processes there."""


def load_transport(name: str) -> WeightTransport:
    """Return a transport of the table.
    Raises StoreError: there is none of that name (a version of a newer prime-hpc)."""
    if name not in TRANSPORTS:
        raise StoreError(f"weight transport {name!r} is not known here; known are {', '.join(TRANSPORTS)}")
    module, _, attribute = TRANSPORTS[name].partition(":")
    found: WeightTransport = getattr(import_module(module), attribute)
    return found


def transport_of(manifest: Manifest) -> str:
    """Name the transport that made a version."""
    return str(manifest.meta.get("transport", DEFAULT))


@contextlib.contextmanager
def node_lock(scratch: Path) -> Iterator[None]:
    """Hold a server's directory on this node, made if absent: its other processes there wait meanwhile."""
    scratch.mkdir(mode=0o700, parents=True, exist_ok=True)
    with (scratch / "lock").open("a") as file, socket.socket(socket.AF_UNIX) as name:
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError:  # a file system without locks, as Lustre is mounted on some clusters
            _take_name(name, scratch)
        yield


def _take_name(name: socket.socket, scratch: Path) -> None:
    """Wait until this process alone has a name of this machine, which goes with it as a lock does."""
    own = "\0prime-hpc-" + hashlib.sha256(bytes(scratch.absolute())).hexdigest()
    while True:
        try:
            return name.bind(own)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            time.sleep(0.05)


class VersionReader:
    """The receiving side of one process: a receiver for each transport whose versions come."""

    def __init__(self, scratch: Path) -> None:
        """`scratch`: see `WeightTransport.receiver`; made when a receiver needs it."""
        self.scratch = scratch
        self._receivers: dict[str, Receiver] = {}

    def fetch(self, folder: Path, transport: str) -> Path:
        """Return a folder with the whole version, good until the next call.
        Raises StoreError: see `Receiver.fetch`; or an unknown transport."""
        if transport not in self._receivers:
            self._receivers[transport] = load_transport(transport).receiver(self.scratch)
        return self._receivers[transport].fetch(folder)
