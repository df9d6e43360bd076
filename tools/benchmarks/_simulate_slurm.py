"""`tools/bench simulate --slurm`: the same for Slurm jobs of the dev cluster: `submit`, batch script, steps of srun.

Six shapes, among them two trainer ranks on two nodes and a heterogeneous job. All nodes are this machine, so engines
and trainer take the time of slower devices (`_stretched.py`), by sleeping; starts, messages, batches and weights go the
way that they go on a cluster, over the nodes' own network addresses.

`PRIME_HPC_BENCH_ONLY=DIR` keeps the runs there, and takes those that lie there already; with `PRIME_HPC_BENCH_PIECE=N`
only the next N are made, and the figures follow when all are there.
"""

import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import simulate
from simulate import HERE, TOP, experiment

from tests.support.slurm import DONE, Cluster

CASES: dict[str, dict[str, Any]] = {
    "one-rank": {},
    "two-ranks": {"trainer.num_ranks": 2},
    "two-servers": {"inference.num_replicas": 2, "orchestrator.max_concurrent": 64},
    "het": {"slurm.layout": "het"},
    "level-0": {"async_level": 0},
    "batch-64": {"orchestrator.batch_size": 64},
}
CALIBRATIONS = (("one-rank",), ("two-ranks",))
TOKEN_S, TARGET_S = "0.1", "0.002"
"""Twice those of the cases on this machine: more processes share its cores."""
NUM_STEPS = 10
JOB_S = 600.0


def tree_of(name: str, changes: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The experiment of one case, as a job of the dev cluster."""
    path = f"{TOP}:{HERE}"
    variables = {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "WANDB_MODE": "disabled"}
    variables |= {"PRIME_HPC_BENCH_TOKEN_S": TOKEN_S, "PRIME_HPC_BENCH_TARGET_S": TARGET_S}
    slurm = {"site": "devcluster", "partition": "gpu", "gpus_per_node": 1, "cpus_per_task": 2, "time": "0:20:00"}
    base: dict[str, Any] = {
        "launch": "slurm",
        "max_steps": NUM_STEPS,
        "slurm": {**slurm, "layout": "packed", "preflight": {"enabled": False}, "env": variables},
        "supervisor": {"start_timeout_s": 400, "heartbeat_timeout_s": 120},
    }
    return experiment(name, base | changes, folder / "made" / "model", folder, stretched=True)


def measure(name: str, changes: dict[str, Any], folder: Path, cluster: Cluster) -> None:
    """Do one run, as a job.

    Raises:
        RuntimeError: it failed, or did not end in time; with the end of its log.
    """
    path = folder / f"{name}.yaml"
    path.write_text(json.dumps(tree_of(name, changes, folder)))  # JSON is YAML
    argv = [sys.executable, "-m", "prime_hpc.cli", "submit", str(path), "--json", "--no-follow"]
    done = cluster.x(argv, timeout=120, env={"PYTHONPATH": f"{TOP}:{HERE}", "HF_HUB_OFFLINE": "1"})
    if done.returncode:
        raise RuntimeError(done.stderr)
    job = json.loads(done.stdout)["job_id"]
    end, state = time.monotonic() + JOB_S, ""
    while state not in DONE and time.monotonic() < end:
        time.sleep(3)
        state = cluster.job(job).get("JobState", "")
    if state != "COMPLETED":
        cluster.ask("scancel", job)
        log = folder / name / "logs" / "supervisor.log"
        said = log.read_text()[-3000:] if log.exists() else "no log"
        raise RuntimeError(f"{name} did not complete ({state}):\n{said}")


def run() -> dict[str, Any]:
    """All cases and comparisons; of a piece the names of those that are left."""
    from prime_hpc.starter.make import make_starter

    kept, piece = os.environ.get("PRIME_HPC_BENCH_ONLY"), int(os.environ.get("PRIME_HPC_BENCH_PIECE", len(CASES)))
    with tempfile.TemporaryDirectory(prefix="bench-slurm-") as made:
        folder = Path(kept or made)
        folder.mkdir(exist_ok=True)
        if not (folder / "made").is_dir():
            make_starter(folder / "made", name="qwen3-tiny")
        left = [name for name in CASES if not (folder / f"{name}.done").exists()]
        if left:
            _measure_some(left[:piece], folder)
        left = left[piece:]
        if left:
            return {"left": left}
        return {
            "left": [],
            "num_cores": len(os.sched_getaffinity(0)),
            "loads": {name: float((folder / f"{name}.done").read_text()) for name in CASES},
            "comparisons": [simulate.compare(folder, names, CASES) for names in CALIBRATIONS],
        }


def _measure_some(names: list[str], folder: Path) -> None:
    cluster = Cluster(num_nodes=6)
    try:
        for name in names:
            measure(name, CASES[name], folder, cluster)
            (folder / f"{name}.done").write_text(str(os.getloadavg()[0]))
    finally:
        cluster.down()


def render(result: dict[str, Any]) -> str:
    """The figures as tables."""
    if result["left"]:
        return f"still to be measured: {', '.join(result['left'])}"
    lines = [f"jobs of the dev cluster, {result['num_cores']} cores, times stretched"]
    return "\n".join([*lines, *simulate.comparison_lines(result)])
