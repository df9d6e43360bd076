"""What Slurm 22.05, 24.11 and 26.05 really said (`tests/data/slurm/VERSION`), read by what reads it in the product.

Recorded with `python -m tests.support.record_slurm`; the other versions' words are those of Slurm's source.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from loguru import logger

from prime_hpc.slurm import client, probe_site, sbatch_errors, termination
from prime_hpc.slurm import jobs as slurm_jobs
from prime_hpc.slurm.allocation import forget_surrounding_job, job_argument, read_allocation
from prime_hpc.slurm.client import field, first_end, parse_shown
from prime_hpc.slurm.executors import RunExecutor
from prime_hpc.slurm.queue_facts import job_scripts
from prime_hpc.slurm.termination import JobLog, parse_termination, parse_words
from prime_hpc.slurm.times import parse_time
from prime_hpc.supervisor.attempt.lost_batch_host import batch_host_state
from prime_hpc.supervisor.preflight.phase import NO_STEP

DATA = Path(__file__).resolve().parents[1] / "data" / "slurm"
VERSIONS = sorted(path.name for path in DATA.iterdir() if path.is_dir())
OUTCOMES = {
    "cancelled": ("interrupted", False),
    "cancelled where preemption cancels": ("interrupted", False),
    "cancelled where preemption requeues": ("interrupted", False),
    "requeued": ("requeued", True),
    "preempted and requeued": ("preempted", True),
    "preempted and cancelled": ("preempted", False),
    "node lost": ("node_lost", True),
    "time limit": ("requeued", False),
}


@pytest.fixture(autouse=True)
def _no_job_of_a_site_that_changes_comments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_scripts, "squeue_rows", lambda *_: [])


Replay = Callable[..., str]


def test_three_versions_are_recorded() -> None:
    assert VERSIONS == ["22.05", "24.11", "26.05"]


@pytest.fixture(params=VERSIONS)
def answers(request: pytest.FixtureRequest) -> dict[str, dict[str, Any]]:
    """Everything that was asked of one version, by name."""
    found: dict[str, dict[str, Any]] = json.loads((DATA / request.param / "answers.json").read_text())
    return found


def replay(answers: dict[str, dict[str, Any]], name: str) -> Replay:
    """A `run_slurm` that gives one recorded answer."""

    def ask(argv: Sequence[str], *_: Any, **__: Any) -> str:
        kept = answers[name]
        assert argv[0] == kept["argv"][0]
        if kept["code"]:
            raise client.SlurmError(argv, kept["code"], kept["stderr"] or kept["stdout"])
        return str(kept["stdout"])

    return ask


# ---- ends


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("how", OUTCOMES)
def test_an_end_is_called_by_its_name(version: str, how: str, tmp_path: Path) -> None:
    end = json.loads((DATA / version / "ends.json").read_text())[how]
    path = tmp_path / "log"
    path.touch()
    with path.open("a") as file:
        log = JobLog(file.fileno())
        file.write(end["log"])
        file.flush()
        words = log.words()
    assert words is not None
    lost = ["n2"] if how == "node lost" else []
    (job,) = parse_shown(end["job"], "1")[:1]
    verdict = parse_termination(job, end["partition"], 0, lost, words=words)
    assert (verdict.outcome, verdict.by_slurm) == OUTCOMES[how]
    # a node that was lost before, and without which the job went on, is not the reason
    if how.startswith("cancelled"):
        assert parse_termination(job, end["partition"], 0, ["n2"], words=words).outcome == "interrupted"


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("how", OUTCOMES)
def test_where_the_log_says_nothing_the_fields_decide(version: str, how: str) -> None:
    """A script whose output goes elsewhere, or a Slurm of other words."""
    end = json.loads((DATA / version / "ends.json").read_text())[how]
    lost = ["n2"] if how == "node lost" else []
    (job,) = parse_shown(end["job"], "1")[:1]
    verdict = parse_termination(job, end["partition"], 0, lost, words=None)
    assert (verdict.outcome, verdict.by_slurm) == OUTCOMES[how]


def test_slurmstepds_words_of_every_version() -> None:
    # src/slurmd/slurmstepd/req.c, 20.11 to 26.05
    assert parse_words("") == parse_words(" DUE to SIGNAL Terminated") == parse_words(" DUE to SIGNAL Killed") == ""
    assert parse_words(" DUE TO PREEMPTION") == "PREEMPTION"
    assert parse_words(" DUE TO TIME LIMIT") == "TIME LIMIT"
    assert parse_words(" DUE TO JOB REQUEUE") == "JOB REQUEUE"
    assert parse_words(" DUE TO NODE FAILURE, SEE SLURMCTLD LOG FOR DETAILS") == "NODE FAILURE"


def test_words_of_no_known_version_are_said_and_the_fields_decide() -> None:
    said: list[str] = []
    sink = logger.add(said.append, format="{message}")
    try:
        assert parse_words(" DUE TO LUNAR ECLIPSE") is None
        assert parse_words(", because of SIGNAL 15") is None
    finally:
        logger.remove(sink)
    assert len(said) == 2 and "no known version" in said[0] and "LUNAR ECLIPSE" in said[0]


# ---- jobs


def test_squeue(answers: dict[str, dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "run_slurm", replay(answers, "squeue of this user"))
    found = slurm_jobs.jobs()
    ids = {name: field(answers[f"job {name}"]["stdout"], "JobId") for name in ("plain", "waiting", "het", "ended")}
    plain = found[ids["plain"]]
    assert (plain.state, plain.nodes, plain.num_nodes, plain.name) == ("RUNNING", "n1", 1, "a name|with")
    assert (plain.comment, plain.token) == ("prime-hpc:abc x", "abc")
    assert plain.start and plain.end == plain.start + 3600
    waiting = found[ids["waiting"]]
    assert (waiting.state, waiting.reason, waiting.is_pending) == ("PENDING", "BeginTime", True)
    het = found[ids["het"]]
    assert (het.state, het.num_nodes, len(het.components)) == ("RUNNING", 3, 2)
    assert [part.nodes for part in het.components] == ["n5", "n[1-2]"] or het.components[1].nodes == "n[1-2]"
    array = field(answers["job array"]["stdout"], "ArrayJobId")
    tasks = [found[f"{array}_{k}"] for k in (1, 2, 3)]
    assert [task.state for task in tasks[1:]] == ["PENDING", "PENDING"]
    assert found[ids["ended"]].state == "FAILED" and not found[ids["ended"]].is_active
    assert {info.state for info in found.values()} <= {*slurm_jobs.ACTIVE, *slurm_jobs.ENDED}


def test_one_job_a_forgotten_one_and_no_controller(
    answers: dict[str, dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "run_slurm", replay(answers, "squeue of one job"))
    job = field(answers["job plain"]["stdout"], "JobId")
    assert list(slurm_jobs.jobs([job])) == [job]
    monkeypatch.setattr(client, "run_slurm", replay(answers, "squeue of a forgotten job"))
    assert slurm_jobs.jobs(["4999999"]) == {}
    monkeypatch.setattr(client, "run_slurm", replay(answers, "no controller: squeue"))
    with pytest.raises(client.SlurmError) as caught:
        slurm_jobs.jobs([job])
    assert caught.value.is_unreachable and "try again later" in caught.value.advice


def test_sacct(answers: dict[str, dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "run_slurm", replay(answers, "sacct"))
    rows = {row.job_id: row for row in slurm_jobs.find_in_history("abc", 0.0)} or {
        row.job_id: row for row in slurm_jobs.history("1")
    }
    plain = field(answers["job plain"]["stdout"], "JobId")
    het = field(answers["job het"]["stdout"], "HetJobId")
    every = {row.job_id: row for row in slurm_jobs.history(plain)}
    assert every[plain].state == "CANCELLED" and every[plain].nodes == "n1"
    assert {f"{het}+0", f"{het}+1"} <= set(every)
    assert rows


def test_scontrol_show_job(answers: dict[str, dict[str, Any]]) -> None:
    def shown(name: str) -> list[client.ShownJob]:
        return parse_shown(answers[f"job {name}"]["stdout"], "12")

    (plain,), (longer,), (waiting,), (ended,) = (
        shown(name) for name in ("plain", "plain, extended", "waiting", "ended")
    )
    began = parse_time(field(answers["job plain"]["stdout"], "StartTime"))
    assert began and plain.ends_at == began + 3600 and longer.ends_at == began + 7200
    assert (plain.job_id, longer.time_limit, plain.restarts, plain.num_nodes) == ("12", "02:00:00", 0, 1)
    leader, second = shown("het")
    assert (leader.job_id, second.job_id) == ("12+0", "12+1")
    assert (second.nodes, second.partition, second.excluded) == ("n[1-2]", "gpu", "")
    assert first_end([waiting]) is None
    # what an agent without a supervisor looks at
    assert (batch_host_state(plain, 0), batch_host_state(plain, 1), batch_host_state(ended, 0)) == (
        "kept",
        "over",
        "over",
    )
    assert batch_host_state(replace(second, batch_host="n9"), 0) == "dropped"


def test_a_value_of_scontrols_may_hold_spaces() -> None:
    (job,) = parse_shown("JobId=7 JobName=x JobState=RUNNING StdOut=/home/my runs/a/logs/slurm-7.out Power= A=b", "7")
    assert (job.state, job.output, job.restarts) == ("RUNNING", "/home/my runs/a/logs/slurm-7.out", 0)
    assert parse_shown("", "7") == []


def test_the_batch_steps_variables(answers: dict[str, dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    def environ(name: str) -> dict[str, str]:
        return dict(line.split("=", 1) for line in answers[name]["stdout"].splitlines())

    monkeypatch.setattr(client, "run_slurm", replay(answers, "job plain"))
    job = read_allocation(environ("variables"))
    assert job is not None and (job.hosts, job.batch_host, job.restarts) == ((("n1",),), "n1", 0)
    assert job.ends_at == first_end(parse_shown(answers["job plain"]["stdout"], "1"))
    monkeypatch.setattr(client, "run_slurm", replay(answers, "job het"))
    job = read_allocation(environ("variables of a het job"))
    assert job is not None and job.is_het and job.hosts[1] == ("n1", "n2")
    assert job.component_ids == (job.job_id, str(int(job.job_id) + 1))


def test_a_script_that_is_sent_by_hand_inside_another_job(
    answers: dict[str, dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """sbatch hands the other's variables on, and Slurm clears none of them."""
    own, het = (
        dict(line.split("=", 1) for line in answers[name]["stdout"].splitlines())
        for name in ("variables", "variables of a het job")
    )
    array = {"SLURM_ARRAY_JOB_ID": "90", "SLURM_ARRAY_TASK_ID": "3", "SLURM_ARRAY_TASK_COUNT": "1"}
    monkeypatch.setattr(client, "run_slurm", replay(answers, "job plain"))
    inside = {**het, **array, "SLURM_RESTART_COUNT": "2", **own}
    forget_surrounding_job(inside, is_of_array=False)
    assert job_argument(inside) == own["SLURM_JOB_ID"] and inside["SLURM_RESTART_COUNT"] == "0"
    assert not [name for name in inside if name not in own and ("HET" in name or "PACK" in name or "ARRAY" in name)]
    monkeypatch.setattr(client, "run_slurm", replay(answers, "job het"))
    inside = {**array, **het}
    forget_surrounding_job(inside, is_of_array=False)
    assert inside == het
    inside = {**own, **array}
    forget_surrounding_job(inside, is_of_array=True)
    assert inside == {**own, **array}


