"""Words and stacks of real processes, read from outside; runs that cannot be looked at."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from prime_hpc.cli.verbs.run import why
from prime_hpc.config.errors import ConfigError
from prime_hpc.runtime import activity
from prime_hpc.runtime.look import look, probe, words_here
from prime_hpc.supervisor.stalls.stacks import parse_dump
from tests.support.ranks import spawn

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 200.0
SCRIPT = """
import asyncio, ctypes, os, sys, time
from prime_hpc.runtime import activity
from prime_hpc.runtime.event_loops import new_event_loop
kind, run_dir = sys.argv[1:]
activity.introduce("trainer", 3, run_dir)
activity.explain("broken", lambda: 1 / 0)
activity.explain("number", lambda: 7)
async def reward():
    await asyncio.sleep(1000)
async def episode():
    await asyncio.create_task(reward(), name="env task 3")
activity.doing("wait", awaits="batch 12")
if kind == "fork" and os.fork():
    os.wait()
if kind == "calls":
    activity.enter("first")
    activity.leave()
    activity.enter("second " + 40 * "x")
elif kind == "fork-and-introduce" and not os.fork():
    activity.introduce(**activity.introduced(), part="worker", number=1)
    activity.enter("step")
    time.sleep(1000)
print("there", flush=True)
if kind == "coroutine":
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        runner.run(episode())
elif kind == "holds-the-lock":  # a mutex that is locked twice, by a call that keeps the interpreter to itself
    library, mutex = ctypes.PyDLL(None), ctypes.create_string_buffer(64)
    library.pthread_mutex_lock(mutex)
    library.pthread_mutex_lock(mutex)
