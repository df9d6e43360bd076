"""Sites with ways of their own, on a real Slurm: comments cleared, --export=NONE, nodes excluded, GPUs without GRES."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from tests.slurm.test_jobs import attempts, prime_hpc, submit, wait_for_step
from tests.support.slurm import Cluster
from tests.support.tiny_model import make_tiny_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

CLEARS_COMMENTS = """
function slurm_job_submit(job_desc, part_list, submit_uid)
   job_desc.comment = ""
   return slurm.SUCCESS
end
function slurm_job_modify(job_desc, job_rec, part_list, modify_uid)
   return slurm.SUCCESS
end
return slurm.SUCCESS
"""
OWN_DEV = """
set -e
mkdir -p "$1" && mount -t tmpfs none "$1"
for name in null zero full random urandom; do touch "$1/$name"; mount --bind /dev/$name "$1/$name"; done
mkdir "$1/shm" && mount --bind /dev/shm "$1/shm"
mkdir "$1/pts" && mount --bind /dev/pts "$1/pts" && ln -s pts/ptmx "$1/ptmx"  # of srun --unbuffered
ln -s /proc/self/fd "$1/fd"
touch "$1/nvidia0" "$1/nvidia1"
mount --rbind "$1" /dev
"""


@pytest.fixture
def experiment(cluster: Cluster) -> Path:
    """A run of one node and a few steps."""
    folder = Path(cluster.shared) / "sites"
    folder.mkdir(exist_ok=True)
    make_tiny_model(folder / "model")
    tree = {
        "kind": "sft",
        "output_dir": str(folder / "out"),
        "max_steps": 10,
        "seq_len": 64,
        "model": {"name": str(folder / "model"), "dtype": "float32"},
        "trainer": {"num_ranks": 1, "threads_per_rank": 1},
        "sft": {"data": {"type": "fake", "batch_size": 8}},
        "slurm": {"site": "devcluster", "gpus_per_node": 1, "cpus_per_task": 2, "time": "10"},
    }
    path = folder / "exp.yaml"
    path.write_text(yaml.safe_dump(tree))
    return path


@pytest.fixture
def clears_comments(cluster: Cluster) -> Iterator[None]:
    """A site whose job_submit plugin clears every job's comment."""
    conf = cluster.state / "etc" / "slurm.conf"
    before = conf.read_text()
    (conf.parent / "job_submit.lua").write_text(CLEARS_COMMENTS)
    conf.write_text(before + "JobSubmitPlugins=lua\n")
    cluster.drill("restart-controller")
    said = cluster.ask("scontrol", "show", "config")
    if not re.search(r"JobSubmitPlugins\s*= .*lua", said):
        conf.write_text(before)
        cluster.drill("restart-controller")
        pytest.skip("this Slurm has no job_submit/lua plugin")
    yield
    conf.write_text(before)
    cluster.drill("restart-controller")


@pytest.mark.exhaustive
def test_a_run_is_found_again_where_comments_are_cleared(
    cluster: Cluster, experiment: Path, clears_comments: None
) -> None:
    job, run_dir = submit(cluster, experiment, "cleared", "--max-steps", 100000)
    assert cluster.ask("squeue", "-h", "-j", job, "-o", "%k") in ("", "(null)")
    stranger = cluster.sbatch("sleep 300", "--partition=cpu", "--job-name=cleared")
    wait_for_step(cluster, run_dir, 1)
    status = json.loads(prime_hpc(cluster, "status", run_dir, "--json").stdout)
    assert status["job_id"] == job and status["state"] in ("starting", "running"), "its word lags by seconds"
    again = prime_hpc(cluster, "submit", experiment, "--name", "cleared")
    assert again.returncode == 2 and f"in Slurm as job {job}, RUNNING" in again.stderr
    done = prime_hpc(cluster, "cancel", run_dir, "--now")
    assert done.returncode == 0, done.stderr
    assert cluster.wait_state(job, {"CANCELLED", "COMPLETED", "FAILED"}) == "CANCELLED"
    assert cluster.job(stranger)["JobState"] == "RUNNING"


@pytest.mark.exhaustive
def test_a_job_sent_with_export_none_runs(cluster: Cluster, experiment: Path) -> None:
    tree = yaml.safe_load(experiment.read_text())
    del tree["slurm"]["cpus_per_task"]
    tree["slurm"]["extra"] = {"export": "NONE", "cpus-per-gpu": 2, "threads-per-core": 1}
    bare = experiment.with_name("bare.yaml")
    bare.write_text(yaml.safe_dump(tree))
    job, run_dir = submit(cluster, bare, "bare")
    script = (run_dir / "job.sbatch").read_text()
    assert "#SBATCH --export=NONE\n" in script and "#SBATCH --cpus-per-task=2\n" in script
    assert "export PRIMEHPC_SUBMISSION=" in script, "which submission it is, sbatch's environment would not say"
    cluster.wait_state(job, "COMPLETED", timeout=200)
    (life,) = attempts(run_dir)
    assert life["outcome"] == "completed" and life["lost_nodes"] == []


@pytest.mark.exhaustive
def test_a_run_whose_job_slurm_does_not_requeue_goes_on_as_another(cluster: Cluster, experiment: Path) -> None:
    job, run_dir = submit(cluster, experiment, "no-requeue", "--max-steps", 100000, "--ckpt.interval", 1000)
    cluster.ask("scontrol", "update", f"JobId={job}", "Requeue=0")
    wait_for_step(cluster, run_dir, 1)
    cluster.ask("scancel", "--batch", "--signal=USR1", job)
    cluster.wait_until(lambda: len(attempts(run_dir)) == 2, "the successor's attempt", timeout=60)
    first, second = attempts(run_dir)
    assert (first["outcome"], first["next"], first["job_id"]) == ("preempted", "successor", job)
    assert second["resume_step"] == first["saved_step"] > 0 and second["job_id"] != job
    assert prime_hpc(cluster, "cancel", run_dir, "--now").returncode == 0


