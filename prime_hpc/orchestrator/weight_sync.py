"""Keeps every inference server on the newest policy version while generation goes on.

`loop` runs `WeightSync.run` beside the collection of rollouts. New versions are found by the bus, else by listing
the weights directory. Versions are loaded in order, skipping to the newest. A server that failed or restarted gets the
version that the run serves before it gets episodes again.
"""

import asyncio
import contextlib
from collections.abc import Callable, Coroutine
from typing import Any

from loguru import logger

from prime_hpc.client.inference import POLICY, InferenceClient, InferenceError
from prime_hpc.orchestrator.errors import OrchestratorError
from prime_hpc.orchestrator.parts import Parts
from prime_hpc.orchestrator.rollouts.servers import ServerTable
from prime_hpc.runtime.event_loops import in_loop, loop_time, task_group
from prime_hpc.store.errors import ArtifactError, ArtifactTimeout, FencedError, StoreError, WaitCancelled
from prime_hpc.store.leases import set_floor
from prime_hpc.store.run_paths import check_incarnation
from prime_hpc.store.waiting import wait_for_artifact
from prime_hpc.store.weights import list_versions, newest_of_attempt

READER = "orchestrator"
LISTING_PAUSE_S = (0.25, 2.0)
"""First and longest pause between listings of the weights directory; the bus usually comes first."""
PROBE_PAUSE_S = 0.5
CHECK_PAUSE_S = 5.0
"""How often servers that seem well are asked for their version: a restarted one says 0."""
ARTIFACT_DEADLINE_S = 20.0
DOWN_WARNING_S = 60.0
HOLD_LOOK_S = 0.02
NOTHING = -1
_HINTS = {
    401: " (by the variable that orchestrator.client.api_key_var names, VLLM_API_KEY by default, or inference.api_key)",
    404: " (is it prime-hpc's own server?)",
}
"""By the status of a server's answer: what it may come of."""


