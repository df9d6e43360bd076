"""Reading Slurm: what its commands say, and what is made of their failures."""

import os
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from prime_hpc.runtime.clock import Backoff
from prime_hpc.slurm import client
from prime_hpc.slurm import jobs as slurm_jobs
from prime_hpc.slurm.client import SEPARATOR, SlurmError, clean_environment, run_slurm, squeue_rows
from prime_hpc.slurm.jobs import JobInfo, find_by_token, fold, fold_states, history, job, jobs, token_of
from prime_hpc.slurm.queue_facts import job_scripts
from tests.support.fake_slurm import FakeSlurm


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    fake = FakeSlurm(tmp_path)
    fake.use(monkeypatch)
    return fake


def program(folder: Path, name: str, body: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A command on PATH, as a shell script."""
    path = folder / name
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")


def stamp(after_s: float) -> str:
    """A time of Slurm's, so long after now."""
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(time.time() + after_s))


def row(**fields: object) -> str:
    """One line of squeue in the format that is asked for."""
    values = {
        "JobArrayID": "12",
        "JobID": "12",
        "HetJobID": "N/A",
        "HetJobOffset": "N/A",
        "State": "RUNNING",
        "Reason": "None",
        "NumNodes": "2",
        "NodeList": "n[1-2]",
        "StartTime": stamp(-18 * 60),
        "EndTime": stamp(+42 * 60),
        "TimeLeft": "42:00",
        "RestartCnt": "1",
        "Name": "a | b",
        "Comment": "prime-hpc:abc mine",
        **fields,
    }
    assert list(values) == list(slurm_jobs._FIELDS)
    return "".join(f"{value}\x1f" for value in values.values())


def say(tmp_path: Path, rows: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "answer").write_text("\n".join(rows) + "\n")
    program(tmp_path, "squeue", f"cat '{tmp_path}/answer'", monkeypatch)


def test_a_plain_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    say(tmp_path, [row()], monkeypatch)
    info = job("12")
    assert info is not None
    assert (info.job_id, info.state, info.reason, info.nodes, info.num_nodes) == ("12", "RUNNING", "", "n[1-2]", 2)
    assert (info.restarts, info.name, info.token) == (1, "a | b", "abc")
    assert info.time_left_s is not None and 2400 < info.time_left_s <= 2520
    assert info.end is not None and info.start is not None and 3599 <= info.end - info.start <= 3601
    assert info.is_active and not info.is_pending and info.components == ()
    assert job("13") is None


def test_heterogeneous_jobs_are_folded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = [
        row(JobArrayID="21", JobID="21", HetJobID="20", HetJobOffset="1", NodeList="n7", NumNodes="1", TimeLeft="9:00"),
        row(JobArrayID="20", JobID="20", HetJobID="20", HetJobOffset="0"),
    ]
    say(tmp_path, parts, monkeypatch)
    info = jobs(["20"])["20"]
    assert (info.job_id, info.nodes, info.num_nodes, info.time_left_s) == ("20", "n[1-2],n7", 3, 540.0)


def test_a_preemption_with_a_grace_moves_the_end_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    say(tmp_path, [row(EndTime=stamp(10))], monkeypatch)
    info = job("12")
    assert info is not None and info.time_left_s is not None and info.time_left_s <= 10


def test_components_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = [
        row(JobArrayID="21", JobID="21", HetJobID="20", HetJobOffset="1"),
        row(JobArrayID="20", JobID="20", HetJobID="20", HetJobOffset="0"),
    ]
    say(tmp_path, parts, monkeypatch)
    info = jobs(["20"])["20"]
    assert [part.job_id for part in info.components] == ["20+0", "20+1"]


def test_arrays_are_a_job_a_task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [row(JobArrayID="30_1", JobID="31"), row(JobArrayID="30_2", JobID="30", State="PENDING", NodeList="")]
    say(tmp_path, rows, monkeypatch)
    assert set(jobs(["30"])) == {"30_1", "30_2", "30"}  # 30 is also what its last task is called inside
    assert set(jobs(["30_2"])) == {"30_2"}
    assert jobs(["31"])["31"].job_id == "30_1"


