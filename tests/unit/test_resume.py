"""`resume` against a Slurm that fails as it is told to (tests/support/fake_slurm.py)."""

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest

from prime_hpc.config import ConfigError
from prime_hpc.config.snapshot import load_run
from prime_hpc.launch.resume import load_to_resume
from prime_hpc.launch.submission import submit
from prime_hpc.store import run_dirs
from tests.support.fake_slurm import FakeSlurm
from tests.support.submissions import ended, load, run_dir


def test_resume_without_checkpoints(fake: FakeSlurm, config: Path) -> None:
    submit(load(config, "--no-ckpt"))
    with pytest.raises(ConfigError, match=r"no whole checkpoint \(the run has checkpoints off"):
        load_to_resume(run_dir(config), [])
    with pytest.raises(ConfigError, match=r"no whole checkpoint; start over.*--clean"):
        load_to_resume(run_dir(config), ["--ckpt"])


def test_resume_finds_what_a_signal_saved_though_checkpoints_are_off(fake: FakeSlurm, config: Path) -> None:
    from prime_hpc.store.run_paths import RunPaths
    from tests.support.checkpoints import make_checkpoint

    submit(load(config, "--no-ckpt"))
    make_checkpoint(RunPaths(run_dir(config)), 10)
    fake.change("100", state="FAILED")
    ended(config)
    loaded = load_to_resume(run_dir(config), ["--max-steps", "200"])
    assert loaded.experiment.ckpt is None  # the supervisor takes the newest whole one
    for last, words in ((10, "is the last one"), (4, "lies beyond the end")):
        with pytest.raises(ConfigError, match=rf"checkpoint 10 {words} \(of {last} steps\): raise it"):
            load_to_resume(run_dir(config), ["--max-steps", str(last)])


def test_resume_goes_on_where_the_run_was(
    fake: FakeSlurm, config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from prime_hpc.store.run_paths import RunPaths
    from tests.support.checkpoints import make_checkpoint

    submit(load(config, "--clean", "--output-dir", "out"))
    make_checkpoint(RunPaths(run_dir(config)), 10, kind="sft")
    fake.change("100", state="FAILED")
    ended(config)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    loaded = load_to_resume(run_dir(config), ["--max-steps", "200"])
    experiment = loaded.experiment
    assert experiment.run_dir.resolve() == run_dir(config) and experiment.max_steps == 200
    assert experiment.ckpt is not None and experiment.ckpt.resume_step == "latest" and not experiment.clean
    assert Path.cwd() == tmp_path, "relative paths of the config count from where it was first submitted"
    assert submit(loaded) == 0
    assert fake.jobs()[1]["cwd"] == str(tmp_path)
    with pytest.raises(ConfigError, match="goes on in its own directory"):
        load_to_resume(run_dir(config), ["--name", "other"])
    with pytest.raises(ConfigError, match="raise it"):
        load_to_resume(run_dir(config), ["--max-steps", "10"])


def test_resume_does_not_guess_where_paths_count_from(
    fake: FakeSlurm, config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    submit(load(config))

    def broken(path: Any, *arguments: Any) -> Any:
        if str(path).endswith("lock.json"):
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        return open(path, *arguments)  # noqa: PTH123

    monkeypatch.setattr(run_dirs, "open", broken, raising=False)
    with pytest.raises(OSError, match="Input/output error.*lock.json"):
        load_to_resume(run_dir(config), ["--ckpt"])


def test_resume_waits_for_no_job_that_was_waited_for(fake: FakeSlurm, config: Path) -> None:
    """Slurm 26.05 refuses `afterok` of one that it has forgotten."""
    from prime_hpc.store.run_paths import RunPaths
    from tests.support.checkpoints import make_checkpoint

    asked = ["--slurm.dependency", "afterok:7,singleton", "--slurm.trainer.dependency", "afterok:7"]
    submit(load(config, *asked))
    assert fake.jobs()[0]["dependency"] == "afterok:7"
    make_checkpoint(RunPaths(run_dir(config)), 10, kind="sft")
    fake.change("100", state="FAILED")
    ended(config)

    def again(*flags: str) -> str:
        submit(load_to_resume(run_dir(config), list(flags)))
        fake.change(fake.jobs()[-1]["id"], state="FAILED")
        ended(config)
        return str(fake.jobs()[-1]["dependency"])

    assert again() == "singleton" == again()
    assert again("--slurm.dependency", "afterok:9") == "afterok:9" and again() == "None"
    assert load_run(run_dir(config)).slurm.dependency == "afterok:9"  # told from what is stated anew


def test_a_run_whose_epochs_are_over_is_not_sent_again(fake: FakeSlurm, config: Path, tmp_path: Path) -> None:
    """How many steps they are stands in the run's status: the trainer counted them."""
    from prime_hpc.store.run_paths import RunPaths
    from tests.support.checkpoints import make_checkpoint

    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "a", "completion": "b"}\n' * 9)
    tree = json.loads(config.read_text())
    config.write_text(json.dumps(tree | {"sft": {"data": {"path": str(rows), "num_epochs": 2}}}))
    submit(load(config))
    make_checkpoint(RunPaths(run_dir(config)), 10)
    fake.change("100", state="FAILED")
    ended(config)
    assert load_to_resume(run_dir(config), []).experiment.num_steps is None  # nobody has counted
    (run_dir(config) / "status.json").write_text(json.dumps({"step": 10, "max_steps": 10}))
    with pytest.raises(ConfigError, match=r"sft.data.num_epochs: checkpoint 10 is the last one \(of 10 steps\)"):
        load_to_resume(run_dir(config), [])
    assert load_to_resume(run_dir(config), ["--sft.data.num-epochs", "3"]).experiment.sft.data.num_epochs == 3


def test_a_checkpoint_of_another_experiment_is_refused_before_the_queue(fake: FakeSlurm, config: Path) -> None:
    """Refused in the job, it would have waited in the queue for that, and the run would keep the wrong keys."""
    from prime_hpc.store.run_paths import RunPaths
    from tests.support.checkpoints import make_checkpoint

    submit(load(config))
    paths = RunPaths(run_dir(config))
    make_checkpoint(paths, 10, kind="rl")
    fake.change("100", state="FAILED")
    ended(config)
    before = paths.run_yaml.read_text()
    with pytest.raises(ConfigError, match=r"resume_step: \S+step_10 cannot be resumed from: it is of a run of kind rl"):
        submit(load_to_resume(run_dir(config), ["--max-steps", "20"]))
    assert len(fake.jobs()) == 1 and paths.run_yaml.read_text() == before
    for asked, words in (
        (run_dir(config), "it is of a run of kind rl, this is sft"),
        (run_dir(config).parent, "neither a run directory, nor a directory of checkpoints"),
        (4, "no checkpoint of step 4"),
    ):
        with pytest.raises(ConfigError, match=words):
            submit(load(config, "--name", "fork", "--ckpt.resume-step", str(asked)))
    make_checkpoint(paths, 11, kind="sft")
    with pytest.raises(ConfigError, match="of max_steps = 11 nothing is left to do"):
        submit(load(config, "--name", "fork", "--ckpt.resume-step", str(run_dir(config)), "--max-steps", "11"))
    assert submit(load(config, "--name", "fork", "--ckpt.resume-step", str(run_dir(config)), "--max-steps", "12")) == 0
