"""Whether a job comes back, and what its ends are called: from Slurm's own words, recorded on 22.05."""

import time
from pathlib import Path
from typing import Any, cast

import pytest

from prime_hpc.config import Experiment, write_snapshot
from prime_hpc.config.sections.slurm import RestartConfig, SiteConfig, SlurmConfig
from prime_hpc.config.site import write_site
from prime_hpc.slurm import client, termination
from prime_hpc.slurm.allocation import read_allocation
from prime_hpc.slurm.client import first_end, parse_shown
from prime_hpc.slurm.options import resolve_mode
from prime_hpc.slurm.placement import place_slurm
from prime_hpc.slurm.script import render_job
from prime_hpc.slurm.submission_record import open_record, write_record
from prime_hpc.slurm.termination import JobLog, parse_termination
from prime_hpc.store.run_dirs import AttemptRow
from prime_hpc.supervisor.attempt.restart_policy import attempts_without_progress, decide, decide_for, mode_of_run
from tests.support.shown_job import shown

JOB = (
    "JobId=15 JobName=x Priority=4294901745 JobState={state} Reason={reason} Dependency=(null) Requeue=1 "
    "Restarts={restarts} BatchFlag=1 RunTime=00:00:00 TimeLimit=01:00:00 EndTime=2026-11-21T15:28:14 "
    "PreemptTime={preempt} Partition=gpu NodeList=n[1-2] BatchHost=n1"
)
PARTITION = "PartitionName=gpu PriorityTier=1 State=UP PreemptMode={mode} DefMemPerCPU=100"


def verdict(
    *,
    state: str = "COMPLETING",
    reason: str = "None",
    restarts: int = 0,
    preempt: str = "None",
    mode: str = "OFF",
    lost: tuple[str, ...] = (),
    words: str | None = None,
    past_limit: bool = False,
) -> tuple[str, bool]:
    job = JOB.format(state=state, reason=reason, restarts=restarts, preempt=preempt)
    end = parse_termination(
        parse_shown(job, "15")[0], PARTITION.format(mode=mode), 0, lost, words=words, past_limit=past_limit
    )
    return end.outcome, end.by_slurm


def test_a_prolog_that_failed_is_no_requeue_by_hand_and_no_preemption() -> None:
    job = JOB.format(state="COMPLETING", reason="launch_failed_requeued_held", restarts=1, preempt="None")
    for words in ("JOB REQUEUE", None):
        end = parse_termination(parse_shown(job, "15")[0], PARTITION.format(mode="REQUEUE"), 0, words=words)
        assert (end.outcome, end.by_slurm) == ("requeued", True) and "its prolog" in end.reason


def test_what_a_sigterm_means() -> None:
    # with slurmstepd's words in the log
    assert verdict(words="PREEMPTION", restarts=1, mode="REQUEUE") == ("preempted", True)
    assert verdict(words="PREEMPTION", mode="CANCEL") == ("preempted", False)
    assert verdict(words="JOB REQUEUE", restarts=1, mode="REQUEUE") == ("requeued", True)
    assert verdict(words="TIME LIMIT", reason="TimeLimit") == ("requeued", False)
    assert verdict(words="NODE FAILURE", restarts=1, lost=("n2",)) == ("node_lost", True)
    assert verdict(words="") == ("interrupted", False)
    # a node that was lost before is not the reason of a scancel
    assert verdict(words="", lost=("n2",)) == ("interrupted", False)
    # where the log could not be read
    assert verdict(restarts=1, mode="REQUEUE") == ("preempted", True)
    assert verdict(preempt="2026-11-21T14:00:00", mode="CANCEL") == ("preempted", False)
    assert verdict(restarts=1) == ("requeued", True)
    assert verdict(reason="TimeLimit") == ("requeued", False)
    assert verdict(past_limit=True) == ("requeued", False)
    assert verdict(restarts=1, lost=("n2",)) == ("node_lost", True)
    assert verdict() == ("interrupted", False)


@pytest.mark.parametrize(
    ("words", "outcome"),
    [("", "interrupted"), ("PREEMPTION", "preempted"), ("TIME LIMIT", "requeued"), ("NODE FAILURE", "requeued")],
)
def test_the_jobs_log_tells_what_slurm_does_not(monkeypatch: pytest.MonkeyPatch, words: str, outcome: str) -> None:
    """A controller that is busy with the end of many: who was cancelled must not come back."""

    asked = []

    def silent(argv: list[str], *_: object, **__: object) -> str:
        asked.append(argv[2])
        raise client.SlurmError(argv, None, "timed out")

    for module in (client, termination):
        monkeypatch.setattr(module, "run_slurm", silent)
    assert termination.why_terminated("15", 0, 0.0, None, ["n1"], words).outcome == outcome
    assert asked == ["job"], "each question takes time of the save"
    assert termination.why_terminated("15", 0, 0.0, None, ["n1"], None).outcome == "requeued"


