"""How the ranks of one node meet: over a file that only their user can open.

A torch TCPStore listens on all of a node's interfaces and asks nobody for a key: who reaches it can redirect the ranks
to himself, and what ranks send each other is in part unpickled. Over several nodes there is nothing else in torch.
On one node there is a FileStore, and the ranks' own connections stay on the loopback interface.
"""

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import torch
from torch.distributed import DistStoreError, FileStore

from prime_hpc.runtime.role_context import RANKS_FILE, RANKS_PREFIX
from prime_hpc.store.io import scratch
from prime_hpc.store.io.private import make_private_dir
from prime_hpc.trainer.rank_group import RankGroup

_NODE_LOCAL = Path("/tmp")
"""Never $TMPDIR, which may be on a shared file system whose locks do not work."""


@contextlib.contextmanager
def meeting_file() -> Iterator[Path]:
    """Yield a file in a new directory of its own, for this process's ranks; removed at the end."""
    folder = scratch.make_scratch(_NODE_LOCAL, RANKS_PREFIX)
    try:
        yield folder / "store"
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def stay_on_loopback(*, engines_join: bool = False) -> None:
    """For ranks of one node: none of their sockets can be reached from another.
    `engines_join`: NCCL's can, for it has one interface a process: a rank sends weights to engines over it, which may
    be on other nodes. Else it may be stated."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    if not engines_join:
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")


def file_store(world_size: int, *, engines_join: bool = False) -> FileStore | None:
    """Return the store over which this rank meets the others of its node; None where they meet as torch's variables
    say.
    `engines_join`: see `stay_on_loopback`.
    Raises NotPrivateError: another user has made the directory first."""
    path = os.environ.get(RANKS_FILE)
    if not path:
        return None
    folder = Path(path).parent
    make_private_dir(folder)  # whichever rank comes first
    if not (folder / scratch.LOCK_NAME).exists():  # no agent's, which would hold it
        scratch.hold(folder)
        scratch.remove_leftovers(_NODE_LOCAL, RANKS_PREFIX)
    stay_on_loopback(engines_join=engines_join)
    return open_store(path, world_size)


def open_store(path: str, world_size: int) -> FileStore:
    """Open the file over which so many meet."""
    try:
        return FileStore(path, world_size)
    except DistStoreError as error:  # a full disk, and not whose
        raise DistStoreError(f"{path}: {error}") from error


def control_group(device: torch.device, timeout_s: float) -> RankGroup:
    """Return the group over which rank 0 tells the others what to do, between steps. Collective.

    Args:
        device: this rank's. On CUDA it is a gloo group of its own: NCCL's broadcast is a kernel that spins on every
            waiting GPU, for as long as a batch takes to come, and takes time slices from an engine on the same GPU.
    """
    return RankGroup(timeout_s if device.type == "cuda" else None)
