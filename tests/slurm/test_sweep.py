"""Sweeps on a real Slurm: an array with a throttle, one point made to fail and run again alone; het jobs in lanes."""

import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.sampled import sampled
from tests.support.slurm import Cluster

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

CHECKOUT = Path(__file__).resolve().parents[2]
CLI = [sys.executable, "-m", "prime_hpc.cli", "sweep"]
COMMON = {
    "max_steps": 2,
    "trainer": {"num_ranks": 1, "threads_per_rank": 1},
    "supervisor": {"grace_s": 2, "start_timeout_s": 400},
}
SLURM = {
    "time": "00:20:00",
    "gpus_per_node": 0,
    "mem": "1G",
    "cpus_per_task": 2,
    "preflight": {"enabled": False},
    "restart": {"max_crashes": 0},
    "env": {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(CHECKOUT)},
}
SERVER_PORT = 18123


@pytest.fixture(scope="module")
def folder(cluster: Cluster) -> Path:
    """A directory that all nodes see, with a space in its name and a tiny model in it."""
    from tests.support.tiny_model import make_tiny_model

    path = Path(tempfile.mkdtemp(prefix="sweep it ", dir=cluster.shared))
    make_tiny_model(path / "model")
    (path / "site.yaml").write_text("name: test\nscratch: /\n")
    return path


def write(path: Path, tree: dict[str, Any]) -> Path:
    path.write_text(yaml.safe_dump(tree, sort_keys=False))
    return path


def experiment(folder: Path, name: str, **tree: Any) -> Path:
    slurm = {"site": str(folder / "site.yaml"), **SLURM, **tree.pop("slurm")}
    model = {"name": str(folder / "model"), "dtype": "float32", **tree.pop("model", {})}
    out = {"launch": "slurm", "output_dir": str(folder / "out"), "model": model, "slurm": slurm}
    return write(folder / f"{name}.yaml", {**COMMON, **out, **tree})


def sweep(cluster: Cluster, action: str, path: Path, *flags: str, code: int = 0) -> dict[str, Any]:
    """`prime-hpc sweep ... --json` on the login node."""
    done = cluster.x([*CLI, action, str(path), *flags, "--json"], timeout=300)
    assert done.returncode == code, f"{action}: {done.returncode}\n{done.stdout}\n{done.stderr}"
    said = json.loads(done.stdout)
    assert isinstance(said, dict)
    return said


def states(cluster: Cluster, path: Path) -> dict[str, str]:
    return {point["name"]: point["state"] for point in sweep(cluster, "status", path)["points"]}


def wait(cluster: Cluster, path: Path, timeout_s: float, look: Callable[[], None] = lambda: None) -> dict[str, str]:
    """Until no point is under way; returns their states."""
    over = {"completed", "failed", "stopped", "lost", "invalid", "missing"}
    deadline = time.monotonic() + timeout_s
    while set((found := states(cluster, path)).values()) - over:
        assert time.monotonic() < deadline, found
        look()
        time.sleep(1)
    return found


def _ends(folder: Path) -> str:
    """The last words of every supervisor below, for a test that fails."""
    logs = sorted(folder.rglob("supervisor.log"))
    return "\n".join(f"{log}:\n{log.read_text()[-1500:]}" for log in logs)


def attempts(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "attempts.jsonl").read_text().splitlines()]


@pytest.mark.exhaustive
def test_array_of_six_two_at_a_time_and_the_failed_one_again(cluster: Cluster, folder: Path) -> None:
    fake = {"type": "fake", "batch_size": 2, "micro_batch_size": 2}
    experiment(folder, "sft", kind="sft", seq_len=64, sft={"data": fake}, slurm={"partition": "all"})
    axes = {"product": {"trainer.optim.lr": [1e-4, 1e-3, 1e-2], "seq_len": [32, 64]}}
    path = write(folder / "lr.yaml", {"experiment": "sft.yaml", "axes": axes, "throttle": 2, "last": 1})
    home = folder / "out" / "lr"
    culprit = home / "lr0.001-seq_len32"
    culprit.mkdir(parents=True)
    (culprit / "metrics").write_text("in the way: the trainer can make no directory of this name")

    said = sweep(cluster, "submit", path)
    assert (said["points"], len(said["sent"]), len(said["parts"])) == (6, 6, 1)
    job_id = said["parts"][0]["job_id"]
    assert sweep(cluster, "submit", path)["sent"] == [], "all of them wait or run"
    running: list[int] = []

    def look() -> None:
        text = cluster.x(["squeue", "-h", "-r", "-t", "running", "-j", job_id, "-o", "%i"]).stdout
        running.append(len(text.split()))

    found = wait(cluster, path, 600, look)
    assert 0 < max(running) <= 2, "two at a time"
    assert found.pop(culprit.name) == "failed"
    assert set(found.values()) == {"completed"} and len(found) == 5

    table = sweep(cluster, "results", path)
    assert len(table["results"]) == 6
    assert table["results"][-1]["name"] == culprit.name and table["results"][-1]["value"] is None
    losses = [row["value"] for row in table["results"][:-1]]
    assert losses == sorted(losses)

    (culprit / "metrics").unlink()
    assert sweep(cluster, "submit", path, "--dry-run")["sent"] == [culprit.name]
    again = sweep(cluster, "submit", path)
    assert again["sent"] == [culprit.name] and again["left"] == {"completed": 5}
    assert [part["array"] for part in again["parts"]] == ["2"]
    assert set(wait(cluster, path, 300).values()) == {"completed"}
    assert [row["outcome"] for row in attempts(culprit)] == ["failed", "completed"]
    assert {len(attempts(home / name)) for name in found} == {1}
    final = cluster.x([*CLI, "results", str(path), "--plot", str(folder / "lr.png")])
    assert final.returncode == 0, final.stderr
    assert len(re.findall(r"^\d+ .* completed ", final.stdout, re.MULTILINE)) == 6
    assert (folder / "lr.png").stat().st_size > 1000
    assert sweep(cluster, "submit", path)["sent"] == []