@pytest.mark.parametrize(
    ("second", "node", "cancelled", "end"),
    [
        ("JobState=COMPLETING Restarts=0 EndTime=2026-11-21T15:00:00", "IDLE", "15+1", "15:28:14"),
        ("JobState=CANCELLED Restarts=0 EndTime=2026-11-21T15:00:00", "IDLE", "15+1", "15:28:14"),
        ("JobState=COMPLETING Restarts=0 EndTime=2026-11-21T15:00:00", "DOWN", None, "15:28:14"),
        ("JobState=COMPLETING Restarts=1 EndTime=2026-11-21T15:00:00", "IDLE", None, "15:28:14"),
        ("JobState=RUNNING Restarts=0 EndTime=2026-11-21T15:00:00", "IDLE", None, "15:00:00"),
    ],
)
def test_a_component_that_is_cancelled_alone_is_no_grace(
    monkeypatch: pytest.MonkeyPatch, second: str, node: str, cancelled: str | None, end: str
) -> None:
    job = JOB.format(state="RUNNING", reason="None", restarts=0, preempt="None")
    job += f" HetJobOffset=0\nJobId=16 HetJobId=15 HetJobOffset=1 {second}\n"
    answers = {"job": job, "node": f"NodeName=n1 State={node} BootTime=None SlurmdStartTime=None\n"}
    for module in (client, termination):
        monkeypatch.setattr(module, "run_slurm", lambda argv, timeout_s: answers[argv[2]])
    assert termination.cancelled_component("15", 0, 0.0, ["n1"]) == cancelled
    until = termination.granted_until("15")
    assert until is not None and time.strftime("%H:%M:%S", time.localtime(until)) == end


def test_the_job_log_is_read_from_this_life_on(tmp_path: Path) -> None:
    log = tmp_path / "slurm.out"
    log.write_text("slurmstepd-n1: error: *** JOB 9 ON n1 CANCELLED AT 2026-11-21T14:24:43 DUE TO JOB REQUEUE ***\n")
    with log.open("a") as file:
        words = JobLog(file.fileno())
        assert words.words() is None
        file.write("slurmstepd-n1: error: *** JOB 9 ON n1 CANCELLED AT 2026-11-21T14:30:54 ***\n")
        file.flush()
        assert words.words() == ""
        file.write("slurmstepd-n1: error: *** JOB 9 ON n1 CANCELLED AT 2026-11-21T14:31:00 DUE TO TIME LIMIT ***\n")
        file.flush()
        assert words.words() == "TIME LIMIT"


def row(outcome: str, saved: int | None, exit_code: int = 1, before: int | None = None) -> dict:
    return {"outcome": outcome, "saved_before": before, "saved_step": saved, "exit_code": exit_code}


def test_a_job_comes_back_while_it_gets_on() -> None:
    policy = RestartConfig(max_crashes=2)
    crashes = [row("failed", 10), *(row("failed", 20, before=before) for before in (10, 20, 20))]
    assert decide(crashes[:3], policy, "requeue").again
    assert attempts_without_progress(crashes) == 2
    assert decide(crashes, policy, "requeue").again
    assert not decide([*crashes, row("failed", 20, before=20)], policy, "requeue").again
    # progress starts the count again, also that of a run which was taken back to an earlier step
    assert decide([*crashes, row("failed", 30, before=20)], policy, "requeue").again
    assert decide([*crashes, row("failed", 7, before=5)], policy, "requeue").again


def test_a_save_that_takes_longer_than_the_warning_leaves_is_told_so() -> None:
    cause = "the time limit was reached before everything was saved"
    rows = [{**row("requeued", None), "cause": cause, "seconds": {"run": 50.0}}] * 2
    assert "a longer slurm.restart.signal_lead_s" in decide(rows, RestartConfig(max_crashes=1), "requeue").why


@pytest.mark.parametrize("outcome", ["stopped", "interrupted"])
def test_one_that_somebody_ended_before_it_saved_is_no_crash(outcome: str) -> None:
    policy = RestartConfig(max_crashes=1)
    rows = [row("failed", None), row(outcome, None), row("failed", None)]
    assert attempts_without_progress(rows) == 1
    assert decide(rows, policy, "requeue").again
    assert not decide([*rows, row("failed", None)], policy, "requeue").again


