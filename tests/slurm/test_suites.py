"""The Slurm of other Debian suites (24.11, 26.05): the dev cluster in a root of that suite, and the main ways of a run.

All of tests/slurm runs on them as well: see conftest. Here is what differed between versions, or well might.
"""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.runs import rows
from tests.support.sampled import sampled
from tests.support.slurm import DEVCLUSTER, SLURM_IS_MISSING, Cluster, ClusterError, start_or_skip
from tests.support.small_jobs import CLI, attempts, make_folder, sft, wait_for_step

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(
    scope="module", params=[pytest.param(suite, marks=pytest.mark.exhaustive) for suite in ("trixie", "sid")]
)
def other(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """A small cluster of that suite: GPU nodes n1 and n2, n3 without."""
    cluster = start_or_skip("--suite", request.param, "--gpu-nodes", "2", num_nodes=3)
    yield cluster
    cluster.down()


@pytest.fixture(scope="module")
def folder(other: Cluster) -> Path:
    """A directory that all nodes see, with a tiny model and a site profile in it."""
    return make_folder(other)


def test_jobs_run_in_the_root_with_this_checkouts_python(other: Cluster) -> None:
    own = Path("/etc").stat()
    (root,) = set(other.ask("srun", "-p", "all", "-N2", "-n2", "stat", "-c", "%d:%i", "/etc").split())
    assert root != f"{own.st_dev}:{own.st_ino}", "a system of its own, also where this machine's is of the same suite"
    version = other.ask("srun", "-p", "all", "--version").split()[-1]
    assert tuple(map(int, version.split(".")[:2])) >= (24, 11)
    code = "import os, socket, prime_hpc; print(os.getcwd(), socket.gethostname(), prime_hpc.__file__)"
    words = other.ask("srun", "-p", "all", "-N2", "-n2", sys.executable, "-c", code).splitlines()
    here = DEVCLUSTER.parents[1] / "prime_hpc" / "__init__.py"
    assert sorted(words) == [f"{other.shared} n{i} {here}" for i in (1, 2)]
    job = other.sbatch("echo on $SLURMD_NODENAME; exit 3")
    assert other.wait_state(job, {"FAILED", "COMPLETED"}) == "FAILED"
    assert other.output(job) in ("on n1\n", "on n2\n")


def test_preempted_it_saves_and_comes_back(other: Cluster, folder: Path) -> None:
    job, run_dir = sft(other, folder, "preempted", "scavenge", 60)
    wait_for_step(other, run_dir, 3)
    other.drill("preempt", "2")
    other.wait_state(job, "COMPLETED", timeout=300)
    first, last = attempts(run_dir)
    assert (first["outcome"], first["cause"]) == ("preempted", "preempted by a job of higher priority")
    assert (last["outcome"], last["resume_step"]) == ("completed", first["saved_step"])
    assert first["saved_step"] >= 3
    assert sorted(row["step"] for row in rows(run_dir, "trainer")) == list(range(1, 61))


@pytest.mark.exhaustive
@pytest.mark.parametrize("partition", ["scavenge", "scavcancel"])
def test_scancel_is_no_preemption(other: Cluster, folder: Path, partition: str) -> None:
    """Where a preempted job comes back by requeue, and where by a successor that waits behind it."""
    job, run_dir = sft(other, folder, f"cancelled-{partition}", partition, 100_000)
    wait_for_step(other, run_dir, 1)
    other.ask("scancel", job)
    other.wait_until(lambda: not other.ask("squeue", "-h"), "an empty queue", timeout=120)
    (life,) = attempts(run_dir)
    assert (life["outcome"], life["cause"]) == ("interrupted", "cancelled (scancel)")


@pytest.mark.exhaustive
def test_requeued_by_hand_and_stopped(other: Cluster, folder: Path) -> None:
    job, run_dir = sft(other, folder, "requeued", "gpu", 100_000)
    wait_for_step(other, run_dir, 2)
    other.ask("scontrol", "requeue", job)
    other.wait_until(lambda: len(attempts(run_dir)) == 2, "a second attempt", timeout=200)
    first, second = attempts(run_dir)
    assert (first["outcome"], first["cause"]) == ("requeued", "put back into the queue by scontrol requeue")
    assert second["resume_step"] == first["saved_step"] >= 2
    wait_for_step(other, run_dir, first["saved_step"] + 1)
    done = other.x([*CLI, "cancel", str(run_dir)], timeout=200)
    assert done.returncode == 0, done.stderr
    assert attempts(run_dir)[-1]["outcome"] == "stopped"


@pytest.mark.parametrize("suite", sampled(["here", "sid"], 2))
def test_with_cgroups_a_gpu_that_was_not_asked_for_is_denied(suite: str) -> None:
    options = [] if suite == "here" else ["--suite", suite]
    try:
        cluster = Cluster("--cgroup", "--gpu-nodes", "1", "--gpus", "2", *options, num_nodes=1)
    except ClusterError as error:
        if error.code == SLURM_IS_MISSING or "cannot be made here" in str(error):
            pytest.skip(str(error))
        raise
    try:
        script = f"echo $CUDA_VISIBLE_DEVICES; for i in 0 1; do cat {cluster.state}/dev/nvidia$i 2>&1; done; true"
        gpu, mine, others = cluster.ask("srun", "--gres=gpu:1", "sh", "-c", script).splitlines()
        assert gpu == "0"
        assert "No such device" in mine, "no driver is behind it"
        assert "Operation not permitted" in others
    finally:
        cluster.down()


def test_without_a_root_it_says_so() -> None:
    # a short path, for Slurm's sockets; nothing is made there
    words = [str(DEVCLUSTER), "--dir", "/tmp/no-such-suite", "up", "2", "--suite", "nosuchsuite"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60)
    assert done.returncode == SLURM_IS_MISSING
    assert "nosuchsuite" in done.stderr or "namespaces" in done.stderr
