"""Shapes ranked by their last step on a real Slurm: steps are simulated, starts are `sbatch --test-only`'s."""

import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.slurm.test_submit import prime
from tests.support.measured_runs import make_measured, tree_of
from tests.support.slurm import Cluster

pytestmark = [pytest.mark.exhaustive, pytest.mark.timeout(600)]

NARROW = {"slurm.partition": "cpu", "slurm.trainer.nodes": 1, "trainer.num_ranks": 1}
WIDE = {"slurm.partition": "gpu", "trainer.num_ranks": 2, "inference.data_parallel_size": 2}


@pytest.fixture
def folder(cluster: Cluster) -> Path:
    """A directory that all nodes see, with a measured run in it; the GPU nodes are taken for ten minutes."""
    folder = Path(tempfile.mkdtemp(prefix="shapes", dir=cluster.shared))
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text("{}")
    (folder / "model" / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}" + b"x" * 990)
    make_measured(folder / "measured")
    cluster.wait_idle()
    taken = cluster.sbatch("sleep 600", "-p", "gpu", "-N4", "--exclusive", "--time=10")
    cluster.wait_state(taken, "RUNNING", timeout=120)
    return folder


def write(folder: Path, shapes: Any, steps: int, **slurm: Any) -> Path:
    tree = tree_of("r", folder, launch="slurm", max_steps=steps, ckpt={"interval": 50})
    tree["slurm"] = {"site": "devcluster", "gpus_per_node": 0, "cpus_per_task": 2, "mem": "1G", "time": "1-0"}
    tree["slurm"] |= {"setup": ["exec sleep 60"], "shapes": shapes, **slurm}
    path = folder / "exp.yaml"
    path.write_text(yaml.safe_dump(tree))
    return path


def asked(cluster: Cluster, config: Path) -> dict[str, Any]:
    said: dict[str, Any] = json.loads(prime(cluster, "plan", str(config), "--when", "--json").stdout)
    return said


def test_the_shape_that_is_done_first_wins_though_it_starts_later(cluster: Cluster, folder: Path) -> None:
    narrow = {"name": "narrow", "overrides": {**NARROW, "inference.data_parallel_size": 1}}
    shapes = [narrow, {"name": "wide", "overrides": WIDE}]
    said = asked(cluster, write(folder, shapes, 5000))
    wide, slow = said["shapes"]
    assert (said["by"], said["best"], slow["name"]) == ("result", "wide", "narrow")
    assert slow["start"] - said["asked"] < 120 and wide["start"] - said["asked"] > 300, "the GPU nodes are taken"
    assert wide["result"] < slow["result"] and "simulated from measured, own error " in wide["run_from"]
    said = asked(cluster, write(folder, shapes, 40))
    assert (said["by"], said["best"]) == ("result", "narrow"), "of a short run the wait is more than it gains"
    done = prime(cluster, "submit", str(folder / "exp.yaml"), "--best")
    assert "shape narrow: the first of 2 by the time of the last step" in done.stdout
    prime(cluster, "cancel", str(folder / "r"), "--now")


def test_derived_shapes_are_asked_about(cluster: Cluster, folder: Path) -> None:
    config = write(folder, "auto", 40, partition="cpu")
    said = asked(cluster, config)
    names = {row["name"] for row in said["shapes"]}
    assert {"t2-i2", "t1-i1", "t1-i3", "t3-i1"} <= names
    assert said["by"] == "result" and all(row["word"] == "starts" for row in said["shapes"])
    done = prime(cluster, "submit", str(config), "--best")
    assert f"shape {said['best']}: the first of {len(names)}" in done.stdout
    prime(cluster, "cancel", str(folder / "r"), "--now")
