"""What a killed server leaves behind: nothing, neither by itself nor after the supervisor's kill."""

import os
import runpy
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from prime_hpc.inference import server_process
from prime_hpc.trainer import affinity
from prime_hpc.trainer.threads import rank_thread
from tests.support.processes import is_alive


def gone(pids: Sequence[int], timeout_s: float = 60.0) -> bool:
    """Whether all of them end in time; a zombie has given everything back."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if not any(map(is_alive, pids)):
            return True
        time.sleep(0.05)
    return False


@pytest.mark.parametrize("victim", [0, 1])
def test_spawned_engines_die_with_whoever_spawned_them(victim: int) -> None:
    command = [sys.executable, "-m", "tests.support.spawning_server"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).resolve().parents[2])
    try:
        assert server.stdout is not None
        pids = [int(word) for word in server.stdout.readline().split()]
        assert len(pids) == 3
        os.kill(pids[victim], signal.SIGKILL)
        assert gone(pids[victim + 1 :])
    finally:
        server.kill()
        server.wait()


def test_a_server_asks_for_it_in_what_it_spawns(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []
    monkeypatch.setattr(server_process, "die_with_spawner", lambda: asked.append(True))
    runpy.run_module("prime_hpc.inference.main", run_name="__mp_main__")
    assert asked == [True]


SUPERVISOR = """
import sys, time
from pathlib import Path
from prime_hpc.runtime.process_tree import alive, become_subreaper
from prime_hpc.supervisor.roles.process import Role
from prime_hpc.supervisor.roles.spec import RoleSpec
import os, psutil
become_subreaper()
folder = Path(sys.argv[1])
ready = folder / "ready"  # memory that it takes a while to give back, in which it shows no environment any more
hold = f"import pathlib, time; held = b'x' * (600 << 20); pathlib.Path('{ready}').touch(); time.sleep(600)"
leader = f'setsid {sys.executable} -c "{hold}" & echo $! > {folder}/engine; kill -9 $$'
role = Role(RoleSpec("inference", ["sh", "-c", leader], 60.0), folder / "logs", dict(os.environ))
other = Role(RoleSpec("inference", ["sleep", "600"], 60.0, index=1), folder / "logs", dict(os.environ))
role.start()
other.start()
while role.running or not ready.exists():
    time.sleep(0.02)
engine = psutil.Process(int((folder / "engine").read_text()))
role.kill()
role.reap()
print(bool(alive([engine])), other.running)
other.kill()
other.reap()
"""


def test_a_dead_servers_engine_is_ended_before_the_next_start(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SUPERVISOR, str(tmp_path)], capture_output=True, text=True, timeout=280, check=False
    )
    assert done.stdout.split() == ["False", "True"], done.stderr


# ------------------------------------------------------------------------------- the trainer's threads, and its CPUs


def test_a_ranks_threads_are_on_its_own_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[str, object]] = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.cuda, "set_device", lambda d: calls.append((threading.current_thread().name, d)))
    thread = rank_thread(lambda word: calls.append(("ran", word)), name="pins", args=("x",))
    thread.start()
    thread.join()
    assert calls == [("pins", 3), ("ran", "x")] and thread.daemon
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    thread = rank_thread(lambda: None, name="cpu")
    thread.start()
    thread.join()
    assert len(calls) == 2


def test_no_thread_of_the_trainer_is_made_in_another_way() -> None:
    """One that pins or copies would make a context on GPU 0; these two do neither."""
    package = Path(affinity.__file__).parent
    made = {str(p.relative_to(package)) for p in package.rglob("*.py") if "threading.Thread(" in p.read_text()}
    assert made - {"threads.py"} == {"main.py", "data/workers.py"}


def test_a_rank_keeps_to_the_cpus_near_its_gpu(tmp_path: Path) -> None:
    address = "0000:1b:00.0"
    (tmp_path / address).mkdir()
    (tmp_path / address / "local_cpulist").write_text("0-3,8-9\n")
    everything = set(range(16))
    assert affinity.near_cpus(address, everything, 4, tmp_path) == {0, 1, 2, 3, 8, 9}
    assert affinity.near_cpus(address, everything, 7, tmp_path) is None, "less than a CPU a rank"
    assert affinity.near_cpus(address, {0, 1, 2, 3}, 2, tmp_path) is None, "nothing to give up"
    assert affinity.near_cpus(address, {12}, 1, tmp_path) is None
    assert affinity.near_cpus("0000:ff:00.0", everything, 1, tmp_path) is None
    assert affinity.parse_cpus("\n") == set()


def test_the_gpus_place_is_written_as_the_kernel_does(monkeypatch: pytest.MonkeyPatch) -> None:
    class Facts:
        pci_domain_id, pci_bus_id, pci_device_id = 0, 0x1B, 0

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Facts)
    assert affinity.pci_address(torch.device("cuda", 1)) == "0000:1b:00.0"