def test_a_line_break_in_somebodys_comment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    say(tmp_path, [row(Comment="a\nb"), row(JobArrayID="13", JobID="13")], monkeypatch)
    monkeypatch.setattr(job_scripts, "squeue_rows", lambda *_: [])
    found = jobs(["12", "13"])
    assert found["12"].comment == "a\nb" and found["13"].token == "abc"


def test_the_controller_is_not_asked_for_its_whole_table(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[str]] = []

    def answer(argv: list[str], *_: object) -> str:
        which = argv[argv.index("all") + 1 : argv.index("-O")]
        asked.append(which)
        if which[0] == "-u":
            het = [row(JobArrayID=str(i), JobID=str(i), HetJobID="20", HetJobOffset=str(i - 20)) for i in (20, 21)]
            return "".join([row(), *het])
        if "," in which[1]:
            return "" if "-h" in argv else row(JobArrayID="JOBID")
        raise SlurmError(argv, 1, "slurm_load_jobs error: Invalid job id specified")

    monkeypatch.setattr(client, "run_slurm", answer)
    monkeypatch.setattr(job_scripts, "squeue_rows", lambda *_: [])
    own = ["-u", str(os.getuid())]
    assert set(jobs(["12", "20", "21"])) >= {"12", "20"} and len(jobs(["12", "20"])["20"].components) == 2
    assert asked == [own, own], "all of them are this user's"
    asked.clear()
    assert set(jobs(["12", "77", "78"])) == {"12"}
    assert asked == [own, ["-j", "77"], ["-j", "78"]]
    asked.clear()
    assert jobs(["77", "78"], of_others=True) == {} and asked == [["-j", "77"], ["-j", "78"]]
    asked.clear()
    many = [str(i) for i in range(100, 110)]
    assert jobs(many) == {} and asked == [own, *2 * [["-j", ",".join(many)]]], "the second time with the heading"


def test_pauses_grow_and_differ() -> None:
    pause = Backoff(1.0, 10.0)
    lengths = [pause.next() for _ in range(20)]
    assert 0.8 <= lengths[0] <= 1.2 and all(8 <= length <= 12 for length in lengths[8:])
    assert len(set(lengths)) > 10