def test_a_requeue_keeps_what_its_user_excluded(cluster: Cluster) -> None:
    job = cluster.sbatch("sleep 300", "--partition=gpu", "--exclude=n4", "--requeue", "--nodelist=n1")
    cluster.wait_state(job, "RUNNING")
    module = "prime_hpc.supervisor.attempt.restart_policy"
    ask = "return_to_queue(sys.argv[1], 'requeue', 1, ['n3'], restarts=0)"
    code = f"import sys; from {module} import return_to_queue; {ask}"
    done = cluster.x([sys.executable, "-c", code, job], timeout=90)
    assert done.returncode == 0, done.stderr
    assert cluster.job(job)["ExcNodeList"] == "n[3-4]"
    cluster.ask("scancel", job)


def test_a_hidden_partition_hides_nothing_from_its_jobs(cluster: Cluster) -> None:
    """To all but root its nodes do not exist, unless Slurm's commands are told to show all."""
    folder = cluster.shared / "ordinary"
    folder.mkdir()
    for name in ("scontrol", "sinfo"):
        real = cluster.x(["bash", "-c", f"command -v {name}"]).stdout.strip()
        (folder / name).write_text(f'#!/bin/sh\nexec setpriv --reuid 65534 --regid 65534 --clear-groups {real} "$@"\n')
        (folder / name).chmod(0o755)
    code = "from prime_hpc.slurm import requeue, termination\n"
    code += "print(termination.lost_hosts(['n5'], 0.0), list(requeue._nodes_of('cpu')), requeue.silent_nodes('n5'))"
    path = f"{folder}:{os.environ['PATH']}:/usr/sbin:/usr/bin"
    parts = [
        line.split("=")[1] for line in cluster.ask("scontrol", "show", "partition").split() if "PartitionName" in line
    ]
    try:
        for part in parts:
            cluster.ask("scontrol", "update", f"PartitionName={part}", "Hidden=YES")
        assert cluster.x(["scontrol", "show", "node", "n5"], env={"PATH": path}).returncode, "it is hidden"
        done = cluster.x([sys.executable, "-c", code], env={"PATH": path})
    finally:
        for part in parts:
            cluster.ask("scontrol", "update", f"PartitionName={part}", "Hidden=NO")
    assert done.stdout == "['n5'] ['n5', 'n6'] []\n", done.stderr


@pytest.mark.netns
@pytest.mark.exhaustive
def test_gpus_that_slurm_does_not_know(cluster: Cluster, experiment: Path, tmp_path: Path) -> None:
    """Whole nodes are given out, and the driver's device files say what they have.

    Here they are empty files, so that the roles compute on the CPU, as the profile says, and see none of them.
    """
    node = f"n{cluster.num_nodes}"  # CPU-only, as far as Slurm knows
    pid = (cluster.state / "run" / f"{node}.id").read_text().split()[0]
    enter = ["nsenter", "-t", pid, "-m", "-p"]
    made = subprocess.run(
        [*enter, "sh", "-c", OWN_DEV, "sh", str(cluster.shared / "dev")], capture_output=True, text=True
    )
    assert made.returncode == 0, made.stderr
    try:
        site = yaml.safe_load((Path(__file__).parents[2] / "slurm" / "sites" / "devcluster.yaml").read_text())
        site |= {"name": "no-gres", "gpu_option": "none"}
        site["partitions"]["all"]["gpus_per_node"] = 2
        (experiment.parent / "site.yaml").write_text(yaml.safe_dump(site))
        flags: list[Any] = ["--slurm.site", experiment.parent / "site.yaml", "--slurm.partition", "all"]
        flags += ["--slurm.nodelist", node, "--slurm.exclusive", "--trainer-gpu-ids", "[1]", "--slurm.gpus-per-node", 2]
        job, run_dir = submit(cluster, experiment, "no-gres", *flags, "--max-steps", 100000)
        assert "#SBATCH --gres" not in (run_dir / "job.sbatch").read_text()
        wait_for_step(cluster, run_dir, 1)
        given = {
            process.environ().get("CUDA_VISIBLE_DEVICES")
            for process in psutil.process_iter()
            if _is_trainer(process, run_dir)
        }
        assert given == {""}
        report = json.loads((run_dir / "logs" / "attempt_1" / "preflight" / "report.json").read_text())
        assert [verdict["facts"]["gpus"]["count"] for verdict in report["verdicts"]] == [2]
        refused = prime_hpc(cluster, "submit", experiment, *flags, "--name", "on-gpus", "--device", "cuda")
        assert refused.returncode == 2 and "tools/setup gpu" in refused.stderr
        prime_hpc(cluster, "cancel", run_dir, "--now")
        cluster.wait_state(job, "CANCELLED")
    finally:
        subprocess.run([*enter, "umount", "-l", "/dev"], check=True)
        subprocess.run([*enter, "umount", "-R", "-l", str(cluster.shared / "dev")], check=False)


def _is_trainer(process: psutil.Process, run_dir: Path) -> bool:
    try:
        words = process.cmdline()
    except psutil.Error:
        return False
    return "prime_hpc.trainer.main" in words and str(run_dir) in words and "prime_hpc.trainer.torchrun" not in words
