"""A last save of a trainer that is well, before an attempt ends because another role crashed.

The steps since its checkpoint would be taken again, with rollouts that were sampled again.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any

from loguru import logger

from prime_hpc.supervisor.heartbeat import Pulse
from prime_hpc.supervisor.roles.process import Role

LEAST_S = 30.0
"""A step and a save may take so long though those before were quicker."""
TICK_S = 0.05


class SaveFirst:
    """Asks for the save, and waits."""

    def __init__(self, request: int, publish: Callable[..., None]) -> None:
        """`request`: number of the save, like no other of the run; `publish`: of the hubs."""
        self._request, self._publish = request, publish
        self._is_saved = False

    def on_message(self, payload: dict[str, Any]) -> None:
        """Take a "saved", in the hub's thread."""
        self._is_saved = self._is_saved or self._request in (payload.get("ids") or ())

    def ask(
        self,
        roles: Sequence[Role],
        crashed: Role,
        needs_s: float,
        left_s: float | None,
        pulse: Pulse,
        is_over: Callable[[], bool],
    ) -> None:
        """Have the trainer save, where it can.

        Args:
            roles: of the attempt.
            crashed: the one of them because of which it ends.
            needs_s: what a step and a save took lately, at most.
            left_s: to the job's end; None: unknown.
            pulse: of the supervisor.
            is_over: whether somebody wants the attempt to end at once.
        """
        found = [role for role in roles if role.spec.name == "trainer" and role is not crashed]
        if len(found) != 1 or found[0].state != "ready":
            return
        (trainer,) = found
        budget_s = max(LEAST_S, 2 * needs_s)
        if left_s is not None:
            budget_s = min(budget_s, left_s - needs_s)
        logger.info(f"the trainer saves before the attempt ends (at most {max(0.0, budget_s):.0f} s)")
        self._publish("save", id=self._request)
        end = time.monotonic() + budget_s
        while not self._is_saved and trainer.running and time.monotonic() < end and not is_over():
            pulse.tick()
            time.sleep(TICK_S)
        if not self._is_saved:
            logger.warning("the trainer did not save in time: the run goes on from its last checkpoint")