time.sleep(1000)
"""


class Talker:
    """A process that tells what it does."""

    def __init__(self, kind: str, folder: Path) -> None:
        self.run_dir = str(folder / kind)
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        self.process = subprocess.Popen(
            [sys.executable, "-c", SCRIPT, kind, self.run_dir], stdout=subprocess.PIPE, env=environment
        )
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == b"there\n"

    def look(self) -> dict[str, Any]:
        return next(row for row in look(self.run_dir) if row["pid"] == self.process.pid)

    def close(self) -> None:
        for row in look(self.run_dir):
            os.kill(row["pid"], signal.SIGKILL)
        self.process.wait(LIMIT_S)


@pytest.fixture
def talker(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Talker]:
    one = Talker(request.param, tmp_path)
    yield one
    one.close()


@pytest.mark.parametrize("talker", ["coroutine"], indirect=True)
def test_a_process_tells_its_word_its_threads_and_its_tasks(talker: Talker) -> None:
    row = talker.look()
    assert (row["word"]["role"], row["word"]["index"], row["word"]["awaits"]) == ("trainer", 3, "batch 12")
    answer = row["answer"]
    tasks = {task["name"]: task["frames"] for task in answer["tasks"]}
    assert [frame[2] for frame in tasks["env task 3"]] == ["sleep", "reward"]
    assert "MainThread" in answer["threads"]
    assert answer["details"]["number"] == 7
    assert "ZeroDivisionError" in answer["details"]["broken"]["error"]
    assert talker.look()["answer"]["details"]["number"] == 7, "it answers again"


@pytest.mark.parametrize("talker", ["holds-the-lock"], indirect=True)
def test_a_call_that_holds_the_interpreter_still_shows_its_stack(talker: Talker) -> None:
    row = talker.look()
    assert "answer" not in row
    assert dict(parse_dump(row["stacks"]))["MainThread"][0][2] == "<module>"
    assert row["state"] == "S" and talker.process.poll() is None


@pytest.mark.parametrize("talker", ["sleeps"], indirect=True)
def test_a_stopped_process_is_seen_with_its_last_word(talker: Talker) -> None:
    talker.process.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, talker.process.pid, os.WSTOPPED | os.WNOWAIT)
    row = talker.look()
    assert (row["state"], row["word"]["phase"]) == ("T", "wait")
    assert "answer" not in row and "stacks" not in row
    talker.process.send_signal(signal.SIGCONT)
    assert "answer" in talker.look(), "and no signal had been left for it"


class Freezer:
    """A control group whose processes can be frozen, as Slurm freezes those of a suspended job."""

    def __init__(self, version: int) -> None:
        self.is_v2 = version == 2
        homes = ("freezer",) if version == 1 else ("unified", ".")
        above = next(
            (Path("/sys/fs/cgroup", home) for home in homes if self._is_one(Path("/sys/fs/cgroup", home))), None
        )
        if above is None:
            raise OSError(f"no cgroups v{version} are mounted")
        self.folder = above / f"prime-hpc-test-{os.getpid()}"
        self.folder.mkdir()

    def _is_one(self, folder: Path) -> bool:
        return (folder / "cgroup.procs").is_file() and (folder / "cgroup.controllers").is_file() == self.is_v2

    def take(self, pid: int) -> None:
        (self.folder / "cgroup.procs").write_text(str(pid))

    def freeze(self) -> None:
        """Freeze them all, and wait until they are."""
        (self.folder / ("cgroup.freeze" if self.is_v2 else "freezer.state")).write_text("1" if self.is_v2 else "FROZEN")
        deadline = time.monotonic() + LIMIT_S
        while not self._are_frozen():
            assert time.monotonic() < deadline

    def _are_frozen(self) -> bool:
        if self.is_v2:
            return "frozen 1" in (self.folder / "cgroup.events").read_text()
        return (self.folder / "freezer.state").read_text() == "FROZEN\n"

    def thaw(self) -> None:
        (self.folder / ("cgroup.freeze" if self.is_v2 else "freezer.state")).write_text("0" if self.is_v2 else "THAWED")

    def close(self) -> None:
        self.thaw()
        for pid in (self.folder / "cgroup.procs").read_text().split():
            (self.folder.parent / "cgroup.procs").write_text(pid)
        self.folder.rmdir()


@pytest.fixture(params=[1, 2], ids=["v1", "v2"])
def freezer(request: pytest.FixtureRequest) -> Iterator[Freezer]:
    try:
        found = Freezer(request.param)
    except OSError as error:
        pytest.skip(f"no freezer of cgroups v{request.param} that may be used here: {error}")
    yield found
    found.close()


@pytest.mark.parametrize("talker", ["sleeps"], indirect=True)
def test_a_frozen_process_is_a_stopped_one_and_is_asked_nothing(talker: Talker, freezer: Freezer) -> None:
    """In a container the second version may be the only one; its processes seem to sleep."""
    freezer.take(talker.process.pid)
    freezer.freeze()
    row = talker.look()
    status = Path(f"/proc/{talker.process.pid}/status").read_text()
    pending = dict(line.split(":\t") for line in status.splitlines())["ShdPnd"]
    assert (row["state"], row["word"]["phase"], int(pending, 16)) == ("T", "wait", 0)
    freezer.thaw()
    assert "answer" in talker.look()


@pytest.mark.parametrize("talker", ["fork"], indirect=True)
def test_a_forked_child_does_not_speak_for_its_parent(talker: Talker) -> None:
    rows = look(talker.run_dir)
    assert [bool(row["word"]) for row in sorted(rows, key=lambda row: row["pid"])] == [True, False]


@pytest.mark.parametrize("talker", ["calls"], indirect=True)
def test_the_call_in_which_a_process_is_shows_also_while_it_is_stopped(talker: Talker) -> None:
    before = time.time()
    talker.process.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, talker.process.pid, os.WSTOPPED | os.WNOWAIT)
    row = talker.look()
    assert row["state"] == "T" and row["call"]["name"] == ("second " + 40 * "x")[:40]
    assert before - 60 < row["call"]["since"] <= before and row["call"]["begun"] == 0


@pytest.mark.parametrize("talker", ["fork-and-introduce"], indirect=True)
def test_a_forked_child_that_introduces_itself_speaks_for_itself(talker: Talker) -> None:
    deadline, rows = time.monotonic() + LIMIT_S, list[dict[str, Any]]()
    while len([one for one in rows if "call" in one]) < 1:
        assert time.monotonic() < deadline
        rows = [one for one in look(talker.run_dir) if one["word"]]
    (parent,) = [one for one in rows if not one["word"].get("part")]
    (child,) = [one for one in rows if one["word"].get("part")]
    assert (parent["pid"], "call" in parent) == (talker.process.pid, False)
    assert (child["word"]["role"], child["word"]["number"], child["call"]["name"]) == ("trainer", 1, "step")
    assert "MainThread" in parent["answer"]["threads"] and "MainThread" in child["answer"]["threads"]


def test_who_tells_nothing_is_not_signalled(tmp_path: Path) -> None:
    silent = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
    try:
        (row,) = look(pids=[silent.pid])
        assert row["word"] == {} and "answer" not in row
        assert silent.poll() is None
    finally:
        silent.kill()
        silent.wait()


def tell(rank: int, run_dir: str) -> None:
    activity.introduce("trainer", rank, run_dir)
    activity.doing("wait", awaits="x")
    since = activity.now_doing()["since"]
    activity.doing("wait", awaits="x", step=3)
    assert activity.now_doing()["since"] == since
    activity.doing("optim")
    assert activity.now_doing()["phase"] == "optim"
    activity.doing("wait", awaits="\N{SNOWMAN}" * 5000)  # a word has its room: its end was cut off
    [word] = [word for word in words_here(run_dir) if word["pid"] == os.getpid()]
    assert word["phase"] == "wait" and word["awaits"].startswith("\N{SNOWMAN}" * 9)


def test_a_word_is_told_only_where_it_changes(tmp_path: Path) -> None:
    spawn(tell, (str(tmp_path),), 1)  # the test's own process tells nothing


def test_probe(tmp_path: Path) -> None:
    assert "seconds" in probe(tmp_path)
    assert "error" in probe(tmp_path / "absent")


# ------------------------------------------------------------------------------------------------ the verdict
def test_runs_that_cannot_be_looked_at(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError, match="no run"):
        why.run([str(tmp_path / "absent")], "prime-hpc")
    half = tmp_path / "half"
    half.mkdir()
    (half / "run.yaml").write_text("name: [")
    (half / "attempts.jsonl").write_text('{"attempt": 1, "beg')
    assert why.run([str(half)], "prime-hpc") == 3
    assert "not started" in capsys.readouterr().out
    over = {"attempt": 1, "began": time.time() - 9, "ended": time.time(), "outcome": "completed", "cause": "done"}
    (half / "attempts.jsonl").write_text(json.dumps({**over, "host": "n1", "pid": 1}) + "\n")
    assert why.run([str(half), "--json"], "prime-hpc") == 3
    assert json.loads(capsys.readouterr().out)["headline"].startswith("the run is over (completed)")


def test_a_child_gives_up_its_parents_files_and_no_others(tmp_path: Path) -> None:
    """The map's is one of them, though Python does not name it, and closes it at the map's end."""
    page = activity._Page({})
    [mapped] = set(page._files) - {page.word, page.answer, page.stacks, page.asks, page.door}
    others = (tmp_path / "other").open("w")
    for number in (page.stacks, mapped):  # whoever forked has closed some, and other files have got their numbers
        os.dup2(others.fileno(), number)
    os.close(page.answer)  # one is gone
    closed, stacks = (page.word, page.asks, page.door, page.answer), page.stacks
    page.close_in_child()
    del page
    for number in closed:
        with pytest.raises(OSError):
            os.fstat(number)
    for number, text in ((stacks, b"still "), (mapped, b"there")):
        os.write(number, text)
        os.close(number)
    assert (tmp_path / "other").read_text() == "still there"
