"""How many episodes may be in flight, from the engines' own figures: their queue, their KV cache, their preemptions.

Too few leave engines without work. Too many overflow the KV cache: an engine then throws requests out and computes them
again. The best number depends on the model, on lengths that change as the policy learns, and on the time that tools
and rewards take, in which an episode asks nothing of the engine.

Each server has a limit of its own. It grows while the server's queue is empty and its cache has room: as far as the
cache's use says, at most twice. A queue that is never empty is taken off, but for a tenth of what runs; and up to a
quarter of all when many requests are thrown out, above which number it then only feels its way. Between two changes
lie two episodes' length, since the cache shows an episode's need at its end.
"""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field

from loguru import logger

from prime_hpc.client.figures import KV_USE
from prime_hpc.client.inference import InferenceError
from prime_hpc.config.sections.orchestrator import AdaptiveConcurrencyConfig
from prime_hpc.orchestrator.rollouts.dispatcher import Dispatcher
from prime_hpc.orchestrator.rollouts.engine_figures import EngineFigures
from prime_hpc.orchestrator.rollouts.servers import ServerTable
from prime_hpc.runtime.event_loops import loop_time

EVERY_S = 1.0
"""Between two questions to each server."""
WINDOW_S = (5.0, 120.0)
"""Shortest and longest time between two changes of a limit; within that two episodes' length: in the first those that
came with the last change grow up."""
LEAST_LOOKS = 3
"""Answers of the server between two changes."""
KV_TARGET = 0.9
"""Share of the KV cache to fill: the rest is for sequences that grow longer than those before."""
MOST_GROWTH, BLIND_GROWTH, PROBE = 2.0, 1.5, 1.03
"""Growth in one window: at most; of a server that does not tell its cache's use; above what once was too much, and
where the cache is full at times."""
TOLERATED, CUT = 0.2, 0.75
"""Requests that may be thrown out in one window, of those that run: each costs the prefill of what it had. Above that
the limit is cut by half the share, to this much of it at least."""
FORGET = 1.2
"""So far above what once was too much it no longer is: episodes have grown shorter."""
RESERVE = 0.1
"""Requests that may wait in a server's queue, beside those that run: the next to run is there already."""
NEARLY = 0.9
"""A limit binds where so much of it is in flight: others are held back by the batch or the versions."""


@dataclass
class ServerLimit:
    """Episodes in flight that one server may have. Pure: `look` is told all that it goes by."""

    limit: float
    least: float
    most: float
    since: float
    """When the window began, on any clock."""
    _ceiling: float = float("inf")
    """A limit that once was too much."""
    _num_looks: int = 0
    _kv_uses: list[float] = field(default_factory=list)
    _queue_least: float = float("inf")
    _running_peak: float = 0.0
    _flight_peak: int = 0
    _preempted: float = 0.0
    _settles_until: float = float("-inf")
    """After a cut those that were too many are still ending."""

    def look(self, figures: Mapping[str, float], preempted: float, in_flight: int, window_s: float, now: float) -> None:
        """Take a server's figures in, and move the limit where they ask for it.

        Args:
            figures: `running` and `waiting`, requests; `kv_use`, 0 to 1, where the server tells it.
            preempted: requests thrown out since the last look.
            in_flight: episodes of ours at this server.
            window_s: least time between two changes.
            now: on the clock of `since`.
        """
        self._num_looks += 1
        self._kv_uses += [figures[KV_USE]] if KV_USE in figures else []
        self._queue_least = min(self._queue_least, figures["waiting"])
        self._running_peak = max(self._running_peak, figures["running"])
        self._flight_peak = max(self._flight_peak, in_flight)
        if now >= self._settles_until:
            self._preempted += preempted
        if self._preempted_share > TOLERATED:
            self._ceiling, self._settles_until = min(self.limit, max(1, in_flight)), now + window_s
            self._move(min(self._ceiling * max(CUT, 1 - self._preempted_share / 2), self._enough_for_queue()), now)
        elif now - self.since >= window_s and self._num_looks >= LEAST_LOOKS:
            self._move(self._wanted(), now)

    @property
    def _preempted_share(self) -> float:
        return self._preempted / max(1.0, self._running_peak)

    def _wanted(self) -> float:
        """Return the limit that a whole window asks for in which few requests were thrown out."""
        enough = self._enough_for_queue()
        if enough < self.limit or self._queue_least > 0 or self._flight_peak < NEARLY * self.limit:
            return enough
        growth = self._growth()
        if growth <= 1:
            return self.limit
        if self.limit > FORGET * self._ceiling:
            self._ceiling = float("inf")
        grown = max(self.limit * growth, self.limit + 1)
        return min(grown, max(NEARLY * self._ceiling, self.limit * PROBE))

    def _enough_for_queue(self) -> float:
        """Return the episodes in flight with which so many requests run as now and a tenth more wait. Those that ask
        nothing at the moment stay as many: they come and go with the requests that end."""
        kept = max(1.0, RESERVE * self._running_peak)
        if self._queue_least <= kept:
            return self.limit
        return min(self.limit, self._flight_peak - self._queue_least + kept)

    def _growth(self) -> float:
        """Return by how much the cache has room: by far while even its fullest moment has, else step by step."""
        if not self._kv_uses:
            return BLIND_GROWTH
        by_peak = KV_TARGET / max(*self._kv_uses, 1e-3)
        if by_peak >= PROBE:
            return min(MOST_GROWTH, by_peak)
        mean = sum(self._kv_uses) / len(self._kv_uses)
        return PROBE if mean < KV_TARGET and self._preempted_share <= TOLERATED / 2 else 1.0

    def _move(self, limit: float, now: float) -> None:
        self.limit = min(self.most, max(self.least, limit))
        self.since, self._num_looks, self._kv_uses, self._queue_least = now, 0, [], float("inf")
        self._running_peak, self._flight_peak, self._preempted = 0.0, 0, 0.0


