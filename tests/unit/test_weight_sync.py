"""Bringing servers to the newest version: what happens when the next one comes in the middle."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from prime_hpc.client.inference import InferenceError
from prime_hpc.orchestrator import weight_sync
from prime_hpc.orchestrator.rollouts.servers import ServerTable
from prime_hpc.runtime.event_loops import loop_time
from prime_hpc.store.run_paths import RunPaths

DEADLINE_S = 30.0


class Server:
    """An inference server that can be held up while it loads a version, and then has it or refuses it."""

    def __init__(self) -> None:
        self.version = 0
        self.held: asyncio.Event | None = None
        self.began = asyncio.Event()
        self.refuses: set[int] = set()

    async def wait_ready(self, deadline_s: float) -> None:
        """It is."""

    async def health(self) -> bool:
        return True

    async def policy_version(self, name: str = "") -> int:
        return self.version

    async def update_weights(self, folder: Path, version: int, name: str = "") -> dict[str, Any]:
        held, self.held = self.held, None
        if held is not None:
            self.began.set()
            await held.wait()
        if version in self.refuses:
            raise InferenceError(f"{folder} is not there", status=400)
        self.version = version
        return {}


class Bus:
    """What the trainer says."""

    def __init__(self) -> None:
        self.said: dict[str, dict[str, Any]] = {}

    def subscribe(self, topic: str, function: Callable[..., Any]) -> None:
        """Nobody calls it."""

    def latest(self, topic: str) -> dict[str, Any] | None:
        return self.said.get(topic)

    def publish(self, topic: str, **fields: Any) -> None:
        """Nobody hears it."""


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not holds():
            await asyncio.sleep(0.005)


@pytest.mark.parametrize("is_removed", [False, True])
def test_a_version_that_comes_while_a_server_gets_the_one_before_is_loaded_as_well(
    is_removed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a server that was started again; the one before may be gone by then. It is the run's last version: no further
    one would mend it."""
    for name in ("wait_for_artifact", "newest_of_attempt", "set_floor"):
        monkeypatch.setattr(weight_sync, name, lambda *args, **kwargs: None)
    monkeypatch.setattr(weight_sync, "list_versions", lambda paths: [1, 2])

    async def main() -> None:
        server, bus, table = Server(), Bus(), ServerTable(["a"], loop_time())
        clients: list[Any] = [server]
        shared: Any = bus
        sync = weight_sync.WeightSync(
            RunPaths(tmp_path), clients, table, shared, incarnation=1, ready_timeout_s=5, on_change=lambda: None
        )
        await sync.prepare(0)
        running = asyncio.create_task(sync.run())
        bus.said["weights"] = {"version": 1}
        await until(lambda: table.served_version == 1)
        server.version, server.held = 0, (held := asyncio.Event())
        sync.report_error(0)
        async with asyncio.timeout(DEADLINE_S):
            await server.began.wait()
        bus.said["weights"] = {"version": 2}
        await until(lambda: sync.current == 2)
        server.refuses = {1} if is_removed else set()
        held.set()
        await until(lambda: table.served_version == 2 or running.done())
        assert server.version == 2 and not running.done()
        running.cancel()
        await asyncio.wait([running])

    asyncio.run(main())
