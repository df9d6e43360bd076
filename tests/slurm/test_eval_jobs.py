"""An evaluation as a Slurm job: engines on two nodes load one version after another; requeued in the middle, it plays
what is missing. The engines are scripted, everything else is real."""

import json
from collections import Counter
from pathlib import Path

import pytest
import yaml

from prime_hpc.evals.episodes import num_episodes, results_file
from prime_hpc.store.attempts import read_attempts
from prime_hpc.store.run_paths import RunPaths
from tests.support.checkpoints import make_weights
from tests.support.runs import BIN, ROOT, wait_until
from tests.support.slurm import DONE, Cluster
from tests.support.tiny_model import make_tiny_model

pytestmark = [pytest.mark.slow, pytest.mark.exhaustive, pytest.mark.timeout(600)]

VERSIONS, TASKS = (3, 6), 300


def test_versions_of_a_run_are_one_job_that_survives_a_requeue(cluster: Cluster) -> None:
    folder = Path(cluster.shared) / "eval"
    make_tiny_model(folder / "model")
    for version in VERSIONS:
        make_weights(RunPaths(folder / "run"), version)
    tree = {
        "kind": "eval",
        "name": "scores",
        "output_dir": str(folder),
        "seq_len": 128,
        "model": {"name": str(folder / "model"), "dtype": "float32", "renderer": "qwen3"},
        "eval": {
            "environment_ids": ["reverse-text"],
            "weights_dir": str(folder / "run" / "weights"),
            "num_examples": TASKS,
            "max_concurrent": 8,
            "sampling": {"max_tokens": 24},
        },
        "inference": {"num_replicas": 2},
        "slurm": {
            "site": "devcluster",
            "gpus_per_node": 1,
            "env": {"PYTHONPATH": f"{ROOT}/tests/support/scripted_engines:{ROOT}"},
        },
    }
    (folder / "eval.yaml").write_text(yaml.safe_dump(tree))
    done = cluster.x([str(BIN / "prime-hpc"), "submit", str(folder / "eval.yaml"), "--json"], timeout=60)
    assert done.returncode == 0, done.stderr
    job, run_dir = json.loads(done.stdout)["job_id"], folder / "scores"
    wait_until(lambda: num_episodes(run_dir) > TASKS // 2, 240, "episodes")
    cluster.ask("scontrol", "requeue", job)
    wait_until(lambda: len(read_attempts(run_dir / "attempts.jsonl")) == 2, 240, "the second attempt")
    wait_until(lambda: cluster.job(job)["JobState"] in DONE, 240, "the end")
    log = (run_dir / "logs" / f"slurm-{job}.out").read_text()
    assert cluster.job(job)["JobState"] == "COMPLETED", log[-4000:]
    rows = [json.loads(line) for line in results_file(run_dir).read_text().splitlines()]
    assert Counter(row["step"] for row in rows) == {0: TASKS, 3: TASKS, 6: TASKS}
    assert len({(row["step"], row["task"]) for row in rows}) == len(rows)
    assert all(row["state"] == "completed" for row in rows)
    first, second = read_attempts(run_dir / "attempts.jsonl")
    assert first["outcome"] == "preempted" or (first["saved_step"] or 0) > TASKS // 2
    assert second["outcome"] == "completed" and second["why"].startswith("goes on after")
    nodes = {node for label, hosts in second["nodes"].items() if label.startswith("inference") for node in hosts}
    assert len(nodes) == 2
    assert "step 6" in (run_dir / "results" / "table.txt").read_text()
