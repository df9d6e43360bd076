"""The servers of an evaluation: which version each serves, and who takes the next episode.

Own servers load versions through their update route; one that failed gets the version again before it gets episodes
again. An API serves one model and is taken as it is.
"""

import asyncio
import os
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

from loguru import logger

from prime_hpc.client.inference import InferenceClient, InferenceError
from prime_hpc.envs.samples import EpisodeResult
from prime_hpc.evals.errors import EvalError
from prime_hpc.evals.versions import Version
from prime_hpc.runtime.event_loops import ended, loop_time

PROBE_PAUSE_S = 1.0
LOOK_PAUSE_S = 0.1
"""Between two looks at what an attached server serves: one for each episode was a tenth of what cheap ones cost."""


@dataclass
class EvalServer:
    """One server."""

    url: str
    client: InferenceClient | None
    """None: an API."""
    ready: bool = False
    is_lost: bool = False
    """Its node is gone: nobody waits for it, until it is started elsewhere."""
    playing: "set[asyncio.Task[EpisodeResult]]" = field(default_factory=set)
    since: float = field(default_factory=loop_time)
    """When it last became ready or ceased to be."""
    restoring: "asyncio.Task[None] | None" = None
    looking: "asyncio.Task[bool] | None" = None
    """The next look at what it serves, which has not begun."""


