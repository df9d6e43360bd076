"""Real jobs whose shared file system hangs, which Slurm suspends, and which lose two things at once."""

import time

import pytest

from tests.faults import pairs
from tests.support.runs import rows

pytestmark = [pytest.mark.slow, pytest.mark.slurm, pytest.mark.timeout(500)]

NUM_STEPS = 60
STALL_S = 2 * pairs.FENCE_S


def losses(job: pairs.Job) -> dict[int, float]:
    return {row["step"]: row["loss"] for row in rows(job.run_dir, "trainer")}


@pytest.fixture(scope="module")
def undisturbed(site: pairs.Site) -> dict[int, float]:
    """Losses of the run that nothing happens to."""
    job = site.submit("packed", experiment=site.sft(NUM_STEPS))
    wait_for_end(job)
    found = losses(job)
    assert len(found) == NUM_STEPS
    return found


def wait_for_end(job: pairs.Job) -> None:
    def over() -> bool:
        state = job.state()
        assert state is None or state[0] in ("PENDING", "RUNNING", "SUSPENDED", "COMPLETING", "COMPLETED"), state
        return state is not None and state[0] == "COMPLETED"

    job.cluster.wait_until(over, f"the end of {job.run_dir}", timeout=240)


def assert_it_went_on(job: pairs.Job, undisturbed: dict[int, float]) -> None:
    """In one attempt, with the same losses."""
    wait_for_end(job)
    (life,) = job.attempts()
    assert (life["outcome"], life["lost_nodes"]) == ("completed", [])
    assert losses(job) == undisturbed


@pytest.mark.exhaustive
def test_a_shared_file_system_that_hangs_for_longer_than_every_deadline(
    site: pairs.Site, undisturbed: dict[int, float]
) -> None:
    job = site.submit("packed", experiment=site.sft(NUM_STEPS))
    site.cluster.wait_until(lambda: job.step() >= 5, "the first steps", timeout=pairs.START_S)
    site.cluster.drill("hang-shared")
    try:
        time.sleep(STALL_S)  # what is tested is the passing of time
        assert job.step() < NUM_STEPS, "it hangs"
    finally:
        site.cluster.drill("wake-shared")
    assert_it_went_on(job, undisturbed)


@pytest.mark.exhaustive
def test_suspended_and_resumed(site: pairs.Site, undisturbed: dict[int, float]) -> None:
    job = site.submit("packed", experiment=site.sft(NUM_STEPS))
    site.cluster.wait_until(lambda: job.step() >= 5, "the first steps", timeout=pairs.START_S)
    site.cluster.ask("scontrol", "suspend", job.job_id)
    time.sleep(STALL_S)
    assert job.step() < NUM_STEPS, "it stands still"
    site.cluster.ask("scontrol", "resume", job.job_id)
    assert_it_went_on(job, undisturbed)
    assert "was stopped for" in (job.run_dir / "logs" / "supervisor.log").read_text()


@pytest.mark.exhaustive
def test_batch_host_and_controller_at_once_the_nodes_are_given_back(site: pairs.Site) -> None:
    """Slurm 22.05 never misses the dead node then: its controller has not heard it since it was started anew."""
    outcome = pairs.drill(site, "het", ("batch-host", "controller"))
    assert outcome.end == "next attempt"
    assert outcome.lost_checkpoints == 0
