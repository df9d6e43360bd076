"""`cancel` where Slurm is down, falls silent or is busy."""

from pathlib import Path

import pytest

from prime_hpc.launch import cancel as cancel_module
from prime_hpc.launch.submission import submit
from prime_hpc.slurm.sbatch_errors import SlurmRefused
from tests.support.fake_slurm import FakeSlurm
from tests.support.submissions import cancel, load


def test_cancel_with_slurm_down(fake: FakeSlurm, config: Path) -> None:
    submit(load(config))
    fake.behave("squeue", code=1, stderr="Unable to contact slurm controller (connect failure)")
    with pytest.raises(
        SlurmRefused, match=r"the controller is down.*; `touch /.*/STOP` has one that runs save and end"
    ):
        cancel(config)


@pytest.mark.parametrize("now", [True, False])
def test_cancel_says_what_it_knows_where_slurm_falls_silent_after_scancel(
    fake: FakeSlurm, config: Path, monkeypatch: pytest.MonkeyPatch, now: bool
) -> None:
    submit(load(config))
    if now:
        fake.change("100", state="RUNNING", nodes="n1")
    scancel = cancel_module.run_slurm

    def then_silent(argv: list[str], *others: float) -> str:
        said = scancel(argv, *others)
        fake.behave("squeue", code=1, stderr="Unable to contact slurm controller (connect failure)")
        return said

    monkeypatch.setattr(cancel_module, "run_slurm", then_silent)
    monkeypatch.setattr(cancel_module, "GONE_TIMEOUT_S", 0.2)
    result = cancel(config, now=now)
    assert (result.ended, result.outcome, result.job_id) == (False, "unknown", "100")
    assert result.note.startswith("job 100 was asked to end; whether it has cannot be asked: `squeue")
    assert fake.jobs()[0]["state"] == "CANCELLED"


def test_cancel_waits_for_a_controller_that_is_busy_after_scancel(
    fake: FakeSlurm, config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    submit(load(config))
    fake.change("100", state="RUNNING", nodes="n1")
    scancel = cancel_module.run_slurm

    def then_busy(argv: list[str], *others: float) -> str:
        said = scancel(argv, *others)
        fake.behave("squeue", code=1, stderr="slurm_load_jobs error: Socket timed out", only_once=True)
        return said

    monkeypatch.setattr(cancel_module, "run_slurm", then_busy)
    assert cancel(config, now=True).outcome == "cancelled"
