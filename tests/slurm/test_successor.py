"""Under Slurm's own limits: successors, refused at MaxSubmitJobs 1 and taken as soon as it is lifted; a job that its
account would never let start."""

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from prime_hpc.store.run_dirs import read_record
from tests.support.runs import rows
from tests.support.slurm import Cluster, start_or_skip
from tests.support.small_jobs import CLI, attempts, make_folder, submit, wait_for_step

pytestmark = [pytest.mark.slow, pytest.mark.slurm, pytest.mark.exhaustive, pytest.mark.timeout(900)]

LIMIT = "AssocMaxSubmitJobLimit"


@pytest.fixture(scope="module")
def limited() -> Iterator[Cluster]:
    """A cluster of its own, that enforces the limits of its accounts."""
    cluster = start_or_skip("--accounting", "--conf", "AccountingStorageEnforce=limits", num_nodes=2)
    yield cluster
    cluster.down()


@pytest.fixture(scope="module")
def folder(limited: Cluster) -> Path:
    return make_folder(limited, {"sacct": True})


def allow(cluster: Cluster, most: int) -> None:
    """Let this user have so many jobs in the queue."""
    cluster.ask("sacctmgr", "-i", "modify", "user", "root", "set", f"maxsubmitjobs={most}")


def send(cluster: Cluster, folder: Path, name: str, retry_s: float) -> tuple[str, Path]:
    """A run that comes back as a job of its own, once its trainer is killed."""
    restart = {"how": "successor", "successor_retry_s": retry_s, "in_place": False}
    return submit(
        cluster,
        folder,
        name,
        {"partition": "gpu", "restart": restart},
        kind="sft",
        seq_len=64,
        sft={"data": {"type": "fake", "batch_size": 48}},
        ckpt={"interval": 5},
        max_steps=100_000,
    )


def kill_trainer(run_dir: Path) -> None:
    found = [p for p in psutil.process_iter(["cmdline"]) if str(run_dir) in " ".join(p.info["cmdline"] or [])]
    ranks = [p for p in found if "prime_hpc.trainer.main" in " ".join(p.info["cmdline"])]
    os.kill(ranks[-1].pid, signal.SIGKILL)


def status(cluster: Cluster, run_dir: Path) -> dict[str, Any]:
    done = cluster.x([*CLI, "status", str(run_dir), "--json"])
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))


def end(cluster: Cluster, run_dir: Path) -> None:
    done = cluster.x([*CLI, "cancel", str(run_dir), "--now"], timeout=200)
    assert done.returncode == 0, done.stderr
    cluster.wait_until(lambda: not cluster.ask("squeue", "-h").strip(), "an empty queue", timeout=60)


def wait_for_next(cluster: Cluster, run_dir: Path, job: str) -> None:
    """Until the run has gone on in another job, by a step at least."""
    cluster.wait_until(lambda: len(attempts(run_dir)) == 2, "the successor's attempt", timeout=200)
    first, second = attempts(run_dir)
    assert (first["outcome"], first["next"]) == ("failed", "successor")
    assert first["job_id"] == job and second["job_id"] != job
    before = rows(run_dir, "trainer")[-1]["step"]
    wait_for_step(cluster, run_dir, before + 1)


def test_it_is_queued_while_the_run_goes_on(limited: Cluster, folder: Path) -> None:
    allow(limited, 1)
    job, run_dir = send(limited, folder, "refused", retry_s=2)
    wait_for_step(limited, run_dir, 3)
    assert LIMIT in status(limited, run_dir)["no_successor"]
    said = limited.x([*CLI, "status", str(run_dir)]).stdout
    assert "no successor waits: " in said and LIMIT in said
    limited.wait_until(
        lambda: any(row["rule"] == "successor" for row in alarms(run_dir)), "the alarm of a missing successor", 60
    )
    allow(limited, 2)
    limited.wait_until(lambda: bool((read_record(run_dir) or {}).get("successor")), "a successor", 60)
    assert status(limited, run_dir)["no_successor"] is None
    wait_for_step(limited, run_dir, 6)
    kill_trainer(run_dir)
    allow(limited, 3)
    wait_for_next(limited, run_dir, job)
    end(limited, run_dir)


def test_it_is_queued_at_the_attempts_end(limited: Cluster, folder: Path) -> None:
    allow(limited, 1)
    job, run_dir = send(limited, folder, "late", retry_s=3600)
    wait_for_step(limited, run_dir, 6)
    kill_trainer(run_dir)
    log = run_dir / "logs" / "supervisor.log"
    limited.wait_until(lambda: "no successor waits yet, and this job ends" in log.read_text(), "its last tries", 120)
    assert len(attempts(run_dir)) == 1
    allow(limited, 2)
    wait_for_next(limited, run_dir, job)
    end(limited, run_dir)


def alarms(run_dir: Path) -> list[dict[str, Any]]:
    path = run_dir / "alarms.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def test_a_job_that_would_wait_for_ever_says_for_what(limited: Cluster, folder: Path) -> None:
    limited.ask("sacctmgr", "-i", "modify", "user", "root", "set", "GrpTRES=cpu=1")
    try:
        job, run_dir = send(limited, folder, "too-large", retry_s=60)
        limited.wait_until(lambda: limited.job(job)["Reason"] == "AssocGrpCpuLimit", f"job {job} waits for CPUs")
        words = "AssocGrpCpuLimit: user root in account root allows 1 CPU at once, and it asks for 2: it would wait for"
        said = status(limited, run_dir)
        assert said["state"] == "pending" and said["note"].startswith(words)
        done = limited.x([*CLI, "why", str(run_dir)])
        assert done.returncode == 3 and words in done.stdout + done.stderr
        end(limited, run_dir)
    finally:
        limited.ask("sacctmgr", "-i", "modify", "user", "root", "set", "GrpTRES=cpu=-1")
