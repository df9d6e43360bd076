"""Writes that a full disk or a quota refuses: they wait for room, and what waits says so."""

import asyncio
import errno
import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from loguru import logger

from prime_hpc.orchestrator.batching.batch_writer import BatchContent, BatchWriter
from prime_hpc.runtime import activity
from prime_hpc.store.artifact import ArtifactExists, ArtifactWriter
from prime_hpc.store.attempts import Ended
from prime_hpc.store.batch.rank_files import read_rank_batch
from prime_hpc.store.errors import NoRoom, StoreError, Unreadable
from prime_hpc.store.io import files, room
from prime_hpc.store.io.disk import disk_error
from prime_hpc.store.io.retry_reads import Patience
from prime_hpc.store.io.room import RoomWait, takes
from prime_hpc.store.messaging.bus import BusClient
from prime_hpc.store.messaging.file_transfer import HandoverServer
from prime_hpc.store.run_paths import RunPaths, claim_incarnation
from prime_hpc.supervisor.attempt import start
from prime_hpc.supervisor.server_loads import doing
from prime_hpc.supervisor.stalls.diagnose import diagnose
from prime_hpc.trainer.rank_group import RankGroup, _said
from prime_hpc.trainer.until_room import until_room
from tests.unit.test_store_batches import assert_equal, make_rank


@pytest.fixture
def said() -> Iterator[list[str]]:
    lines: list[str] = []
    number = logger.add(lambda message: lines.append(str(message)), level="INFO", format="{message}")
    yield lines
    logger.remove(number)


@pytest.fixture
def blocked(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """What the process says of itself."""
    reasons: dict[str, str] = {}
    monkeypatch.setattr(activity, "blocked", reasons.__setitem__)
    return reasons


def refuse(times: int, number: int = errno.ENOSPC, operation: str = "write") -> Callable[[str, Path], None]:
    """So many such operations meet a full disk."""
    left = [times]

    def observe(seen: str, path: Path) -> None:
        if seen == operation and left[0] > 0 and not path.is_dir():  # whole folders are removed
            left[0] -= 1
            raise OSError(number, os.strerror(number), str(path))

    return observe


def test_a_full_disk_and_a_quota_are_want_of_room_and_nothing_else_is(tmp_path: Path) -> None:
    full, quota = (disk_error(OSError(number, "no"), tmp_path / "a") for number in (errno.ENOSPC, errno.EDQUOT))
    assert isinstance(full, NoRoom) and re.search(r"a: disk full \([\d,.]+ MiB free\)", str(full))
    assert isinstance(quota, NoRoom) and re.search(r"of user \w+, group \w+ or the directory's project", str(quota))
    assert not any(isinstance(disk_error(OSError(n, "no"), tmp_path), NoRoom) for n in (errno.EROFS, errno.EIO))
    assert takes(NoRoom("full"), 3 << 20).needs == 3 << 20


def test_a_wait_ends_with_room_or_with_its_time(tmp_path: Path, said: list[str], blocked: dict[str, str]) -> None:
    now = [0.0]
    wait = RoomWait("batch 1", tmp_path, 100.0, clock=lambda: now[0])
    while now[0] < 100:
        now[0] += wait.next_pause(NoRoom("a: disk full"))
    assert now[0] == 100 and blocked == {"batch 1": "batch 1 cannot be written now: a: disk full"}
    assert 2 <= len(said) <= 5
    wait.over()
    assert blocked == {"batch 1": ""} and "could be written after" in said[-1]
    now[0] += 1000  # another wait, not more of the last one
    now[0] += wait.next_pause(NoRoom("a: disk full")) + 100
    with pytest.raises(NoRoom, match=r"waited 10\d s \(supervisor.write_timeout_s\)"):
        wait.next_pause(NoRoom("a: disk full"))
    assert blocked == {"batch 1": ""}


def test_what_takes_more_than_is_free_is_not_tried(tmp_path: Path) -> None:
    wait = RoomWait("batch 1", tmp_path / "not" / "there", 100.0)
    wait.next_pause(takes(NoRoom("full"), 1 << 60))
    assert not wait.has_room
    wait.next_pause(NoRoom("full"))
    assert wait.has_room


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
@pytest.mark.parametrize("operation", ["create", "write", "torn", "fsync", "mkdir"])
def test_a_batch_is_written_when_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, blocked: dict[str, str], operation: str, number: int
) -> None:
    monkeypatch.setattr(room, "FIRST_PAUSE_S", 0.01)
    paths, bus = RunPaths(tmp_path), BusClient(None, "orchestrator")
    claim_incarnation(paths)
    parts: Any = SimpleNamespace(paths=paths, bus=bus, handover=HandoverServer(bus), incarnation=1)
    content = BatchContent(1, [make_rank([20, 20], [2])], {"step": 1}, {})
    with files.observe_operations(refuse(3, number, operation)):
        asyncio.run(BatchWriter(parts, 0, 60.0).write(content))
    assert_equal(read_rank_batch(paths.rollouts_step(1), 0), content.ranks[0])
    assert files.list_dir(paths.rollouts) == ["step_000001"] and list(blocked.values()) == [""]
    with files.observe_operations(refuse(99)), pytest.raises(NoRoom, match="waited 0 s.*write_timeout_s"):
        asyncio.run(BatchWriter(parts, 0).write(content))
    assert files.list_dir(paths.rollouts) == ["step_000001"]


