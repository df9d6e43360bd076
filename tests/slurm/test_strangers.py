"""Another user on other nodes and on the job's own, while an RL job trains: he gets nothing and changes nothing."""

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from prime_hpc.store.attempts import read_attempts
from tests.support.runs import BIN, ROOT, starter_tree, steps, used_prompts
from tests.support.slurm import Cluster

pytestmark = [pytest.mark.slow, pytest.mark.exhaustive, pytest.mark.netns, pytest.mark.timeout(900)]

START_S = 300
NUM_IDLE = 1000
NOBODY = 65534
SLURMS = ("slurmd", "slurmstepd", "srun", "slurmctld", "slurmdbd", "munged")
"""What listens for Slurm itself."""


def on_node(cluster: Cluster, node: str, *words: object, job: str | None = None) -> str:
    """Standard output of a command on a node: as a step of the job, or as a job of its own."""
    where = [f"--jobid={job}", "--overlap"] if job else ["-p", "cpu", "--mem=200"]
    done = cluster.x(["srun", "--quiet", *where, "-N1", "-n1", "-w", node, *map(str, words)], timeout=500)
    assert done.returncode == 0, done.stderr
    return done.stdout


def listeners(cluster: Cluster, job: str, node: str) -> dict[int, str]:
    """Port -> process, of all of the run's on a node, as `ss` has them."""
    found = {}
    for line in on_node(cluster, node, "ss", "-ltnpH", job=job).splitlines():
        program = re.search(r'users:\(\("([^"]+)",pid=(\d+)', line)
        if program and program[1] not in SLURMS:
            address, _, port = line.split()[3].rpartition(":")
            found[int(port)] = f"{program[1]} ({program[2]}) on {address}"
    return found


def visit(cluster: Cluster, start: str, host: str, ports: list[int], job: str | None = None) -> list[dict[str, Any]]:
    """What a stranger on node `start` gets from the ports of `host`."""
    script = ROOT / "tests" / "support" / "stranger.py"
    words = [sys.executable, "-I", script, host, ",".join(map(str, ports)), "--uid", NOBODY, "--flood", NUM_IDLE]
    said = json.loads(on_node(cluster, start, *words, job=job))
    assert said["uid"] == NOBODY
    return said["ports"]


def test_strangers_on_the_network_and_on_the_nodes_get_nothing(cluster: Cluster) -> None:
    folder = Path(cluster.shared) / "strangers"
    folder.mkdir()
    tree = starter_tree(
        folder,
        output_dir=str(folder / "out"),
        name="run",
        max_steps=100_000,
        ckpt={"interval": 1000},
        trainer={"num_ranks": 2},
        inference={"cpu_kv_cache_gib": 0.25, "server": {"port": 0}},
        slurm={
            "site": "devcluster",
            "layout": "packed",
            "gpus_per_node": 2,
            "cpus_per_task": 2,
            "inference": {"nodes": 1},
            "trainer": {"nodes": 1},
        },
    )
    (folder / "exp.yaml").write_text(yaml.safe_dump(tree))
    done = cluster.x([str(BIN / "prime-hpc"), "submit", str(folder / "exp.yaml"), "--json"], timeout=100)
    assert done.returncode == 0, done.stderr
    job, run_dir = json.loads(done.stdout)["job_id"], folder / "out" / "run"
    cluster.wait_until(lambda: len(steps(run_dir)) >= 2, "the first steps", timeout=START_S)
    nodes = sorted({node for named in read_attempts(run_dir / "attempts.jsonl")[0]["nodes"].values() for node in named})
    assert len(nodes) == 2
    found = []
    for node in nodes:
        ports = listeners(cluster, job, node)
        for start, own in (("n6", None), (node, job)):  # from another node, and beside the run on its own
            for one in visit(cluster, start, node if own is None else "127.0.0.1", sorted(ports), own):
                print(f"{start} -> {node} {ports[one['port']]}: {one}")
                found.append((f"{start} -> {node} {ports[one['port']]}", one))
    after = len(steps(run_dir))
    cluster.wait_until(lambda: len(steps(run_dir)) >= after + 3, "the run goes on", timeout=120)
    (run_dir / "STOP").touch()
    cluster.wait_until(lambda: not cluster.ask("squeue", "-h").strip(), "the job has ended", timeout=120)
    print(
        f"{len({(one['port'], name.split()[2]) for name, one in found})} ports of 2 nodes, each from 2 places: "
        f"{sum(one['routes'] for _, one in found)} HTTP requests, {sum(one['messages'] for _, one in found)} messages, "
        f"{NUM_IDLE * len(found)} idle connections"
    )
    assert sum(one["http"] for _, one in found) >= 2
    for name, one in found:
        assert one["told"] == [] and one["held"] == 0 and one["idle_gone"] == NUM_IDLE, (name, one)
    (life,) = read_attempts(run_dir / "attempts.jsonl")
    assert life["outcome"] == "stopped"
    done_steps = steps(run_dir)
    assert done_steps == list(range(1, len(done_steps) + 1))
    prompts = [position for step in done_steps for position in used_prompts(run_dir, step)]
    assert len(prompts) == len(set(prompts))