class AdaptiveConcurrency:
    """Asks every server for its figures and sets the dispatcher's room by them, from `run` on."""

    def __init__(
        self, config: AdaptiveConcurrencyConfig, dispatcher: Dispatcher, table: ServerTable, engines: EngineFigures
    ) -> None:
        """Nothing is asked yet.

        Args:
            config: bounds, over all servers.
            dispatcher: begins with the room that it has.
            table: the servers; each one's limit is kept there, where the next group's server is chosen.
        """
        self._dispatcher, self._table, self._engines, self._most = dispatcher, table, engines, config.most
        dispatcher.max_concurrent = min(max(dispatcher.max_concurrent, config.least), config.most)
        count, now = len(table.servers), loop_time()
        numbers = (dispatcher.max_concurrent, config.least, config.most)
        start, lowest, highest = (max(1.0, number / count) for number in numbers)
        self._limits = [ServerLimit(start, lowest, highest, now) for _ in table.servers]
        self._warned: set[int] = set()

    async def run(self) -> None:
        """Look every second, until cancelled. Raises what the dispatcher's `pump` does."""
        while True:
            await asyncio.sleep(EVERY_S)
            await asyncio.gather(*(self._look(index) for index in range(len(self._limits))))
            servers = self._table.servers
            for server, limit in zip(servers, self._limits, strict=True):
                server.limit = limit.limit
            ready = [limit.limit for server, limit in zip(servers, self._limits, strict=True) if server.ready]
            if ready:
                self._dispatcher.max_concurrent = max(1, min(self._most, round(sum(ready))))
                self._dispatcher.pump()

    def drain(self) -> dict[str, float]:
        """Return the engines' figures since the last call, and `queue/limit`: episodes that may be in flight now."""
        return {"queue/limit": self._dispatcher.max_concurrent} | self._engines.drain()

    async def _look(self, index: int) -> None:
        server = self._table.servers[index]
        try:
            found = await self._engines.look(index)
        except InferenceError as error:
            self._warn(index, server.url, error)
            return
        if found is not None:
            figures, preempted = found
            shortest, longest = WINDOW_S
            window_s = min(longest, max(shortest, 2 * self._dispatcher.load.episode_s))
            self._limits[index].look(figures, preempted, server.in_flight, window_s, loop_time())

    def _warn(self, index: int, url: str, why: InferenceError) -> None:
        if index not in self._warned:
            self._warned.add(index)
            logger.warning(f"{url} does not tell how busy it is, so that its share of episodes stays: {why}")
