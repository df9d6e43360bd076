"""Programs that are killed with their starter, also where a thread starts them and fork handlers would hang."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from prime_hpc.runtime.tied_process import split, tied
from tests.support.processes import is_alive

STATUS = ["grep", "-E", "Sig(Blk|Ign)", "/proc/self/status"]


def run(*words: str, **how: object) -> "subprocess.CompletedProcess[str]":
    return subprocess.run([sys.executable, "-c", *words], capture_output=True, text=True, timeout=280, **how)  # type: ignore[call-overload]


def test_the_program_is_what_was_asked_for(tmp_path: Path) -> None:
    done = subprocess.run(tied(["sh", "-c", 'echo "$0 $1"; exit 7', "a b", "c"]), stdout=subprocess.PIPE, check=False)
    assert (done.stdout, done.returncode) == (b"a b c\n", 7)
    command = ["sbatch", "--parsable", "x"]
    (tmp_path / "sbatch").write_text("#!/bin/sh\n")
    with pytest.raises(PermissionError, match="sbatch"):
        tied(command, {"PATH": str(tmp_path)})
    (tmp_path / "sbatch").chmod(0o755)
    words = tied(command, {"PATH": str(tmp_path)}, deaf_to=[signal.SIGTERM])
    assert split(words) == ([signal.SIGTERM], command)
    assert split(command) is None
    with pytest.raises(FileNotFoundError, match="no-such-program"):
        tied(["no-such-program"])


def ignored(deaf_to: list[signal.Signals]) -> str:
    """What a program finds ignored and blocked, as the kernel says."""
    words = tied(STATUS, deaf_to=deaf_to)
    signal.pthread_sigmask(signal.SIG_BLOCK, deaf_to)
    said = subprocess.run(words, stdout=subprocess.PIPE, text=True, check=True).stdout
    signal.pthread_sigmask(signal.SIG_UNBLOCK, deaf_to)
    return said


def test_it_hears_what_a_program_started_as_ever_hears() -> None:
    as_ever = subprocess.run(STATUS, stdout=subprocess.PIPE, text=True, check=True).stdout
    assert ignored([]) == as_ever
    blocked, deaf = (line.split()[1] for line in ignored([signal.SIGTERM]).splitlines())
    before, heard = (line.split()[1] for line in as_ever.splitlines())
    assert blocked == before and int(deaf, 16) == int(heard, 16) | 1 << (signal.SIGTERM - 1)


def test_a_thread_starts_it_where_a_copy_of_the_process_would_hang(tmp_path: Path) -> None:
    """A library's fork handler waits for a lock that another thread holds: nothing is forked for it to run in."""
    code = """
import os, subprocess, sys, threading
from prime_hpc.slurm.client import run_slurm
os.register_at_fork(after_in_child=threading.Event().wait)
said = []
thread = threading.Thread(target=lambda: said.append(run_slurm(["sh", "-c", "echo 12"], dies_with_us=True)))
thread.start()
thread.join(200)
print(said, flush=True)
os._exit(0)
"""
    assert run(code).stdout.strip() == "['12\\n']"


@pytest.mark.parametrize("how", ["kill", "exit"])
def test_it_ends_with_its_starter(tmp_path: Path, how: str) -> None:
    code = """
import os, signal, subprocess, sys
from prime_hpc.runtime.tied_process import tied
child = subprocess.Popen(tied(["sh", "-c", "echo up; exec sleep 300"]), stdout=subprocess.PIPE)
child.stdout.read(2)
print(child.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL) if sys.argv[1] == "kill" else os._exit(0)
"""
    number = int(run(code, how).stdout)
    began = time.monotonic()
    while is_alive(number):
        assert time.monotonic() - began < 280
        time.sleep(0.02)


def test_a_starter_that_is_gone_already_is_noticed() -> None:
    words = tied(["sh", "-c", "echo never"])
    words[words.index(str(os.getpid()))] = "1"  # as if the parent by now were another
    done = subprocess.run(words, stdout=subprocess.PIPE, check=False)
    assert (done.returncode, done.stdout) == (1, b"")
