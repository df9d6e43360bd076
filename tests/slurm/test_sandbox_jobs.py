"""Environments with sandboxes in real jobs: what a tool reaches from a compute node, and what the job leaves there."""

import pytest

from tests.support.runs import rows
from tests.support.sandbox_jobs import Observed, probe
from tests.support.sandboxes import needs_sandboxes
from tests.support.slurm import DONE, Cluster
from tests.support.small_jobs import attempts

pytestmark = [pytest.mark.slow, pytest.mark.exhaustive, pytest.mark.timeout(600), needs_sandboxes()]
pytestmark += [pytest.mark.usefixtures("bubblewrap")]

HANG = "import os, time\nif os.fork() == 0:\n    os.setsid()\ntime.sleep(600)\n"


@pytest.mark.parametrize("workers", [0, 1])
def test_tools_of_a_job_see_none_of_it_and_leave_nothing(cluster: Cluster, workers: int) -> None:
    seen = Observed(cluster, f"tools-{workers}")
    job = seen.submit(probe(seen), workers)
    seen.wait(lambda: cluster.job(job)["JobState"] not in ("PENDING", "RUNNING", "COMPLETING"), "the end")
    output = (seen.run_dir / "logs" / f"slurm-{job}.out").read_text()
    assert cluster.job(job)["JobState"] == "COMPLETED", output[-4000:]
    assert [life["outcome"] for life in attempts(seen.run_dir)] == ["completed"]
    tools, programs = seen.rollouts("python-tool"), seen.rollouts("humaneval")
    assert tools and programs
    for line in tools:
        assert line["state"] == "completed" and "leaks: [] processes: 2" in line["completion"], line
    assert all(line["reward"] == 1 for line in programs), programs[0]
    assert seen.namespaces, "sandboxes were seen while they ran"
    played_by_workers = rows(seen.run_dir, "orchestrator")[-1].get("env_workers/python-tool/episodes", 0)
    assert bool(played_by_workers) == bool(workers)
    assert not seen.left()


@pytest.mark.parametrize("workers", [0, 1])
def test_a_cancelled_job_leaves_no_sandbox(cluster: Cluster, workers: int) -> None:
    seen = Observed(cluster, f"hangs-{workers}")
    job = seen.submit(HANG, workers, steps=1000, command_s=500)
    seen.wait(lambda: seen.inside() >= 6, "commands in sandboxes")
    cluster.ask("scancel", job)
    cluster.wait_state(job, "CANCELLED", timeout=60)
    seen.wait(lambda: not seen.left(), "nothing is left", timeout=30)


@pytest.mark.parametrize("workers", [0, 1])
def test_slurm_s_warning_ends_no_command_and_spoils_no_episode(cluster: Cluster, workers: int) -> None:
    """SIGTERM to all processes of the steps, as before a preemption: what runs in a sandbox gets it too."""
    seen = Observed(cluster, f"warned-{workers}")
    job = seen.submit("import time\ntime.sleep(3)\nprint('whole')", workers, steps=4)
    seen.wait(lambda: seen.inside() >= 6, "commands in sandboxes")
    cluster.ask("scancel", "--signal=TERM", job)
    cluster.wait_state(job, DONE, timeout=240)
    output = (seen.run_dir / "logs" / f"slurm-{job}.out").read_text()
    assert cluster.job(job)["JobState"] == "COMPLETED", output[-4000:]
    assert [life["outcome"] for life in attempts(seen.run_dir)] == ["completed"]
    tools = [line for line in seen.rollouts("python-tool") if line["state"] == "completed"]
    assert tools and all("whole" in line["completion"] for line in tools), tools
    assert all(line["reward"] == 1 for line in seen.rollouts("humaneval") if line["state"] == "completed")
