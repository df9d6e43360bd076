"""The tinker service as a Slurm job: ranks on two nodes, the unchanged client on the login node, a preemption, and real
vLLM servers of the job that sample."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from prime_hpc.store.attempts import read_attempts
from tests.support.runs import BIN, ROOT, command
from tests.support.slurm import Cluster
from tests.support.tiny_model import make_tiny_model

pytestmark = [pytest.mark.slow, pytest.mark.exhaustive, pytest.mark.timeout(600)]

START_S = 120


def experiment(folder: Path, name: str, num_ranks: int, **changes: Any) -> Path:
    """A service, without engines unless `changes` name some."""
    tree: dict[str, Any] = {
        "name": name,
        "output_dir": str(folder),
        "seq_len": 64,
        "model": {"name": str(folder / "model"), "dtype": "float32", "lora": {"rank": 4}},
        "orchestrator": {"sampling": {"max_tokens": 16}},
        "trainer": {
            "max_concurrent_runs": 2,
            "num_ranks": num_ranks,
            "threads_per_rank": 1,
            "micro_batch_tokens": 128,
            "tinker": {},
        },
        "slurm": {
            "site": "devcluster",
            "partition": "scavenge",
            "gpus_per_node": 1,
            "cpus_per_task": 2,
            "env": {"PYTHONPATH": str(ROOT)},
        },
    } | changes
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(tree))
    return path


def say(cluster: Cluster, *words: object) -> str:
    """Standard output of a verb on the login node."""
    return cluster.ask(str(BIN / "prime-hpc"), *map(str, words), timeout=120)


def script(cluster: Cluster, run_dir: Path, *words: object) -> dict[str, Any]:
    """A user's script there."""
    argv = [BIN / "python", "-m", "tests.support.tinker_script", run_dir, *words]
    done = cluster.x(list(map(str, argv)), timeout=200, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_clients_go_on_after_a_preemption_with_what_was_saved_for_them(cluster: Cluster) -> None:
    folder = Path(cluster.shared) / "tinker"
    make_tiny_model(folder / "model")
    jobs, urls = {}, {}
    for name, num_ranks in (("one", 1), ("two", 2)):
        path = experiment(folder, name, num_ranks)
        jobs[name] = json.loads(say(cluster, "submit", path, "--json"))["job_id"]
        urls[name] = folder / name / "tinker.url"
    for url in urls.values():
        cluster.wait_until(url.exists, f"{url}", timeout=START_S)
    expected = script(cluster, folder / "one", 1, 8)
    found = script(cluster, folder / "two", 1, 6, "--leave")
    print(expected, found)
    for of in ("losses", "norms"):
        np.testing.assert_allclose(found[of], expected[of][:6], rtol=2e-5)
    assert len(set(expected["losses"])) == 8

    told = json.loads(say(cluster, "status", folder / "two", "--json"))
    assert (told["state"], told["service"], told["max_steps"]) == ("running", found["url"], None)
    assert len(told["nodes"]["trainer"]) == 2
    assert f"{found['url']} for the tinker client" in say(cluster, "status", folder / "two")

    before = urls["two"].stat().st_mtime_ns
    cluster.drill("preempt", jobs["two"], timeout=120)

    def is_back() -> bool:
        return urls["two"].exists() and urls["two"].stat().st_mtime_ns != before

    cluster.wait_until(is_back, "the second life", timeout=2 * START_S)
    first, second = read_attempts(folder / "two" / "attempts.jsonl")
    assert (first["outcome"], first["saved_step"], second["why"]) == ("preempted", 1, "serves again")
    saved = f"tinker://{found['adapter']}/weights/stopped-6"
    on = script(cluster, folder / "two", 7, 8, "--from", saved)
    for of in ("losses", "norms"):
        np.testing.assert_allclose(on[of], expected[of][6:], rtol=2e-5)

    say(cluster, "cancel", folder / "one", folder / "two", "--timeout", 60)
    assert [cluster.job(job)["JobState"] for job in jobs.values()] == ["COMPLETED"] * 2
    assert not any(url.exists() for url in urls.values())
    assert read_attempts(folder / "two" / "attempts.jsonl")[-1]["outcome"] == "stopped"


def test_clients_sample_from_the_engines_of_the_job(cluster: Cluster) -> None:
    folder = Path(cluster.shared) / "tinker-samples"
    made = command("python", ROOT / "tools" / "make-starter", folder / "starter")
    assert made.returncode == 0, made.stderr
    model = {"name": str(folder / "starter" / "model"), "dtype": "float32", "lora": {"rank": 4}}
    engines = {"cpu_kv_cache_gib": 0.25, "num_replicas": 2, "ready_timeout_s": 240}
    path = experiment(folder, "service", 1, model=model, inference=engines)
    say(cluster, "submit", path)
    run_dir = folder / "service"
    cluster.wait_until((run_dir / "tinker.url").exists, "the address", timeout=START_S)
    found = [script(cluster, run_dir, 1, 3, "--sample") for _ in range(2)]  # one may come to each server
    for samples in (one["samples"] for one in found):
        assert len(samples["engine"]) == 24
        np.testing.assert_allclose(samples["engine"], samples["trainer"], rtol=1e-4)
        assert np.abs(np.subtract(samples["engine"], samples["later"])).max() > 0.01  # by the weights of just then
    nodes = json.loads(say(cluster, "status", run_dir, "--json"))["nodes"]
    assert len({node for hosts in nodes.values() for node in hosts}) == 3
    say(cluster, "cancel", run_dir, "--timeout", 60)
