"""Runs as Slurm jobs that live through what clusters do to jobs. Real `prime-hpc submit`, real Slurm, real trainers.

The runs are small SFT ones on random data over two nodes (one FSDP2 rank each): up in seconds, and bit for bit
repeatable, so that a run that was interrupted can be compared with one that was not. `test_rl_jobs` has the slow ones
with inference servers.
"""

import json
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from tests.support.runs import BIN, rows
from tests.support.slurm import Cluster
from tests.support.small_jobs import attempts, wait_for_step
from tests.support.tiny_model import make_tiny_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

NUM_STEPS = 60


def write_experiment(folder: Path, **slurm: object) -> Path:
    """A tiny SFT experiment over two nodes, with these keys of `slurm` beside its own."""
    make_tiny_model(folder / "model")
    tree = {
        "kind": "sft",
        "output_dir": str(folder / "out"),
        "max_steps": NUM_STEPS,
        "seq_len": 64,
        "model": {"name": str(folder / "model"), "dtype": "float32"},
        "ckpt": {"interval": 10},
        "trainer": {"num_ranks": 2, "threads_per_rank": 1, "optim": {"lr": 1e-4}},
        "sft": {"data": {"type": "fake", "batch_size": 48}},
        "slurm": {
            "site": "devcluster",
            "gpus_per_node": 1,
            "trainer": {"nodes": 2},
            "cpus_per_task": 2,
            "preflight": {"allreduce": False},
            "restart": {"node_timeout_s": 8, "fence_s": 15, "max_crashes": 1},
        }
        | slurm,
    }
    path = folder / "exp.yaml"
    path.write_text(yaml.safe_dump(tree))
    return path


@pytest.fixture(scope="session")
def experiment(cluster: Cluster) -> Path:
    """Of the session's cluster."""
    folder = Path(cluster.shared) / "jobs"
    folder.mkdir(exist_ok=True)
    return write_experiment(folder)


BROKEN_TRAINER = """
import sys
if "prime_hpc.trainer.main" in sys.orig_argv and "prime_hpc.trainer.torchrun" not in sys.orig_argv:
    raise SystemExit("RuntimeError: the trainer is broken")
"""


def submit(cluster: Cluster, experiment: Path, name: str, *flags: object) -> tuple[str, Path]:
    """`prime-hpc submit`; returns the job's id and the run directory."""
    done = prime_hpc(cluster, "submit", experiment, "--name", name, "--json", *flags)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)["job_id"], experiment.parent / "out" / name


def prime_hpc(cluster: Cluster, *words: object) -> "subprocess.CompletedProcess[str]":
    return cluster.x([str(BIN / "prime-hpc"), *map(str, words)], timeout=60)


def losses(run_dir: Path) -> dict[int, float]:
    """Loss by step; of a step that was done twice, the later one."""
    return {row["step"]: row["loss"] for row in rows(run_dir, "trainer")}


@pytest.fixture(scope="session")
def undisturbed(cluster: Cluster, experiment: Path) -> Path:
    """The run that the others are compared with."""
    job, run_dir = submit(cluster, experiment, "undisturbed")
    cluster.wait_state(job, "COMPLETED", timeout=400)
    return run_dir


def assert_finished(cluster: Cluster, job: str, run_dir: Path, undisturbed: Path) -> list[dict[str, Any]]:
    """The job completed, with the undisturbed run's losses to the last bit. Returns its attempts."""
    cluster.wait_state(job, "COMPLETED", timeout=400)
    lives = attempts(run_dir)
    assert lives[-1]["outcome"] == "completed", lives
    assert losses(run_dir) == losses(undisturbed)
    return lives


def test_a_job_completes_and_frees_its_nodes(cluster: Cluster, undisturbed: Path) -> None:
    cluster.wait_idle(timeout=60)
    (life,) = attempts(undisturbed)
    assert life["nodes"]["trainer"] == ["n1", "n2"]
    assert (life["outcome"], life["saved_step"]) == ("completed", NUM_STEPS)
    assert list(losses(undisturbed)) == list(range(1, NUM_STEPS + 1))
    status = json.loads((undisturbed / "status.json").read_text())
    assert (status["state"], status["step"]) == ("ended", NUM_STEPS)


