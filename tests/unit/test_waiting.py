"""Why a job waits, from what `scontrol` of Slurm 22.05 answered (AccountingStorageEnforce=limits)."""

import re
from pathlib import Path

import pytest

from prime_hpc.launch.monitor.status import status_of
from prime_hpc.slurm.jobs import JobInfo
from prime_hpc.slurm.queue_facts import waiting
from prime_hpc.slurm.queue_facts.waiting import hint, limit_of
from tests.support.status_run import Run, answering, job

JOB = (
    "JobId=10 JobName=wrap UserId=root(0) GroupId=root(0) MCS_label=N/A Priority=4294901750 Nice=0 Account={account} "
    "QOS={qos} JobState=PENDING Reason={reason} Dependency=(null) Requeue=1 Restarts=0 BatchFlag=1 "
    "RunTime=00:00:00 TimeLimit=00:10:00 TimeMin=N/A StartTime=Unknown EndTime=Unknown Partition=cpu NodeList= "
    "NumNodes=2 NumCPUs=16 NumTasks=16 CPUs/Task=1 TRES=cpu=16,mem=1.50G,node=2,billing=16,gres/gpu=3 Socks/Node=*\n"
)
PARTITION = "PartitionName=cpu AllowQos=ALL QoS=N/A MaxNodes=1 MaxTime=00:05:00 MinNodes=0 Nodes=n[5-6] State=UP\n"
QOS = """Current Association Manager state

QOS Records

QOS=grp(2)
    UsageRaw=0.000000
    GrpJobs=N(1) GrpJobsAccrue=N(2) GrpSubmitJobs=N(3) GrpWall=N(0.00)
    GrpTRES=cpu=8(0),mem=N(100),energy=N(0),node=N(1),billing=N(1),fs/disk=N(0),vmem=N(0),pages=N(0),gres/gpu=4(3)
    GrpTRESMins=cpu=200(90),mem=N(0),energy=N(0),node=N(0),billing=N(0),fs/disk=N(0),vmem=N(0),pages=N(0),gres/gpu=N(0)
    GrpTRESRunMins=cpu=100(10),mem=N(1000),energy=N(0),node=N(10),billing=N(10),fs/disk=N(0),gres/gpu=N(30)
    MaxWallPJ=5
    MaxTRESPJ=cpu=4,mem=1000
    MaxTRESPN=cpu=4
    MaxTRESMinsPJ=cpu=10
    MinPrioThresh= 
    MinTRESPJ=gres/gpu=8
    PreemptMode=OFF
    Priority=0
    Account Limits
      root
        MaxJobsPA=N(1) MaxJobsAccruePA=N(2) MaxSubmitJobsPA=N(3)
        MaxTRESPA=cpu=N(1),mem=N(100),energy=N(0),node=1(1),billing=N(1),fs/disk=N(0),vmem=N(0),gres/gpu=N(3)
    User Limits
      0
        MaxJobsPU=1(1) MaxJobsAccruePU=N(2) MaxSubmitJobsPU=N(3)
        MaxTRESPU=cpu=N(1),mem=N(100),energy=N(0),node=2(1),billing=N(1),fs/disk=N(0),vmem=N(0),gres/gpu=N(3)
      7
        MaxJobsPU=1(0) MaxJobsAccruePU=N(2) MaxSubmitJobsPU=N(3)
        MaxTRESPU=cpu=N(1),mem=N(100),energy=N(0),node=2(0),billing=N(1),fs/disk=N(0),vmem=N(0),gres/gpu=N(3)
"""
ASSOC = """Current Association Manager state

Association Records

ClusterName=primehpcdev Account={account} UserName= Partition= Priority=0 ID=4
    SharesRaw/Norm/Level/Factor=1/18446744073709551616.00/1/0.00
    ParentAccount={parent} Lft=5 DefAssoc=No
    GrpJobs=N(0) GrpJobsAccrue=N(2)
    GrpSubmitJobs=N(2) GrpWall=N(0.00)
    GrpTRES=cpu={most}(0),mem=N(0),energy=N(0),node=N(0),billing=N(0),fs/disk=N(0),vmem=N(0),pages=N(0),gres/gpu=N(0)
    MaxJobs= MaxJobsAccrue= MaxSubmitJobs= MaxWallPJ=
    MaxTRESPJ=node=1
ClusterName=primehpcdev Account={account} UserName=root(0) Partition= Priority=0 ID=5
    SharesRaw/Norm/Level/Factor=1/18446744073709551616.00/1/0.00
    ParentAccount= Lft=6 DefAssoc=No
    GrpJobs=N(0) GrpJobsAccrue=N(2)
    GrpSubmitJobs=N(2) GrpWall=N(0.00)
    GrpTRES=cpu=N(0),mem=N(0),energy=N(0),node=N(0),billing=N(0),fs/disk=N(0),vmem=N(0),pages=N(0),gres/gpu=N(0)
    MaxJobs=2(1) MaxJobsAccrue= MaxSubmitJobs= MaxWallPJ=
    MaxTRESPJ=node=1
"""
SCONTROL = """#!/bin/sh
folder=${0%/*}
case "$*" in
*" job "*) cat "$folder/job" ;;
*partition*wide*) echo "PartitionName=wide MaxNodes=UNLIMITED MaxTime=UNLIMITED State=UP" ;;
*partition*) cat "$folder/partition" ;;
*qos=grp*) cat "$folder/qos" ;;
*accounts=sub*) cat "$folder/sub" ;;
*accounts=tight*) cat "$folder/tight" ;;
*) exit 1 ;;
esac
"""
_QOS, _ACCOUNT = "or name another slurm.qos", "or name another slurm.account"
_EVER = "it would wait for ever. Ask for less"