def test_an_error_that_its_role_calls_permanent_is_not_tried_a_third_time() -> None:
    cause, policy = "trainer rank 0: SFTDataError: /data/a.jsonl:20: no JSON object", RestartConfig()
    failed = {**row("failed", None), "cause": cause, "permanent": True}
    assert decide([failed], policy, "requeue").again  # it may be a node that sees another file
    assert not decide([failed, failed], policy, "requeue").again
    assert decide([failed, {**failed, "cause": f"{cause} once more"}], policy, "requeue").again
    assert decide([failed, {**failed, "outcome": "preempted"}], policy, "requeue").again
    assert decide([failed, {**failed, "saved_before": 4, "saved_step": 8}], policy, "requeue").again
    assert decide([failed, {**failed, "permanent": False}], policy, "requeue").again
    of_a_version_before = {key: value for key, value in failed.items() if key != "permanent"}
    assert decide([of_a_version_before] * 2, policy, "requeue").again, "whatever its words"


def test_what_failed_before_the_run_was_resumed_does_not_count(tmp_path: Path) -> None:
    slurm = SlurmConfig(restart=RestartConfig(max_crashes=2, max_attempts=9))
    experiment = Experiment(slurm=slurm)
    began = [{"began": 10.0 * number, "attempt": number} for number in range(1, 9)]
    rows = [cast(AttemptRow, {**row("failed", None), "cause": "x", **one}) for one in began]
    assert not decide_for(experiment, tmp_path, rows[:4], "requeue").again
    open_record(tmp_path, token="t", state="sent", command=[], layout="packed", cluster=None)
    write_record(tmp_path, time=45.0)
    assert decide_for(experiment, tmp_path, rows[:5], "requeue").why == "attempt 6 follows, 1 without progress so far"
    assert not decide_for(experiment, tmp_path, rows[:7], "requeue").again
    assert decide_for(experiment, tmp_path, rows[:4], "requeue").again, "the newest counts, whatever its node's clock"
    last = cast(AttemptRow, {**rows[7], "attempt": 9})
    assert "max_attempts" in decide_for(experiment, tmp_path, [*rows, last], "requeue").why


def test_preemption_never_counts_as_a_crash() -> None:
    policy = RestartConfig(max_crashes=1)
    assert decide([row("preempted", None)] * 20, policy, "requeue").again
    assert not decide([row("requeued", None)] * 3, policy, "requeue").again


def test_jobs_that_are_too_short_to_begin_are_told_so() -> None:
    policy, seconds = RestartConfig(max_crashes=1), {"start": 70.0, "run": 0.0}
    limit = {**row("requeued", None), "seconds": seconds, "cause": "warned by SIGUSR1, 142 s before the time limit"}
    assert "a longer slurm.time" in decide([limit] * 2, policy, "requeue").why
    put_back = {**limit, "cause": "put back into the queue by scontrol requeue"}
    for other in (row("requeued", None), put_back):
        decision = decide([limit, other], policy, "requeue")
        assert not decision.again and "slurm.time" not in decision.why


def test_a_service_comes_back_from_its_time_limit_whether_or_not_anybody_saved() -> None:
    policy = RestartConfig(max_crashes=1)
    limits = [row("requeued", None)] * 20
    assert decide(limits, policy, "requeue", is_service=True).again
    assert attempts_without_progress([*limits, row("failed", None)], is_service=True) == 1
    assert not decide([*limits, *[row("failed", None)] * 2], policy, "requeue", is_service=True).again
    assert decide([*[row("failed", 3, before=3)] * 5, row("failed", 4, before=3)], policy, "requeue").again


@pytest.mark.parametrize("outcome", ["completed", "stopped", "interrupted"])
def test_what_was_wanted_is_final(outcome: str) -> None:
    assert not decide([row(outcome, 5, 0)], RestartConfig(), "requeue").again


def test_no_way_back() -> None:
    assert not decide([row("failed", 5)], RestartConfig(), "off").again
    assert not decide([row("failed", 5, 2)], RestartConfig(), "requeue").again
    assert not decide([row("requeued", n) for n in range(1, 4)], RestartConfig(max_attempts=3), "requeue").again


def test_mode_follows_the_site() -> None:
    site = SiteConfig.model_validate({"name": "s", "partitions": {"scav": {"preempt": "cancel"}, "gpu": {}}})
    config = SlurmConfig()
    assert resolve_mode(config, site, "gpu") == "requeue"
    assert resolve_mode(config, site, "gpu,scav") == "successor"
    assert resolve_mode(config, site.model_copy(update={"requeue": False}), None) == "successor"
    own = SlurmConfig.model_validate({"restart": {"how": "off"}})
    assert resolve_mode(own, site, "gpu") == "off"


HET = {
    "inference": {"data_parallel_size": 16},
    "trainer": {"num_ranks": 16},
    "slurm": {"gpus_per_node": 8, "trainer": {"partition": "gpu"}, "inference": {"partition": "gpu"}},
}
EVALUATION = {
    "kind": "eval",
    "eval": {"env": [{"id": "reverse-text"}]},
    "inference": {"data_parallel_size": 8},
    "slurm": {"gpus_per_node": 8, "partition": "gpu", "inference": {"partition": "scav"}},
}


