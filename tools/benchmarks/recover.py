"""`tools/bench recover`: a trainer killed every ten steps of a real job, and the share of the time that was not lost.

A packed job on the dev cluster: two trainer nodes, one node of the `transformers` backend with the starter model, whose
tokens take as long as stated (`_stretched.py`), so that a step is one of tens of seconds though the cores idle. Half
way through each tenth step a trainer rank gets SIGKILL; the next attempt begins in the same job.

Effective share: steps that lasted, each as long as the median of those that nothing disturbed, over the time from the
end of the first step to the end of the last one. Down: from the kill to the end of the step that it hit, less one step.

`PRIME_HPC_BENCH_STEPS` (100), `PRIME_HPC_BENCH_TOKEN_S` (0.5 s, 48 tokens a rollout) and `PRIME_HPC_BENCH_INTERVAL` (a
checkpoint every 1 step) change the run;
`PRIME_HPC_BENCH_LOG` names a file for the supervisor's log.
"""

import json
import os
import signal
import statistics
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil

from prime_hpc.starter.make import make_starter
from prime_hpc.store.attempts import read_attempts
from prime_hpc.store.run_paths import RunPaths
from tests.support.runs import rows
from tests.support.slurm import Cluster

HERE = Path(__file__).resolve().parent
TOP = HERE.parents[1]
NUM_STEPS = int(os.environ.get("PRIME_HPC_BENCH_STEPS", "100"))
TOKEN_S = os.environ.get("PRIME_HPC_BENCH_TOKEN_S", "0.5")
INTERVAL = int(os.environ.get("PRIME_HPC_BENCH_INTERVAL", "1"))
EVERY = 10
START_S = 600.0


def experiment(folder: Path) -> dict[str, Any]:
    """The job."""
    path = {"PYTHONPATH": f"{TOP}:{HERE}", "PRIME_HPC_BENCH_TOKEN_S": TOKEN_S, "OMP_NUM_THREADS": "1"}
    return {
        "name": "recover",
        "output_dir": str(folder / "out"),
        "launch": "slurm",
        "max_steps": NUM_STEPS,
        "async_level": 1,
        "seq_len": 128,
        "model": {"name": str(folder / "made" / "model"), "dtype": "float32"},
        "ckpt": {"interval": INTERVAL, "keep_last": 2},
        "trainer": {"num_ranks": 2, "threads_per_rank": 1, "micro_batch_tokens": 2048, "optim": {"lr": 1e-5}},
        "orchestrator": {
            "batch_size": 16,
            "rollouts_per_example": 4,
            "max_concurrent": 16,
            "sampling": {"max_tokens": 48, "extra": {"ignore_eos": True}},
            "advantage": {"zero": "keep"},
            "env": [{"id": "reverse-text", "timeout_s": 600}],
        },
        "inference": {"backend": "_stretched:STRETCHED", "server": {"port": 0}, "cpu_threads": 1},
        "slurm": {
            "site": "devcluster",
            "layout": "packed",
            "gpus_per_node": 1,
            "cpus_per_task": 2,
            "env": path,
            "preflight": {"allreduce": False},
            "trainer": {"nodes": 2},
            "inference": {"nodes": 1},
        },
    }