class WeightSync:
    """Follows the trainer's versions; owns who is ready in the `ServerTable`."""

    def __init__(
        self, parts: Parts, table: ServerTable, *, on_change: Callable[[], None], sleeps: bool = False
    ) -> None:
        """`sleeps`: an attempt that crashed may have left the engines asleep (`inference.sleep`).
        `on_change()` is called in the event loop when the served version or the set of ready servers changed, and
        when an update begins."""
        self._paths, self._clients, self._bus = parts.paths, parts.clients, parts.bus
        self._incarnation, self._ready_timeout_s = parts.incarnation, parts.ready_timeout_s
        self._table, self._on_change = table, on_change
        self._name, self._sleeps = parts.served_as, sleeps
        self._locks = [asyncio.Lock() for _ in self._clients]
        self._loading: dict[int, asyncio.Task[None]] = {}
        self._unloaded: dict[int, tuple[int, str]] = {}
        """By server: the version that it did not load last time, and why."""
        self._lost = {index for index, server in enumerate(table.servers) if server.is_absent}
        """Servers for which `prepare` does not wait."""
        self._news = asyncio.Event()
        self._trouble = [asyncio.Event() for _ in self._clients]
        self._closing = False
        self._asleep = False
        """From `sleep` until a newer version is there: the trainer has the GPU."""
        self._announced = -1
        self._may_follow = asyncio.Event()
        self._may_follow.set()
        self._due = 0
        """A version that an earlier attempt has made and this one goes on from."""
        self._made_again = 0
        """Up to here this attempt may not have made the versions that the servers have."""
        self.is_updating = False
        """True if a new version is there, and not yet in all servers."""
        self.heard_at = 0.0
        """When the trainer last announced a version, also one that is served already and was made once more."""
        self.current = 0
        """The newest version that was asked for; servers that come back get it."""
        self.update_seconds = 0.0
        """Time the last update took, over all servers."""
        self.paused_seconds = 0.0
        """For which of that the engines sampled nothing: the longest pause of a server."""
        self._updates: list[tuple[str, float, float]] = []

    def facts(self) -> dict[str, Any]:
        """Describe the servers: `wanted`, the version that all should serve, and who has which. Any thread."""
        servers = [
            {
                "url": s.url,
                "ready": s.ready,
                "version": s.version,
                "in_flight": s.in_flight,
                "loads": i in self._loading,
            }
            for i, s in enumerate(self._table.servers)
        ]
        return {"wanted": self.current, "servers": servers}

    def is_loading(self, index: int) -> bool:
        """Return whether a server loads weights now, or sleeps."""
        return self._asleep or self._locks[index].locked()

    async def prepare(self, version: int) -> None:
        """Start-up: every server answers and serves `version` (0: the base model), whatever it served before. One that
        is lost meanwhile gets it when it is back (`run`, `keep`).

        Raises OrchestratorError naming the server that is not ready by the deadline or refuses the version.
        """
        self.current = version
        if version > 0:  # the trainer publishes it anew where it was not beside the checkpoint
            try:
                await asyncio.to_thread(self._wait_for_first, version)
            except asyncio.CancelledError:
                self._closing = True  # or the thread would wait on
                raise
        wanted = [i for i in range(len(self._clients)) if i not in self._lost]
        await asyncio.gather(*(self._unless_dropped(i, self._prepare_one(i, version)) for i in wanted))
        await self._announce()

    def drain_updates(self) -> list[tuple[str, float, float]]:
        """Return the updates since the last call, and of each the engines' pause at its end, on the loop's clock."""
        found, self._updates = self._updates, []
        return found

    async def run(self) -> None:
        """Follow versions and watch servers until cancelled. Raises OrchestratorError when a server refuses one,
        FencedError when a newer attempt publishes them."""
        loop = asyncio.get_running_loop()

        def on_weights(_: dict[str, Any]) -> None:
            self.heard_at = loop_time()
            self._news.set()

        self._bus.subscribe("weights", in_loop(loop, on_weights))
        try:
            async with task_group() as tasks:
                tasks.create_task(self._follow(), name="follow-weights")
                self._watch(tasks)
        finally:
            self._closing = True

    async def keep(self) -> None:
        """Watch servers until cancelled, at the version that `prepare` gave them. Raises as `run`."""
        async with task_group() as tasks:
            self._watch(tasks)

    def _watch(self, tasks: asyncio.TaskGroup) -> None:
        """Look after every server by itself: one that hangs holds up no other."""
        for index in range(len(self._clients)):
            tasks.create_task(self._restore_forever(index), name=f"restore-server-{index}")
            tasks.create_task(self._check_forever(index), name=f"check-server-{index}")

    async def hold(self) -> int:
        """Let no server begin to load anything until `go_on`, once those that do have loaded.
        Returns the newest version that a server was given."""
        self._may_follow.clear()
        while self.is_updating or self._loading or any(lock.locked() for lock in self._locks):
            await asyncio.sleep(HOLD_LOOK_S)
        return self.current

    async def go_on(self, incarnation: int, step: int) -> None:
        """Follow the versions of another attempt, which begins with that of `step` and makes those after it once more:
        of them, only what is newer than what the servers have is news."""
        self._incarnation, self._due, self._announced = incarnation, step, -1
        self._made_again = self.current
        self.heard_at = loop_time()
        self._may_follow.set()
        self._news.set()
        await self._announce()

    async def sleep(self) -> None:
        """Put the engines to sleep until the next version, which wakes them. They are given no memory before that.
        Raises OrchestratorError: a server refuses, so that the trainer's memory would be taken."""
        self._asleep = True
        await asyncio.gather(*(self._sleep_one(index) for index in range(len(self._clients))))

    async def _sleep_one(self, index: int) -> bool:
        """Return whether a server sleeps now; one that does not answer does so when it is back (`_restore_server`)."""
        async with self._locks[index]:
            if not self._table.servers[index].ready and not await self._clients[index].health():
                return False
            try:
                await self._clients[index].sleep()
            except InferenceError as error:
                url = self._table.servers[index].url
                if error.status is not None and 400 <= error.status < 500:
                    raise OrchestratorError(
                        f"inference server {url} does not sleep, as inference.sleep wants: {error}"
                    ) from error
                logger.warning(f"inference server {url} did not go to sleep: {error}")
                self.report_error(index)
                return False
        return True

    def report_error(self, index: int) -> None:
        """Send nothing to a server for which an episode failed, until it was looked at."""
        if self._table.mark_suspect(index, loop_time()):
            logger.warning(f"inference server {self._table.servers[index].url} failed; looking at it")
        self._trouble[index].set()

    def drop(self, index: int) -> None:
        """Wait for nothing of a server whose node is gone, until it is back."""
        self._lost.add(index)
        self._set_aside(index, "is gone with its node")

    def leave(self, index: int) -> None:
        """Give a server no more episodes or versions: its node is about to go. What it plays may end before that."""
        self._set_aside(index, "is leaving, and gets no more episodes")

    def _set_aside(self, index: int, why: str) -> None:
        server = self._table.servers[index]
        server.is_absent = server.is_elastic
        if self._table.mark_suspect(index, loop_time()):
            logger.warning(f"inference server {server.url} {why}")
        loading = self._loading.get(index)
        if loading is not None:
            loading.cancel()
        self._on_change()

    async def _unless_dropped(self, index: int, load: Coroutine[Any, Any, None]) -> None:
        """Have a server load something, broken off by `drop`."""
        loading = asyncio.create_task(load, name=f"load-{index}")
        self._loading[index] = loading
        try:
            await asyncio.wait({loading})
            if not loading.cancelled():
                loading.result()
        finally:
            loading.cancel()
            if self._loading.get(index) is loading:
                del self._loading[index]

    async def _prepare_one(self, index: int, version: int) -> None:
        client, url = self._clients[index], self._table.servers[index].url
        try:
            if not await client.health():
                logger.info(f"waiting for inference server {url}, for {self._ready_timeout_s:g} s at most")
            await client.wait_ready(self._ready_timeout_s)
            found = await self._found(index)
            if version > 0:
                await client.update_weights(self._paths.weights_step(version), version, self._name)
            elif found != 0 or self._sleeps:  # of the base model this is no more than to wake it
                if found not in (0, NOTHING):
                    logger.info(f"{url} serves version {found} of an earlier run; back to the base model")
                await self._serve_base(client)
        except InferenceError as error:
            hint = _HINTS.get(error.status or 0, "")
            raise OrchestratorError(f"inference server {url} cannot serve version {version}: {error}{hint}") from error
        self._table.mark_ready(index, version)

    async def _found(self, index: int) -> int:
        """Return the version that a server has for this run; `NOTHING` where it does not know the run's name."""
        try:
            return await self._clients[index].policy_version(self._name)
        except InferenceError as error:
            if error.status == 404 and self._name != POLICY:
                return NOTHING
            raise

    async def _serve_base(self, client: InferenceClient) -> None:
        """Version 0: of the only run the model itself goes back to it."""
        await (client.reload_weights() if self._name == POLICY else client.serve_base(self._name))

    def _wait_for_first(self, version: int) -> None:
        try:
            wait_for_artifact(
                self._paths.weights_step(version),
                deadline_s=self._ready_timeout_s,
                bus=self._bus,
                topic="weights",
                key={"version": version},
                names=(),  # each engine checks all files before it loads them
                cancelled=lambda: self._closing,
            )
        except (ArtifactTimeout, ArtifactError) as error:
            raise OrchestratorError(f"weights version {version}, from which the run goes on: {error}") from error

    async def _follow(self) -> None:
        while True:
            version = await self._next_version()
            of_attempt = self._incarnation
            try:
                await asyncio.to_thread(self._wait_for, version)
            except WaitCancelled:
                await self._may_follow.wait()
                continue
            except (ArtifactTimeout, ArtifactError) as error:
                logger.warning(f"weights version {version} cannot be read yet: {error}")
                continue
            await self._may_follow.wait()
            if of_attempt != self._incarnation:
                continue
            await self.serve(version)

    async def serve(self, version: int) -> None:
        """Have the servers that are ready load a version; the others get it when they are back (`run`, `keep`).
        Raises OrchestratorError: a server refuses it."""
        start = loop_time()
        self.current, self.paused_seconds, self._asleep = version, 0.0, False
        self.is_updating = True
        self._on_change()
        await asyncio.gather(*(self._unless_dropped(i, self._load(i)) for i in self._table.ready_indices))
        self.is_updating = False
        end = loop_time()
        self.update_seconds = end - start
        self._updates += [("load", start, end), ("pause", max(start, end - self.paused_seconds), end)]
        await self._announce()

    def _wait_for(self, version: int) -> None:
        wait_for_artifact(
            self._paths.weights_step(version),
            deadline_s=ARTIFACT_DEADLINE_S,
            bus=self._bus,
            topic="weights",
            key={"version": version},
            names=(),  # each engine checks all files before it loads them
            min_incarnation=0 if version == self._due else self._incarnation,
            cancelled=lambda: self._closing or not self._may_follow.is_set(),
        )

    async def _next_version(self) -> int:
        """Return the newest version above the current one, as soon as there is one."""
        pause = LISTING_PAUSE_S[0]
        while True:
            self._news.clear()
            await self._may_follow.wait()
            if self._due > self.current:
                return self._due
            message = self._bus.latest("weights") or {}
            announced = message.get("version")
            if isinstance(announced, int) and announced > self.current:
                return announced
            listed = await asyncio.to_thread(newest_of_attempt, self._paths, self.current, self._incarnation)
            if listed is not None:
                return listed
            await wait_for_event(self._news, pause)
            pause = min(pause * 1.5, LISTING_PAUSE_S[1])

    async def _load(self, index: int) -> None:
        """Bring one server to the current version; what goes wrong makes it suspect, a refusal ends the run."""
        async with self._locks[index]:
            loaded = None
            while loaded != self.current:  # the next one may come while a server that is back gets this one
                loaded = self.current
                if not await self._load_version(index, loaded):
                    return
            self._table.mark_ready(index, self.current)

    async def _load_version(self, index: int, version: int) -> bool:
        """Return whether a server has it now, or whether it need not any more."""
        try:
            if version > 0:
                folder = self._paths.weights_step(version)
                answer = await self._clients[index].update_weights(folder, version, self._name)
                paused = answer.get("seconds", {}).get("paused", 0.0)
                self.paused_seconds = max(self.paused_seconds, float(paused))
            else:
                await self._serve_base(self._clients[index])
        except InferenceError as error:
            if version != self.current:
                return True
            url = self._table.servers[index].url
            if error.status is not None and 400 <= error.status < 500:
                await self._say_if_fenced()  # a newer attempt may have removed the version
                raise OrchestratorError(f"inference server {url} refuses version {version}: {error}") from error
            before, self._unloaded[index] = self._unloaded.get(index), (version, str(error))
            said = "DEBUG" if before == self._unloaded[index] else "WARNING"  # it is asked again every few seconds
            logger.log(said, f"inference server {url} did not load version {version}: {error}")
            self.report_error(index)
            return False
        self._unloaded.pop(index, None)
        return True

    async def _say_if_fenced(self) -> None:
        """Raise an OrchestratorError where a newer attempt of the run has begun."""
        try:
            await asyncio.to_thread(check_incarnation, self._paths, self._incarnation)
        except FencedError as error:
            raise OrchestratorError(str(error)) from error
        except (OSError, StoreError) as error:
            logger.warning(f"whether a newer attempt has begun is unknown: {error}")

    async def _announce(self) -> None:
        """Tell which version is served, and hold on to its files: a server that restarts needs them again."""
        served = self._table.served_version
        if served > self._announced and self._table.ready_indices:
            self._announced = served
            await asyncio.to_thread(set_floor, self._paths, READER, served)
            self._bus.publish("served", version=served)
            logger.debug(f"version {served} is served")
        self._on_change()

    async def _restore_forever(self, index: int) -> None:
        server, warned = self._table.servers[index], loop_time()
        while True:
            await wait_for_event(self._trouble[index], PROBE_PAUSE_S)
            self._trouble[index].clear()
            if server.ready or server.is_absent:
                warned = loop_time()
            elif await self._restore_server(index):
                await self._announce()
            else:
                if loop_time() - warned > DOWN_WARNING_S:
                    warned = loop_time()
                    version, why = self._unloaded.get(index, (0, ""))
                    why = f", which did not load version {version}: {why}" if why else ""
                    logger.warning(f"still waiting for {server.url}{why}")
                await asyncio.sleep(PROBE_PAUSE_S)

    async def _restore_server(self, index: int) -> bool:
        """Look at a server that is not ready. Returns whether it is ready now."""
        client, server = self._clients[index], self._table.servers[index]
        if not await client.health() or (self._asleep and not await self._sleep_one(index)):
            return False
        is_there = await asyncio.to_thread(self._is_there, self.current)
        try:
            found = await self._found(index)  # last: another may have taken its place while the disk was waited for
        except InferenceError as error:
            logger.debug(f"{server.url} is not ready: {error}")
            return False
        if not self._may_follow.is_set() or self._locks[index].locked():
            return False  # locked: what it has begun to load makes it ready, or it is looked at again
        if found == self.current:
            self._table.mark_ready(index, found)
        elif self._asleep:
            return False  # loading would wake it on the trainer's GPU; the next version is near
        elif not is_there:
            return False  # the trainer makes it once more
        else:
            said = "DEBUG" if self._unloaded.get(index, (NOTHING, ""))[0] == self.current else "INFO"
            logger.log(said, f"{server.url} is back with version {found}; it gets version {self.current}")
            await self._unless_dropped(index, self._load(index))
        if server.ready:
            seconds = loop_time() - server.not_ready_since
            logger.info(f"inference server {server.url} takes episodes again after {seconds:.1f} s")
        return server.ready

    def _is_there(self, version: int) -> bool:
        """Return whether a version lies there, as far as can be told now; it is asked again."""
        with contextlib.suppress(OSError):
            return version > self._made_again or version == 0 or version in list_versions(self._paths)
        return False

    async def _check_forever(self, index: int) -> None:
        while True:
            await asyncio.sleep(CHECK_PAUSE_S)
            if self._table.servers[index].ready:
                await self._check(index)

    async def _check(self, index: int) -> None:
        """Find a server that restarted unnoticed: it serves another version than the one it was given."""
        if self._locks[index].locked():
            return
        before = self._table.servers[index].version
        try:
            found = await self._found(index)
        except InferenceError:
            self.report_error(index)
            return
        if found != before and before == self._table.servers[index].version and not self._locks[index].locked():
            logger.warning(f"{self._table.servers[index].url} serves version {found} instead of {before}")
            self.report_error(index)


async def wait_for_event(event: asyncio.Event, timeout_s: float) -> None:
    """Until the event is set or the time is over."""
    try:
        async with asyncio.timeout(timeout_s):
            await event.wait()
    except TimeoutError:
        return
