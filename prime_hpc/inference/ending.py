"""The end of a server: a signal (orderly), or a failure with its reason."""

import asyncio
import signal
from collections.abc import Callable

from prime_hpc.inference.server_process import end_hard_soon

DRAIN_S = 2
"""Time for requests in flight to be answered with `abort` and for their connections to close."""
WATCH_S = 0.5


class End:
    """Set once; belongs to the event loop."""

    def __init__(self) -> None:
        self._event = asyncio.Event()
        self.failure: str | None = None

    def fail(self, reason: str) -> None:
        """End because of `reason`; the first one counts."""
        self.failure = self.failure or reason
        self._event.set()

    def watch_signals(self) -> None:
        """From now on SIGTERM and SIGINT end serving in order."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal)

    def _on_signal(self) -> None:
        if not self._event.is_set():
            end_hard_soon()
        self._event.set()

    async def wait(self, problem: Callable[[], str | None]) -> None:
        """Return when serving must end: told to, or `problem`, asked every `WATCH_S`, names one."""
        while not self._event.is_set():
            try:
                await asyncio.wait_for(self._event.wait(), WATCH_S)
            except TimeoutError:
                if found := problem():
                    self.fail(found)
