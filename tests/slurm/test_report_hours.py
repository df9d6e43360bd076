"""Hours of `report` and `usage` beside Slurm's own accounting: of jobs that were given back, killed and cancelled, of a
sweep, of a het job."""

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
from tests.support.tiny_model import make_tiny_model

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


def charged(cluster: Cluster, job: str, kind: str = "gres/gpu") -> float:
    """Device-hours of all lives of a job, its components and its array's tasks, from sacct."""
    columns = "JobID,ElapsedRaw,AllocTRES"
    seconds = 0.0
    for line in cluster.ask("sacct", "-X", "--duplicates", "-nP", "-j", job, "-o", columns).splitlines():
        _, elapsed, held = line.split("|")
        tres = dict(part.split("=") for part in held.split(",") if part)
        seconds += float(elapsed) * float(tres.get(kind, 0))
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


def used(cluster: Cluster, *words: object) -> list[dict[str, Any]]:
    """Rows of `prime-hpc usage`."""
    done = prime_hpc(cluster, "usage", *words, "--json")
    assert done.returncode == 0, done.stderr
    return list(json.loads(done.stdout)["rows"])


def test_usage_of_a_sweep_its_points_and_its_user(accounted: Cluster, experiment: Path) -> None:
    folder = experiment.parent / "swept"
    (folder / "out").mkdir(parents=True)
    tree = yaml.safe_load(experiment.read_text()) | {"output_dir": str(folder / "out"), "max_steps": 30}
    (folder / "exp.yaml").write_text(yaml.safe_dump(tree))
    axes = {"product": {"trainer.optim.lr": [1e-4, 1e-3]}}
    (folder / "lr.yaml").write_text(yaml.safe_dump({"experiment": "exp.yaml", "axes": axes, "throttle": 1, "last": 1}))
    done = prime_hpc(accounted, "sweep", "submit", folder / "lr.yaml", "--json")
    assert done.returncode == 0, done.stderr
    [part] = json.loads(done.stdout)["parts"]
    job = part["job_id"]
    accounted.wait_until(lambda: not accounted.ask("squeue", "-h").strip(), "the end of the sweep", timeout=400)
    wait_for_database(accounted, job)
    by_slurm = charged(accounted, job)
    points = used(accounted, folder / "out")
    assert len(points) == 2 and {row["by_slurm"] for row in points} == {1}
    for row in [*used(accounted, folder / "out", "--by", "sweep"), *used(accounted, folder / "out", "--by", "user")]:
        assert row["runs"] == 2 and row["unit"] == "GPU"
        assert row["charged_hours"] == pytest.approx(by_slurm, rel=1e-6)
        assert 0 < row["effective_hours"] < row["charged_hours"]
    [sweep] = used(accounted, folder / "out", "--by", "sweep")
    assert sweep["name"] == "lr"
    held = [accounting(accounted, folder / "out" / point["name"])["total"]["held_hours"] for point in points]
    print(f"sweep of two: sacct {by_slurm:.5f}, usage {sweep['charged_hours']:.5f}, by the runs {sum(held):.5f}")
    assert sum(held) == pytest.approx(by_slurm, rel=0.01)


def test_usage_of_a_het_job(accounted: Cluster) -> None:
    from tests.support import small_jobs

    folder = accounted.shared / "het"
    folder.mkdir()
    site = yaml.safe_load((ROOT / "slurm" / "sites" / "devcluster.yaml").read_text()) | {"sacct": True, "name": "het"}
    (folder / "site.yaml").write_text(yaml.safe_dump(site))
    make_tiny_model(folder / "model")
    job, run_dir = small_jobs.rl(accounted, folder, "het", 6)
    accounted.wait_state(job, "COMPLETED", timeout=400)
    wait_for_database(accounted, job)
    by_slurm = charged(accounted, job, "cpu")
    [row] = used(accounted, run_dir)
    total = accounting(accounted, run_dir)["total"]
    print(f"het job: sacct {by_slurm:.5f}, usage {row['charged_hours']:.5f}, by the run {total['held_hours']:.5f}")
    assert (row["unit"], row["by_slurm"]) == ("CPU", 1)
    assert row["charged_hours"] == pytest.approx(by_slurm, rel=1e-6)
    assert total["held_hours"] == pytest.approx(by_slurm, rel=0.01)
    assert 0 < row["effective_hours"] < row["charged_hours"]