@pytest.mark.exhaustive
def test_the_rendered_script_does_the_same_by_hand(cluster: Cluster, experiment: Path, undisturbed: Path) -> None:
    done = prime_hpc(cluster, "render", experiment, "--name", "by hand")
    assert done.returncode == 0, done.stderr
    run_dir = experiment.parent / "out" / "by hand"
    (run_dir / "logs").mkdir(parents=True)
    job = cluster.sbatch(done.stdout)
    (life,) = assert_finished(cluster, job, run_dir, undisturbed)
    assert life["job_id"] == job


@pytest.mark.exhaustive
def test_preempted_it_saves_and_comes_back(cluster: Cluster, experiment: Path, undisturbed: Path) -> None:
    flags = ("--slurm.partition", "scavenge", "--ckpt.interval", 1000)
    job, run_dir = submit(cluster, experiment, "preempted", *flags)
    wait_for_step(cluster, run_dir, 5)
    cluster.drill("preempt", "5")
    first, last = assert_finished(cluster, job, run_dir, undisturbed)
    assert (first["outcome"], first["cause"]) == ("preempted", "preempted by a job of higher priority")
    assert first["saved_step"] >= 5, "there was time to save"
    assert last["resume_step"] == first["saved_step"]


@pytest.mark.exhaustive
def test_preempted_where_jobs_are_cancelled_a_successor_goes_on(
    cluster: Cluster, experiment: Path, undisturbed: Path
) -> None:
    flags = ("--slurm.partition", "scavcancel", "--ckpt.interval", 1000)
    job, run_dir = submit(cluster, experiment, "succeeded", *flags)
    wait_for_step(cluster, run_dir, 5)
    cluster.drill("preempt", "5")
    cluster.wait_until(lambda: len(attempts(run_dir)) == 2, "the successor's attempt", timeout=400)
    successor = attempts(run_dir)[-1]["job_id"]
    assert successor != job
    first, _ = assert_finished(cluster, successor, run_dir, undisturbed)
    assert first["outcome"] == "preempted"
    cluster.wait_until(lambda: not cluster.ask("squeue", "-h").strip(), "no successor is left behind", timeout=30)


@pytest.mark.parametrize(
    "lost",
    [
        pytest.param("n2", id="a trainer node"),
        pytest.param("n1", id="the batch host, without which Slurm lets it run", marks=pytest.mark.exhaustive),
    ],
)
def test_a_lost_node_brings_it_back_on_others(cluster: Cluster, experiment: Path, undisturbed: Path, lost: str) -> None:
    job, run_dir = submit(cluster, experiment, f"lost-{lost}")
    wait_for_step(cluster, run_dir, 12)
    assert attempts(run_dir)[0]["host"] == "n1"
    cluster.drill("power-off", lost)
    lives = assert_finished(cluster, job, run_dir, undisturbed)
    first, last = lives[0], lives[-1]  # Slurm 22.05 may refuse the steps of the attempt between: see supervisor.checkup
    assert (first["outcome"], first["lost_nodes"]) == ("node_lost", [lost])
    assert last["resume_step"] >= 10
    assert lost not in last["nodes"]["trainer"] and len(last["nodes"]["trainer"]) == 2


@pytest.mark.exhaustive
def test_the_time_limit_is_no_end(cluster: Cluster, experiment: Path) -> None:
    """However slowly it starts: the limit is set once there is something to save."""
    flags = ("--slurm.restart.signal-lead-s", 45, "--max-steps", 100_000, "--ckpt.interval", 10_000)
    job, run_dir = submit(cluster, experiment, "limited", *flags)
    wait_for_step(cluster, run_dir, 1)
    hours, minutes, _ = cluster.job(job)["RunTime"].split(":")
    limit = int(hours) * 60 + int(minutes) + 2  # 60 to 120 s from now; Slurm may warn 30 s too early
    cluster.ask("scontrol", "update", f"JobId={job}", f"TimeLimit={limit}")
    cluster.wait_until(lambda: len(attempts(run_dir)) == 2, "a second attempt", timeout=400)
    first, second = attempts(run_dir)
    assert (first["outcome"], first["next"]) == ("requeued", "requeue")
    assert "time limit" in first["cause"]
    assert second["resume_step"] == first["saved_step"] > 0
    assert second["job_id"] == job
    cancelled = prime_hpc(cluster, "cancel", "--now", run_dir)
    assert cancelled.returncode == 0, cancelled.stderr


