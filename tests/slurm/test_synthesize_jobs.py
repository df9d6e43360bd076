"""`synthesize` as a Slurm job of inference nodes alone: requeued in the middle, it plays what is missing and writes its
rows once. The engines are scripted, everything else is real."""

import json
from pathlib import Path

import pytest
import yaml

from prime_hpc.evals.episodes import num_episodes, results_file
from prime_hpc.store.attempts import read_attempts
from prime_hpc.store.manifest import verify_artifact
from tests.support.runs import BIN, ROOT, wait_until
from tests.support.slurm import DONE, Cluster
from tests.support.tiny_model import make_tiny_model

pytestmark = [pytest.mark.slow, pytest.mark.exhaustive, pytest.mark.timeout(600)]

PROMPTS = 400


def test_prompts_are_answered_on_two_nodes_by_one_job_that_survives_a_requeue(cluster: Cluster) -> None:
    folder = Path(cluster.shared) / "synthesize"
    make_tiny_model(folder / "model")
    prompts = folder / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"say {n}", "id": n}) + "\n" for n in range(PROMPTS)))
    tree = {
        "kind": "synthesize",
        "name": "replies",
        "output_dir": str(folder),
        "seq_len": 128,
        "model": {"name": str(folder / "model"), "dtype": "float32", "renderer": "qwen3"},
        "synthesize": {
            "prompts": [str(prompts)],
            "max_concurrent": 8,
            "sampling": {"max_tokens": 24},
            "parsed": False,
            "finished": False,
            "drop_duplicates": False,
            "shard_rows": 150,
        },
        "inference": {"data_parallel_size": 2, "pipeline_parallel_size": 2},
        "slurm": {
            "site": "devcluster",
            "gpus_per_node": 2,
            "env": {"PYTHONPATH": f"{ROOT}/tests/support/scripted_engines:{ROOT}"},
        },
    }
    (folder / "synthesize.yaml").write_text(yaml.safe_dump(tree))
    done = cluster.x([str(BIN / "prime-hpc"), "submit", str(folder / "synthesize.yaml"), "--json"], timeout=60)
    assert done.returncode == 0, done.stderr
    job, run_dir = json.loads(done.stdout)["job_id"], folder / "replies"
    wait_until(lambda: num_episodes(run_dir) > PROMPTS // 3, 240, "episodes")
    cluster.ask("scontrol", "requeue", job)
    wait_until(lambda: len(read_attempts(run_dir / "attempts.jsonl")) == 2, 240, "the second attempt")
    wait_until(lambda: cluster.job(job)["JobState"] in DONE, 240, "the end")
    log = (run_dir / "logs" / f"slurm-{job}.out").read_text()
    assert cluster.job(job)["JobState"] == "COMPLETED", log[-4000:]
    episodes = [json.loads(line) for line in results_file(run_dir).read_text().splitlines()]
    assert len({row["task"] for row in episodes}) == len(episodes) == PROMPTS
    _, second = read_attempts(run_dir / "attempts.jsonl")
    assert second["outcome"] == "completed" and second["why"].startswith("goes on after")
    nodes = {node for label, hosts in second["nodes"].items() if label.startswith("inference") for node in hosts}
    assert len(nodes) == 2
    verify_artifact(run_dir / "data" / "rows")
    files = sorted((run_dir / "data" / "rows").glob("*.jsonl"))
    rows = [json.loads(line) for path in files for line in path.read_text().splitlines()]
    assert len(files) == 3 and [row["input"]["id"] for row in rows] == list(range(PROMPTS))
