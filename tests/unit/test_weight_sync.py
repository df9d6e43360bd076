"""Bringing servers to the newest version: what happens when the next one comes in the middle, and which one counts."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from prime_hpc.client.inference import InferenceError
from prime_hpc.orchestrator import sft_eval_loop, weight_sync
from prime_hpc.orchestrator.errors import OrchestratorError
from prime_hpc.orchestrator.rollouts.servers import ServerTable
from prime_hpc.runtime.event_loops import loop_time
from prime_hpc.store.run_paths import RunPaths, claim_incarnation
from tests.support.checkpoints import make_weights

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


def test_an_evaluation_takes_no_version_of_a_fenced_attempt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of what this attempt makes anew; what was there when it began counts, whoever made it."""
    monkeypatch.setattr(sft_eval_loop, "LOOK_S", 0.05)
    paths = RunPaths(tmp_path / "run")
    claim_incarnation(paths)
    for version in (40, 80, 100):  # the last two came after attempt 2 had begun
        make_weights(paths, version, 1)
    claim_incarnation(paths)
    own: Any = SimpleNamespace(
        _exp=SimpleNamespace(orchestrator=SimpleNamespace(weights_timeout_s=0.0)),
        _config=SimpleNamespace(interval=1),
        _parts=SimpleNamespace(paths=paths, bus=None, incarnation=2, status=SimpleNamespace(beat=lambda **_: None)),
        _start_step=60,
    )

    def wait_for(version: int) -> bool:
        return asyncio.run(sft_eval_loop.EvalLoop._wait_for(own, version))

    assert wait_for(40) and not wait_for(20)
    for version in (70, 80):
        with pytest.raises(OrchestratorError, match=f"no weights version {version}"):
            wait_for(version)
    make_weights(paths, 80, 2)
    assert wait_for(80) and not wait_for(70)
