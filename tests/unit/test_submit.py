"""`submit` against a Slurm that fails as it is told to (tests/support/fake_slurm.py)."""

import errno
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from prime_hpc.config import ConfigError, Experiment
from prime_hpc.config.site import GENERIC
from prime_hpc.launch import local, submission
from prime_hpc.launch.for_slurm import is_for_slurm
from prime_hpc.launch.submission import submit, unseen_by_others, uses_slurm
from prime_hpc.slurm import client, sbatch_errors, submission_record
from prime_hpc.slurm.queue import refuse_if_queued
from prime_hpc.slurm.sbatch_errors import SlurmRefused
from prime_hpc.store.run_dirs import read_record
from tests.support.fake_slurm import FakeSlurm
from tests.support.submissions import ended, load, run_dir

POLICY = "Job violates accounting/QOS policy (job submit limit, user's size and/or time limits)"


def test_a_job_is_sent_with_all_that_belongs_to_it(
    fake: FakeSlurm, config: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "7")  # from inside another job
    monkeypatch.setenv("SLURM_MEM_PER_CPU", "1")
    assert submit(load(config)) == 0
    (job,) = fake.jobs()
    record = read_record(run_dir(config))
    assert record is not None
    assert (record["state"], record["job_id"], record["layout"]) == ("sent", job["id"], "packed")
    assert record["cluster"] == "fake" and record["successor"] is None
    assert job["comment"] == f"prime-hpc:{record['token']}" and job["name"] == "r"
    assert job["script"] == str(run_dir(config) / "job.sbatch")
    assert {"run.yaml", "site.yaml", "lock.json", "logs"} <= {p.name for p in run_dir(config).iterdir()}
    inside = fake.environment_of(job["id"])
    assert "SLURM_JOB_ID" not in inside and "SLURM_MEM_PER_CPU" not in inside
    assert submission_record.check_in(run_dir(config), {**inside, "SLURM_JOB_ID": job["id"]}) is None
    out = capsys.readouterr().out
    assert f"submitted as job {job['id']} (packed, 1 node): PENDING (Priority)" in out
    assert "prime-hpc logs -f" in out and str(run_dir(config)) in out


