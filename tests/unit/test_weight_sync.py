"""Bringing servers to the newest version: the next one comes in the middle, a server hangs or is lost."""

import asyncio
import errno
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from loguru import logger

from prime_hpc.client.inference import POLICY, InferenceError
from prime_hpc.orchestrator import weight_sync
from prime_hpc.orchestrator.errors import OrchestratorError
from prime_hpc.orchestrator.rollouts.servers import ServerTable
from prime_hpc.runtime.event_loops import loop_time
from prime_hpc.store.io import files
from prime_hpc.store.run_paths import RunPaths
from tests.support.policy_servers import Bus, Server

DEADLINE_S = 30.0


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not holds():
            await asyncio.sleep(0.005)


def sync_of(
    servers: list[Server], table: ServerTable, bus: Bus, folder: Path, incarnation: int = 1, sleeps: bool = False
) -> weight_sync.WeightSync:
    parts: Any = SimpleNamespace(paths=RunPaths(folder), clients=servers, bus=bus, served_as=POLICY)
    parts.incarnation, parts.ready_timeout_s = incarnation, 5
    return weight_sync.WeightSync(parts, table, on_change=lambda: None, sleeps=sleeps)


def test_a_server_that_is_waited_for_is_named(tmp_path: Path) -> None:
    server, said = Server(), list[str]()
    sink = logger.add(lambda message: said.append(message.record["message"]), level="INFO")
    sync = sync_of([server], ServerTable(["http://a"], 0.0), Bus(), tmp_path)
    asyncio.run(sync.prepare(0))
    assert not said
    server.is_up = False
    with pytest.raises(OrchestratorError, match="was not ready"):
        asyncio.run(sync.prepare(0))
    logger.remove(sink)
    assert said == ["waiting for inference server http://a, for 5 s at most"]


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
        sync = sync_of([server], table, bus, tmp_path)
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