# ---- nodes, settings, refusals


def test_lost_nodes(answers: dict[str, dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    since = 4e9  # all slurmds began before
    monkeypatch.setattr(termination, "run_slurm", replay(answers, "nodes"))
    assert termination.lost_hosts(["n1", "n2"], since) == []
    monkeypatch.setattr(termination, "run_slurm", replay(answers, "nodes, one lost"))
    (lost,) = termination.lost_hosts(["n1", "n2"], since)
    states = dict(line.split() for line in answers["states, one lost"]["stdout"].splitlines())
    assert [node for node, state in states.items() if state.startswith("down")] == [lost]


def test_site_probe(answers: dict[str, dict[str, Any]]) -> None:
    names = {"config": "config", "partition": "partitions"}

    def ask(argv: Sequence[str], _timeout_s: float, **_: Any) -> str:
        if argv[0] == "sbatch":
            raise client.SlurmError(argv, 1, "sbatch: error: Batch job submission failed: Invalid qos specification")
        name = {"sinfo": "node types", "sacctmgr": "associations"}.get(argv[0]) or names[argv[2]]
        return str(answers[name]["stdout"])

    site = probe_site.probe(ask, list).site
    assert list(site.partitions) == ["gpu", "cpu", "all", "scavenge", "scavcancel", "high"]
    assert {name: part.preempt for name, part in site.partitions.items()} == {
        **dict.fromkeys(("gpu", "cpu", "all", "high"), "off"),
        "scavenge": "requeue",
        "scavcancel": "cancel",
    }
    gpu = site.partitions["gpu"]
    assert (gpu.nodes, gpu.gpus_per_node, gpu.cpus_per_node) == (4, 8, 16)
    assert (site.name, site.het_jobs, site.requeue, site.sacct) == ("primehpcdev", True, True, True)


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("no such partition", "slurm.partition"),
        ("too many GPUs", "slurm"),
        ("too many nodes", "slurm"),
        ("no such constraint", "slurm.constraint"),
        ("no such reservation", "slurm.reservation"),
        ("no such option", "slurm.extra"),
        ("no controller: sbatch", "launch"),
    ],
)
def test_refusals(answers: dict[str, dict[str, Any]], monkeypatch: pytest.MonkeyPatch, name: str, key: str) -> None:
    monkeypatch.setattr(sbatch_errors, "run_slurm", lambda *_, **__: "gpu\ncpu\n")
    try:
        text = replay(answers, name)(["sbatch"])
    except client.SlurmError as error:
        (problem,) = sbatch_errors.refusal(error, "packed").problems
        assert problem.key == key and answers[name]["stderr"].split(": ")[-1].strip().split("\n")[0] in problem.message
    else:
        assert name == "too many nodes", "whether it is queued all the same differs"
        assert RunExecutor._get_job_id_from_submission_command(text).isdigit()