def test_odd_values(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    odd = row(State="PENDING", NodeList="", StartTime="N/A", EndTime="N/A", TimeLeft="UNLIMITED", Comment="(null)")
    say(tmp_path, [odd], monkeypatch)
    monkeypatch.setattr(job_scripts, "squeue_rows", lambda *_: [])
    info = job("12")
    assert info is not None and info.is_pending
    assert (info.start, info.end, info.time_left_s, info.comment, info.token) == (None, None, None, "", None)


def test_jobs_that_slurm_forgot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program(tmp_path, "squeue", "echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1", monkeypatch)
    assert jobs(["12"]) == {}
    assert jobs([]) == {}


def test_a_job_that_slurm_forgets_between_two_questions(monkeypatch: pytest.MonkeyPatch) -> None:
    forgotten = SlurmError(["squeue"], 1, "slurm_load_jobs error: Invalid job id specified")
    answers: list[str | SlurmError] = [row(Comment="changed by the site"), forgotten]

    def answer(*_: object) -> str:
        said = answers.pop(0)
        if isinstance(said, SlurmError):
            raise said
        return said

    monkeypatch.setattr(client, "run_slurm", answer)
    assert jobs(["12"])["12"].token is None and not answers


def test_tokens(fake: FakeSlurm) -> None:
    for comment in ("prime-hpc:aa", "prime-hpc:aab", "other prime-hpc:aa", "prime-hpc:aa words", ""):
        fake.add(comment=comment)
    assert [info.job_id for info in find_by_token("aa")] == ["100", "103"]
    assert token_of("prime-hpc") is None and token_of("prime-hpc:x y") == "x"


def test_the_jobs_of_a_token_come_oldest_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two, the first is the job and the second its successor; squeue sorts as its user's SQUEUE_SORT says."""
    ids = ("1000", "999")
    say(tmp_path, [row(JobArrayID=i, JobID=i, Comment="prime-hpc:aa") for i in ids], monkeypatch)
    assert [info.job_id for info in find_by_token("aa")] == ["999", "1000"]


@pytest.mark.parametrize(
    ("states", "folded"),
    [
        (["RUNNING", "RUNNING"], "RUNNING"),
        (["COMPLETED", "RUNNING"], "RUNNING"),
        (["NODE_FAIL", "PENDING"], "PENDING"),
        (["COMPLETING", "COMPLETED"], "COMPLETING"),
        (["COMPLETED", "FAILED"], "FAILED"),
        (["CANCELLED", "NODE_FAIL"], "NODE_FAIL"),
        (["COMPLETED", "COMPLETED"], "COMPLETED"),
        (["SOMETHING_NEW"], "SOMETHING_NEW"),
    ],
)
def test_folded_states(states: list[str], folded: str) -> None:
    assert fold_states(states) == folded


def test_the_telling_reason_counts() -> None:
    parts = [JobInfo("5+0", "PENDING", "Priority"), JobInfo("5+1", "PENDING", "PartitionConfig")]
    assert fold(parts)["5"].reason == "PartitionConfig" and fold(parts)["5"].cannot_start
    for never in (
        "Job's account not permitted to use this partition (gpu allows good not bad)",
        "Job's QOS not permitted to use this partition (gpu denies fast including fast)",
        "DependencyNeverSatisfied",
    ):
        assert JobInfo("5", "PENDING", never).cannot_start
    mended_by_time = ("QOSMaxJobsPerUserLimit", "QOSMaxGRESPerUser", "AssocMaxJobsLimit", "AssocGrpGRES", "Resources")
    assert not any(JobInfo("5", "PENDING", reason).cannot_start for reason in mended_by_time)


# --- failures ---------------------------------------------------------------------------------------------------


def test_a_missing_command() -> None:
    with pytest.raises(SlurmError, match="is not found on PATH.*load the site's Slurm module") as caught:
        run_slurm(["no-such-squeue", "-h"])
    assert caught.value.is_missing and caught.value.is_unreachable
    assert (caught.value.code, caught.value.exit_code) == (None, 3)


def test_a_hanging_command(fake: FakeSlurm) -> None:
    fake.behave("squeue", hang="before")
    with pytest.raises(SlurmError, match=r"`squeue -h .*timed out: no answer within 0.5 s.*scontrol ping") as caught:
        jobs(["1"], timeout_s=0.5)
    assert caught.value.is_unreachable and not caught.value.is_missing


@pytest.mark.parametrize(
    "said",
    [
        "sbatch: error: Slurm temporarily unable to accept job, sleeping and retrying",
        "wrapper: module: command not found",  # of a site's wrapper, which goes on all the same
    ],
)
def test_a_command_that_says_why_it_does_not_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: str) -> None:
    program(tmp_path, "sbatch", f"echo '{said}' >&2; exec sleep 600", monkeypatch)
    with pytest.raises(SlurmError, match=rf"no answer within 3 s \({said}\)") as caught:
        run_slurm(["sbatch"], 3.0)
    assert ("MaxJobCount" in str(caught.value)) is said.startswith("sbatch: ")
    assert caught.value.is_unreachable and not caught.value.is_missing


@pytest.mark.parametrize(
    ("command", "tries"),
    [
        *(("squeue -u 0", 2), ("scontrol show job 7", 2), ("scancel 7", 2)),
        *(("sbatch job.sbatch", 1), ("scontrol requeue 7", 1), ("scancel -s USR1 7", 1)),
    ],
)
def test_what_a_busy_controller_drops_is_asked_again_where_it_is_the_same_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str, tries: int
) -> None:
    monkeypatch.setattr(client, "_PAUSES_S", (0.0,))
    calls, name = tmp_path / "calls", command.split()[0]
    dropped = f"echo '{name}: error: Socket timed out on send/recv operation' >&2; exit 1"
    program(
        tmp_path, name, f"echo . >>{calls}; [ $(wc -l <{calls}) -gt 1 ] || {{ {dropped}; }}; echo answer", monkeypatch
    )
    if tries == 1:
        with pytest.raises(SlurmError, match="Socket timed out"):
            run_slurm(command.split(), 20.0)
    else:
        assert run_slurm(command.split(), 20.0) == "answer\n"
    assert len(calls.read_text().split()) == tries