@pytest.mark.parametrize(("version", "found"), [(0, 0), (0, 4), (3, 3)])
def test_engines_that_a_crash_left_asleep_are_woken(
    version: int, found: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Servers outlive an attempt that ended while its trainer computed; before version 1 nothing else wakes them."""
    for name in ("wait_for_artifact", "set_floor"):
        monkeypatch.setattr(weight_sync, name, lambda *args, **kwargs: None)
    server = Server()
    server.version, server.is_asleep = found, True
    sync = sync_of([server], ServerTable(["a"], 0.0), Bus(), tmp_path, incarnation=2, sleeps=True)
    asyncio.run(sync.prepare(version))
    assert server.version == version and not server.is_asleep


def test_engines_that_were_not_ready_when_the_others_went_to_sleep_do_so_too(watched: Any) -> None:
    """Else they keep memory of the GPU on which the trainer computes: one of which an episode had just failed, and one
    that comes back meanwhile."""
    servers, table, sync = watched

    async def main() -> None:
        table.mark_suspect(0, loop_time())
        table.mark_suspect(1, loop_time())
        servers[1].is_up = False
        await sync.sleep()
        assert [server.is_asleep for server in servers] == [True, False]
        servers[1].is_up = True
        keeping = asyncio.create_task(sync.keep())
        sync.report_error(0)
        sync.report_error(1)
        await until(lambda: len(table.ready_indices) == 2)
        keeping.cancel()
        assert all(server.is_asleep for server in servers)

    asyncio.run(main())


@pytest.fixture
def watched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[list[Server], ServerTable, weight_sync.WeightSync]:
    """Two servers that both have version 5, as all should."""
    monkeypatch.setattr(weight_sync, "set_floor", lambda *args: None)
    monkeypatch.setattr(weight_sync, "list_versions", lambda paths: [5, 6])
    servers, table = [Server(), Server()], ServerTable(["a", "b"], 0.0)
    sync = sync_of(servers, table, Bus(), tmp_path)
    sync.current = 5
    for index, server in enumerate(servers):
        server.version = 5
        table.mark_ready(index, 5)
    return servers, table, sync


def test_a_server_that_hangs_while_it_is_restored_holds_up_no_other(watched: Any) -> None:
    """Nor what waits for loads to end, once its node is known to be gone."""
    servers, table, sync = watched

    async def main() -> None:
        keeping = asyncio.create_task(sync.keep())
        servers[0].version, servers[0].held = 0, asyncio.Event()  # was started again; nobody will set this
        sync.report_error(0)
        async with asyncio.timeout(DEADLINE_S):
            await servers[0].began.wait()
        sync.report_error(1)
        await until(lambda: table.servers[1].ready)
        assert not table.servers[0].ready and sync.is_loading(0)
        sync.drop(0)
        async with asyncio.timeout(DEADLINE_S):
            assert await sync.hold() == 5
        assert not sync.is_loading(0)
        await sync.go_on(1, 5)
        await until(lambda: table.servers[0].ready)
        assert servers[0].version == 5
        keeping.cancel()
        await asyncio.wait([keeping])

    asyncio.run(main())


def test_a_server_that_is_replaced_while_the_disk_is_waited_for_is_not_taken_for_the_one_that_answered(
    watched: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Episodes would be sent to one that is still starting, or has the base model."""
    servers, _, sync = watched

    def replaced(paths: RunPaths) -> list[int]:
        servers[0].version = 0
        return [5]

    async def main() -> None:
        await sync.go_on(1, 5)  # from here on it is looked up whether version 5 is made once more
        monkeypatch.setattr(weight_sync, "list_versions", replaced)
        sync.report_error(0)
        assert await sync._restore_server(0)
        assert servers[0].version == 5

    asyncio.run(main())


def test_a_version_is_served_by_those_that_are_ready_and_later_by_the_others(watched: Any) -> None:
    servers, table, sync = watched

    async def main() -> None:
        sync.drop(0)
        async with asyncio.timeout(DEADLINE_S):
            await sync.serve(6)
        assert [server.version for server in servers] == [5, 6] and table.ready_indices == [1]
        keeping = asyncio.create_task(sync.keep())
        await until(lambda: table.ready_indices == [0, 1])
        assert servers[0].version == 6 and table.served_version == 6
        keeping.cancel()
        await asyncio.wait([keeping])

    asyncio.run(main())


def test_a_run_begins_with_the_servers_that_are_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether one is lost before it is waited for, or while it loads the version from which the run goes on."""
    for name in ("wait_for_artifact", "set_floor"):
        monkeypatch.setattr(weight_sync, name, lambda *args, **kwargs: None)
    monkeypatch.setattr(weight_sync, "list_versions", lambda paths: [3])

    async def main() -> None:
        servers, table = [Server(), Server(), Server()], ServerTable(["a", "b", "c"], 0.0)
        sync = sync_of(servers, table, Bus(), tmp_path)
        servers[0].is_up, servers[1].held = False, asyncio.Event()
        sync.drop(0)
        preparing = asyncio.create_task(sync.prepare(3))
        async with asyncio.timeout(DEADLINE_S):
            await servers[1].began.wait()
            assert not preparing.done()
            sync.drop(1)
            await preparing
        assert table.ready_indices == [2]
        servers[0].is_up = True
        keeping = asyncio.create_task(sync.keep())
        await until(lambda: table.ready_indices == [0, 1, 2])
        assert [server.version for server in servers] == [3, 3, 3]
        keeping.cancel()
        await asyncio.wait([keeping])

    asyncio.run(main())


def test_a_server_that_goes_on_not_loading_a_version_is_warned_of_once(
    watched: tuple[list[Server], ServerTable, weight_sync.WeightSync], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is asked again every few seconds, for as long as its node's file system is gone."""
    servers, table, sync = watched
    monkeypatch.setattr(weight_sync, "DOWN_WARNING_S", 0.0)
    monkeypatch.setattr(weight_sync, "PROBE_PAUSE_S", 0.0)
    said: list[Any] = []
    words = ["stale"]

    async def fail(folder: Path, version: int, name: str = "") -> dict[str, Any]:
        raise InferenceError(words[0], status=503)

    async def main() -> None:
        sync.current = 6
        loads = servers[0].update_weights
        monkeypatch.setattr(servers[0], "update_weights", fail)
        for words[0] in ("stale", "stale", "stale", "no room"):
            await sync._load(0)
            assert not await sync._restore_server(0)
        told = [record for record in said if "did not load version 6" in record["message"]]
        assert [record["level"].name for record in told] == ["WARNING", *["DEBUG"] * 5, "WARNING", "DEBUG"]
        again = [record["level"].name for record in said if "is back" in record["message"]]
        assert again == ["DEBUG"] * 4
        watching = asyncio.create_task(sync._restore_forever(0))
        await until(
            lambda: any("still waiting for a, which did not load version 6: no room" in r["message"] for r in said)
        )
        monkeypatch.setattr(servers[0], "update_weights", loads)
        await until(lambda: table.servers[0].ready)
        watching.cancel()
        assert not sync._unloaded

    handler = logger.add(lambda message: said.append(message.record), level="DEBUG")
    try:
        asyncio.run(main())
    finally:
        logger.remove(handler)


def test_a_directory_of_versions_that_cannot_be_listed_for_a_moment_ends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths, listed, failing = RunPaths(tmp_path), files.list_dir, [3]
    paths.weights_step(1).mkdir(parents=True)

    def list_dir(path: Path) -> list[str]:
        if path == paths.weights and failing[0]:
            failing[0] -= 1
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        return listed(path)

    async def main() -> None:
        sync = sync_of([Server()], ServerTable(["a"], loop_time()), Bus(), tmp_path)
        await sync.prepare(0)
        monkeypatch.setattr(files, "list_dir", list_dir)
        running = asyncio.create_task(sync.run())
        await until(lambda: not failing[0] or running.done())
        assert not running.done()
        running.cancel()
        await asyncio.wait([running])
        sync._made_again, failing[0] = 1, 1
        assert [sync._is_there(1), sync._is_there(1)] == [False, True]

    asyncio.run(main())


def test_what_ends_the_watch_is_named_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And not as the group of tasks that it ended."""

    def fail(*_: object) -> None:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(weight_sync, "newest_of_attempt", fail)
    sync = sync_of([Server()], ServerTable(["a"], 0.0), Bus(), tmp_path)
    with pytest.raises(ZeroDivisionError, match="a bug"):
        asyncio.run(sync.run())


def test_a_server_that_refuses_the_key_says_where_it_is_stated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def refuses(self: weight_sync.WeightSync, index: int) -> int:
        raise InferenceError("401 this server needs its key", status=401)

    monkeypatch.setattr(weight_sync.WeightSync, "_found", refuses)
    with pytest.raises(OrchestratorError, match=r"needs its key \(.*orchestrator\.client\.api_key_var.*VLLM_API_KEY"):
        asyncio.run(sync_of([Server()], ServerTable(["http://a"], 0.0), Bus(), tmp_path).prepare(0))
