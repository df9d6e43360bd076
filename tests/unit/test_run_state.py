"""What a run's files and Slurm's answer come to, at a given time."""

from pathlib import Path

import pytest

from prime_hpc.launch.monitor.run_facts import Queue, read_evidence
from prime_hpc.launch.monitor.run_state import judge
from tests.support.status_run import Run, job


@pytest.mark.parametrize(("state", "left_s"), [("RUNNING", 890.0), ("SUSPENDED", 900.0)])
def test_the_time_left_is_that_of_now_not_of_slurms_answer(tmp_path: Path, state: str, left_s: float) -> None:
    run = Run(tmp_path / "run")
    queue = Queue({"12": job(state, time_left_s=900.0)}, asked=run.now - 10)
    evidence = read_evidence(run.sent().attempt().word("running").path)
    assert judge(evidence, queue, run.now).time_left_s == left_s
