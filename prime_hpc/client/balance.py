"""One address in front of several servers, for programs that know a single one and keep it for as long as they live.

Bytes go through as they are: whoever connects needs the servers' own key. A connection is led to the server with the
fewest; while none can be reached (one is being started again) it waits, instead of being refused.
"""

import asyncio
import contextlib
import socket
import threading
from collections import Counter
from collections.abc import Iterable
from urllib.parse import urlsplit

from prime_hpc.runtime.event_loops import new_event_loop

CONNECT_TIMEOUT_S = 5.0
RETRY_S = 0.5
CHUNK = 1 << 16

Address = tuple[str, int]


class Balance:
    """Leads connections to servers, from a thread of its own: whoever waits for an answer may block every other one."""

    def __init__(self, listener: socket.socket, urls: Iterable[str], patience_s: float) -> None:
        """Serve from now on.

        Args:
            listener: listens; closed by `close`.
            urls: `http://host:port/...` of each server.
            patience_s: how long a connection waits for a server, at most.
        """
        self._listener, self._patience_s = listener, patience_s
        self._addresses: dict[int, Address] = {index: _address(url) for index, url in enumerate(urls)}
        self._open: dict[int, set[asyncio.StreamWriter]] = {index: set() for index in self._addresses}
        self._load = Counter[int]()
        """Connections that a server has, or is about to get."""
        self._loop = new_event_loop()
        self._thread = threading.Thread(target=self._run, name="balance", daemon=True)
        self._thread.start()

    def move(self, index: int, url: str | None) -> None:
        """Use another address of a server from now on; None: it is lost. Its connections are cut: a node that is gone
        does not say so, and who asked would wait for its answer in vain."""
        with contextlib.suppress(RuntimeError):  # closed
            self._loop.call_soon_threadsafe(self._move, index, url)

    def close(self) -> None:
        """Take no more connections, and cut those that there are."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._listener.close()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        serving = self._loop.create_task(asyncio.start_server(self._serve, sock=self._listener))
        self._loop.run_forever()
        left = asyncio.all_tasks(self._loop) | {serving}
        for task in left:
            task.cancel()
        self._loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
        self._loop.close()

    def _move(self, index: int, url: str | None) -> None:
        address = _address(url) if url is not None else None
        if address == self._addresses.get(index):
            return
        for writer in self._open[index]:
            writer.transport.abort()
        self._addresses.pop(index, None)
        if address is not None:
            self._addresses[index] = address

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection to its end."""
        with contextlib.suppress(asyncio.CancelledError):  # at the end; asyncio would log it
            await self._lead(reader, writer)

    async def _lead(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Lead a connection to a server, and pass on what either says."""
        begun, both = bytearray(), list[asyncio.Future[None]]()
        reached = None
        try:
            end = self._loop.time() + self._patience_s
            while (reached := await self._reach()) is None:
                if self._loop.time() >= end:
                    return
                with contextlib.suppress(TimeoutError):
                    begun += (data := await asyncio.wait_for(reader.read(CHUNK), RETRY_S))
                    if not data:
                        return  # it does not wait any longer
            index, its_reader, its_writer = reached
            self._open[index] |= {writer, its_writer}
            its_writer.write(begun)
            both = [
                asyncio.ensure_future(_pass_on(reader, its_writer)),
                asyncio.ensure_future(_pass_on(its_reader, writer)),
            ]
            await asyncio.gather(*both)
        except OSError:
            pass
        finally:
            for one_way in both:
                one_way.cancel()
            ends = [writer] if reached is None else [writer, reached[2]]
            for one in ends:
                one.close()
            if reached is not None:
                self._open[reached[0]] -= set(ends)
                self._load[reached[0]] -= 1

    async def _reach(self) -> tuple[int, asyncio.StreamReader, asyncio.StreamWriter] | None:
        """Connect to the least busy server that takes connections; None where none does."""
        for index in sorted(self._addresses, key=self._load.__getitem__):
            self._load[index] += 1
            try:
                connecting = asyncio.open_connection(*self._addresses[index])
                return index, *await asyncio.wait_for(connecting, CONNECT_TIMEOUT_S)
            except (OSError, KeyError):  # it may be lost meanwhile
                self._load[index] -= 1
        return None


async def _pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Hand on what comes until it ends; then both ends know. Raises OSError: the connection broke."""
    while data := await reader.read(CHUNK):
        writer.write(data)
        await writer.drain()
    raise ConnectionResetError


def _address(url: str) -> Address:
    parts = urlsplit(url)
    return str(parts.hostname), parts.port or 80
