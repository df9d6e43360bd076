"""The report's GPU-hours beside Slurm's own accounting, of jobs that were given back, killed and cancelled."""

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from tests.slurm.test_jobs import attempts, prime_hpc, submit, wait_for_step, write_experiment
from tests.support.runs import ROOT
from tests.support.slurm import Cluster, start_or_skip

pytestmark = [pytest.mark.slow, pytest.mark.slurm, pytest.mark.exhaustive, pytest.mark.timeout(1200)]


@pytest.fixture(scope="module")
def accounted() -> Iterator[Cluster]:
    """A cluster of its own, with a database of what it charged."""
    cluster = start_or_skip("--accounting", num_nodes=3)
    yield cluster
    cluster.down()


@pytest.fixture(scope="module")
def experiment(accounted: Cluster) -> Path:
    """Two nodes with a GPU each, in Slurm's tables."""
    site = yaml.safe_load((ROOT / "slurm" / "sites" / "devcluster.yaml").read_text())
    (accounted.shared / "site.yaml").write_text(yaml.safe_dump(site | {"sacct": True, "name": "accounted"}))
    folder = accounted.shared / "jobs"
    folder.mkdir()
    return write_experiment(folder, site=str(accounted.shared / "site.yaml"))


def charged(cluster: Cluster, job: str) -> float:
    """GPU-hours of all lives of a job, from sacct."""
    columns = "JobID,ElapsedRaw,AllocTRES"
    seconds = 0.0
    for line in cluster.ask("sacct", "-X", "--duplicates", "-nP", "-j", job, "-o", columns).splitlines():
        _, elapsed, held = line.split("|")
        tres = dict(part.split("=") for part in held.split(",") if part)
        seconds += float(elapsed) * float(tres.get("gres/gpu", 0))
    return seconds / 3600


def accounting(cluster: Cluster, run_dir: Path) -> dict[str, Any]:
    done = prime_hpc(cluster, "report", run_dir, "--json")
    assert done.returncode == 0, done.stderr
    [run] = json.loads(done.stdout)["runs"]
    return dict(run["accounting"])


def wait_for_database(cluster: Cluster, job: str) -> None:
    """slurmdbd hears of an end some seconds later."""
    question = ("sacct", "-X", "-nP", "-j", job, "-o", "State")
    cluster.wait_until(lambda: "RUNNING" not in cluster.ask(*question).split(), f"the end of job {job} in sacct", 60)


def test_a_job_that_was_given_back_and_lost_a_rank(accounted: Cluster, experiment: Path) -> None:
    job, run_dir = submit(accounted, experiment, "requeued")
    wait_for_step(accounted, run_dir, 12)
    accounted.ask("scontrol", "requeue", job)
    accounted.wait_until(lambda: len(attempts(run_dir)) == 2, "the second attempt", timeout=200)
    wait_for_step(accounted, run_dir, 22)
    ranks = [p for p in psutil.process_iter(["cmdline"]) if str(run_dir) in " ".join(p.info["cmdline"] or [])]
    trainers = [p for p in ranks if "prime_hpc.trainer.main" in " ".join(p.info["cmdline"])]
    os.kill(trainers[-1].pid, signal.SIGKILL)
    accounted.wait_state(job, "COMPLETED", timeout=400)
    wait_for_database(accounted, job)

    found = accounting(accounted, run_dir)
    by_slurm = charged(accounted, job)
    assert by_slurm > 60 / 3600, "two nodes with a GPU each, for half a minute at least"
    assert found["unit"] == "GPU" and len(found["rows"]) == 3
    assert found["slurm"]["hours"] == pytest.approx(by_slurm, rel=1e-6)
    assert found["total"]["held_hours"] == pytest.approx(by_slurm, rel=0.01)
    for row in found["rows"]:
        assert sum(row["trainer"].values()) == pytest.approx(row["wall"], abs=0.05)


def test_a_job_that_was_cancelled(accounted: Cluster, experiment: Path) -> None:
    job, run_dir = submit(accounted, experiment, "cancelled", "--max-steps", 10_000)
    wait_for_step(accounted, run_dir, 12)
    accounted.ask("scancel", job)
    accounted.wait_state(job, "CANCELLED", timeout=200)
    wait_for_database(accounted, job)
    found = accounting(accounted, run_dir)
    assert found["total"]["held_hours"] == pytest.approx(charged(accounted, job), rel=0.01)
