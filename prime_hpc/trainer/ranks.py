"""How the ranks of one node meet: over a file that only their user can open.

A torch TCPStore listens on all of a node's interfaces and asks nobody for a key: who reaches it can redirect the ranks
to himself, and what ranks send each other is in part unpickled. Over several nodes there is nothing else in torch.
On one node there is a FileStore, and the ranks' own connections stay on the loopback interface.
"""

import contextlib
import ctypes
import os
import shutil
import socket
import struct
import tempfile
from collections.abc import Iterator
from pathlib import Path

from torch.distributed import FileStore

from prime_hpc.observe.context import RANKS_FILE
from prime_hpc.store.private import make_private_dir

_NODE_LOCAL = "/tmp"
"""Never $TMPDIR, which may be on a shared file system whose locks do not work."""
_SO_ATTACH_FILTER = 26


@contextlib.contextmanager
def meeting_file() -> Iterator[Path]:
    """A file in a new directory of its own, for this process's ranks; removed at the end."""
    folder = Path(tempfile.mkdtemp(prefix="prime-hpc-ranks-", dir=_NODE_LOCAL))
    try:
        yield folder / "store"
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def stay_on_loopback() -> None:
    """For ranks of one node: none of their sockets can be reached from another. NCCL's interface may be stated."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")


def file_store(world_size: int) -> FileStore | None:
    """The store over which this rank meets the others of its node; None where they meet as torch's variables say.

    Raises:
        NotPrivateError: another user has made the directory first.
    """
    path = os.environ.get(RANKS_FILE)
    if not path:
        return None
    make_private_dir(Path(path).parent)  # whichever rank comes first
    stay_on_loopback()
    return FileStore(path, world_size)


def deafen_listeners() -> int:
    """After gloo's groups are connected: their listeners, which nobody needs any more and which ask nobody for a key,
    take no further connection. Returns how many there were.

    The kernel drops what arrives (a packet filter that any process may put on its own socket); what is connected stays.
    """
    drop_all = struct.pack("HBBI", 0x06, 0, 0, 0)  # BPF_RET | BPF_K, 0 bytes
    number = 0
    with contextlib.suppress(OSError):
        for entry in list(Path("/proc/self/fd").iterdir()):
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(int(entry.name))) as sock:
                is_tcp = sock.family in (socket.AF_INET, socket.AF_INET6) and sock.type == socket.SOCK_STREAM
                if is_tcp and sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    program = ctypes.create_string_buffer(drop_all)
                    filter_ = struct.pack("HL", 1, ctypes.addressof(program))
                    sock.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, filter_)
                    number += 1
    return number