def test_a_job_that_a_site_keeps_from_being_requeued_is_named(
    fake: FakeSlurm, config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fake.behave("scontrol", say="JobId=100 JobState=PENDING Requeue=1 Restarts=0")
    assert submit(load(config)) == 0
    assert "requeue" not in capsys.readouterr().err
    fake.behave("scontrol", say="JobId=101 JobState=PENDING Requeue=0 Restarts=0")
    assert submit(load(config, "--name", "other")) == 0
    assert "will not requeue this job" in capsys.readouterr().err


def test_json(fake: FakeSlurm, config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert submit(load(config), as_json=True) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["job_id"] == fake.jobs()[0]["id"] and said["slurm_state"] == "PENDING"
    assert said["reason"] == "Priority" and said["adopted"] is False


def test_dry_run_asks_nobody_and_writes_nothing(
    fake: FakeSlurm, config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = sorted(p for p in config.parent.rglob("*"))
    assert submit(load(config), dry_run=True) == 0
    assert "#SBATCH --partition=gpu" in capsys.readouterr().out
    assert fake.calls() == []
    assert sorted(p for p in config.parent.rglob("*") if "fake-slurm" not in p.parts) == [
        p for p in before if "fake-slurm" not in p.parts
    ]


def test_lint_errors_reach_no_queue(fake: FakeSlurm, config: Path) -> None:
    with pytest.raises(ConfigError, match=r"slurm.time.*PH305"):
        submit(load(config, "--slurm.time", "0"))
    assert fake.jobs() == [] and not run_dir(config).exists()


@pytest.mark.parametrize(
    ("words", "key", "advice"),
    [
        (
            "sbatch: error: Batch job submission failed: Invalid partition name specified",
            "slurm.partition",
            "are cpu, gpu",
        ),
        ("sbatch: error: Job submission failed: Requested node configuration is not available", "slurm", "exclude"),
        (
            "sbatch: error: Batch job submission failed: Invalid account or account/partition combination specified",
            "slurm.account",
            "sacctmgr",
        ),
        (
            "sbatch: error: Batch job submission failed: Requested time limit is invalid (missing or too long)",
            "slurm.time",
            "sinfo",
        ),
        (
            f"sbatch: error: AssocMaxSubmitJobLimit\nsbatch: error: Batch job submission failed: {POLICY}",
            "slurm",
            "--feed",
        ),
        ("sbatch: error: Invalid --mail-type specification", "slurm.mail_type", ""),
        ("sbatch: unrecognized option '--foo=1'", "slurm.extra", "job.sbatch"),
        ("sbatch: error: something quite new", "slurm", "something quite new"),
    ],
)
def test_what_sbatch_refuses_is_said_and_leaves_the_way_free(
    fake: FakeSlurm, config: Path, words: str, key: str, advice: str
) -> None:
    fake.behave("sbatch", code=1, stderr=words)
    fake.behave("sinfo", say="Welcome to Foo!\ngpu\ncpu\n")  # of a site's wrapper
    with pytest.raises(SlurmRefused) as caught:
        submit(load(config))
    (problem,) = caught.value.problems
    assert caught.value.exit_code == 3 and problem.key == key and advice in problem.message
    assert words.rpartition(": ")[2].split(" (")[0] in problem.message
    record = read_record(run_dir(config))
    assert record is not None and record["state"] == "failed" and record["error"]
    fake.behave("sbatch")
    assert submit(load(config)) == 0
    assert len(fake.jobs()) == 1


def test_het_refused() -> None:
    said = client.SlurmError(["sbatch"], 1, "Requested operation not supported on this system")
    error = sbatch_errors.refusal(said, "het")
    assert error.problems[0].key == "slurm.layout" and "packed" in error.problems[0].message


def test_no_sbatch(fake: FakeSlurm, config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake.remove("sbatch")
    monkeypatch.setenv("PATH", str(fake.bin))
    with pytest.raises(SlurmRefused, match="no sbatch on PATH .*module.*states slurm.gpus_per_node.*--launch local"):
        uses_slurm(load(config, "--launch", "auto").experiment)
    assert not uses_slurm(load(config, "--launch", "local").experiment)
    for plain in (Experiment(), Experiment(launch="auto", max_steps=3)):
        assert not uses_slurm(plain)  # nothing speaks of Slurm: a laptop
        with pytest.raises(SlurmRefused, match="PRIMEHPC_SITE is mine"):
            uses_slurm(plain, {**os.environ, "PRIMEHPC_SITE": "mine"})
    with pytest.raises(SlurmRefused, match="no sbatch on PATH.*launch = slurm asks for one.*--launch local"):
        submit(load(config, "--trainer.num-ranks", "3"))  # before anything that lint says of it
    assert not run_dir(config).exists() and submit(load(config), dry_run=True) == 0


def test_without_a_configuration_auto_stays_here_where_slurm_was_not_meant(
    fake: FakeSlurm, config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    auto = load(config, "--launch", "auto").experiment
    assert uses_slurm(auto)
    monkeypatch.setenv("SLURM_CONF", "/nowhere/slurm.conf")
    monkeypatch.setattr(client, "cluster_name", lambda environ: None)
    words = (
        "sinfo: error: fetch_config: DNS SRV lookup failed\nsinfo: fatal: Could not establish a configuration source"
    )
    fake.behave("sinfo", code=1, stderr=words)
    assert not uses_slurm(Experiment()) and not is_for_slurm(Experiment(), GENERIC)
    with pytest.raises(SlurmRefused, match=r"find no configuration \(no slurm.conf is .*nothing was started"):
        uses_slurm(auto)
    fake.behave("sinfo")  # configless, found by DNS
    assert uses_slurm(auto)


@pytest.mark.parametrize("state", ["PENDING", "RUNNING", "COMPLETING"])
def test_the_same_name_twice(fake: FakeSlurm, config: Path, state: str) -> None:
    submit(load(config))
    fake.change("100", state=state, nodes="n1")
    for flags in ([], ["--clean"], ["--ckpt.resume-step", "latest"]):
        with pytest.raises(ConfigError, match=f"in Slurm as job 100, {state}.*prime-hpc cancel") as caught:
            submit(load(config, *flags))
        assert caught.value.exit_code == 2
    assert len(fake.jobs()) == 1 and (run_dir(config) / "run.yaml").exists()


def test_another_job_with_the_same_id_does_not_count(fake: FakeSlurm, config: Path) -> None:
    submit(load(config))
    fake.change(
        "100", comment="prime-hpc:of-another-run", state="RUNNING"
    )  # slurmctld forgot ours, and used the id again
    assert submit(load(config)) == 0
    assert [job["id"] for job in fake.jobs()] == ["100", "101"]


def test_after_its_end_a_run_is_resumed_or_deleted(fake: FakeSlurm, config: Path) -> None:
    submit(load(config))
    fake.change("100", state="FAILED")
    ended(config)
    with pytest.raises(ConfigError, match="already holds a run, which saved no checkpoint"):
        submit(load(config))
    assert submit(load(config, "--ckpt.resume-step", "latest")) == 0
    fake.change("101", state="FAILED")
    (run_dir(config) / "weights").mkdir()
    assert submit(load(config, "--clean")) == 0
    assert not (run_dir(config) / "weights").exists() and not (run_dir(config) / "attempts.jsonl").exists()


def test_a_run_that_was_cancelled_while_it_waited_is_sent_again(fake: FakeSlurm, config: Path) -> None:
    submit(load(config))
    fake.change("100", state="CANCELLED")
    assert submit(load(config)) == 0
    assert len(fake.jobs()) == 2


def test_a_finished_run_needs_no_slurm(fake: FakeSlurm, config: Path) -> None:
    submit(load(config))
    ended(config, "completed")
    fake.behave("squeue", code=1, stderr="Unable to contact slurm controller")
    refuse_if_queued(run_dir(config))
    with pytest.raises(ConfigError, match="already holds a run"):
        submit(load(config))


def test_a_foreground_run_is_refused_too(fake: FakeSlurm, config: Path) -> None:
    from prime_hpc.launch.prepare import prepare_run

    submit(load(config))
    with pytest.raises(ConfigError, match="in Slurm as job 100"):
        prepare_run(load(config, "--clean"))


def test_a_job_that_is_ending_is_waited_for(fake: FakeSlurm, config: Path) -> None:
    submit(load(config))
    fake.change("100", state="COMPLETING")
    ended(config, "interrupted")
    with pytest.raises(ConfigError, match="COMPLETING.*; Slurm still ends it: try again in a minute"):
        submit(load(config, "--ckpt.resume-step", "latest"))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a directory of another user")
def test_another_users_run_is_refused_before_the_queue(fake: FakeSlurm, config: Path) -> None:
    submit(load(config))
    fake.change("100", state="FAILED")
    ended(config)
    os.chown(run_dir(config), 12345, 12345)
    before = sorted(path.name for path in run_dir(config).iterdir())
    with pytest.raises(ConfigError, match=r"belongs to another user .*uid 12345.*choose another --name"):
        submit(load(config, "--ckpt.resume-step", "latest"))
    assert len(fake.jobs()) == 1 and sorted(path.name for path in run_dir(config).iterdir()) == before


def test_a_disk_that_is_full_after_sbatch_loses_no_job(
    fake: FakeSlurm, config: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write = submission_record._replace

    def full(path: Path, record: dict[str, Any]) -> None:
        if record["state"] != "sending":
            raise OSError(errno.ENOSPC, "No space left on device")
        write(path, record)

    monkeypatch.setattr(submission_record, "_replace", full)
    assert submit(load(config)) == 0
    said = capsys.readouterr()
    assert "submitted as job 100" in said.out
    assert "No space left on device; it lacks state = sent, job_id = 100" in said.err
    monkeypatch.setattr(submission_record, "_replace", write)
    assert submit(load(config)) == 0 and len(fake.jobs()) == 1, "the same job is found"
    assert (read_record(run_dir(config)) or {})["job_id"] == "100"


def test_a_file_system_of_one_host_is_noticed(tmp_path: Path) -> None:
    mounts = tmp_path / "mounts"
    mounts.write_text("/dev/a / ext4 rw 0 0\nsrv:/x /home nfs4 rw 0 0\n/dev/b /home/my\\040disk xfs rw 0 0\n")
    assert unseen_by_others(Path("/home/u/run"), 4, mounts=mounts) is None
    assert unseen_by_others(Path("/data/run"), 1, mounts=mounts) is None
    assert "on / (ext4)" in str(unseen_by_others(Path("/data/run"), 4, mounts=mounts))
    assert unseen_by_others(Path("/data/run"), 4, Path("/data"), mounts) is None
    assert "(xfs)" in str(unseen_by_others(Path("/home/my disk/run"), 4, mounts=mounts))


def test_so_is_one_of_the_checkpoints_alone(
    fake: FakeSlurm, config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(submission, "unseen_by_others", lambda folder, *_: f"{folder} is local")
    submit(load(config, "--ckpt.path", str(tmp_path / "own")), dry_run=True)
    said = capsys.readouterr().err
    assert f"warning: output_dir: {run_dir(config).resolve()} is local" in said
    assert f"warning: ckpt.path: {(tmp_path / 'own').resolve()} is local" in said


def test_sites_defaults_in_the_environment_are_mentioned(
    fake: FakeSlurm, config: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SBATCH_ACCOUNT", "mine")
    assert submit(load(config)) == 0
    assert "SBATCH_ACCOUNT" in capsys.readouterr().err
    assert "SBATCH_ACCOUNT" not in fake.environment_of("100")


@pytest.mark.parametrize("reason", ["PartitionConfig", "AssocMaxGRESPerJob", "QOSMinGRES", "DependencyNeverSatisfied"])
def test_a_job_that_can_never_start_is_pointed_out(
    fake: FakeSlurm, config: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], reason: str
) -> None:
    original = submission.jobs

    def late(*args: Any) -> Any:
        fake.change("100", reason=reason)
        return original(*args)

    monkeypatch.setattr(submission, "jobs", late)
    assert submit(load(config)) == 0
    said = capsys.readouterr().err
    assert f"cannot start it as it is ({reason})" in said and "the job that it depends on ended otherwise" in said


def test_a_local_job_outlives_the_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it starts inherits that it hears of no Ctrl-C and of no terminal that closes."""
    numbers, heard = (signal.SIGINT, signal.SIGHUP), list[Any]()
    original = subprocess.Popen

    def popen(*args: Any, **options: Any) -> Any:
        heard.append([signal.getsignal(number) for number in numbers])
        return original(["true"])

    monkeypatch.setattr("submitit.local.local.subprocess.Popen", popen)
    before = [signal.getsignal(number) for number in numbers]
    local.start_job(tmp_path)
    assert heard == [[signal.SIG_IGN, signal.SIG_IGN]]
    assert [signal.getsignal(number) for number in numbers] == before


def test_the_log_of_a_local_job_that_failed_does_not_call_it_successful() -> None:
    code = (
        "from submitit.core.logger import get_logger; logger = get_logger(); logger.info('begins')\n"
        "import prime_hpc.supervisor.main as supervisor; supervisor.supervise = lambda *_: 1\n"
        "from prime_hpc.launch.job import local_job; assert local_job('run', {}) == 1\n"
        "logger.info('Job completed successfully')"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=Path(__file__).parents[2], capture_output=True, timeout=280, check=True
    )
    assert b"begins" in done.stdout and b"successfully" not in done.stdout + done.stderr


def test_who_reads_a_submit_through_a_pipe_does_not_wait_for_the_local_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[list[str]] = []
    original = subprocess.Popen

    def popen(*args: Any, **options: Any) -> Any:  # what it starts inherits
        started.append([str(Path(f"/proc/self/fd/{fd}").readlink()) for fd in (1, 2)])
        return original(["true"])

    monkeypatch.setattr("submitit.local.local.subprocess.Popen", popen)
    ours = [Path(f"/proc/self/fd/{fd}").readlink() for fd in (1, 2)]
    local.start_job(tmp_path)
    assert started == [[str(tmp_path / "logs" / "submitit" / "controller.log")] * 2]
    assert [Path(f"/proc/self/fd/{fd}").readlink() for fd in (1, 2)] == ours
