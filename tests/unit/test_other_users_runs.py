"""What the commands say of a run that belongs to another user."""

import errno
import os
from pathlib import Path

import pytest

from prime_hpc.cli.verbs.run import resume
from prime_hpc.config.errors import ConfigError
from prime_hpc.launch.cancel import cancel_run
from prime_hpc.launch.monitor.who_hangs import find_target
from prime_hpc.launch.submission import submit
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
