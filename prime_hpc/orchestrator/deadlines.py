"""The loop's waits for servers, weights and the end of any episode: how long, before the run ends with the reason, and
what for, when somebody asks why nothing goes on (`runtime.activity.explain`)."""

import time
from collections.abc import Sequence
from typing import Any

from prime_hpc.config import Experiment
from prime_hpc.orchestrator.errors import OrchestratorError
from prime_hpc.orchestrator.rollouts.dispatcher import Dispatcher
from prime_hpc.orchestrator.rollouts.servers import ServerTable
from prime_hpc.orchestrator.weight_sync import WeightSync

STALL_SLACK_S = 120.0
"""No episode ended for twice the longest episode deadline plus this: something is stuck."""
MOST_EPISODES = 8


class Deadlines:
    """Looked at by the loop whenever it has waited."""

    def __init__(
        self, exp: Experiment, ready_timeout_s: float, table: ServerTable, dispatcher: Dispatcher, weights: WeightSync
    ) -> None:
        """`ready_timeout_s`: for which all servers may be away."""
        config = exp.orchestrator
        envs = [*config.env, *(config.eval.env if config.eval else [])]
        self._no_end_s = 2 * max(env.timeout_s for env in envs) + STALL_SLACK_S
        self._weights_s, self._ready_s = config.weights_timeout_s, ready_timeout_s
        self._table, self._dispatcher, self._weights = table, dispatcher, weights
        self._waiting_since: float | None = None

    def check(self, what: str, version: int, reason: str, now: float) -> None:
        """Look at all of them.

        Args:
            what: is waited for, for the message.
            reason: `servers`, `weights` or `rollouts`: what it waits for.
            now: on the loop's clock.

        Raises:
            OrchestratorError: one has passed.
        """
        down = self._table.all_down_since(now)
        if down > self._ready_s:
            urls = ", ".join(server.url for server in self._table.servers)
            raise OrchestratorError(f"no inference server answered for {down:.0f} s ({urls}); see their logs")
        if reason != "weights":
            self._waiting_since = None
        elif self._waiting_since is None:
            self._waiting_since = now
        elif (waited := now - max(self._waiting_since, self._weights.heard_at)) > self._weights_s:
            raise OrchestratorError(
                f"waited {waited:.0f} s for weights version {version} ({what}); version "
                f"{self._table.served_version} is served; see the trainer's log (orchestrator.weights_timeout_s)"
            )
        if self._dispatcher.num_running and now - self._dispatcher.last_end > self._no_end_s:
            raise OrchestratorError(
                f"{self._dispatcher.num_running} episodes run and none ended for {self._no_end_s:.0f} s, though each "
                "has a deadline: an environment ignores cancellation"
            )


def explain(dispatcher: Dispatcher, weights: WeightSync, env_names: Sequence[str]) -> dict[str, Any]:
    """Describe the episodes that run for the longest, and the servers. Another thread may ask; nothing changes."""
    now = time.time()
    oldest = [
        {"env": env_names[source], "task": task, "server": server, "seconds": round(now - began, 1)}
        for source, task, server, began in dispatcher.oldest(MOST_EPISODES)
    ]
    return {"running": dispatcher.num_running, "oldest": oldest, **weights.facts()}
