"""Questions to the roles that are well, before an attempt ends because another one crashed or lost a node.

To a trainer: to save. The steps since its checkpoint would be taken again, with rollouts that were sampled again. One
of many runs saves each of them as it ends, which it is told to.

To an orchestrator whose trainer has crashed: does it write nothing until the next attempt begins? It is asked before
the run directory goes back to a checkpoint. One that does not answer in time, or cannot, ends with its attempt, and the
next one starts its own.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any

from loguru import logger

from prime_hpc.config import Experiment
from prime_hpc.supervisor.heartbeat import Pulse
from prime_hpc.supervisor.roles.led_roles import Held, LedRoles
from prime_hpc.supervisor.roles.process import Role

LEAST_S = 30.0
"""A step and a save may take so long though those before were quicker."""
TICK_S = 0.05
HOLD_S = 10.0
"""So long a batch that is just being written may take, and the answer."""
HOLD_TICK_S = 0.02


class SaveFirst:
    """Asks a trainer for the save, and waits."""

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
        *,
        many: bool = False,
    ) -> None:
        """Have the trainer save, where it can.

        Args:
            crashed: the one of them because of which it ends.
            needs_s: what a step and a save took lately, at most.
            left_s: to the job's end; None: unknown.
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
        if many:
            self._publish("stop", reason=f"{crashed.spec.label} has crashed", save=True)
        else:
            self._publish("save", id=self._request)

        def is_saved() -> bool:
            return trainer.has_reported("done") if many else self._is_saved

        end = time.monotonic() + budget_s
        while not is_saved() and trainer.running and time.monotonic() < end and not is_over():
            pulse.tick()
            time.sleep(TICK_S)
        if not is_saved():
            logger.warning("the trainer did not save in time: the run goes on from its last checkpoint")


def may_outlive(experiment: Experiment) -> bool:
    """Return whether the run's orchestrator may outlive an attempt: engines that sleep on the trainer's GPU, and what a
    bench measures, begin anew with it."""
    is_bench = experiment.orchestrator.bench or experiment.trainer.bench
    return experiment.kind == "rl" and not experiment.engines_sleep and not is_bench


class Hold:
    """Asks an orchestrator to hold; of one attempt."""

    def __init__(self, incarnation: int, publish: Callable[..., None]) -> None:
        self._incarnation, self._publish = incarnation, publish
        self._answer: dict[str, Any] | None = None

    def on_message(self, payload: dict[str, Any]) -> None:
        """Take an answer, in the hub's thread."""
        if payload.get("incarnation") == self._incarnation:
            self._answer = payload

    def ask(self, roles: Sequence[Role], lost: Sequence[str], left: LedRoles) -> None:
        """Add the orchestrator to what the attempt leaves, if it holds."""
        found = [role for role in roles if role.spec.name == "orchestrator"]
        if len(found) != 1 or found[0].state != "ready" or set(found[0].hosts) & set(lost):
            return
        (role,) = found
        self._publish("hold", incarnation=self._incarnation)
        end = left.clock.now() + HOLD_S
        while self._answer is None and role.running and left.clock.now() < end:
            left.pulse.tick()
            time.sleep(HOLD_TICK_S)
        if self._answer is None:
            logger.info(f"the orchestrator did not answer within {HOLD_S:g} s; it starts again too")
            return
        left.add_orchestrator(role, Held(int(self._answer["first_batch"]), int(self._answer["last_batch"])))
