"""Listeners of libraries that take connections from anyone: made deaf once those that are needed are connected.

gloo's listeners stay open for as long as their group lives, and ask nobody for a key.
"""

import contextlib
import ctypes
import os
import secrets
import socket
import struct
import weakref
from pathlib import Path

from loguru import logger

_SO_ATTACH_FILTER = 26
_TCP_MD5SIG_EXT = 32
_TCP_MD5SIG_FLAG_PREFIX = 1
_asking: "weakref.WeakSet[socket.socket]" = weakref.WeakSet()


def keep_open(listening: socket.socket) -> None:
    """Have `shut_listeners` leave this one out: its server answers only those who prove that they know its secret."""
    _asking.add(listening)


def shut_listeners() -> int:
    """Have the kernel drop whatever reaches a TCP port that this process listens on; what is connected stays.

    A packet filter, which any process may put on its own socket; from Linux 6.18 on only with CAP_NET_ADMIN. Else a key
    that every segment has to be signed with (RFC 2385), which nobody knows. Warns where neither can be had.
    Returns how many listeners are deaf now.
    """
    deaf, open_ = 0, 0
    kept = {sock.getsockname() for sock in list(_asking) if sock.fileno() >= 0}
    with contextlib.suppress(OSError):
        for entry in list(Path("/proc/self/fd").iterdir()):
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(int(entry.name))) as sock:
                is_tcp = sock.family in (socket.AF_INET, socket.AF_INET6) and sock.type == socket.SOCK_STREAM
                if (
                    is_tcp
                    and sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
                    and sock.getsockname() not in kept
                ):
                    if _shut(sock):
                        deaf += 1
                    else:
                        open_ += 1
    if open_:
        logger.warning(
            f"{open_} ports of torch's collectives take connections from anyone who reaches them: this kernel takes "
            "neither packet filters nor TCP signatures from an ordinary user (slurm/SECURITY.md)"
        )
    return deaf


def _shut(sock: socket.socket) -> bool:
    for way in (_drop_everything, _require_signature):
        with contextlib.suppress(OSError):
            way(sock)
            return True
    return False


def _drop_everything(sock: socket.socket) -> None:
    program = ctypes.create_string_buffer(struct.pack("HBBI", 0x06, 0, 0, 0))  # BPF_RET | BPF_K, 0 bytes
    sock.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, struct.pack("HL", 1, ctypes.addressof(program)))


def _require_signature(sock: socket.socket) -> None:
    """Of every address; the kernel drops what is not signed before it answers anything (linux/tcp.h, tcp_md5sig)."""
    key = secrets.token_bytes(64)
    anyone = [struct.pack("=HH124x", socket.AF_INET, 0)]
    if sock.family == socket.AF_INET6:
        mapped = socket.inet_pton(socket.AF_INET6, "::ffff:0.0.0.0")
        anyone = [struct.pack("=HHI16sI100x", socket.AF_INET6, 0, 0, address, 0) for address in (bytes(16), mapped)]
    for address in anyone:
        signature = struct.pack("=128sBBHi80s", address, _TCP_MD5SIG_FLAG_PREFIX, 0, len(key), 0, key)
        sock.setsockopt(socket.IPPROTO_TCP, _TCP_MD5SIG_EXT, signature)
