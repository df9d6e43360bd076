"""The servers of an evaluation: which version each serves, and who takes the next episode.

Own servers load versions through their update route; one that failed gets the version again before it gets episodes
again. An API serves one model and is taken as it is.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from loguru import logger

from prime_hpc.client.inference import InferenceClient, InferenceError
from prime_hpc.evals.errors import EvalError
from prime_hpc.evals.versions import Version
from prime_hpc.runtime.event_loops import loop_time

PROBE_PAUSE_S = 1.0


@dataclass
class EvalServer:
    """One server."""

    url: str
    client: InferenceClient | None
    """None: an API."""
    ready: bool = False
    in_flight: int = 0
    since: float = field(default_factory=loop_time)
    """When it last became ready or ceased to be."""
    restoring: "asyncio.Task[None] | None" = None


class Servers:
    """All servers, each on the version that is evaluated now."""

    def __init__(self, clients: Sequence[InferenceClient | None], urls: Sequence[str], patience_s: float) -> None:
        """Args:
        clients: of own servers; None of an API.
        urls: one a server.
        patience_s: for so long no server may answer.
        """
        self._servers = [EvalServer(url, client) for url, client in zip(urls, clients, strict=True)]
        self._patience_s = patience_s
        self._version = Version(0)
        self._changed = asyncio.Condition()
        self.on_move: Callable[[int, str], None] = lambda index, url: None
        """Called when a server answers elsewhere."""

    async def load(self, version: Version) -> None:
        """Every server answers and serves `version`.

        Raises:
            EvalError: one does not in time, or refuses it.
        """
        self._version = version
        await asyncio.gather(*(self._restore(index) for index in range(len(self._servers))))

    async def pick(self) -> int:
        """Return the ready server with the fewest episodes in flight; give it back with `release`.

        Raises:
            EvalError: none has been ready for too long.
        """
        while True:
            ready = [i for i, server in enumerate(self._servers) if server.ready]
            if ready:
                index = min(ready, key=lambda i: self._servers[i].in_flight)
                self._servers[index].in_flight += 1
                return index
            for server in self._servers:
                if server.restoring is not None and server.restoring.done() and server.restoring.exception():
                    server.restoring.result()
            down = loop_time() - max(server.since for server in self._servers)
            if down > self._patience_s:
                urls = ", ".join(server.url for server in self._servers)
                raise EvalError(f"no server answered for {down:.0f} s ({urls}); see their logs")
            async with self._changed:
                try:
                    async with asyncio.timeout(PROBE_PAUSE_S):
                        await self._changed.wait()
                except TimeoutError:
                    continue

    def release(self, index: int) -> None:
        """Note that an episode has ended there."""
        self._servers[index].in_flight -= 1

    def report(self, index: int) -> None:
        """Give a server for which an episode failed no other one before it serves the version again."""
        server = self._servers[index]
        if server.client is None or not server.ready:
            return
        logger.warning(f"inference server {server.url} failed; looking at it")
        server.ready, server.since = False, loop_time()
        server.restoring = asyncio.create_task(self._restore(index), name=f"restore-{index}")

    def move(self, index: int, url: str) -> None:
        """Use another address: it was started again there."""
        server = self._servers[index]
        if server.url == url:
            return
        server.url = url
        if server.client is not None:
            server.client.move(url)
        self.on_move(index, url)

    async def close(self) -> None:
        """Close the connections."""
        for server in self._servers:
            if server.restoring is not None:
                server.restoring.cancel()
            if server.client is not None:
                await server.client.aclose()

    async def _restore(self, index: int) -> None:
        """Have one server serve the version, however long it takes to come back."""
        server, version = self._servers[index], self._version
        end = loop_time() + self._patience_s
        while server.client is not None:
            try:
                await server.client.wait_ready(max(1.0, end - loop_time()))
                if version.path is not None:
                    await server.client.update_weights(version.path, version.step)
                elif await server.client.policy_version() != 0:
                    await server.client.reload_weights()
                break
            except InferenceError as error:
                refused = error.status is not None and 400 <= error.status < 500
                if refused or loop_time() >= end:
                    hint = " (is it prime-hpc's own server?)" if error.status == 404 else ""
                    raise EvalError(f"{server.url} cannot serve {version.label}: {error}{hint}") from error
                await asyncio.sleep(PROBE_PAUSE_S)
        server.ready, server.since = True, loop_time()
        async with self._changed:
            self._changed.notify_all()
