"""Sandboxes in an image, by apptainer, on nodes without bubblewrap: the escapes, and real jobs. Debian's sid has both.

The image is an unpacked root of the suite, with a Python of another release than the one that plays.
"""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.runs import ROOT
from tests.support.sandbox_jobs import Observed, probe
from tests.support.slurm import DEVCLUSTER, DONE, Cluster, start_or_skip
from tests.support.small_jobs import attempts

pytestmark = [pytest.mark.slow, pytest.mark.exhaustive, pytest.mark.timeout(900)]

SUITES = ["tests/integration/test_sandbox_escapes.py", "tests/integration/test_sandbox_image.py"]


@pytest.fixture(scope="module")
def nodes() -> Iterator[Cluster]:
    """A cluster whose nodes have apptainer, and no bubblewrap."""
    cluster = start_or_skip("--suite", "sid", "--gpu-nodes", "2", num_nodes=4)
    try:
        assert cluster.x(["bash", "-c", "! command -v bwrap && command -v apptainer"]).returncode == 0
        yield cluster
    finally:
        cluster.down()


@pytest.fixture(scope="module")
def image(nodes: Cluster) -> Path:
    """Of what the nodes' own root was made of: its archive is there."""
    folder, parts = nodes.shared / "image", DEVCLUSTER.parent / "devcluster.d" / "root.sh"
    script = 'source "$1"; exec "$2" sid "$3" "${ROOT_PACKAGES[@]}" "${ROOT_PACKAGES_SID[@]}"'
    words = ["bash", "-c", script, "bash", str(parts), str(ROOT / "tools" / "lib" / "debian-root"), str(folder)]
    subprocess.run(words, check=True, capture_output=True, timeout=600)
    folder.chmod(0o755)
    return folder


def test_none_of_the_escapes_gets_out_of_an_image(nodes: Cluster, image: Path) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-rs", "-n0", "--all", "-p", "no:cacheprovider", *SUITES]
    variables = {"PRIME_HPC_TEST_SANDBOX_IMAGE": str(image), "PYTHONPATH": str(ROOT)}
    done = nodes.x(
        ["srun", "-p", "all", "-N1", "-n1", "--chdir", str(ROOT), *command], timeout=600, env=variables, cwd=ROOT
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " passed" in done.stdout and "skipped" not in done.stdout, done.stdout[-2000:]


def test_a_job_s_tools_run_in_the_image_and_leave_nothing(nodes: Cluster, image: Path) -> None:
    seen = Observed(nodes, "boxed")
    job = seen.submit(probe(seen), 1, runtime="apptainer", image=str(image))
    seen.wait(lambda: nodes.job(job)["JobState"] in DONE, "the end", timeout=400)
    output = (seen.run_dir / "logs" / f"slurm-{job}.out").read_text()
    assert nodes.job(job)["JobState"] == "COMPLETED", output[-4000:]
    assert [life["outcome"] for life in attempts(seen.run_dir)] == ["completed"]
    tools, programs = seen.rollouts("python-tool"), seen.rollouts("humaneval")
    assert tools and programs and seen.namespaces
    for line in tools:
        assert line["state"] == "completed" and "leaks: [] processes: 2" in line["completion"], line
    assert all(line["reward"] == 1 for line in programs), programs[0]
    seen.wait(lambda: not seen.left(), "nothing is left", timeout=30)


def test_a_cancelled_job_leaves_nothing_of_its_containers(nodes: Cluster, image: Path) -> None:
    seen = Observed(nodes, "cancelled")
    hang = "import os, time\nif os.fork() == 0:\n    os.setsid()\ntime.sleep(600)\n"
    job = seen.submit(hang, 1, steps=1000, command_s=500, runtime="apptainer", image=str(image))
    seen.wait(lambda: seen.inside() >= 6, "commands in sandboxes", timeout=400)
    nodes.ask("scancel", job)
    nodes.wait_state(job, "CANCELLED", timeout=60)
    seen.wait(lambda: not seen.left(), "nothing is left", timeout=30)
