"""The saves of the tinker service's adapters: names, and the time until which they are kept."""

import asyncio
import errno
import json
import socket
import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from prime_hpc.config import Experiment
from prime_hpc.config.run_files import TINKER_URL
from prime_hpc.store.tinker_files import adapters_root, count_saves, forget_address
from prime_hpc.trainer.tinker import paths
from prime_hpc.trainer.tinker.batches import BadRequestError
from prime_hpc.trainer.tinker.board import Kind as Kinds
from prime_hpc.trainer.tinker.board import Operation
from prime_hpc.trainer.tinker.paths import Index, Kind, Shape, Shelf, new_save, tinker_path
from prime_hpc.trainer.tinker.requests import CreateSession
from prime_hpc.trainer.tinker.server import Server
from prime_hpc.trainer.tinker.service import KEPT_S, Service

MODEL = "0123456789abcdef:train:0"


@pytest.fixture
def shelf(tmp_path: Path) -> Shelf:
    shelf = Shelf(tmp_path)
    shelf.write(MODEL, Index(Shape("base", 4, 1)))
    return shelf


def put(shelf: Shelf, name: str, number: int, ttl_seconds: int | None = None, kind: Kind = "weights") -> str:
    save = new_save(number, 0, has_optimizer=False, user_metadata=None, ttl_seconds=ttl_seconds)
    shelf.change(MODEL, lambda index: index.with_save(kind, name, save))
    path = tinker_path(MODEL, kind, name)
    shelf.find(path).folder.mkdir(parents=True)
    return path


