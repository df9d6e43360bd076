"""Acts on what the supervisor says of servers: one is lost with its node, is about to be, or is being started at
another address."""

import asyncio
from collections.abc import Callable
from typing import Any

from loguru import logger

from prime_hpc.config import Experiment
from prime_hpc.config.engine_groups import sampling_role
from prime_hpc.orchestrator.parts import Parts
from prime_hpc.orchestrator.rollouts.dispatcher import Dispatcher
from prime_hpc.orchestrator.rollouts.servers import ServerTable
from prime_hpc.orchestrator.weight_sync import WeightSync
from prime_hpc.runtime.event_loops import in_loop


class ServerNews:
    """Listens on behalf of a loop."""

    def __init__(
        self,
        exp: Experiment,
        parts: Parts,
        table: ServerTable,
        weights: WeightSync,
        dispatcher: Dispatcher,
        fail: Callable[[Exception], None],
    ) -> None:
        """`fail(error)` has the loop raise what went wrong here."""
        self._role, self._parts, self._table = sampling_role(exp), parts, table
        self._weights, self._dispatcher, self._fail = weights, dispatcher, fail

    def listen(self, loop: asyncio.AbstractEventLoop) -> None:
        """From now on, and to the last word of each server so far."""
        self._parts.bus.subscribe("server", in_loop(loop, self._hear))

    def _hear(self, news: dict[str, Any]) -> None:
        """In the event loop, which would only log what this raises."""
        try:
            self.act(news)
        except Exception as error:  # noqa: BLE001 - the loop raises it
            self._fail(error)

    def act(self, news: dict[str, Any]) -> None:
        """Play the episodes of a lost server elsewhere, give one that is leaving no more; ask one that is started again
        at its new address."""
        index = news["index"]
        if news["role"] != self._role:
            teacher = self._parts.teacher if news["role"] == "teacher" else None
            if news["state"] != "lost" and teacher is not None and teacher.is_other:
                teacher.move(index, news["url"])
            return
        server = self._table.servers[index]
        if news["state"] == "lost":
            self._weights.drop(index)
            count = self._dispatcher.drop_server(index)
            logger.warning(f"{count} episodes of {server.url} are played again elsewhere")
            return
        if news["state"] == "leaving":
            self._weights.leave(index)
            return
        server.is_absent = False
        if news["url"] != server.url:
            server.url = news["url"]
            self._parts.clients[index].move(news["url"])
            for pool in (self._parts.train_pool, self._parts.eval_pool):
                if pool is not None:
                    pool.move_server(index, news["url"])
