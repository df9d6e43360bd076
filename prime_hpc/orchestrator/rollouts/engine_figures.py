"""Figures of the engines for a run's metrics, from their own `/metrics`: queue, KV cache, preemptions, drafts.

A server that tells nothing (vLLM's statistics are off, an API) has no figures.
"""

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from prime_hpc.client.figures import KV_USE
from prime_hpc.client.inference import InferenceClient, InferenceError
from prime_hpc.orchestrator.rollouts.servers import ServerTable

EVERY_S = 5.0
"""Between two questions to each server."""
LOOKS_AFTER_UPDATE = 2
"""In which preemptions count for nothing: an update of the weights throws all requests out by itself, and their count
comes with the engine's next step."""


@dataclass
class _Watch:
    """One server between two looks."""

    version: int = -1
    skip: int = 0
    preempted: float | None = None
    drafts: tuple[float, float] | None = None
    """Tokens drafted, and accepted, since the server's start."""


@dataclass
class _Sums:
    """Of all servers, since the last row of metrics."""

    kv_uses: list[float] = field(default_factory=list)
    waiting: list[float] = field(default_factory=list)
    preempted: list[float] = field(default_factory=list)
    drafted: float = 0.0
    accepted: float = 0.0


class EngineFigures:
    """Asks servers for their figures and keeps what a row of metrics says of them."""

    def __init__(
        self, table: ServerTable, clients: Sequence[InferenceClient], is_loading: Callable[[int], bool]
    ) -> None:
        """Nothing is asked yet. `clients`: of the servers, in the table's order."""
        self._table, self._clients, self._is_loading = table, clients, is_loading
        self._watches = [_Watch() for _ in clients]
        self._sums = _Sums()

    async def run(self) -> None:
        """Look every few seconds, until cancelled."""
        while True:
            await asyncio.sleep(EVERY_S)
            await asyncio.gather(*map(self._try_look, range(len(self._clients))))

    async def _try_look(self, index: int) -> None:
        with contextlib.suppress(InferenceError):
            await self.look(index)

    async def look(self, index: int) -> tuple[dict[str, float], float] | None:
        """Ask a server. Returns its figures and the requests thrown out since the last look; None: it does not sample
        now. Raises InferenceError: it does not tell `running` and `waiting`."""
        server, watch = self._table.servers[index], self._watches[index]
        if not self._is_sampling(index):
            watch.skip = LOOKS_AFTER_UPDATE
            return None
        version = server.version
        figures = await self._clients[index].load()
        if not {"running", "waiting"} <= figures.keys():
            raise InferenceError("its /metrics names neither requests that run nor any that wait")
        count = figures.get("preempted", 0.0)
        before, watch.preempted = watch.preempted, count
        if version != watch.version or not self._is_sampling(index) or server.version != version:
            watch.version, watch.skip = server.version, LOOKS_AFTER_UPDATE
        preempted = 0.0 if before is None or watch.skip > 0 else max(0.0, count - before)
        watch.skip = max(0, watch.skip - 1)
        self._sums.kv_uses += [figures[KV_USE]] if KV_USE in figures else []
        self._sums.waiting.append(figures["waiting"])
        self._sums.preempted += [preempted] if "preempted" in figures else []
        self._add_drafts(watch, figures)
        return figures, preempted

    def _add_drafts(self, watch: _Watch, figures: dict[str, float]) -> None:
        now = figures.get("drafted", 0.0), figures.get("accepted", 0.0)
        before, watch.drafts = watch.drafts, now
        if before is None:
            return
        if now[0] < before[0]:  # the server was started again
            before = (0.0, 0.0)
        self._sums.drafted += now[0] - before[0]
        self._sums.accepted += now[1] - before[1]

    def drain(self) -> dict[str, float]:
        """Return the figures since the last call; those that no server told are left out.

        `engines/kv_use`: the fullest KV cache, 0 to 1. `engines/waiting`: requests in the servers' queues, mean over
        looks and servers. `engines/preempted`: requests that were thrown out for want of room.
        `engines/draft_acceptance`: the share of drafted tokens that were accepted.
        """
        sums, self._sums = self._sums, _Sums()
        if not sums.waiting:
            return {}
        row = {"engines/waiting": sum(sums.waiting) / len(sums.waiting)}
        row |= {"engines/preempted": sum(sums.preempted)} if sums.preempted else {}
        row |= {"engines/draft_acceptance": sums.accepted / sums.drafted} if sums.drafted else {}
        return row | ({"engines/kv_use": max(sums.kv_uses)} if sums.kv_uses else {})

    def _is_sampling(self, index: int) -> bool:
        return self._table.servers[index].ready and not self._is_loading(index)
