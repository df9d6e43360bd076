"""Requests that come in one after the other reach the engine together. For CPU machines; used by `tokens`.

An engine's step costs 2 ms on a CPU before the first token of it is computed, and a small model's step little more.
Episodes that start together (a batch opens when new weights are served) still ask one by one, every few milliseconds:
an engine that begins with the first of them makes many steps with few sequences each, at the expense of the trainer
that shares its cores: of 128 samples that began together it made 163 steps, and 26 with requests that wait. On GPUs
nothing waits.
"""

import asyncio

GAP_S = 0.02
"""So long without another request, and those that wait go on."""
LIMIT_S = 0.25
"""Longest wait of the first of them."""


class Gathering:
    """Holds requests back while more are coming. All calls from one event loop."""

    def __init__(self, gap_s: float = GAP_S, limit_s: float = LIMIT_S) -> None:
        self._gap_s, self._limit_s = gap_s, limit_s
        self._go: asyncio.Event | None = None
        self._began = self._last = 0.0

    async def join(self) -> None:
        """Return when no other request came for `gap_s`, at the latest `limit_s` after the first that waits."""
        loop = asyncio.get_running_loop()
        self._last = loop.time()
        if self._go is None:
            self._go, self._began = asyncio.Event(), self._last
            loop.call_later(min(self._gap_s, self._limit_s), self._look)
        await self._go.wait()

    def _look(self) -> None:
        loop = asyncio.get_running_loop()
        due = min(self._last + self._gap_s, self._began + self._limit_s)
        if loop.time() < due:
            loop.call_at(due, self._look)
            return
        assert self._go is not None
        self._go.set()
        self._go = None
