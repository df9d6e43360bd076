"""Slurm's warning is outlived by a role, and by nothing that the role starts."""

import subprocess
import sys

import pytest

from prime_hpc.runtime.role_context import LED
from prime_hpc.runtime.slurm_warning import DEAF, is_led

SCRIPT = """
import os, signal, subprocess, time
from prime_hpc.runtime import slurm_warning
slurm_warning.outlive()
slurm_warning.outlive()
began = time.monotonic()
assert not slurm_warning.was_warned_since(began)
os.kill(os.getpid(), signal.SIGTERM)
assert slurm_warning.was_warned_since(began) and not slurm_warning.was_warned_since(time.monotonic())
ready, tell = os.pipe()
copy = os.fork()
if copy == 0:
    os.write(tell, b"1")
    time.sleep(60)
    os._exit(0)
os.read(ready, 1)
os.kill(copy, signal.SIGTERM)
print(os.waitstatus_to_exitcode(os.waitpid(copy, 0)[1]))
for prefix in ((), slurm_warning.DEAF):
    with subprocess.Popen([*prefix, "sh", "-c", "echo runs; read line; exit 3"], stdin=-1, stdout=-1) as started:
        started.stdout.readline()
        started.send_signal(signal.SIGTERM)
        if prefix:
            started.stdin.write(b"go on\\n")
            started.stdin.flush()
        print(started.wait(60))
"""


def test_a_role_goes_on_and_what_it_starts_ends_by_it_but_for_what_is_deaf() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=280, check=False)
    assert done.stdout.split() == ["-15", "-15", "3"], done.stderr
    assert DEAF[0] == "sh"


OF_PROGRAMS = """
import signal, subprocess
from prime_hpc.runtime import slurm_warning
signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # as its agent has it started
slurm_warning.outlive()
signal.raise_signal(signal.SIGUSR1)
assert slurm_warning.was_warned_since(0.0)
subprocess.run(["sh", "-c", "trap 'echo caught' USR1; kill -USR1 $$"])
print(subprocess.run([*slurm_warning.DEAF, "sh", "-c", "kill -USR1 $$; echo deaf"], stdout=-1).stdout)
"""


def test_what_a_role_starts_may_use_sigusr1_itself() -> None:
    done = subprocess.run([sys.executable, "-c", OF_PROGRAMS], capture_output=True, text=True, timeout=280, check=False)
    assert sorted(done.stdout.split()) == ["b'deaf\\n'", "caught"], done.stderr


def test_only_a_step_is_led(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(LED, raising=False)
    assert not is_led()
    monkeypatch.setenv(LED, "1")
    assert is_led()