def test_a_refusal_of_a_site_s_own_is_told_in_its_words_and_about_no_key() -> None:
    """A job_submit plugin's `slurm.log_user` of several lines, and `slurm.ERROR`."""
    said = "sbatch: error: Refused.\nsbatch: error: rl-17 has no hours left (time limit of the project: May).\n"
    own = "sbatch: error: Batch job submission failed: Unspecified error"
    for stderr, words in (
        (said + own, "Refused; rl-17 has no hours left (time limit of the project: May)"),
        (f"sbatch: error: Invalid: state --time\n{own}", "Invalid: state --time"),
        (own, own),
    ):
        (problem,) = sbatch_errors.refusal(client.SlurmError(["sbatch"], 1, stderr), "packed").problems
        told = words.rpartition("failed: ")[2]
        assert problem.key == "slurm" and problem.message == f"Slurm refused the job: {told}"


def test_a_refusal_for_a_limit_on_time_names_the_time() -> None:
    """Words of every refusal for a policy follow it: of accounts in general."""
    said = "sbatch: error: QOSMaxWallDurationPerJobLimit\nsbatch: error: Batch job submission failed: "
    said += "Job violates accounting/QOS policy (job submit limit, user's size and/or time limits)"
    (problem,) = sbatch_errors.refusal(client.SlurmError(["sbatch"], 1, said), "packed").problems
    assert problem.key == "slurm.time" and "MaxWall" in problem.message


def test_srun_that_makes_no_step_is_no_nodes_fault(answers: dict[str, dict[str, Any]]) -> None:
    for name in ("gres", "nodelist"):
        assert any(words in answers[f"srun: {name}"]["stdout"] for words in NO_STEP)
    for name in ("lost node", "command", "exit"):
        assert not any(words in answers[f"srun: {name}"]["stdout"] for words in NO_STEP)
    assert "failed on node n2" in answers["srun: lost node"]["stdout"]


def test_rows_of_no_known_version(monkeypatch: pytest.MonkeyPatch) -> None:
    values = ["7", "7", "N/A", "N/A", "HIBERNATING", "None", "about 2", "n1", "soon", "N/A", "a while", "once", "x", ""]
    monkeypatch.setattr(client, "run_slurm", lambda *_: "\x1f".join(values) + "\x1f\n")
    job = slurm_jobs.jobs()["7"]
    assert (job.state, job.is_active, job.num_nodes, job.restarts, job.start) == ("HIBERNATING", True, 0, 0, None)
