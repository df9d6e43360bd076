"""Runs whose roles live in an apptainer container, on the Slurm of Debian's sid, which has both (26.05, 1.4).

The image is a root of another Debian; the checkout, its environment and interpreter are mounted, as a site would mount
a shared installation. As root of a machine that grants less than all capabilities apptainer needs --userns.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.support.runs import rows, starter_tree
from tests.support.slurm import DEVCLUSTER, Cluster, start_or_skip
from tests.support.small_jobs import CLI, TASKS, attempts, make_folder, rl, sft, small_tree, wait_for_step

pytestmark = [pytest.mark.slow, pytest.mark.exhaustive, pytest.mark.timeout(900)]

MAKER = DEVCLUSTER.parents[1] / "tools" / "lib" / "debian-root"
ROOT = DEVCLUSTER.parent / "devcluster.d" / "root.sh"
PYTHON, ENGINES = "/opt/python", "/opt/engines/bin/python"
WRAPPER = """#!/bin/sh
echo "$(cat /etc/debian_version) $*" >>'{log}'
exec '{python}' "$@"
"""


@pytest.fixture(scope="module")
def boxed() -> Iterator[Cluster]:
    """A cluster that has apptainer, and in `shared` an image and a site profile that names it."""
    cluster = start_or_skip("--suite", "sid", "--gpu-nodes", "2", num_nodes=4)
    try:
        image = _image(cluster)
        root, base = DEVCLUSTER.parents[1], Path(sys.base_prefix).resolve()
        mounts = sorted({str(path) for path in (root, Path(sys.prefix).resolve(), base)} - {"/usr"})
        box = {
            "runtime": "apptainer",
            "image": str(image),
            "args": ["--userns"],
            "python": PYTHON,
            "mounts": [f"{path}:{path}" for path in mounts],
        }
        make_folder(cluster, {"container": box})
        yield cluster
    finally:
        cluster.down()


def _image(cluster: Cluster) -> Path:
    """A root in which two interpreters say that they were called there, then are this one."""
    image = cluster.shared / "image"
    # that of the dev cluster on trixie: its archive is there, and it has the libraries that an interpreter needs
    script = 'source "$1"; exec "$2" trixie "$3" "${ROOT_PACKAGES[@]}"'
    words = ["bash", "-c", script, "bash", str(ROOT), str(MAKER), str(image)]
    made = subprocess.run(words, capture_output=True, text=True, timeout=1800)
    if made.returncode in (3, 4):
        pytest.skip(f"no image: {made.stderr}")
    assert made.returncode == 0, made.stderr
    for path, log in ((PYTHON, "inside.log"), (ENGINES, "engines.log")):
        python = image / path.lstrip("/")
        python.parent.mkdir(parents=True, exist_ok=True)
        python.write_text(WRAPPER.format(log=cluster.shared / log, python=sys.executable))
        python.chmod(0o755)
    if os.environ.get("PRIME_HPC_TEST_SIF"):  # one file, as sites have it; minutes to compress
        built = cluster.x(["apptainer", "build", "--userns", str(image) + ".sif", str(image)], timeout=900)
        assert built.returncode == 0, built.stderr
        return image.with_suffix(".sif")
    return image


def said_inside(cluster: Cluster, log: str = "inside.log") -> list[str]:
    """A line a Python that was started in the container: the image's Debian, and what was started."""
    path = cluster.shared / log
    lines = path.read_text().splitlines() if path.exists() else []
    path.write_text("")
    return lines


def assert_all_in_the_image(lines: list[str], *roles: str) -> None:
    assert {line.split()[0] for line in lines} == {lines[0].split()[0]} and lines[0].startswith("13")
    for role in roles:
        assert any("prime_hpc.supervisor.agent" in line and f" {role} " in line for line in lines), (role, lines)


def test_a_job_of_one_node_is_preempted_and_comes_back(boxed: Cluster) -> None:
    said_inside(boxed)
    job, run_dir = sft(boxed, boxed.shared, "boxed", "scavenge", 60)
    wait_for_step(boxed, run_dir, 3)
    boxed.drill("preempt", "2")
    boxed.wait_state(job, "COMPLETED", timeout=400)
    first, last = attempts(run_dir)
    assert (first["outcome"], last["outcome"]) == ("preempted", "completed")
    assert last["resume_step"] == first["saved_step"] >= 3
    lines = said_inside(boxed)
    assert_all_in_the_image(lines, "trainer")
    assert sum("supervisor.agent" in line for line in lines) == 2, "one agent an attempt"