def test_one_who_waits_for_room_can_be_ended(tmp_path: Path, blocked: dict[str, str]) -> None:
    paths, bus = RunPaths(tmp_path), BusClient(None, "orchestrator")
    parts: Any = SimpleNamespace(paths=paths, bus=bus, handover=HandoverServer(bus), incarnation=0)

    async def play() -> None:
        content = BatchContent(1, [make_rank([20, 20], [2])], {"step": 1}, {})
        writing = asyncio.create_task(BatchWriter(parts, 0, 3600.0).write(content))
        while not blocked:
            await asyncio.sleep(0.01)
        writing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await writing

    with files.observe_operations(refuse(999)):
        asyncio.run(play())
    assert files.list_dir(paths.rollouts) == []


def test_ranks_that_lack_room_say_so_alike() -> None:
    ranks = RankGroup()
    with pytest.raises(NoRoom, match="a: disk full") as caught:
        ranks.on_all(lambda: (_ for _ in ()).throw(NoRoom("a: disk full", 7)))
    assert caught.value.needs == 7
    with pytest.raises(StoreError) as other:
        ranks.from_first(lambda: (_ for _ in ()).throw(OSError(errno.ENOSPC, "no space")))
    assert not isinstance(other.value, NoRoom)  # nobody knows what was half done


@pytest.mark.parametrize("first", ["full", "broken"])
def test_ranks_of_which_one_lacks_room_and_one_meets_an_error_that_passes_wait(first: str) -> None:
    """Whichever of them is told first."""
    full, broken = NoRoom("a: disk full", 7), Unreadable("b", "Input/output error", errno.EIO)
    ranks: Any = RankGroup()
    errors: list[Exception] = [full, broken] if first == "full" else [broken, full]
    ranks.gather_all = lambda said: [_said(error) for error in errors]
    with pytest.raises(NoRoom, match="disk full") as caught:
        ranks.on_all(lambda: None)
    assert caught.value.needs == 7
    errors.append(ValueError("odd"))
    with pytest.raises(StoreError, match="ValueError: odd") as other:
        ranks.on_all(lambda: None)
    assert not isinstance(other.value, NoRoom | Unreadable)


def test_all_ranks_write_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, blocked: dict[str, str]) -> None:
    monkeypatch.setattr(room, "FIRST_PAUSE_S", 0.01)
    tries: list[int] = []

    def write() -> str:
        tries.append(1)
        if len(tries) < 4:
            raise NoRoom("a: disk full")
        return "written"

    assert until_room(write, RankGroup(), RoomWait("a version", tmp_path, 60.0)) == "written" and len(tries) == 4
    with pytest.raises(NoRoom, match="waited 0 s"):
        until_room(lambda: (_ for _ in ()).throw(NoRoom("full")), RankGroup(), RoomWait("a version", tmp_path, 0.0))


def test_a_version_is_given_up_when_the_attempt_is_to_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, blocked: dict[str, str], said: list[str]
) -> None:
    """Then what else there is, as the checkpoint, can be saved in the time that is left."""
    looks, slept = [False, False, True, True, True], list[float]()
    monkeypatch.setattr("prime_hpc.trainer.until_room.time.sleep", slept.append)
    monkeypatch.setattr("prime_hpc.trainer.until_room.LOOK_S", 0.01)
    wait = RoomWait("weights version 3", tmp_path, 3600.0)
    full = lambda: (_ for _ in ()).throw(NoRoom("a: disk full"))  # noqa: E731
    assert until_room(full, RankGroup(), wait, lambda: looks.pop(0)) is None
    assert slept == [0.01] * 2 and blocked == {"weights version 3": ""}
    assert "weights version 3 is not written: the attempt is to end" in said[-1]