class Servers:
    """All servers, each on the version that is evaluated now."""

    def __init__(
        self,
        clients: Sequence[InferenceClient | None],
        urls: Sequence[str],
        patience_s: float,
        *,
        are_attached: bool = False,
    ) -> None:
        """Describe them.

        Args:
            clients: of own servers; None of an API.
            patience_s: for so long no server may answer.
            are_attached: started by others, who may have them load other weights meanwhile.
        """
        self._are_attached = are_attached
        self._servers = [EvalServer(url, client) for url, client in zip(urls, clients, strict=True)]
        self._patience_s = patience_s
        self._version = Version(0)
        self._changed = asyncio.Condition()
        self.on_move: Callable[[int, str], None] = lambda index, url: None
        """Called when a server answers elsewhere."""

    async def load(self, version: Version) -> None:
        """Every server but those that are lost, before or meanwhile, answers and serves `version`.
        Raises EvalError: one does not in time, or refuses it."""
        self._version = version
        await asyncio.gather(*(self._unless_lost(i) for i, server in enumerate(self._servers) if not server.is_lost))

    async def load_unless_gone(self, version: Version) -> bool:
        """`load`, and whether the version is still there to be loaded."""
        try:
            if not version.is_gone:
                await self.load(version)
                return True
        except EvalError:
            if not version.is_gone:
                raise
        logger.warning(f"{version.label} is left out: its run has removed {version.path} meanwhile")
        return False

    async def load_first(self, versions: Sequence[Version]) -> None:
        """Load the first of the versions that is still there. Raises EvalError: none is, or as `load`."""
        for version in versions:
            if await self.load_unless_gone(version):
                return
        raise EvalError(f"none of {len(versions)} versions is there any more: their run has removed them")

    async def _unless_lost(self, index: int) -> None:
        """Have one server serve the version, broken off by `lose`."""
        loading = self._begin_restoring(index)
        await asyncio.wait({loading})
        if not loading.cancelled():
            loading.result()

    async def play(
        self, episode: Callable[[int], Coroutine[Any, Any, EpisodeResult]]
    ) -> tuple[int, EpisodeResult | None]:
        """Have an episode played on the ready server with the fewest in flight.

        Args:
            episode: plays it on a server, by its index.

        Returns:
            the server, and the result; None where the server was lost meanwhile.

        Raises:
            EvalError: none has been ready for too long.
        """
        index = await self._pick()
        playing, task = self._servers[index].playing, asyncio.create_task(episode(index))
        playing.add(task)
        try:
            await ended(task)
            return index, None if task.cancelled() else task.result()
        finally:
            task.cancel()
            playing.discard(task)

    async def still_serves(self, index: int) -> bool:
        """Return whether the tokens that a server has sampled until now were the version's, as one look tells that all
        share who ask before it begins. Of a server that others may have used meanwhile their number does not say it:
        another run's version may have the same.
        Raises EvalError: another process has loaded weights of its own; loaded again, ours would end that one's."""
        server = self._servers[index]
        if not self._are_attached or server.client is None:
            return True
        if server.looking is None:
            server.looking = asyncio.create_task(self._look(server, server.client), name=f"look-{index}")
        looking = server.looking
        await ended(looking)  # not the task itself: who is cancelled takes no other's answer along
        return looking.result()

    async def _look(self, server: EvalServer, client: InferenceClient) -> bool:
        await asyncio.sleep(LOOK_PAUSE_S)
        version, server.looking = self._version, None
        try:
            step, folder = await client.served()
        except InferenceError:
            return False
        if step == 0 or version.path is None:  # the base model: it was started anew, if another one is to be there
            is_ours = step == version.step
        else:
            is_ours = step == version.step and os.path.realpath(folder) == os.path.realpath(version.path)
        if step and not is_ours:
            raise EvalError(
                f"{server.url} was given other weights of step {step} meanwhile, {folder}: versions of a run need a "
                "server that nobody else uses; end that and start this again, or let one of both start its own "
                "(--inference, under another --name)"
            )
        return is_ours

    async def _pick(self) -> int:
        while True:
            ready = [i for i, server in enumerate(self._servers) if server.ready]
            if ready:
                return min(ready, key=lambda i: len(self._servers[i].playing))
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

    def lose(self, index: int) -> None:
        """Have the episodes of a server whose node is gone played elsewhere: nobody would ever answer them."""
        server = self._servers[index]
        server.ready, server.is_lost, server.since = False, True, loop_time()
        logger.warning(f"{len(server.playing)} episodes of {server.url} are played again elsewhere: its node is gone")
        if server.restoring is not None:
            server.restoring.cancel()
            server.restoring = None
        for task in server.playing:
            task.cancel()

    def report(self, index: int) -> None:
        """Give a server for which an episode failed no other one before it serves the version again."""
        server = self._servers[index]
        if server.client is None or not server.ready:
            return
        logger.warning(f"inference server {server.url} failed; looking at it")
        server.ready, server.since = False, loop_time()
        self._begin_restoring(index)

    def _begin_restoring(self, index: int) -> "asyncio.Task[None]":
        """Return what has a server serve the version, in the place of what had it serve the one before."""
        server = self._servers[index]
        if server.restoring is not None:
            server.restoring.cancel()
        server.restoring = asyncio.create_task(self._restore(index), name=f"restore-{index}")
        return server.restoring

    def move(self, index: int, url: str) -> None:
        """Use another address: it was started again there."""
        server = self._servers[index]
        was_lost, server.is_lost = server.is_lost, False
        if server.url != url:
            server.url = url
            if server.client is not None:
                server.client.move(url)
            self.on_move(index, url)
        if was_lost:
            self._begin_restoring(index)

    async def close(self) -> None:
        """Close the connections."""
        for server in self._servers:
            for task in (server.restoring, server.looking):
                if task is not None:
                    task.cancel()
            if server.client is not None:
                await server.client.close()

    async def _restore(self, index: int) -> None:
        """Have one server serve the version, however long it takes to come back."""
        server, end = self._servers[index], loop_time() + self._patience_s
        while server.client is not None:
            version = self._version
            try:
                await server.client.wait_ready(max(1.0, end - loop_time()))
                if version.path is not None:
                    await server.client.update_weights(version.path, version.step)
                elif await server.client.policy_version() != 0:
                    await server.client.reload_weights()
                if version is self._version:  # the next one's turn may have come meanwhile
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
