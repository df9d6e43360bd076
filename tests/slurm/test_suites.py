"""The dev cluster on the Slurm of other Debian suites: daemons, commands and tasks in a root of that suite."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.slurm import DEVCLUSTER, SLURM_IS_MISSING, Cluster, ClusterError


@pytest.fixture(scope="module", params=["trixie", pytest.param("sid", marks=pytest.mark.exhaustive)])
def other(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """A small cluster of that suite."""
    try:
        cluster = Cluster("--suite", request.param, num_nodes=2)
    except ClusterError as error:
        if error.code == SLURM_IS_MISSING:
            pytest.skip(f"no Slurm of {request.param}: {error}")
        raise
    yield cluster
    cluster.down()


def test_jobs_run_in_the_root_with_this_checkouts_python(other: Cluster) -> None:
    (release,) = set(other.ask("srun", "-p", "all", "-N2", "-n2", "cat", "/etc/debian_version").split())
    assert release != Path("/etc/debian_version").read_text().strip()
    version = other.ask("srun", "-p", "all", "--version").split()[-1]
    assert tuple(map(int, version.split(".")[:2])) >= (24, 11)
    code = "import os, socket, prime_hpc; print(os.getcwd(), socket.gethostname(), prime_hpc.__file__)"
    words = other.ask("srun", "-p", "all", "-N2", "-n2", sys.executable, "-c", code).splitlines()
    here = DEVCLUSTER.parents[1] / "prime_hpc" / "__init__.py"
    assert sorted(words) == [f"{other.shared} n{i} {here}" for i in (1, 2)]
    job = other.sbatch("echo on $SLURMD_NODENAME; exit 3")
    assert other.wait_state(job, {"FAILED", "COMPLETED"}) == "FAILED"
    assert other.output(job) == "on n1\n"


def test_without_a_root_it_says_so(tmp_path: Path) -> None:
    words = [str(DEVCLUSTER), "--dir", str(tmp_path / "c"), "up", "2", "--suite", "nosuchsuite"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60)
    assert done.returncode == SLURM_IS_MISSING
    assert "nosuchsuite" in done.stderr or "namespaces" in done.stderr