@pytest.fixture
def answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A scontrol that answers from the files beside it."""
    texts = {"partition": PARTITION, "qos": QOS, "scontrol": SCONTROL}
    texts["sub"] = ASSOC.format(account="sub", parent="tight(3)", most="N")
    texts["tight"] = ASSOC.format(account="tight", parent="", most="8")
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "scontrol").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    return tmp_path


@pytest.mark.parametrize(
    ("reason", "words", "is_for_ever"),
    [
        ("QOSGrpGRES", "QOS grp allows 4 GPUs at once, 3 are in use, and it asks for 3", False),
        ("QOSGrpCpuLimit", f"allows 8 CPUs at once, and it asks for 16: {_EVER} (slurm.cpus_per_task, or nodes)", True),
        ("QOSGrpCPURunMinutesLimit", "allows 100 CPU minutes at once, 10 are in use, and it asks for 160", True),
        (
            "QOSGrpCPUMinutesLimit",
            "allows 200 CPU minutes for its whole time, 90 are in use, and it asks for 160",
            False,
        ),
        ("QOSMaxCpuPerJobLimit", f"QOS grp allows 4 CPUs a job, and it asks for 16: {_EVER}", True),
        ("QOSMaxMemoryPerJob", "allows 1,000 MiB of memory a job, and it asks for 1,536", True),
        ("QOSMaxCpuPerNode", "allows 4 CPUs a node, and it asks for 8", True),
        (
            "QOSMaxWallDurationPerJobLimit",
            f"allows 5 minutes a job, and it asks for 10: {_EVER} (slurm.time), {_QOS}",
            True,
        ),
        ("QOSMaxCpuMinutesPerJobLimit", "(slurm.cpus_per_task, or nodes, or a shorter slurm.time)", True),
        ("QOSMaxNodePerUserLimit", "allows 2 nodes a user at once, 1 are in use, and it asks for 2", False),
        ("QOSMaxJobsPerUserLimit", "QOS grp allows 1 job a user at once, 1 are in use, and it asks for 1", False),
        ("MaxNodePerAccount", "allows 1 node an account at once, 1 are in use, and it asks for 2", True),
        ("QOSMinGRES", "QOS grp is for at least 8 GPUs, and it asks for 3: another slurm.qos", True),
        ("PartitionNodeLimit", "partition cpu limits the nodes: 1 at most, and it asks for 2", True),
    ],
)
def test_the_limit_that_keeps_it_out(answers: Path, reason: str, words: str, is_for_ever: bool) -> None:
    (answers / "job").write_text(JOB.format(account="root", qos="grp", reason=reason))
    limit = limit_of(JobInfo("10", "PENDING", reason), asked=hash(answers))
    assert limit is not None and words in limit.words
    assert limit.is_for_ever is is_for_ever


def test_of_several_partitions_one_that_takes_it_is_enough(answers: Path) -> None:
    shown = JOB.format(account="root", qos="grp", reason="PartitionNodeLimit")
    (answers / "job").write_text(shown.replace("Partition=cpu", "Partition=cpu,wide"))
    assert limit_of(JobInfo("10", "PENDING", "PartitionNodeLimit"), asked=hash(answers)) is None


def test_a_partition_that_allows_what_is_asked_for_only_lacks_nodes_now(answers: Path) -> None:
    """Slurm gives the reason of a limit also where nodes that the job needs are down: it starts when they are back."""
    (answers / "job").write_text(JOB.format(account="root", qos="grp", reason="PartitionNodeLimit"))
    job = JobInfo("10", "PENDING", "PartitionNodeLimit")
    partition = PARTITION.replace("MaxTime=00:05:00", "MaxTime=01:00:00")
    (answers / "partition").write_text(partition.replace("MaxNodes=1", "MaxNodes=2"))
    assert limit_of(job, asked=1.0) is None and not job.cannot_start and "are down" in hint(job)
    (answers / "partition").write_text(
        partition.replace("MaxNodes=1", "MaxNodes=8").replace("MinNodes=0", "MinNodes=4")
    )
    limit = limit_of(job, asked=2.0)
    assert limit is not None and limit.is_for_ever and "nodes: 4 at least, and it asks for 2" in limit.words


def test_a_time_limit_that_backfill_may_lower_is_below_the_partitions(answers: Path) -> None:
    """`slurm.time_min`: the job starts, with less time, where a partition allows less than `slurm.time`."""
    shown = JOB.format(account="root", qos="grp", reason="PartitionTimeLimit").replace("NumNodes=2", "NumNodes=1")
    job = JobInfo("10", "PENDING", "PartitionTimeLimit")
    for number, (changes, words) in enumerate(
        [
            ({}, "time: 00:05:00 at most, and it asks for 00:10:00: it would wait for ever; a shorter slurm.time (`"),
            ({"TimeMin=N/A": "TimeMin=00:05:00"}, ""),
            ({"TimeMin=N/A": "TimeMin=00:06:00"}, "00:05:00 at most"),
            ({"TimeLimit=00:10:00": "TimeLimit=UNLIMITED"}, "it asks for UNLIMITED"),
            ({"TimeLimit=00:10:00": "TimeLimit=Partition_Limit"}, ""),
        ]
    ):
        text = shown
        for old, new in changes.items():
            assert old in text
            text = text.replace(old, new)
        (answers / "job").write_text(text)
        limit = limit_of(job, asked=100.0 + number)
        assert (limit is not None) == bool(words) and (limit is None or words in limit.words)


def test_in_its_first_moment_a_job_is_said_to_be_against_the_partition(answers: Path) -> None:
    """Slurm's reason is another a moment later: the limit is told all the same."""
    (answers / "job").write_text(JOB.format(account="root", qos="grp", reason="PartitionTimeLimit"))
    limit = limit_of(JobInfo("10", "PENDING", "PartitionConfig"), asked=hash(answers))
    assert limit is not None and "partition cpu limits the nodes" in limit.words


