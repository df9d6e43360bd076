"""Tell what the orchestrator waits for when somebody asks why nothing goes on (`runtime.activity.explain`)."""

import time
from collections.abc import Sequence
from typing import Any

from prime_hpc.orchestrator.rollouts.dispatcher import Dispatcher
from prime_hpc.orchestrator.weight_sync import WeightSync

MOST_EPISODES = 8


def explain(dispatcher: Dispatcher, weights: WeightSync, env_names: Sequence[str]) -> dict[str, Any]:
    """Describe the episodes that run for the longest, and the servers. Another thread may ask; nothing changes."""
    now = time.time()
    oldest = [
        {"env": env_names[source], "task": task, "server": server, "seconds": round(now - began, 1)}
        for source, task, server, began in dispatcher.oldest(MOST_EPISODES)
    ]
    return {"running": dispatcher.num_running, "oldest": oldest, **weights.facts()}
