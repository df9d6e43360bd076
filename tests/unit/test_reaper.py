"""The reaper ends what it was told to watch, and nothing that merely has the same number now."""

import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from prime_hpc.supervisor import reaper as reaper_module
from prime_hpc.supervisor.reaper import Reaper, still_themselves

SLEEP = [sys.executable, "-c", "import time; time.sleep(600)"]


def test_a_number_that_another_process_has_now_is_left_alone() -> None:
    process = subprocess.Popen(SLEEP)
    try:
        watched = psutil.Process(process.pid)
        assert still_themselves({process.pid: watched}) == [process.pid]
        watched._ident = (process.pid, watched.create_time() - 100)  # type: ignore[attr-defined]  # an earlier holder's
        watched._gone = watched._pid_reused = False  # type: ignore[attr-defined]
        assert still_themselves({process.pid: watched}) == []
    finally:
        process.kill()
        process.wait()


def test_what_is_watched_ends_with_the_supervisor_and_what_is_forgotten_does_not() -> None:
    watched, forgotten = subprocess.Popen(SLEEP), subprocess.Popen(SLEEP)
    reaper = Reaper()
    try:
        for process in (watched, forgotten):
            reaper.watch(process.pid)
        reaper.watch(2**22 + 1)  # no such process any more
        reaper.forget(forgotten.pid)
        assert reaper._process.stdin is not None
        reaper._process.stdin.close()  # as when the supervisor was killed: no farewell
        deadline = time.monotonic() + 60
        while watched.poll() is None and time.monotonic() < deadline:
            time.sleep(0.05)
        assert watched.poll() is not None
        reaper._process.wait(timeout=280)
        assert forgotten.poll() is None
    finally:
        for process in (watched, forgotten):
            process.kill()
            process.wait()


def test_one_that_does_not_end_fails_no_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reaper_module, "END_S", 0.2)
    reaper = Reaper()
    os.kill(reaper.pid, signal.SIGSTOP)
    reaper.close()
    assert reaper._process.wait(200) == -signal.SIGKILL