def ranks_of(run_dir: Path) -> list[psutil.Process]:
    """Trainer ranks of a run; the dev cluster's nodes are this machine."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or []
        if str(run_dir) in words and "prime_hpc.trainer.main" in words and "prime_hpc.trainer.torchrun" not in words:
            found.append(process)
    return found


def step_ends(run_dir: Path) -> list[tuple[int, float]]:
    """Steps in the order in which they ended, and when."""
    path = RunPaths(run_dir).metrics("trainer")
    return [(row["step"], row["time"]) for row in rows(run_dir, "trainer")] if path.exists() else []


def play(cluster: Cluster, run_dir: Path, job: str) -> list[tuple[int, float]]:
    """Kill at every tenth step; returns the steps that were hit, and when."""
    killed: list[tuple[int, float]] = []
    began = time.time()
    while True:
        ends = step_ends(run_dir)
        last = max((step for step, _ in ends), default=0)
        if last >= NUM_STEPS:
            cluster.wait_state(job, "COMPLETED", timeout=START_S)
            return killed
        if not ends and time.time() - began > START_S:
            raise RuntimeError(f"no step within {START_S:.0f} s: {run_dir / 'logs' / 'supervisor.log'}")
        due = EVERY * (len(killed) + 1) - 1
        steps = [later - earlier for (_, earlier), (_, later) in pairwise(ends)]
        if last >= due and last < NUM_STEPS - 1 and time.time() - ends[-1][1] > 0.5 * statistics.median(steps):
            ranks = ranks_of(run_dir)
            ranks[0].send_signal(signal.SIGKILL)
            killed.append((last + 1, time.time()))
        state = cluster.job(job).get("JobState", "")
        if state not in ("RUNNING", "PENDING", "COMPLETED", "COMPLETING", "CONFIGURING"):
            raise RuntimeError(f"the job is {state}: {run_dir / 'logs' / 'supervisor.log'}")
        time.sleep(0.5)


def run() -> dict[str, Any]:
    """The job's figures."""
    cluster = Cluster(num_nodes=6)
    try:
        folder = cluster.shared
        make_starter(folder / "made", name="qwen3-tiny")
        path = folder / "recover.yaml"
        path.write_text(json.dumps(experiment(folder)))
        submit = [sys.executable, "-m", "prime_hpc.cli", "submit", str(path), "--json"]
        done = cluster.x(submit, env={"PYTHONPATH": f"{TOP}:{HERE}"})
        if done.returncode:
            raise RuntimeError(done.stderr)
        run_dir = folder / "out" / "recover"
        killed = play(cluster, run_dir, json.loads(done.stdout)["job_id"])
        ends = step_ends(run_dir)
        attempts = read_attempts(RunPaths(run_dir).attempts)
        said = (run_dir / "logs" / "supervisor.log").read_text()
        starts = {role: said.count(f"started {role} ") for role in ("inference[0]", "orchestrator")}
        if keep := os.environ.get("PRIME_HPC_BENCH_LOG"):
            Path(keep).write_text(said)
    finally:
        cluster.down()
    lasted = dict(ends)
    order = sorted(lasted)
    seconds = {step: lasted[step] - lasted[step - 1] for step in order if step - 1 in lasted}
    hit = {step for step, _ in killed}
    usual = statistics.median(value for step, value in seconds.items() if step not in hit)
    wall = lasted[order[-1]] - lasted[order[0]]
    return {
        "steps": len(order),
        "losses": len(killed),
        "attempts": len(attempts),
        "in_place": sum(row.get("next") == "in_place" for row in attempts),
        "starts_of_the_engine": starts["inference[0]"],
        "starts_of_the_orchestrator": starts["orchestrator"],
        "step_s": usual,
        "wall_s": wall,
        "effective": usual * (len(order) - 1) / wall,
        "down_s": [lasted[step] - when - usual for step, when in killed],
        "longer_s": [seconds[step] - usual for step, _ in killed],
        "done_again": len(ends) - len(order),
        "load": os.getloadavg()[0],
    }


def render(result: dict[str, Any]) -> str:
    """The figures for people."""
    down, longer = sorted(result["down_s"]), sorted(result["longer_s"])
    return "\n".join(
        [
            f"{result['steps']} steps of {result['step_s']:.1f} s, a trainer rank killed {result['losses']} times: "
            f"{result['attempts']} attempts, {result['in_place']} begun in place, "
            f"{result['starts_of_the_engine']} start of the engine, {result['starts_of_the_orchestrator']} of the "
            f"orchestrator, {result['done_again']} steps done again",
            f"from the kill to the end of the step that it hit, less a usual one: {down[len(down) // 2]:.1f} s (median)"
            + ("" if result["done_again"] else f"; that step was {longer[len(longer) // 2]:.1f} s longer"),
            f"effective share: {result['steps'] - 1} x {result['step_s']:.1f} s / {result['wall_s']:.0f} s = "
            f"{100 * result['effective']:.1f} %",
        ]
    )