def test_what_has_expired_is_refused_and_deleted_and_nothing_else(
    shelf: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = paths.time.time()
    monkeypatch.setattr(paths.time, "time", lambda: now)
    kept, brief = put(shelf, "kept", 1), put(shelf, "brief", 2, 60)
    longer, sampler = put(shelf, "longer", 3, 600), put(shelf, "brief", 4, 60, "sampler_weights")
    folders = {path: shelf.find(path).folder for path in (kept, brief, longer, sampler)}
    assert shelf.delete_expired() == []
    monkeypatch.setattr(paths.time, "time", lambda: now + 61)
    with pytest.raises(BadRequestError, match="has expired"):
        shelf.find(brief)
    assert sorted(shelf.delete_expired()) == sorted([brief, sampler])
    assert {path for path, folder in folders.items() if folder.exists()} == {kept, longer}
    shelf.set_expiry(shelf.find(longer), None)
    shelf.set_expiry(shelf.find(kept), 5)
    monkeypatch.setattr(paths.time, "time", lambda: now + 1e6)
    assert shelf.delete_expired() == [kept]
    assert shelf.find(longer).save.expires is None


def fail_to_write(monkeypatch: pytest.MonkeyPatch, only: str = "") -> None:
    """As a file system whose quota is used up, for the adapters whose id begins so."""
    write = Shelf.write

    def fail(shelf: Shelf, model_id: str, index: Index) -> None:
        if model_id.startswith(only):
            raise OSError(errno.EDQUOT, "Disk quota exceeded")
        write(shelf, model_id, index)

    monkeypatch.setattr(Shelf, "write", fail)


def test_an_expired_save_that_cannot_be_deleted_keeps_no_other(shelf: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    now, others = paths.time.time(), ("0", "f")
    for first in others:
        model_id = f"{first}edcba9876543210:train:1"
        shelf.write(model_id, Index(Shape("base", 4, 1)))
        save = new_save(1, 0, has_optimizer=False, user_metadata=None, ttl_seconds=60)
        shelf.change(model_id, partial(_with_sampler, save=save))
    put(shelf, "brief", 2, 60)
    monkeypatch.setattr(paths.time, "time", lambda: now + 61)
    fail_to_write(monkeypatch, MODEL)
    assert sorted(path.partition("://")[2][0] for path in shelf.delete_expired()) == list(others)


def test_a_save_that_took_the_name_of_a_deleted_one_stays(shelf: Shelf) -> None:
    old = shelf.find(put(shelf, "name", 1))
    path = put(shelf, "name", 2)
    shelf.delete(old)
    assert shelf.find(path).save.number == 2 and shelf.find(path).folder.exists() and not old.folder.exists()


def test_changes_of_two_threads_are_all_kept(shelf: Shelf) -> None:
    def fill(first: int) -> None:
        for number in range(first, first + 50):
            put(shelf, f"name-{number}", number)

    threads = [threading.Thread(target=fill, args=(first,)) for first in (1, 101, 201)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(shelf.saved(MODEL)) == 150


def test_a_save_of_an_earlier_version_has_no_end(shelf: Shelf) -> None:
    path = put(shelf, "old", 1)
    file = shelf.of_model(MODEL).root / paths.INDEX
    found = json.loads(file.read_text())
    del found["saves"]["weights"]["old"]["expires"]
    file.write_text(json.dumps(found))
    assert "expires" not in file.read_text() and not shelf.find(path).save.has_expired


@pytest.mark.parametrize("ttl_seconds", [0, -1])
def test_no_time_at_all_is_refused(ttl_seconds: int) -> None:
    with pytest.raises(BadRequestError, match="at least 1"):
        paths.expiry(ttl_seconds)


def test_saves_are_counted_for_those_who_ask_whether_there_was_progress(shelf: Shelf, tmp_path: Path) -> None:
    assert count_saves(tmp_path) == count_saves(tmp_path / "no service") == 0
    put(shelf, "first", 1)
    put(shelf, "second", 2)
    put(shelf, "sampler", 3, kind="sampler_weights")
    other = "fedcba9876543210:train:1"
    shelf.write(other, Index(Shape("base", 4, 1)))
    shelf.change(other, lambda i: i.with_save("weights", "x", new_save(5, 0, has_optimizer=True, user_metadata=None)))
    assert count_saves(tmp_path) == 3 + 5
    for name, text in (("no-json", "{"), ("no-saves", "{}"), ("a-list", "[]")):
        (adapters_root(tmp_path) / name).mkdir()
        (adapters_root(tmp_path) / name / "index.json").write_text(text)
    (adapters_root(tmp_path) / "a-file").touch()
    assert count_saves(tmp_path) == 8


def test_the_address_of_a_service_that_is_gone_is_forgotten(tmp_path: Path) -> None:
    (tmp_path / TINKER_URL).write_text("http://n1:1")
    for _ in range(2):
        forget_address(tmp_path)
        assert not (tmp_path / TINKER_URL).exists()


def _with_sampler(index: Index, save: Any) -> Index:
    return index.with_save("sampler_weights", f"unnamed-{save.number}", save)


def follow(service: Service, model_id: str, number: int) -> str:
    """A save without a name, and a sampler that follows its adapter from then on; returns the save's path."""
    save = new_save(number, 0, has_optimizer=False, user_metadata=None, ttl_seconds=None)
    service.shelf.change(model_id, partial(_with_sampler, save=save))
    path = tinker_path(model_id, "sampler_weights", f"unnamed-{number}")
    sampler = f"{model_id.partition(':')[0]}:sample:{number}"
    payload = {"sampler": sampler, "follows": True}
    service._finish(Operation(Kinds.PUBLISH, model_id, f"{model_id}:{number}", payload), {"path": path, "type": "t"})
    assert service.describe_sampler(sampler)["model_path"] == path
    return path


def begin(service: Service) -> str:
    """A session with an adapter and a sampler whose save has no name; returns the session's id."""
    session_id = service.create_session(CreateSession())["session_id"]
    model_id = f"{session_id}:train:0"
    service._sessions[session_id].models.append(model_id)
    service.shelf.write(model_id, Index(Shape("base", 4, 1)))
    follow(service, model_id, 1)
    return session_id


def assert_nothing_kept(service: Service) -> None:
    kept = (service._sessions, service._models, service._lines, service._samplers, service._published)
    assert not any(kept)


@pytest.fixture
def service(shelf: Shelf) -> Service:
    return service_of(shelf)


def service_of(shelf: Shelf) -> Service:
    tree = {"model": {"lora": {"rank": 4}}, "trainer": {"tinker": {}, "max_concurrent_runs": 2}}
    return Service(Experiment.model_validate(tree), shelf, None, "base", 100)


def test_a_session_that_is_over_leaves_nothing_behind(service: Service) -> None:
    for _ in range(20):
        service.finish(begin(service))
    assert_nothing_kept(service)


def test_a_save_that_nothing_follows_any_more_is_deleted(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    """A loop of thousands of steps would fill the disk before its session ends."""
    session_id = begin(service)
    first = service.describe_sampler(f"{session_id}:sample:1")["model_path"]
    second = follow(service, f"{session_id}:train:0", 2)
    assert service.describe_sampler(f"{session_id}:sample:1")["model_path"] == second
    assert service.shelf.find(first).name == "unnamed-1"  # a request may be on its way with it
    now = paths.time.time()
    monkeypatch.setattr(paths.time, "time", lambda: now + KEPT_S + 1)
    assert service.shelf.delete_expired() == [first] and service.shelf.find(second)


def test_unnamed_saves_of_a_service_that_was_killed_do_not_stay_for_ever(
    service: Service, shelf: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each requeue of a service left those of its sessions behind."""
    session_id = begin(service)  # which nobody ends
    named, unnamed = put(shelf, "named", 7), tinker_path(f"{session_id}:train:0", "sampler_weights", "unnamed-1")
    again = Shelf(shelf.of_model(MODEL).root.parents[1])
    (again.of_model("fedcba9876543210:train:0").root).mkdir()
    (again.of_model("fedcba9876543210:train:0").root / paths.INDEX).write_text("{")
    assert service_of(again).shelf is again
    assert again.find(unnamed).name == "unnamed-1"  # a client that lives may still sample from it
    now = paths.time.time()
    monkeypatch.setattr(paths.time, "time", lambda: now + paths.UNNAMED_LEFT_S + 1)
    assert again.delete_expired() == [unnamed] and again.find(named)


def test_a_full_file_system_keeps_no_session_from_ending(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    sessions = [begin(service) for _ in range(3)]
    Path(service.shelf.of_model(f"{sessions[0]}:train:0").root, paths.INDEX).write_text("{")
    fail_to_write(monkeypatch)
    service._timeout_s = -1.0
    service._look(paths.time.monotonic())
    assert_nothing_kept(service)


def test_sessions_are_watched_on_after_a_look_that_failed(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[float] = []

    def look(now: float) -> None:
        looks.append(now)
        if len(looks) == 1:
            raise RuntimeError("not foreseen")

    monkeypatch.setattr("prime_hpc.trainer.tinker.service.LOOK_S", 0.001)
    monkeypatch.setattr(service, "_look", look)

    async def watch() -> None:
        watching = asyncio.create_task(service.watch())
        async with asyncio.timeout(200):
            while len(looks) < 3 and not watching.done():
                await asyncio.sleep(0.001)
        assert not watching.done()
        watching.cancel()

    asyncio.run(watch())


def test_a_server_hangs_up_whatever_its_watcher_ended_with(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    cleaned: list[web.AppRunner] = []
    clean = web.AppRunner.cleanup

    async def cleanup(runner: web.AppRunner) -> None:
        cleaned.append(runner)
        await clean(runner)

    async def watch() -> None:
        raise RuntimeError("not foreseen")

    monkeypatch.setattr(web.AppRunner, "cleanup", cleanup)
    monkeypatch.setattr(service, "watch", watch)
    server = Server.__new__(Server)
    server._service, server._key, server._engines = service, "tml-key", None
    server._started, server._stopping = threading.Event(), asyncio.Event()

    async def serve() -> None:
        serving = asyncio.create_task(server._serve())
        while not server._started.is_set():
            await asyncio.sleep(0.001)
        server._stopping.set()
        await serving

    with socket.create_server(("127.0.0.1", 0)) as server._sock:
        asyncio.run(serve())
    assert len(cleaned) == 1
