"""What the commands say of a run that belongs to another user."""

import errno
import os
import time
from pathlib import Path

import pytest

from prime_hpc.cli.verbs.run import resume
from prime_hpc.config.errors import ConfigError
from prime_hpc.launch.cancel import cancel_run
from prime_hpc.launch.monitor import status, who_hangs
from prime_hpc.launch.monitor.run_facts import Queue
from prime_hpc.launch.monitor.status import ask_slurm, status_of
from prime_hpc.launch.monitor.who_hangs import find_target, why_idle
from prime_hpc.launch.submission import submit
from prime_hpc.slurm.jobs import _private_data
from prime_hpc.slurm.sbatch_errors import SlurmRefused
from prime_hpc.store import run_paths
from prime_hpc.store.attempts import begin
from tests.support.fake_slurm import FakeSlurm
from tests.support.submissions import load, run_dir

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a directory of another user")


def test_cancel_of_another_users_run(fake: FakeSlurm, config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    submit(load(config))
    fake.change("100", state="RUNNING", nodes="n1")

    def refused(*_: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    os.chown(run_dir(config), 12345, 12345)
    monkeypatch.setattr(Path, "touch", refused)  # root may write everywhere
    told: list[str] = []
    with pytest.raises(
        ConfigError, match=r"STOP cannot be .*belongs to another user .*uid 12345.*, who alone can end it"
    ):
        cancel_run(run_dir(config), now=False, timeout_s=5, say=told.append)
    assert not told, "it was asked for nothing"
    fake.behave("scancel", code=1, stderr="scancel: error: Kill job error on job id 100: Access/permission denied")
    for state, now in (("RUNNING", True), ("PENDING", False)):
        fake.change("100", state=state, nodes="n1" if state == "RUNNING" else "")
        with pytest.raises(SlurmRefused, match=r"permission denied.*; .*uid 12345.*, who alone can end it"):
            cancel_run(run_dir(config), now=now, timeout_s=5, say=told.append)
    with pytest.raises(ConfigError, match=r"name: .* belongs to another user .*uid 12345"):
        resume.run([str(run_dir(config))], "prime-hpc resume")


def test_another_users_run_is_no_silent_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of `why` and `shell`."""
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    (theirs / "run.yaml").write_text("name: theirs\n")
    begin(theirs / "attempts.jsonl", incarnation=1, why="test", resume_step=None, job_id=None)
    os.chown(theirs, 12345, 12345)
    monkeypatch.setattr(run_paths.os, "geteuid", lambda: 4242)
    assert find_target(str(theirs)).path == theirs, "a group's directory: the file WHY can be put there"
    monkeypatch.setattr(run_paths.os, "access", lambda *_: False)  # root may write everywhere
    with pytest.raises(
        ConfigError, match=r"belongs to another user .*uid 12345.*, who alone can look at its processes"
    ):
        find_target(str(theirs))


@pytest.mark.parametrize("hidden", ["jobs,usage", "usage"])
def test_a_job_that_slurm_hides_is_not_a_lost_one(
    fake: FakeSlurm, config: Path, monkeypatch: pytest.MonkeyPatch, hidden: str
) -> None:
    """With `PrivateData=jobs` squeue says of another user's job that there is none."""
    submit(load(config))
    fake.forget("100")
    fake.behave("scontrol", say=f"AuthType = auth/munge\nPrivateData             = {hidden}\nPriorityType = x\n")
    _private_data.cache_clear()
    assert status_of(run_dir(config), details=False).state == "lost", "root is shown all"
    os.chown(run_dir(config) / "submit.json", 12345, 12345)
    monkeypatch.setattr(status.os, "geteuid", lambda: 4242)
    found = status_of(run_dir(config), details=False)
    words = "Slurm cannot be asked: it shows nobody the jobs of others (PrivateData)"
    assert (found.state, words in found.note) == (("pending", True) if hidden == "jobs,usage" else ("lost", False))
    os.chown(run_dir(config) / "submit.json", 4242, 4242)
    assert status_of(run_dir(config), details=False).state == "lost", "one's own would be shown"
    _private_data.cache_clear()


def test_a_silent_controller_is_no_silent_file_system(
    fake: FakeSlurm, config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`why` said that the run directory does not answer, or asked the controller once more, for as long again."""
    submit(load(config))
    begin(run_dir(config) / "attempts.jsonl", incarnation=1, why="test", resume_step=None, job_id="100")
    fake.change("100", state="RUNNING", nodes="n1")
    job = find_target(str(run_dir(config))).job
    assert job is not None and job.nodes == "n1"
    monkeypatch.setattr(who_hangs, "READ_WITHIN_S", 0.5)
    asked = list[set[str]]()

    def slow(wanted: set[str], by_token: bool) -> Queue:
        asked.append(wanted)
        time.sleep(1.0)  # as long as nobody answers
        return ask_slurm(wanted, by_token)

    monkeypatch.setattr(who_hangs, "ask_slurm", slow)
    monkeypatch.setattr(who_hangs, "jobs", lambda *_: pytest.fail("it was asked before"))
    fake.behave("squeue", code=1, stderr="slurm_load_jobs error: Unable to contact slurm controller (connect failure)")
    target = find_target(str(run_dir(config)))
    assert target.status is not None and target.status.state == "starting" and not why_idle(target.status)
    assert target.job is None and asked == [{"100"}]
