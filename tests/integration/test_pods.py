"""Whole runs from the manifests of `render --target kubernetes`: their containers' commands as processes of this
machine, a pod killed in the middle, another told to go; one that has nothing left to play. `tests.support.pods` plays
the kubelet."""

import json
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.pods import Kubelet, can_unshare
from tests.support.runs import command, rows, starter_tree, steps, used_prompts

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not can_unshare(), reason="pods get names by a mount namespace of their own"),
]
NUM_STEPS = 6


@pytest.fixture
def kubelet(tmp_path: Path) -> Any:
    experiment = starter_tree(
        tmp_path,
        name="pods",
        max_steps=NUM_STEPS,
        trainer={"num_ranks": 2, "optim": {"lr": 1e-3}},
        inference={"backend": "transformers", "num_replicas": 2},
        ckpt={"interval": 2},
        device="cpu",
        slurm={"gpus_per_node": 0, "trainer": {"nodes": 2}, "inference": {"nodes": 2}},
        kubernetes={"image": "none", "grace_s": 120},
    )
    cluster = sent(experiment, tmp_path)
    yield cluster
    cluster.close()


def sent(experiment: dict[str, Any], work: Path) -> Kubelet:
    """The kubelet that has got the experiment's objects."""
    (work / "exp.yaml").write_text(yaml.safe_dump(experiment))
    made = command("prime-hpc", "render", work / "exp.yaml", "--target", "kubernetes")
    assert made.returncode == 0, made.stderr
    return Kubelet(list(yaml.safe_load_all(made.stdout)), work)


def saved(run_dir: Path, step: int) -> bool:
    return (run_dir / "checkpoints" / f"step_{step}" / "manifest.json").exists()


@pytest.mark.exhaustive
def test_a_run_survives_a_lost_pod_and_an_eviction_and_gives_all_pods_back(kubelet: Kubelet, tmp_path: Path) -> None:
    run_dir = tmp_path / "shared" / "outputs" / "pods"
    for name in kubelet.pods:
        kubelet.start(name)
    todo = [(2, "pods-trainer-1", signal.SIGKILL), (4, "pods-inference-0", signal.SIGTERM)]
    deadline = time.monotonic() + 800
    while not kubelet.is_over():
        assert time.monotonic() < deadline, (tmp_path / "pods-supervisor.log").read_text()[-3000:]
        kubelet.tick()
        if todo and saved(run_dir, todo[0][0]) and all(pod.process for pod in kubelet.pods.values()):
            _, name, number = todo.pop(0)
            kubelet.kill(name, number)
        time.sleep(0.3)
    said = (tmp_path / "pods-supervisor.log").read_text()
    assert {name: pod.exits[-1] for name, pod in kubelet.pods.items()} == dict.fromkeys(kubelet.pods, 0), said[-3000:]
    assert kubelet.pods["pods-trainer-1"].exits == [-signal.SIGKILL, 0], "an Indexed Job's pod comes back by its name"
    attempts = [json.loads(line) for line in (run_dir / "attempts.jsonl").read_text().splitlines()]
    assert attempts[0]["outcome"] == "node_lost" and attempts[0]["lost_nodes"] == ["pods-trainer-1.pods"], attempts
    assert attempts[-1]["outcome"] == "completed"
    assert all(attempt["resume_step"] >= 2 for attempt in attempts[1:])
    done = sorted(set(steps(run_dir)))  # the one that was not saved when its pod went is done twice
    assert done == list(range(1, NUM_STEPS + 1))
    prompts = [prompt for step in done for prompt in used_prompts(run_dir, step)]
    assert len(prompts) == len(set(prompts)) == NUM_STEPS * 4
    assert max(row["lag_max"] for row in rows(run_dir, "trainer")) <= 2
    key = next((tmp_path / "Secret").rglob("key")).read_text()
    for path in run_dir.rglob("*"):
        assert not path.is_file() or key.encode() not in path.read_bytes(), path
    assert not list((run_dir / "secrets").glob("step-*")), "what the pods were told is removed"


@pytest.mark.exhaustive
def test_rows_that_are_chosen_anew_start_no_engine(tmp_path: Path) -> None:
    """All is played: the run that is sent again with another filter has nothing to ask a server."""
    tree = starter_tree(tmp_path)
    experiment: dict[str, Any] = {
        "kind": "synthesize",
        "name": "rows",
        **{key: tree[key] for key in ("seq_len", "model")},
        "synthesize": {"environment_ids": ["reverse-text"], "num_examples": 4, "finished": False},
        "inference": {"backend": "transformers"},
        "device": "cpu",
        "slurm": {"gpus_per_node": 0},
        "kubernetes": {"image": "none"},
    }
    episodes = tmp_path / "shared" / "outputs" / "rows" / "results" / "episodes.jsonl"
    kept = []
    for more in ({"sampling": {"max_tokens": 8}}, {"n_best": 1}):
        experiment["synthesize"] |= more
        cluster = sent(experiment, tmp_path)
        try:
            for name in cluster.pods:
                cluster.start(name)
            deadline = time.monotonic() + 200
            while not cluster.is_over():
                assert time.monotonic() < deadline, (tmp_path / "rows-supervisor.log").read_text()[-3000:]
                cluster.tick()
                time.sleep(0.3)
        finally:
            cluster.close()
        said = (tmp_path / "rows-supervisor.log").read_text()
        assert {pod.exits[-1] for pod in cluster.pods.values()} == {0}, said[-3000:]
        kept.append(episodes.read_bytes())
    attempts = episodes.parents[1] / "logs"
    assert len(kept[0].splitlines()) == 4 and kept[1] == kept[0], said[-3000:]
    assert [(attempts / f"attempt_{n}" / "inference").is_dir() for n in (1, 2)] == [True, False], said[-3000:]
