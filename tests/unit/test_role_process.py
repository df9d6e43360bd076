"""The frame of a role whose work is a coroutine."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from prime_hpc.client.keys import KEY_VARIABLES
from prime_hpc.config import load_experiment
from prime_hpc.config.snapshot import write_snapshot
from prime_hpc.observe.role_status import read_status
from prime_hpc.runtime.role_context import RoleContext, role_environment
from prime_hpc.store.messaging.bus import BusServer

ROLE = """
import asyncio, sys
from verifiers.v1.runtimes.subprocess import SubprocessConfig, SubprocessRuntime
from prime_hpc.store.role_process import run_role

async def work(experiment, context, bus, status):
    while not bus.connected:
        await asyncio.sleep(0.01)
    runtime = SubprocessRuntime(SubprocessConfig())
    await runtime.start()
    print((await runtime.run(["env"], {})).stdout)
    await runtime.stop()

sys.exit(run_role("eval", work, ()))
"""


def test_programs_of_episodes_are_not_told_the_run_s_messages_nor_its_servers_keys(tmp_path: Path) -> None:
    """A model that looks at its environment would have them in what it says, and in every file that keeps it."""
    argv = ["--model.name", "m", "--environment-ids", "reverse-text", "--output-dir", str(tmp_path), "--name", "e"]
    experiment = load_experiment(argv, "eval", {}).experiment
    write_snapshot(experiment, experiment.run_dir, ["test"])
    hub = BusServer(secret="the-secret-of-the-hub")
    facts = role_environment(
        bus_address=hub.address, attempt=1, incarnation=0, resume_step=None, urls={"inference": []}
    )
    keys = dict.fromkeys(KEY_VARIABLES.values(), "the-key-of-the-servers")
    done = subprocess.run(
        [sys.executable, "-c", ROLE, str(experiment.run_dir)],
        env={**os.environ, **facts, **keys, "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    hub.close()
    assert done.returncode == 0, done.stdout + done.stderr
    assert "PRIMEHPC_INCARNATION=0" in done.stdout
    assert "the-secret" not in done.stdout and "the-key" not in done.stdout


GUARDED = """
import os, sys
from prime_hpc.store.role_process import leave, run_role

async def work(experiment, context, bus, status):
    os.replace = os.rename = os.kill = None
    if experiment.name == "fails":
        os.rename("a", "b")

code = run_role("eval", work, ())
sys.stdout.flush()
sys.stdout = None
os.close(2)
leave(code)
"""


@pytest.mark.parametrize("name", ["fails", "ends_well"])
def test_a_process_whose_functions_an_environment_took_away_says_so(tmp_path: Path, name: str) -> None:
    """HumanEval's reliability_guard does that, in whatever process its checker runs."""
    argv = ["--model.name", "m", "--environment-ids", "reverse-text", "--output-dir", str(tmp_path), "--name", name]
    experiment = load_experiment(argv, "eval", {}).experiment
    write_snapshot(experiment, experiment.run_dir, ["test"])
    done = subprocess.run(
        [sys.executable, "-c", GUARDED, str(experiment.run_dir)], capture_output=True, text=True, check=False
    )
    status = read_status(RoleContext("eval", experiment.run_dir).log_dir)
    assert status is not None
    if name == "ends_well":
        assert (done.returncode, status["state"]) == (0, "done"), done.stdout + done.stderr
        return
    assert (done.returncode, status["state"]) == (1, "failed"), done.stdout + done.stderr
    for told in (done.stdout, status["error"]):
        assert "set os.kill, os.rename, os.replace to None" in told and "workers" in told
