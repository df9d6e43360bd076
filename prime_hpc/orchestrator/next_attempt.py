"""An orchestrator that outlives a crash of its trainer: it holds, and goes on as a part of the run's next attempt.

    supervisor             orchestrator
      hold      ------->   what is being written or loaded is finished, then nothing more
                <-------   held: the newest version that a server was given, the batches that it can commit again
      (the run directory goes back to the newest checkpoint, the attempt begins, its hub opens)
      go_on     ------->   moves to that hub, commits the batches after that step once more, follows new versions

Rollouts go on all the while. The trainer takes the steps after its checkpoint again, with the batches that it had, and
waits for no rollout. The versions that come of them are those that the servers have, but for the order of sums where
the device leaves that open; they are not loaded again, and tokens keep the log-probabilities with which they were
sampled. Where the supervisor finds that nothing fits, the process is ended as ever.
"""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from loguru import logger

from prime_hpc.orchestrator.batching.batch_writer import BatchWriter
from prime_hpc.orchestrator.parts import Parts
from prime_hpc.orchestrator.rollouts.carried import GroupCarrier
from prime_hpc.orchestrator.weight_sync import WeightSync
from prime_hpc.runtime.event_loops import in_loop


class NextAttempt:
    """Listens for the supervisor's two messages, on behalf of a loop."""

    def __init__(
        self,
        parts: Parts,
        weights: WeightSync,
        writer: BatchWriter,
        carrier: GroupCarrier,
        fail: Callable[[Exception], None],
    ) -> None:
        """`fail(error)` has the loop raise what went wrong here."""
        self._parts, self._weights, self._writer, self._carrier = parts, weights, writer, carrier
        self._fail = fail
        self._incarnation = parts.incarnation
        self._is_held = False
        self._tasks: set[asyncio.Task[None]] = set()

    def listen(self, loop: asyncio.AbstractEventLoop) -> None:
        """From now on. An orchestrator that was started by hand, or measures, has no next attempt."""
        if self._incarnation <= 0:
            return
        self._parts.bus.subscribe("hold", in_loop(loop, lambda message: self._begin(self._hold(message))))
        self._parts.bus.subscribe("go_on", in_loop(loop, lambda message: self._begin(self._go_on(message))))

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work, name="next-attempt")
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            assert isinstance(error, Exception)
            self._fail(error)

    async def _hold(self, message: dict[str, Any]) -> None:
        if self._is_held or message["incarnation"] != self._incarnation:
            return
        self._is_held = True
        logger.info("the trainer has crashed: rollouts go on, and nothing is written until its next attempt begins")
        version = await self._weights.hold()
        first, last = await self._writer.hold()
        self._parts.bus.publish(
            "held", incarnation=self._incarnation, version=version, first_batch=first, last_batch=last
        )

    async def _go_on(self, message: dict[str, Any]) -> None:
        incarnation, step = message["incarnation"], message["step"]
        if not self._is_held or incarnation <= self._incarnation:
            return
        self._is_held, self._incarnation = False, incarnation
        self._parts.bus.move(message["hub"], incarnation)
        self._parts.status.move(incarnation)
        self._carrier.begin_attempt(incarnation)
        if self._parts.traces is not None:
            self._parts.traces.begin_attempt(incarnation)
        again = await self._writer.go_on(incarnation, step)
        await self._weights.go_on(incarnation, step)
        which = f"; batches {again[0]} to {again[-1]} are written once more" if again else ""
        logger.info(f"goes on in the next attempt (incarnation {incarnation}), after step {step}{which}")