def test_a_supervisor_that_meets_a_full_disk_ends_with_its_code(tmp_path: Path) -> None:
    full = Ended.by_itself(OSError(errno.ENOSPC, "No space left on device", str(tmp_path / "logs")))
    assert full.code == 74 and re.search(r"logs: disk full \([\d,.]+ MiB free\): free space", full.cause)
    assert Ended.by_itself(NoRoom("attempts.jsonl: disk full")).code == 74
    assert Ended.by_itself(OSError(errno.EAGAIN, "no more processes")).code == 1


@pytest.mark.parametrize("first", [b"changes", b"whole"])
def test_what_got_its_name_before_the_file_system_failed_is_written_again_in_any_form(
    tmp_path: Path, first: bytes
) -> None:
    """As a weight version, of which only changes were written, is whole after a failure."""
    paths = RunPaths(tmp_path)
    final = paths.weights_step(1)

    def write(content: bytes) -> None:
        with ArtifactWriter(final, kind="weights", writer="trainer", incarnation=1) as writer:
            writer.write("model", [content])

    def fail(operation: str, path: Path) -> None:
        if operation == "fsync" and path == final.parent and final.exists():
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))

    claim_incarnation(paths)
    with files.observe_operations(fail), pytest.raises(StoreError, match="I/O error"):
        write(first)
    for _ in range(2):
        write(b"whole")
        assert (final / "model").read_bytes() == b"whole" and files.list_dir(paths.weights) == ["step_000001"]
    with pytest.raises(ArtifactExists):
        write(b"other")


def test_the_start_of_an_attempt_waits_for_room_as_for_what_it_reads(tmp_path: Path) -> None:
    now, tries = [0.0], list[int]()

    def write() -> None:
        tries.append(1)
        files.write_atomic(tmp_path / "a", b"1")

    def sleep(seconds: float) -> None:
        now[0] += seconds

    with files.observe_operations(refuse(3)):
        Patience(60.0, clock=lambda: now[0], sleep=sleep)(write)
    assert len(tries) == 4 and (tmp_path / "a").read_bytes() == b"1"
    with files.observe_operations(refuse(999)), pytest.raises(NoRoom, match="disk full.*waited 60 s"):
        Patience(60.0, clock=lambda: now[0], sleep=sleep)(write)


def test_status_and_why_tell_of_it() -> None:
    word = {"role": "trainer", "index": 0, "phase": "publish", "awaits": "", "since": time.time()}
    word |= {"blocked": "weights version 3 cannot be written now: w: disk full"}
    (row,) = doing({("trainer", 0): {"doing": word}})["trainer"]
    assert row["blocked"] == word["blocked"] and row["count"] == 1
    seen = {"word": word, "host": "n1", "pid": 7, "state": "S", "waits": {}, "cpu": 0.0, "parent": 1, "comm": "python"}
    found = diagnose([seen], {})
    assert found.is_hang and found.headline() == f"trainer rank 0 on n1: {word['blocked']}"
    seen["word"] = word | {"blocked": "training goes on without a checkpoint: c: disk full"}
    found = diagnose([seen], {})  # who else holds the run up is still looked for
    assert not found.is_hang and found.kind != "file system"
    assert "trainer rank 0 on n1: training goes on without a checkpoint: c: disk full" in found.evidence


def test_parts_of_a_process_are_blocked_each_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []

    def play() -> None:
        for what, why in (("a", "no room for a"), ("b", "no room for b"), ("a", ""), ("b", "")):
            activity.blocked(what, why)
            seen.append(activity.now_doing()["blocked"])

    monkeypatch.setattr(activity, "_page", activity._Page({"blocked": "", "phase": "", "awaits": "", "since": 0.0}))
    thread = threading.Thread(target=play)
    thread.start()
    thread.join()
    assert seen == ["no room for a", "no room for a; no room for b", "no room for b", ""]


def test_a_job_waits_for_the_room_that_its_preflight_asks_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else every node is refused, and the attempt counts as one that crashed."""
    free = [1 << 20, 1 << 20, 3 << 30]
    monkeypatch.setattr(start.disk, "free_bytes", lambda path: free.pop(0))
    Patience(60, sleep=lambda seconds: None)(lambda: start.refuse_full(tmp_path, 2.0))
    assert not free
    monkeypatch.setattr(start.disk, "free_bytes", lambda path: 1 << 20)
    with pytest.raises(NoRoom, match=r"1\.0 MiB free, 2 GiB are needed \(slurm\.preflight\.min_free_gib\)"):
        start.refuse_full(tmp_path, 2.0)
    start.refuse_full(tmp_path, 0.0)