def test_a_job_that_is_gone_when_scancel_is_sent_again_was_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "_PAUSES_S", (0.0,))
    first = f"[ -e {tmp_path}/sent ] || {{ touch {tmp_path}/sent; echo 'Socket timed out on send/recv' >&2; exit 1; }}"
    program(tmp_path, "scancel", f"{first}; echo 'Invalid job id specified' >&2; exit 1", monkeypatch)
    assert run_slurm(["scancel", "7"], 20.0) == ""
    with pytest.raises(SlurmError, match="Invalid job id"):
        run_slurm(["scancel", "7"], 20.0)


@pytest.mark.parametrize(
    ("words", "unreachable", "advice"),
    [
        ("slurm_load_jobs error: Unable to contact slurm controller (connect failure)", True, "controller is down"),
        ("Socket timed out on send/recv operation", True, "controller is down"),
        ("slurm_load_jobs error: Connection reset by peer", True, "controller is down"),
        ("Unexpected message received for job 19", True, "controller is down"),  # scontrol requeue, its answer cut off
        ("Message receive failure", True, "controller is down"),
        (
            "scontrol: error: Unable to establish control machine address\nslurm_load_jobs error: No error",
            True,
            "again",
        ),
        ("Slurm backup controller in standby mode", True, "about to take over"),
        ("Rate limit exceeded, please retry later", True, "controller is busy"),
        ("Job can not be altered now, try again later", True, "controller is busy"),
        ("error: If munged is up, restart with --num-threads=10\nMunge encode failed", True, "munge does not answer"),
        ("fatal: Could not establish a configuration source", True, "SLURM_CONF"),
        ("/opt/site/bin/squeue: fork: retry: Resource temporarily unavailable", True, "no processes left"),
        ("slurm_load_partitions error: Access/permission denied", False, "written by hand"),
        ("scancel: error: Kill job error on job id 7: Access/permission denied", False, "denied"),
        ("Invalid partition name specified", False, ""),
    ],
)
def test_what_a_failure_means(words: str, unreachable: bool, advice: str) -> None:
    error = SlurmError(["squeue"], 1, words)
    assert error.is_unreachable is unreachable and not error.is_missing
    assert advice in str(error) and words.splitlines()[0] in str(error) and "exit status 1" in str(error)


@pytest.mark.parametrize("end", ["kill -PIPE $$", "exit 141"], ids=["killed", "a wrapper says so"])
def test_a_command_whose_connection_the_controller_closes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    program(tmp_path, "squeue", end, monkeypatch)
    with pytest.raises(SlurmError, match="was ended by signal 13: it said nothing; the controller is down") as caught:
        jobs(["1"])
    assert caught.value.is_unreachable and not caught.value.is_missing


@pytest.mark.parametrize("code", [126, 127])
def test_a_site_wrapper_whose_command_cannot_be_run(code: int) -> None:
    error = SlurmError(["sbatch"], code, "sbatch: error while loading shared libraries: libslurm.so: cannot open it")
    assert error.is_missing and error.is_unreachable and "load the site's Slurm module" in str(error)


def test_a_failure_without_a_word_is_no_refusal() -> None:
    """A site's wrapper that was killed, say: a requeue is tried again, a submit looks for its job."""
    error = SlurmError(["scontrol"], 1, "\n")
    assert error.is_unreachable and not error.is_missing
    assert SlurmError(["scontrol"], 0, "its answer is of a form that is not known here: ''").is_unreachable


