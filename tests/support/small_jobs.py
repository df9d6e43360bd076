"""Small runs as Slurm jobs, up in seconds: SFT on one node, RL with a scripted server as a het job, or with scripted
engines on nodes of their own."""

import json
import sys
from pathlib import Path
from typing import Any

import yaml

from prime_hpc.store.attempts import read_attempts
from tests.support.runs import rows
from tests.support.slurm import DEVCLUSTER, Cluster
from tests.support.tiny_model import make_tiny_model

CLI = [sys.executable, "-m", "prime_hpc.cli"]
SERVER_PORT = 18124
TASKS = {"gpus_per_node": 0, "mem": "1G", "cpus_per_task": 2, "time": "00:20:00"}


def make_folder(cluster: Cluster, site: dict[str, Any] | None = None) -> Path:
    """A directory that all nodes see, with a tiny model and a site profile in it."""
    make_tiny_model(cluster.shared / "model")
    (cluster.shared / "site.yaml").write_text(yaml.safe_dump({"name": "test", "scratch": "/", **(site or {})}))
    return cluster.shared


def small_tree(folder: Path, slurm: dict[str, Any], **tree: Any) -> dict[str, Any]:
    """An experiment of one rank, with what is given besides."""
    env = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(DEVCLUSTER.parents[1])}
    return {
        "output_dir": str(folder / "out"),
        "launch": "slurm",
        "trainer": {"num_ranks": 1, "threads_per_rank": 1},
        "supervisor": {"grace_s": 5, "start_timeout_s": 400},
        **tree,
        "model": {"name": str(folder / "model"), "dtype": "float32", **tree.get("model", {})},
        "slurm": {"site": str(folder / "site.yaml"), "preflight": {"allreduce": False}, **TASKS, "env": env, **slurm},
    }


def submit(cluster: Cluster, folder: Path, name: str, slurm: dict[str, Any], **tree: Any) -> tuple[str, Path]:
    """`prime-hpc submit`; returns the job's id and the run directory."""
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(small_tree(folder, slurm, **tree)))
    done = cluster.x([*CLI, "submit", str(path), "--name", name, "--json"])
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)["job_id"], folder / "out" / name


def sft(cluster: Cluster, folder: Path, name: str, partition: str, steps: int) -> tuple[str, Path]:
    """A small SFT run on one node."""
    data = {"data": {"type": "fake", "batch_size": 48}}
    ckpt = {"interval": 100_000}
    return submit(
        cluster, folder, name, {"partition": partition}, kind="sft", seq_len=64, sft=data, ckpt=ckpt, max_steps=steps
    )


def attempts(run_dir: Path) -> list[dict[str, Any]]:
    return [dict(row) for row in read_attempts(run_dir / "attempts.jsonl")]


def wait_for_step(cluster: Cluster, run_dir: Path, step: int) -> None:
    """Until the run's newest attempt has done that step."""

    def there() -> bool:
        path = run_dir / "metrics" / "trainer.jsonl"
        return path.exists() and max((row["step"] for row in rows(run_dir, "trainer")), default=0) >= step

    cluster.wait_until(there, f"step {step} of {run_dir.name}", timeout=400)


def rl(cluster: Cluster, folder: Path, name: str, steps: int, layout: str = "het") -> tuple[str, Path]:
    """RL of two nodes, as a het or a homogeneous job: orchestrator and beside it a scripted server, and the trainer."""
    script = f"{sys.executable} -m tests.support.scripted_server '{folder / 'model'}' {SERVER_PORT}"
    root = DEVCLUSTER.parents[1]
    het = {"layout": "het", "orchestrator": {"partition": "cpu"}, "trainer": {"partition": "gpu"}}
    places: dict[str, Any] = het if layout == "het" else {"layout": layout, "partition": "gpu"}
    return submit(
        cluster,
        folder,
        name,
        {
            **places,
            "setup": [f"(PYTHONPATH='{root}' {script} & while kill -0 $$; do sleep 0.5; done; kill $!) &"],
            "restart": {"node_timeout_s": 10, "fence_s": 20},
        },
        seq_len=256,
        max_steps=steps,
        ckpt={"interval": 2},
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
    )


def rl_with_engines(
    cluster: Cluster,
    folder: Path,
    name: str,
    slurm: dict[str, Any],
    *,
    steps: int,
    replies: str = "",
    env: dict[str, str] | None = None,
    orchestrator: dict[str, Any],
    **tree: Any,
) -> tuple[str, Path]:
    """RL as a homogeneous job: the trainer's node, then that of a scripted engine, which every node reaches.

    Args:
        cluster, folder, name: as for `submit`.
        slurm: on top of one trainer node and one engine's.
        steps: of the trainer.
        replies: `module:function` that answers (see `scripted_engine`).
        env: more variables of the job.
        orchestrator: on top of groups of 4 and batches of 8.
        tree: more of the experiment.
    """
    root = DEVCLUSTER.parents[1]
    variables = {"PYTHONPATH": f"{root}/tests/support/scripted_engines:{root}", "OMP_NUM_THREADS": "1"}
    variables |= {"SCRIPTED_REPLIES": replies} if replies else {}
    base: dict[str, Any] = {"partition": "all", "layout": "packed", "env": variables | (env or {})}
    batches: dict[str, Any] = {"batch_size": 8, "rollouts_per_example": 4, "max_concurrent": 8}
    batches |= {"advantage": {"zero": "keep"}, "sampling": {"max_tokens": 64}}
    whole: dict[str, Any] = {"seq_len": 256, "max_steps": steps, "ckpt": {"interval": 2}}
    whole |= {"model": {"renderer": "qwen3"}, "inference": {"server": {"port": 0}}, "orchestrator": batches}
    whole["orchestrator"] |= orchestrator
    return submit(cluster, folder, name, base | slurm, **(whole | tree))


def last_step(run_dir: Path) -> int:
    """The last step that a run's trainer has written down; 0 before the first."""
    path = run_dir / "metrics" / "trainer.jsonl"
    return max((row["step"] for row in rows(run_dir, "trainer")), default=0) if path.exists() else 0
