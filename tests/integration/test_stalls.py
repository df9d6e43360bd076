"""A stall is not a death: real supervisor, agents and roles, on files that hang, or stopped, and woken again."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from prime_hpc.runtime.process_tree import family, send
from prime_hpc.store.attempts import read_attempts
from tests.support.forked import so_far

ROOT = Path(__file__).resolve().parents[2]
WAIT_S = 200.0
FENCE_S = 5.0
STALL_S = 2 * FENCE_S
LINES = 40


class Run:
    """A led run whose role writes lines, and the means to stall it."""

    def __init__(self, folder: Path) -> None:
        self.dir, self.now = folder / "run", folder / "hangs"
        self.dir.mkdir()
        self.lines, over = self.dir / "lines", self.dir / "over"
        actions = ["beat:0.5", "ready", f"write:{self.lines}:{LINES}", "done", f"write:{over}:1"]
        restart = {"node_timeout_s": FENCE_S, "fence_s": FENCE_S}
        facts = {"actions": actions, "over": str(over), "restart": restart}
        facts["supervisor"] = {"heartbeat_timeout_s": FENCE_S, "grace_s": 1}
        path = f"{ROOT}/tests/support/hanging_files:{ROOT}"
        environment = {**os.environ, "PYTHONPATH": path, "HANGING_ROOT": str(self.dir), "HANGING_NOW": str(self.now)}
        command = [sys.executable, "-m", "tests.support.led_run", str(self.dir), json.dumps(facts)]
        self.log = (folder / "log").open("wb+")
        self.process = subprocess.Popen(
            command, env=environment, stdout=self.log, stderr=subprocess.STDOUT, start_new_session=True
        )

    def wait(self, holds: Callable[[], bool], what: str) -> None:
        end = time.monotonic() + WAIT_S
        while not holds():
            assert time.monotonic() < end and self.process.poll() is None, f"{what}: {self.said()}"
            time.sleep(0.05)

    def said(self) -> str:
        return so_far(self.log).decode()

    def num_lines(self) -> int:
        return len(self.lines.read_text().splitlines()) if self.lines.exists() else 0

    def all(self) -> list[psutil.Process]:
        return family(self.process.pid)

    def agents(self) -> list[psutil.Process]:
        return [p for p in self.all() if "prime_hpc.supervisor.agent" in p.cmdline() and "srun" not in p.cmdline()[1]]

    def close(self) -> None:
        self.now.unlink(missing_ok=True)
        members = self.all()
        send(members, signal.SIGKILL)
        self.process.wait(200)
        self.log.close()

    def assert_it_went_on(self) -> None:
        """To its end, in one attempt, with every line."""
        assert self.process.wait(WAIT_S) == 0, self.said()
        (life,) = read_attempts(self.dir / "attempts.jsonl")
        assert (life["outcome"], life["lost_nodes"]) == ("completed", [])
        assert self.lines.read_text().split() == [str(n) for n in range(LINES)]


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    one = Run(tmp_path)
    yield one
    one.close()


def stalled(seconds: float) -> None:
    """What is being tested is the passing of time: longer than every deadline of the run."""
    time.sleep(seconds)


def test_a_file_system_that_hangs_for_longer_than_every_deadline(run: Run) -> None:
    run.wait(lambda: run.num_lines() > 3, "lines")
    run.now.touch()
    before = run.num_lines()
    stalled(STALL_S)
    assert run.num_lines() <= before + 1, "it hangs"
    assert run.process.poll() is None, run.said()
    run.now.unlink()
    run.assert_it_went_on()
    assert "does the file system hang?" in run.said()


@pytest.mark.parametrize("first", [pytest.param("supervisor", marks=pytest.mark.exhaustive), "agents"])
def test_stopped_and_woken_in_any_order(run: Run, first: str) -> None:
    run.wait(lambda: run.num_lines() > 3, "lines")
    agents = run.agents()
    assert len(agents) == 2
    below = [p for agent in agents for p in family(agent.pid)]
    above = [p for p in run.all() if p not in below]
    groups = [above, below] if first == "supervisor" else [below, above]
    for group in groups:
        send(group, signal.SIGSTOP)
    stalled(STALL_S)
    for group in groups:
        send(group, signal.SIGCONT)
        stalled(FENCE_S / 5)  # the others sleep on meanwhile
    run.assert_it_went_on()
    assert "was stopped for" in run.said()


def test_a_dead_agent_is_still_a_lost_node(run: Run) -> None:
    run.wait(lambda: run.num_lines() > 3, "lines")
    agent = next(a for a in run.agents() if a.environ()["SLURMD_NODENAME"] == "n2")
    agent.suspend()  # and the others go on
    assert run.process.wait(WAIT_S) == 1, run.said()
    (life,) = read_attempts(run.dir / "attempts.jsonl")
    assert (life["outcome"], life["lost_nodes"]) == ("node_lost", ["n2"])