def test_a_machine_without_processes_left(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(*_: object, **__: object) -> None:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr("prime_hpc.slurm.client.subprocess.run", run)
    with pytest.raises(
        SlurmError, match="could not be started here: Resource temporarily .*no processes left"
    ) as caught:
        jobs(["1"])
    assert caught.value.is_unreachable and not caught.value.is_missing


def test_what_a_site_says_around_an_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The job after the banner is known by its id all the same."""
    fields = ("JobArrayID", "Comment")
    answer = "Welcome to Foo, Slurm 23.11\n\n12|a\ncomment|\n13||\nbye\n".replace("|", SEPARATOR)
    (tmp_path / "answer").write_text(answer)
    program(tmp_path, "squeue", f"cat '{tmp_path}/answer'", monkeypatch)
    assert [row["JobArrayID"] for row in squeue_rows([], fields, 5.0)] == ["12", "13"]
    (tmp_path / "answer").write_text(answer[: answer.index("13") + 3])
    with pytest.raises(SlurmError, match="breaks off after 1 rows"):  # whoever asks for 13 must not think it gone
        squeue_rows([], fields, 5.0)


def test_no_jobs_are_told_from_no_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrapper such as `squeue "$@" | tee -a log` ends well though squeue could ask nobody."""
    program(tmp_path, "squeue", "echo hello", monkeypatch)
    with pytest.raises(SlurmError, match="form that is not known here: 'hello'") as caught:
        squeue_rows([], ("JobArrayID", "Comment"), 5.0)
    assert caught.value.is_unreachable
    heading = "case $* in *-h*) ;; *) printf 'JOBID\\037COMMENT\\037\\n' ;; esac"
    program(tmp_path, "squeue", f"echo hello; {heading}", monkeypatch)
    assert squeue_rows([], ("JobArrayID", "Comment"), 5.0) == []


def test_no_accounting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program(tmp_path, "sacct", "echo 'Slurm accounting storage is disabled' >&2; exit 1", monkeypatch)
    assert history("12") == []
    monkeypatch.setenv("PATH", str(tmp_path / "nowhere"))
    assert history("12") == []


def test_accounting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lives = [
        "12|PREEMPTED|0:15|2026-01-31T10:00:00|2026-01-31T11:00:00|n1|c",
        "12|CANCELLED by 1000|0:0|2026-01-31T12:00:00|Unknown|None assigned|",
    ]
    (tmp_path / "answer").write_text("\n".join(lives).replace("|", "\x1f") + "\n")
    program(tmp_path, "sacct", f"cat '{tmp_path}/answer'", monkeypatch)
    first, second = history("12")
    assert (first.state, first.exit_code, first.nodes, first.comment) == ("PREEMPTED", "0:15", "n1", "c")
    assert (second.state, second.end, second.nodes) == ("CANCELLED", None, "")


def test_the_environment_of_a_job_does_not_leak(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inside = {"SLURM_JOB_ID": "1", "SLURM_CONF": "/c", "SRUN_X": "1", "SBATCH_X": "1", "SLURM_JWT": "j", "PATH": "p"}
    assert clean_environment(inside) == {"SLURM_CONF": "/c", "SLURM_JWT": "j", "PATH": "p"}
    program(tmp_path, "squeue", "env", monkeypatch)
    monkeypatch.setenv("SQUEUE_FORMAT", "%i")
    monkeypatch.setenv("SLURM_TIME_FORMAT", "relative")
    said = run_slurm(["squeue"], extra={"PRIMEHPC_SUBMISSION": "t /d"})
    assert "SQUEUE_FORMAT" not in said and "relative" not in said and "PRIMEHPC_SUBMISSION=t /d" in said


def test_answers_are_whole_and_no_job_inherits_what_makes_them_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("scontrol", "sinfo", "sbatch"):
        program(tmp_path, name, "env", monkeypatch)
    assert {"SCONTROL_ALL=1", "SLURM_TIME_FORMAT=%s"} <= set(run_slurm(["scontrol"]).split())
    assert "SINFO_ALL=1" in run_slurm(["sinfo"])
    assert "SCONTROL_ALL=" not in run_slurm(["scontrol"], of_user=True), "as for advice to this user"
    assert "SINFO_ALL=" not in run_slurm(["sinfo"], of_user=True)
    assert "_ALL=" not in (said := run_slurm(["sbatch"])) and "SLURM_TIME_FORMAT" not in said


def test_a_command_that_dies_with_its_caller(tmp_path: Path) -> None:
    code = (
        "import sys; from prime_hpc.slurm.client import run_slurm\n"
        f"run_slurm(['sh', '-c', 'echo $$ > {tmp_path}/pid.tmp; mv {tmp_path}/pid.tmp {tmp_path}/pid; exec sleep 600'],"
        " dies_with_us=True)"
    )
    caller = subprocess.Popen([sys.executable, "-c", code])
    began = time.monotonic()
    while not (tmp_path / "pid").exists():
        assert time.monotonic() - began < 280
        time.sleep(0.02)
    caller.kill()
    caller.wait(timeout=280)
    status = Path(f"/proc/{(tmp_path / 'pid').read_text().strip()}/stat")
    while status.exists() and ") Z " not in status.read_text():
        assert time.monotonic() - began < 280
        time.sleep(0.02)