@pytest.mark.parametrize("layout", ["het", "packed"])
def test_rl_over_two_nodes(boxed: Cluster, layout: str) -> None:
    said_inside(boxed)
    job, run_dir = rl(boxed, boxed.shared, f"boxed-{layout}", 4, layout)
    boxed.wait_state(job, "COMPLETED", timeout=400)
    (life,) = attempts(run_dir)
    assert life["outcome"] == "completed"
    assert [row["step"] for row in rows(run_dir, "trainer")] == [1, 2, 3, 4]
    assert_all_in_the_image(said_inside(boxed), "trainer", "orchestrator")


def test_an_array_of_a_sweep(boxed: Cluster) -> None:
    said_inside(boxed)
    fake = {"data": {"type": "fake", "batch_size": 4}}
    tree = small_tree(boxed.shared, {"partition": "gpu"}, kind="sft", seq_len=64, sft=fake, max_steps=2)
    (boxed.shared / "points.yaml").write_text(yaml.safe_dump(tree))
    path = boxed.shared / "boxed-sweep.yaml"
    axes = {"product": {"trainer.optim.lr": [1e-4, 1e-3]}}
    path.write_text(yaml.safe_dump({"experiment": "points.yaml", "axes": axes, "throttle": 2}))
    done = boxed.x([*CLI, "sweep", "submit", str(path), "--json"], timeout=120)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert (said["points"], len(said["parts"])) == (2, 1)

    wait_for_points(boxed, path)
    lines = said_inside(boxed)
    assert_all_in_the_image(lines, "trainer")
    assert sum("supervisor.agent" in line for line in lines) == 2, "one agent a point"


def wait_for_points(cluster: Cluster, sweep: Path) -> None:
    """Until all of a sweep have completed."""

    def states() -> set[str]:
        told = cluster.x([*CLI, "sweep", "status", str(sweep), "--json"], timeout=120)
        return {point["state"] for point in json.loads(told.stdout)["points"]}

    cluster.wait_until(lambda: states() <= {"completed", "failed"}, "the end of all points", timeout=400)
    assert states() == {"completed"}


def test_engines_of_an_environment_of_their_own(boxed: Cluster) -> None:
    """`inference.python`, which the submitting machine does not have, in each point of a sweep."""
    folder = boxed.shared
    said_inside(boxed), said_inside(boxed, "engines.log")
    env = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(DEVCLUSTER.parents[1])}
    two = {"layout": "packed", "partition": "all", "inference": {"nodes": 1}, "preflight": {"allreduce": False}}
    tree = starter_tree(
        folder,
        output_dir=str(folder / "out"),
        max_steps=3,
        launch="slurm",
        trainer={"num_ranks": 1, "threads_per_rank": 1},
        inference={"backend": "transformers", "data_parallel_size": 1, "server": {"port": 0}, "python": ENGINES},
        slurm={"site": str(folder / "site.yaml"), **TASKS, "env": env, **two},
    )
    (folder / "engines.yaml").write_text(yaml.safe_dump(tree))
    path = folder / "engines-sweep.yaml"
    axes = {"product": {"trainer.optim.lr": [1e-4, 1e-3]}}
    path.write_text(yaml.safe_dump({"experiment": "engines.yaml", "axes": axes, "throttle": 1}))
    done = boxed.x([*CLI, "sweep", "submit", str(path), "--json"], timeout=120)
    assert done.returncode == 0, done.stderr
    wait_for_points(boxed, path)
    servers = said_inside(boxed, "engines.log")
    assert len(servers) == 2 and all("prime_hpc.inference.main" in line for line in servers), servers
    assert_all_in_the_image([*said_inside(boxed), *servers], "trainer", "orchestrator")
    for point in ("lr0.0001", "lr0.001"):
        lock = json.loads((folder / "out" / "engines-sweep" / point / "lock.json").read_text())
        assert lock["engines"]["inference"]["executable"] == ENGINES
