"""Servers that come and go as jobs of their own (`slurm.elastic`), beside an RL run."""

from pathlib import Path

import pytest
import yaml

from tests.support.runs import BIN, starter_tree
from tests.support.slurm import Cluster
from tests.support.small_jobs import attempts, last_step

pytestmark = [pytest.mark.slow, pytest.mark.exhaustive, pytest.mark.timeout(600)]

START_S = 240


@pytest.mark.parametrize("layout", ["packed", "het"])
def test_a_server_joins_is_taken_away_and_comes_back(cluster: Cluster, layout: str) -> None:
    folder = Path(cluster.shared) / f"elastic_{layout}"
    folder.mkdir()
    tree = starter_tree(
        folder,
        output_dir=str(folder / "out"),
        max_steps=100_000,
        ckpt={"interval": 50},
        inference={"cpu_kv_cache_gib": 0.25, "server": {"port": 0}},
        slurm={
            "site": "devcluster",
            "layout": layout,
            "gpus_per_node": 1,
            "cpus_per_task": 2,
            "elastic": {"servers": 1, "comment": "comes and goes"},
            "restart": {"node_timeout_s": 12, "fence_s": 20, "replica_retry_s": 2},
        },
    )
    config = folder / "exp.yaml"
    config.write_text(yaml.safe_dump(tree))
    done = cluster.x([str(BIN / "prime-hpc"), "submit", str(config), "--name", "stretch"], timeout=60)
    assert done.returncode == 0, done.stderr
    run_dir = folder / "out" / "stretch"
    log = run_dir / "logs" / "supervisor.log"

    def said() -> str:
        return log.read_text() if log.exists() else ""

    def other_jobs() -> list[str]:
        lines = cluster.ask("squeue", "-h", "-o", "%i %k").splitlines()
        return [job for job, _, comment in (line.partition(" ") for line in lines) if comment == "comes and goes"]

    cluster.wait_until(lambda: said().count("inference[1] is ready") == 1, "the server joins", timeout=START_S)
    (job,) = other_jobs()
    orchestrator = run_dir / "logs" / "attempt_1" / "orchestrator" / "orchestrator.log"
    cluster.wait_until(lambda: "takes episodes again" in orchestrator.read_text(), "it gets episodes", timeout=60)
    cluster.ask("scancel", "--batch", "--signal=USR1", job)  # as Slurm does before its time limit
    cluster.wait_until(lambda: "is leaving" in orchestrator.read_text(), "it gets no more episodes", timeout=60)
    cluster.ask("scancel", job)  # as a preemption does
    cluster.wait_until(lambda: "inference[1] has left" in said(), "it leaves", timeout=60)
    before = last_step(run_dir)
    cluster.wait_until(lambda: last_step(run_dir) >= before + 3, "the run goes on", timeout=90)
    cluster.wait_until(lambda: said().count("inference[1] is ready") == 2, "another one joins", timeout=START_S)
    assert other_jobs() != [job]
    cancelled = cluster.x([str(BIN / "prime-hpc"), "cancel", str(run_dir)], timeout=100)
    assert cancelled.returncode == 0, cancelled.stderr
    cluster.wait_until(lambda: not cluster.ask("squeue", "-h").strip(), "nothing is left in the queue", timeout=30)
    (life,) = attempts(run_dir)
    assert (life["outcome"], life["lost_nodes"]) == ("stopped", [])