@pytest.mark.parametrize("arrays", sampled([["0-39"], ["0-1000", "0-998"]], 2), ids=["one part", "two parts"])
def test_many_points_wait_and_are_cancelled(cluster: Cluster, folder: Path, arrays: list[str]) -> None:
    """In two parts: MaxArraySize of the dev cluster is 1001."""
    num_points = sum(int(array.split("-")[1]) + 1 for array in arrays)
    fake = {"type": "fake", "batch_size": 2, "micro_batch_size": 2}
    later = {"partition": "all", "extra": {"begin": "now+1hour"}}
    experiment(folder, "later", kind="sft", seq_len=64, sft={"data": fake}, slurm=later)
    path = write(folder / f"many{num_points}.yaml", {"experiment": "later.yaml", "seeds": num_points, "throttle": 3})
    said = sweep(cluster, "submit", path)
    assert len(said["sent"]) == num_points
    parts = said["parts"]
    assert [part["array"] for part in parts] == arrays
    assert all(after["after"] == [before["job_id"]] for before, after in pairwise(parts))
    assert list(states(cluster, path).values()) == ["pending"] * num_points
    assert sweep(cluster, "submit", path)["sent"] == []
    assert sweep(cluster, "cancel", path) == {"waiting": num_points, "saved": 0, "ended": 0, "left": [], "done": True}
    assert set(states(cluster, path).values()) == {"stopped"}
    jobs = ",".join(str(part["job_id"]) for part in parts)
    assert cluster.x(["squeue", "-h", "-j", jobs, "-t", "pending"]).stdout == ""


@pytest.mark.exhaustive
def test_cancel_saves_and_resume_goes_on(cluster: Cluster, folder: Path) -> None:
    fake = {"type": "fake", "batch_size": 2, "micro_batch_size": 2}
    tree = {"kind": "sft", "seq_len": 64, "sft": {"data": fake}, "ckpt": {"interval": 100_000}, "max_steps": 100_000}
    experiment(folder, "long", **tree, slurm={"partition": "all"})
    path = write(folder / "stop.yaml", {"experiment": "long.yaml", "seeds": 2, "throttle": 1})
    sweep(cluster, "submit", path)
    run_dir = folder / "out" / "stop" / "seed0"
    rows = run_dir / "metrics" / "trainer.jsonl"
    until(lambda: rows.exists() and rows.read_text().count("\n") > 3, 300, "the first point trains")
    said = sweep(cluster, "cancel", path)
    assert (said["waiting"], said["saved"], said["ended"], said["done"]) == (1, 1, 0, True)
    assert states(cluster, path) == {"seed0": "stopped", "seed1": "stopped"}
    saved = sorted(int(p.name.removeprefix("step_")) for p in (run_dir / "checkpoints").iterdir())[-1]
    assert sweep(cluster, "submit", path)["sent"] == [], "who cancelled says when it goes on"
    assert sweep(cluster, "resume", path)["sent"] == ["seed0", "seed1"]
    until(lambda: len(attempts(run_dir)) == 2, 300, "the first point comes back")
    assert attempts(run_dir)[-1]["resume_step"] == saved
    assert sweep(cluster, "cancel", path, "--now")["done"]


def until(condition: Callable[[], bool], timeout_s: float, what: str) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout_s:.0f} s: {what}"
        time.sleep(0.5)