@pytest.mark.exhaustive
def test_stop_saves_and_ends_and_resume_goes_on(cluster: Cluster, experiment: Path, undisturbed: Path) -> None:
    job, run_dir = submit(cluster, experiment, "stopped", "--ckpt.interval", 1000)
    wait_for_step(cluster, run_dir, 5)
    done = prime_hpc(cluster, "cancel", run_dir)
    assert done.returncode == 0, done.stderr
    cluster.wait_idle(timeout=60)
    (life,) = attempts(run_dir)
    assert life["outcome"] == "stopped"
    assert 5 <= life["saved_step"] < NUM_STEPS
    again = prime_hpc(cluster, "resume", run_dir, "--json")
    assert again.returncode == 0, again.stderr
    assert_finished(cluster, json.loads(again.stdout)["job_id"], run_dir, undisturbed)
    assert job


@pytest.mark.exhaustive
def test_a_crash_is_tried_again_but_not_for_ever(cluster: Cluster, experiment: Path) -> None:
    # every attempt fails, and none saves anything
    broken = experiment.parent / "broken"
    broken.mkdir()
    (broken / "sitecustomize.py").write_text(BROKEN_TRAINER)
    job, run_dir = submit(cluster, experiment, "crashes", "--slurm.env.PYTHONPATH", broken)
    cluster.wait_state(job, "FAILED", timeout=400)
    lives = attempts(run_dir)
    assert [life["outcome"] for life in lives] == ["failed", "failed"], "max_crashes = 1: one more try"
    assert [life["next"] for life in lives] == ["requeue", None]
    assert "trainer rank 0 ended with exit code 1" in lives[0]["cause"]


@pytest.mark.exhaustive
def test_a_rank_that_crashes_starts_again_inside_the_job(cluster: Cluster, experiment: Path, undisturbed: Path) -> None:
    job, run_dir = submit(cluster, experiment, "in-place")
    wait_for_step(cluster, run_dir, 12)
    os.kill(rank_processes(run_dir)[0], signal.SIGKILL)
    lives = assert_finished(cluster, job, run_dir, undisturbed)
    assert [life["next"] for life in lives] == ["in_place", None]
    assert [life["restarts"] for life in lives] == [0, 0] and lives[1]["resume_step"] >= 10
    assert {life["job_id"] for life in lives} == {job}


def rank_processes(run_dir: Path) -> list[int]:
    """Return the process ids of the trainer's ranks on all nodes."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or []
        if str(run_dir) in words and "prime_hpc.trainer.main" in words and "prime_hpc.trainer.torchrun" not in words:
            found.append(process.pid)
    return found


@pytest.mark.exhaustive
def test_the_controller_may_be_restarted_under_a_job(cluster: Cluster, experiment: Path, undisturbed: Path) -> None:
    job, run_dir = submit(cluster, experiment, "controlled")
    wait_for_step(cluster, run_dir, 3)
    cluster.drill("kill-controller")
    cluster.drill("start-controller")
    assert len(assert_finished(cluster, job, run_dir, undisturbed)) == 1


@pytest.mark.exhaustive
def test_a_task_a_rank_instead_of_torchrun(cluster: Cluster, experiment: Path, undisturbed: Path) -> None:
    job, run_dir = submit(cluster, experiment, "srun-ranks", "--trainer.launcher", "srun")
    assert_finished(cluster, job, run_dir, undisturbed)


def test_what_preflight_finds_is_named_before_anything_starts(cluster: Cluster, experiment: Path) -> None:
    elsewhere = experiment.parent / "late"  # the ledger of bad nodes is kept by output directory
    flags = ("--output-dir", elsewhere, "--slurm.preflight.timeout-s", 0.01, "--slurm.restart.max-crashes", 0)
    job, _ = submit(cluster, experiment, "late", *flags)
    cluster.wait_state(job, "FAILED", timeout=200)
    (life,) = attempts(elsewhere / "late")
    assert life["cause"].startswith("preflight: "), life["cause"]
    assert "gave no answer within 0 s" in life["cause"] or "nodes began its check" in life["cause"], life["cause"]
    assert not (elsewhere / "late" / "logs" / "attempt_1" / "trainer").exists()
