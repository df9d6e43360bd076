"""`python -m tests.support.growth_alone NAME FOLDER`: what is no role's process, over many steps in one of its own.

Prints as JSON what has grown (see `tests.support.growth`).
"""

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerFast

from prime_hpc.config.sections.orchestrator import EnvConfig
from prime_hpc.observe.console import Console
from tests.integration.test_supervisor import role, supervise
from tests.support.env_world import World
from tests.support.growth import STEPS, Growth, limit_caches


def a_supervisor(run_dir: Path) -> list[str] | None:
    """Of a trainer that makes many steps."""
    growth, shown = Growth(STEPS), Console._show_step

    def show(console: Console, row: dict[str, Any]) -> None:
        shown(console, row)
        growth.look(row["step"])

    Console._show_step = show  # type: ignore[method-assign, assignment]
    run_dir.mkdir()
    trainer = role("trainer", run_dir, "ready", f"train:{STEPS[-1]}", "done")
    code, _ = supervise(run_dir, [role("orchestrator", run_dir, "ready", "done"), trainer])
    assert code == 0
    return growth.found


def environments(tokenizer_dir: Path) -> list[str] | None:
    """Of which sixteen episodes are played a step."""
    limit_caches()
    growth = Growth(STEPS)
    world = World(PreTrainedTokenizerFast.from_pretrained(tokenizer_dir), tokenizer_dir)

    async def play() -> None:
        async with world.pool(EnvConfig(id="reverse-text", args={"num_tasks": 64})) as pool:
            for step in range(1, STEPS[-1] + 1):
                await asyncio.gather(*(pool.run_episode(0, (16 * step + i) % 64) for i in range(16)))
                world.server.requests.clear()
                world.server.headers.clear()
                growth.look(step)

    with world.server:
        asyncio.run(play())
    return growth.found


if __name__ == "__main__":
    found = {"a_supervisor": a_supervisor, "environments": environments}[sys.argv[1]](Path(sys.argv[2]))
    print(json.dumps(found))
