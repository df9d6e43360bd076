"""Batches made ahead in a thread, so that the device never waits for text.

The thread of every rank takes part in the stream's collectives; before each batch all agree to go on, so that `close`
on every rank ends all of them at the same place.
"""

import queue
import threading

from loguru import logger

from prime_hpc.runtime.clock import AwakeClock
from prime_hpc.trainer.data.messages import SFTDataError
from prime_hpc.trainer.data.stream import Batch, SampleStream
from prime_hpc.trainer.threads import rank_thread

_LOOK_S = 0.2
_JOIN_S = 30.0


class Prefetcher:
    """Runs a stream in a thread. `take` and `close` belong to the main thread of every rank alike."""

    def __init__(self, stream: SampleStream, depth: int, timeout_s: float) -> None:
        """Args:
        stream: to run; nobody else may from now on.
        depth: batches made ahead.
        timeout_s: longest wait of `take`.
        """
        self._stream, self._timeout_s = stream, timeout_s
        self._made: queue.Queue[Batch | BaseException | None] = queue.Queue(depth)
        self._ends = threading.Event()
        self._thread = rank_thread(self._run, name="sft-data")
        self._thread.start()

    def take(self) -> Batch | None:
        """Return the next batch; None after the last.
        Raises SFTDataError: what the stream raised, or no batch within `timeout_s`."""
        clock = AwakeClock(max_gap_s=5.0)
        end = clock.now() + self._timeout_s
        while True:
            try:
                made = self._made.get(timeout=1.0)
            except queue.Empty:
                if not self._thread.is_alive() and self._made.empty():
                    raise SFTDataError("the thread that makes batches has ended") from None
                if clock.now() > end:
                    raise SFTDataError(
                        f"no batch within trainer.batch_timeout_s = {self._timeout_s:g} s: is the file system of the "
                        "data slow, or sft.data.num_workers too small?"
                    ) from None
                continue
            if isinstance(made, BaseException):
                raise made
            return made

    def close(self) -> None:
        """End the thread. Every rank calls it at the same step; after a failure nobody need."""
        self._ends.set()
        self._thread.join(_JOIN_S)
        if self._thread.is_alive():
            logger.warning(f"the thread that makes batches did not end within {_JOIN_S:g} s")

    def _run(self) -> None:
        try:
            while self._stream.agree(not self._ends.is_set()):
                batch = self._stream.next()
                self._put(batch)
                if batch is None:
                    return
        except Exception as error:  # noqa: BLE001 - raised by `take` in the main thread
            self._put(error)

    def _put(self, made: Batch | BaseException | None) -> None:
        while not self._ends.is_set():
            try:
                self._made.put(made, timeout=_LOOK_S)
                return
            except queue.Full:
                continue