@pytest.mark.parametrize("reason", ["PartitionNodeLimit", "QOSMaxCpuPerNode", "QOSMinGRES"])
def test_what_slurm_does_not_say_of_a_job_is_below_no_limit(answers: Path, reason: str) -> None:
    shown = JOB.format(account="root", qos="grp", reason=reason)
    text = re.sub(r" TRES=\S+" if "Min" in reason else r" NumNodes=\S+", "", shown)
    assert text != shown
    (answers / "job").write_text(text)
    (answers / "partition").write_text(PARTITION.replace("00:05:00", "1:00:00").replace("MinNodes=0", "MinNodes=4"))
    assert limit_of(JobInfo("10", "PENDING", reason), asked=hash(answers)) is None


@pytest.mark.parametrize(
    ("reason", "words"),
    [
        ("AssocGrpCpuLimit", f"account tight allows 8 CPUs at once, and it asks for 16: {_EVER}"),
        ("AssocMaxNodePerJobLimit", f"user root in account sub allows 1 node a job, and it asks for 2: {_EVER}"),
    ],
)
def test_of_accounts_those_above_count_too(answers: Path, reason: str, words: str) -> None:
    (answers / "job").write_text(JOB.format(account="sub", qos="normal", reason=reason))
    limit = limit_of(JobInfo("10", "PENDING", reason), asked=hash(answers))
    assert limit is not None and limit.words.startswith(words) and limit.words.endswith(_ACCOUNT)


def test_what_slurm_does_not_tell_is_no_error(answers: Path) -> None:
    (answers / "job").write_text(JOB.format(account="root", qos="hidden", reason="QOSGrpGRES"))
    assert limit_of(JobInfo("10", "PENDING", "QOSGrpGRES"), asked=hash(answers)) is None
    assert limit_of(JobInfo("10", "RUNNING", "QOSGrpGRES"), asked=hash(answers)) is None
    (answers / "scontrol").unlink()
    for reason in ("QOSGrpCpuLimit", "Resources"):
        assert limit_of(JobInfo("10", "PENDING", reason), asked=hash(answers)) is None


@pytest.mark.parametrize(
    ("reason", "words"),
    [
        ("ReqNodeNotAvail, Reserved for maintenance", "a shorter slurm.time may start before it"),
        ("ReqNodeNotAvail, UnavailableNodes:n6", "down or drained"),
        ("PartitionDown", "the site has closed the partition"),
        ("AssocGrpBillingMinutes", "the hours that the site granted are used up"),
        ("JobHeldAdmin", "its staff alone"),
        ("JobHoldMaxRequeue", "`scontrol release 10`"),
        ("launch failed requeued held", "`scontrol release 10`"),
        ("MaxMemPerLimit", "Slurm cannot start it as it is"),
        ("QOSGrpCPURunMinutesLimit", ""),
        ("Priority", ""),
    ],
)
def test_what_a_reason_means(reason: str, words: str) -> None:
    said = hint(JobInfo("10", "PENDING", reason))
    assert words in said and bool(words) == bool(said)


def test_the_limit_that_holds_it_up_stands_before_the_last_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(tmp_path)
    monkeypatch.setattr(waiting, "limit_of", lambda job, asked: waiting.Limit("QOS few allows 1 CPU", True))
    run.sent().attempt(ended=60, outcome="preempted", next="requeue", cause="warned by SIGUSR1")
    status = status_of(run.path, ask=answering(job("PENDING", reason="QOSGrpCpuLimit")))
    assert status.note == "QOSGrpCpuLimit: QOS few allows 1 CPU; ended by: warned by SIGUSR1"