@pytest.mark.netns  # two servers of one port at once
@pytest.mark.exhaustive
def test_het_points_in_two_lanes(cluster: Cluster, folder: Path) -> None:
    """Orchestrator and trainer on nodes of different partitions; a scripted server beside the orchestrator."""
    server = f"{sys.executable} -m tests.support.scripted_server '{folder / 'model'}' {SERVER_PORT}"
    experiment(
        folder,
        "rl",
        kind="rl",
        seq_len=256,
        model={"renderer": "default"},
        orchestrator={
            "batch_size": 8,
            "rollouts_per_example": 4,
            "max_concurrent": 8,
            "advantage": {"zero": "keep"},
            "sampling": {"max_tokens": 64},
            "env": [{"id": "reverse-text"}],
            "client": {"base_url": f"http://127.0.0.1:{SERVER_PORT}/v1"},
        },
        slurm={
            "layout": "het",
            "exclusive": True,
            "orchestrator": {"partition": "cpu"},
            "trainer": {"partition": "gpu"},
            # it ends with the batch process, whose number the shell's stays
            "setup": [f"(PYTHONPATH='{CHECKOUT}' {server} & while kill -0 $$; do sleep 0.5; done; kill $!) &"],
        },
    )
    path = write(folder / "lanes.yaml", {"experiment": "rl.yaml", "seeds": 3, "lanes": 2})
    parts = sweep(cluster, "submit", path)["parts"]
    ids = [part["job_id"] for part in parts]
    assert [(part["kind"], part["layout"], part["lane"]) for part in parts] == [
        ("job", "het", 0),
        ("job", "het", 1),
        ("job", "het", 0),
    ]
    text = cluster.x(["squeue", "-h", "-a", "-o", "%i %E", "-j", ",".join(ids)]).stdout
    assert len({line.split()[0] for line in text.splitlines()}) == 6, "two components a job"
    assert f"{ids[2]}+0 afterany:{ids[0]}(unfulfilled)" in text
    assert set(wait(cluster, path, 700).values()) == {"completed"}, _ends(folder)
    spans = [attempts(folder / "out" / "lanes" / f"seed{seed}")[0] for seed in range(3)]
    assert spans[0]["began"] < spans[1]["ended"] and spans[1]["began"] < spans[0]["ended"], "two lanes at once"
    assert spans[0]["ended"] < spans[2]["began"], "one after the other in a lane"
    assert [row["value"] for row in sweep(cluster, "results", path)["results"]] == [1.0, 1.0, 1.0]


@pytest.mark.exhaustive
def test_more_points_than_a_limit_of_three(cluster: Cluster, folder: Path) -> None:
    """Jobs that sleep, in the place of whole runs; a job of the user's own counts too."""
    (folder / "narrow.yaml").write_text("name: narrow\nscratch: /\nsacct: false\nmax_submit_jobs: 3\n")
    fake = {"type": "fake", "batch_size": 2, "micro_batch_size": 2}
    ran = folder / "ran"
    nap = {"partition": "all", "site": str(folder / "narrow.yaml"), "setup": [f"echo ran >> '{ran}'", "exec sleep 1"]}
    experiment(folder, "nap", kind="sft", seq_len=64, sft={"data": fake}, slurm=nap)
    path = write(folder / "fed.yaml", {"experiment": "nap.yaml", "seeds": 7})
    other = cluster.sbatch("sleep 600", "-p", "cpu")
    most = feed(cluster, path)
    assert 1 < most <= 3, "with the other job as many as the limit, and never more"
    cluster.x(["scancel", other])
    cluster.wait_idle(60)
    assert ran.read_text() == "ran\n" * 7, "each point once"
    assert sweep(cluster, "status", path)["points"][6]["job_id"] is not None


@pytest.mark.exhaustive
def test_whole_runs_are_fed_under_a_limit_of_three(cluster: Cluster, folder: Path) -> None:
    (folder / "narrow.yaml").write_text("name: narrow\nscratch: /\nsacct: false\nmax_submit_jobs: 3\n")
    fake = {"type": "fake", "batch_size": 2, "micro_batch_size": 2}
    slurm = {"partition": "all", "site": str(folder / "narrow.yaml")}
    experiment(folder, "fed-sft", kind="sft", seq_len=64, sft={"data": fake}, slurm=slurm)
    path = write(folder / "fed-runs.yaml", {"experiment": "fed-sft.yaml", "seeds": 6})
    assert 1 < feed(cluster, path) <= 3
    assert set(wait(cluster, path, 600).values()) == {"completed"}
    assert {len(attempts(folder / "out" / "fed-runs" / f"seed{seed}")) for seed in range(6)} == {1}


def feed(cluster: Cluster, path: Path) -> int:
    """`sweep submit --feed` to its end; returns the most jobs that were in the queue at once."""
    argv = cluster.command([*CLI, "submit", str(path), "--feed", "--every", "1"])
    most, deadline = 0, time.monotonic() + 600
    with (path.parent / "feed.log").open("w") as log:
        process = subprocess.Popen(argv, env=cluster.env, cwd=cluster.shared, stdout=log, stderr=subprocess.STDOUT)
        while process.poll() is None:
            assert time.monotonic() < deadline, (path.parent / "feed.log").read_text()
            queued = cluster.x(["squeue", "-h", "-r", "-t", "pending,configuring,running"]).stdout
            most = max(most, len(queued.splitlines()))
            time.sleep(0.2)
    assert process.returncode == 0, (path.parent / "feed.log").read_text()
    return most
