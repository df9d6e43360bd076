"""The question to an orchestrator whose trainer has crashed: does it write nothing until the next attempt begins?

Asked before the attempt is over and the run directory goes back to a checkpoint. An orchestrator that does not answer
in time, or cannot, ends with its attempt, and the next one starts its own.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any

from loguru import logger

from prime_hpc.config import Experiment
from prime_hpc.supervisor.roles.kept_roles import Held, KeptRoles
from prime_hpc.supervisor.roles.process import Role

HOLD_S = 10.0
"""So long a batch that is just being written may take, and the answer."""
TICK_S = 0.02


def may_outlive(experiment: Experiment) -> bool:
    """Return whether the run's orchestrator may outlive an attempt: engines that sleep on the trainer's GPU, and what a
    bench measures, begin anew with it."""
    is_bench = experiment.orchestrator.bench or experiment.trainer.bench
    return experiment.kind == "rl" and not experiment.engines_sleep and not is_bench


class Hold:
    """The question, of one attempt, and its answer."""

    def __init__(self, incarnation: int, publish: Callable[..., None]) -> None:
        """`incarnation`: of the attempt; `publish`: of its hubs."""
        self._incarnation, self._publish = incarnation, publish
        self._answer: dict[str, Any] | None = None

    def on_message(self, payload: dict[str, Any]) -> None:
        """Take an answer, in the hub's thread."""
        if payload.get("incarnation") == self._incarnation:
            self._answer = payload

    def ask(self, roles: Sequence[Role], lost: Sequence[str], left: KeptRoles) -> None:
        """Add the orchestrator to what the attempt leaves, if it holds.

        Args:
            roles: of the attempt.
            lost: nodes that are gone.
            left: the servers.
        """
        found = [role for role in roles if role.spec.name == "orchestrator"]
        if len(found) != 1 or found[0].state != "ready" or set(found[0].hosts) & set(lost):
            return
        (role,) = found
        self._publish("hold", incarnation=self._incarnation)
        end = left.clock.now() + HOLD_S
        while self._answer is None and role.running and left.clock.now() < end:
            left.pulse.tick()
            time.sleep(TICK_S)
        if self._answer is None:
            logger.info(f"the orchestrator did not answer within {HOLD_S:g} s; it starts again too")
            return
        left.add_orchestrator(role, Held(int(self._answer["first_batch"]), int(self._answer["last_batch"])))
