"""`prime-hpc shell` into a real job: each component of a het job, a terminal, and a run that has ended."""

import subprocess
from pathlib import Path

import pytest

from tests.support.slurm import Cluster
from tests.support.small_jobs import CLI, make_folder, rl, wait_for_step

pytestmark = [pytest.mark.slow, pytest.mark.exhaustive, pytest.mark.timeout(900)]


def shell(cluster: Cluster, run_dir: Path, *words: str) -> "subprocess.CompletedProcess[str]":
    return cluster.x([*CLI, "shell", str(run_dir), *words], timeout=280)


def test_a_shell_where_each_role_is(cluster: Cluster) -> None:
    job, run_dir = rl(cluster, make_folder(cluster), "shelled", 100_000)
    wait_for_step(cluster, run_dir, 1)
    for role, partition in (("trainer", "gpu"), ("orchestrator", "cpu")):
        done = shell(cluster, run_dir, "--role", role, "--", "sh", "-c", "env; cat /proc/self/cgroup >/dev/null")
        assert done.returncode == 0, done.stderr
        found = dict(line.partition("=")[::2] for line in done.stdout.splitlines())
        said = f"{found['SLURMD_NODENAME']}: {role}"
        assert any(line.startswith(said) and f"run {run_dir}" in line for line in done.stderr.splitlines()), done.stderr
        assert found["SLURM_JOB_PARTITION"] == partition and found["SLURM_JOB_NAME"] == "shell"
        assert not [name for name in found if name.endswith("_KEY") or name == "PRIMEHPC_BUS"]
    typed = f"{' '.join(CLI)} shell {run_dir} --role trainer"
    done = cluster.x(["sh", "-c", f"printf 'tty; exit 7\\n' | script -qec '{typed}' /dev/null"], timeout=280)
    assert done.returncode == 7 and "/dev/pts/" in done.stdout, done.stdout + done.stderr
    done = shell(cluster, run_dir, "--role", "trainer", "--rank", "3")
    assert done.returncode == 2 and "ranks 0 to 0" in done.stderr
    cluster.ask("scancel", job)
    cluster.wait_state(job, "CANCELLED", timeout=280)
    done = shell(cluster, run_dir)
    assert done.returncode == 3 and "the run is over" in done.stderr