def het(**partitions: str) -> dict[str, Any]:
    """A het job, its roles in these partitions."""
    return {
        **HET,
        "slurm": {"layout": "het", "gpus_per_node": 8, **{r: {"partition": p} for r, p in partitions.items()}},
    }


@pytest.mark.parametrize(
    ("tree", "mode"),
    [
        (het(orchestrator="scav", trainer="gpu", inference="gpu"), "successor"),
        (het(orchestrator="gpu", trainer="scav", inference="gpu"), "requeue"),
        (EVALUATION, "successor"),
        ({**HET, "slurm": {"gpus_per_node": 8, "partition": "gpu, scav"}}, "successor"),
        ({**HET, "slurm": {"gpus_per_node": 8, "partition": "gpu"}}, "requeue"),
    ],
)
def test_a_job_comes_back_as_its_script_says(tmp_path: Path, tree: dict[str, Any], mode: str) -> None:
    partitions = {"scav": {"preempt": "cancel", "gpus_per_node": 8}, "gpu": {"gpus_per_node": 8}}
    site = SiteConfig.model_validate({"name": "s", "partitions": partitions})
    env = {} if "kind" in tree else {"orchestrator": {"env": [{"id": "reverse-text"}]}}
    experiment = Experiment.model_validate({"name": "r", "output_dir": str(tmp_path), **env, **tree})
    write_snapshot(experiment, tmp_path, ["x"])
    write_site(site, tmp_path)
    script = render_job(place_slurm(experiment, site), experiment, site, python="/bin/python", command_tail=[])
    assert mode_of_run(tmp_path) == mode
    assert ("#SBATCH --requeue" in script) == (mode == "requeue")


def test_allocation_of_het_packed_and_array_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    assert read_allocation({}) is None
    packed = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-3]", "SLURM_JOB_END_TIME": "1000"}
    job = read_allocation(packed)
    assert job is not None
    assert (job.job_id, job.hosts, job.is_het, job.restarts, job.ends_at) == (
        "7",
        (("n1", "n2", "n3"),),
        False,
        0,
        1000,
    )
    het = {
        "SLURM_JOB_ID": "8",
        "SLURM_HET_SIZE": "2",
        "SLURM_JOB_ID_HET_GROUP_0": "8",
        "SLURM_JOB_NODELIST_HET_GROUP_0": "n1",
        "SLURM_JOB_NODELIST_HET_GROUP_1": "n[3,5]",
        "SLURM_RESTART_COUNT": "2",
        "SLURM_JOB_END_TIME": "1000",
    }
    both = f"{shown('00:20:00', 1000.0)}\n{shown('00:10:00', 400.0)}"
    monkeypatch.setattr(client, "run_slurm", lambda *_, **__: both)
    job = read_allocation(het)
    assert job is not None and job.ends_at == 400, "its components' limits differ"
    assert (job.hosts, job.is_het, job.restarts) == ((("n1",), ("n3", "n5")), True, 2)
    task = read_allocation({**packed, "SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "4"})
    assert task is not None and task.job_id == "7_4"


def test_end_time() -> None:
    def ends(*stated: str) -> float | None:
        return first_end(parse_shown("\n".join(f"JobId=7 EndTime={one} Deadline=N/A" for one in stated), "7"))

    assert ends("Unknown") is None
    first = ends("2026-11-21T15:28:14", "Unknown", "2026-11-21T16:00:00")
    assert first == ends("2026-11-21T15:28:14") == time.mktime((2026, 11, 21, 15, 28, 14, 0, 0, -1))


@pytest.mark.parametrize(
    ("state", "lost", "lost_at_its_end"),
    [
        ("IDLE", False, False),
        ("DOWN*+CLOUD", True, True),
        ("ALLOCATED*", True, True),
        ("DOWN~", True, True),
        ("MIXED+NOT_RESPONDING", True, True),
        ("FAIL", True, True),
        ("FAILING", False, False),
        ("ALLOCATED+FAILING", False, False),
        ("MIXED+DRAIN+POWER_DOWN", False, False),
        ("IDLE+POWERING_DOWN", True, False),
        ("IDLE+CLOUD+POWERED_DOWN", True, False),
    ],
)
def test_states_of_lost_nodes(monkeypatch: pytest.MonkeyPatch, state: str, lost: bool, lost_at_its_end: bool) -> None:
    node = f"NodeName=n1 State={state} BootTime=None SlurmdStartTime=None"
    monkeypatch.setattr(termination, "run_slurm", lambda *_, **__: node)
    assert termination.lost_hosts(["n1"], time.time()) == ["n1"] * lost
    assert termination.lost_hosts(["n1"], time.time(), silent_end=True) == ["n1"] * lost_at_its_end
