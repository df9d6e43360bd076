"""Agents without a supervisor: when, and by whom, a job is given back that lost its batch host."""

from collections.abc import Callable

import pytest

from prime_hpc.observe.slurm import SlurmError
from prime_hpc.supervisor.orphan import LOOK_S, TURN_S, WAIT_S, await_orphan, nodes_left

LINE = "JobId=7 JobState={state} Restarts={restarts} NodeList={nodes} BatchHost=n1 NumNodes=2"
WHOLE = LINE.format(state="RUNNING", restarts=1, nodes="n[1-3]")
SHRUNK = LINE.format(state="RUNNING", restarts=1, nodes="n[2-3]")
AGAIN = LINE.format(state="PENDING", restarts=2, nodes="(null)")


@pytest.mark.parametrize(
    ("line", "left"),
    [(WHOLE, []), (SHRUNK, ["n2", "n3"]), (AGAIN, None), (SHRUNK.replace("RUNNING", "COMPLETING"), None)],
)
def test_what_slurm_says_of_the_job(line: str, left: list[str] | None) -> None:
    assert nodes_left(line, "1") == left
    assert nodes_left(line, "0") is None  # another life of the job


def wait(host: str, says: Callable[[float], str], led_at: float = 1e9, **environ: str) -> tuple[bool, float]:
    """The verdict of `host`, and after how long; from `led_at` on the supervisor is heard again."""
    now = [0.0]

    def sleep(seconds: float) -> None:
        now[0] += seconds

    environment = {"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "1", **environ}
    return await_orphan(
        lambda job: says(now[0]), environment, host, lambda: now[0] >= led_at, clock=lambda: now[0], sleep=sleep
    ), now[0]


def test_the_first_node_that_is_left_gives_it_back_once_slurm_has_dropped_the_other() -> None:
    def says(now: float) -> str:
        if 50 < now < 90:
            raise SlurmError(["scontrol"], 1, "unable to contact slurm controller")
        return WHOLE if now < 300 else SHRUNK

    assert wait("n2", says) == (True, 300)
    assert wait("n3", says) == (True, 300 + TURN_S)  # had the first one failed to
    assert wait("n3", lambda now: AGAIN if now >= 300 + LOOK_S else says(now)) == (False, 300 + LOOK_S)


def test_a_job_that_keeps_its_batch_host_is_left_alone() -> None:
    assert wait("n2", lambda now: WHOLE) == (False, WAIT_S)
    assert wait("n2", lambda now: WHOLE, led_at=40) == (False, 40)
    assert wait("n2", lambda now: SHRUNK, SLURM_JOB_ID="") == (False, 0)
