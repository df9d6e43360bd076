"""Messages between an orchestrator, hosts and workers: maps in msgpack, each behind its length. Nothing is unpickled.

A message is a map whose `op` says what it is; `worker.py`, `host.py` and `fleet.py` say what each holds.
"""

import struct
from typing import Any

import msgpack

PURPOSE = "environment host"
"""Part of the proof by which an orchestrator and a host that listens know each other (`store.messaging.auth`)."""
_LENGTH = struct.Struct("!I")
MAX_FRAME = 1 << 28
"""Bytes; an episode of a million tokens takes 13 MB."""


class FrameError(ConnectionError):
    """The other end does not keep to the protocol: the connection is of no more use."""


def pack(op: str, **fields: Any) -> bytes:
    """One message, ready to be sent.
    Raises TypeError, ValueError: a value that msgpack lacks, or more than `MAX_FRAME` bytes."""
    body = msgpack.packb({"op": op, **fields}, default=_plain, unicode_errors="surrogatepass")
    if len(body) > MAX_FRAME:
        raise ValueError(f"a message {op!r} of {len(body)} bytes; at most {MAX_FRAME} can be sent")
    return _LENGTH.pack(len(body)) + body


def _plain(value: Any) -> Any:
    """Return a NumPy scalar as Python's own."""
    if hasattr(value, "item") and getattr(value, "ndim", 1) == 0:
        return value.item()
    raise TypeError(f"a {type(value).__name__} cannot be sent to another process: {value!r:.100}")


class Unpacker:
    """Messages from a stream of bytes."""

    def __init__(self) -> None:
        self._received = bytearray()

    def feed(self, data: bytes) -> list[dict[str, Any]]:
        """Take what arrived and return the messages that are whole now.
        Raises FrameError: too long, no msgpack, or no map with an `op`."""
        self._received += data
        found = []
        while len(self._received) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._received)
            if length > MAX_FRAME:
                raise FrameError(f"a message of {length} bytes; at most {MAX_FRAME} are taken")
            end = _LENGTH.size + length
            if len(self._received) < end:
                break
            found.append(_message(bytes(self._received[_LENGTH.size : end])))
            del self._received[:end]
        return found


def _message(body: bytes) -> dict[str, Any]:
    try:
        message = msgpack.unpackb(body, unicode_errors="surrogatepass", max_ext_len=0, strict_map_key=False)
    except (ValueError, msgpack.UnpackException, RecursionError) as error:
        raise FrameError(f"no msgpack: {error}") from error
    if not isinstance(message, dict) or not isinstance(message.get("op"), str):
        raise FrameError("no message: a map with an `op` was expected")
    return message
