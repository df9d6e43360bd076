"""What sites have their own ways of: sbatch options, srun's environment, GPUs that Slurm does not know."""

import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from prime_hpc.config import ConfigError, load_experiment
from prime_hpc.config.sections.sbatch_options import REFUSED
from prime_hpc.config.sections.slurm import SiteConfig
from prime_hpc.config.site import parse_site
from prime_hpc.slurm import client, requeue
from prime_hpc.slurm.allocation import Allocation
from prime_hpc.slurm.client import SlurmError
from prime_hpc.slurm.jobs import jobs
from prime_hpc.slurm.options import resolve
from prime_hpc.supervisor.attempt import restart_policy
from prime_hpc.supervisor.preflight.node import node_facts
from prime_hpc.supervisor.roles.slurm_step import StepContext, StepRole, StepSpec
from prime_hpc.supervisor.roles.srun_environment import SRUN_INPUTS, for_srun
from tests.support.fake_slurm import FakeSlurm
from tests.unit.test_placement import SITE, experiment, on_h100

# ---------------------------------------------------------------------------------------------------- sbatch options


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        ({"gpus": 16}, "--gpus would break the job: state slurm.gpus_per_node"),
        ({"--gpus_per_task": 1}, "--gpus-per-task would break.*slurm.gpus_per_node"),
        ({"ntasks": 4}, "--ntasks would break.*one task a node"),
        ({"chdir": "/tmp"}, "--chdir would break"),
        ({"clusters": "b"}, "--clusters would break the job: state slurm.cluster"),
        ({"hold": True}, "--hold would break.*scontrol hold"),
        ({"signal": "B:TERM@1"}, "--signal would break.*slurm.restart.signal_lead_s"),
        ({"outp": "x"}, "--outp would break"),  # sbatch takes it for --output
        ({"export": "HOME"}, "--export takes NONE or ALL here: state slurm.env"),
        ({"array": "1-3", "wrap": "true"}, "--array would.*sweep.*; --wrap would"),
    ],
)
def test_an_option_that_would_break_the_job_is_refused_with_the_key_to_use(
    tmp_path: Path, extra: dict[str, Any], words: str
) -> None:
    config = tmp_path / "exp.yaml"
    config.write_text(
        f"name: x\norchestrator: {{env: [{{id: reverse-text}}]}}\nslurm:\n  extra: {extra!r}\n".replace("True", "true")
    )
    with pytest.raises(ConfigError, match=words) as caught:
        load_experiment([str(config)], "submit")
    assert f"{config}:4: slurm.extra: " in str(caught.value)
    site = tmp_path / "site.yaml"
    site.write_text(f"options:\n  extra: {extra!r}\n".replace("True", "true"))
    with pytest.raises(ConfigError, match=words):
        parse_site(site)


def test_every_refusal_says_what_to_do_and_can_be_taken_back() -> None:
    assert all(REFUSED.values())
    assert not experiment(slurm=on_h100(extra=dict.fromkeys(REFUSED, False))).slurm.trainer.extra


def test_what_is_asked_for_by_gpu_becomes_what_a_node_gets() -> None:
    def asked(**slurm: Any) -> dict[str, Any]:
        return resolve("trainer", experiment(slurm=slurm), SITE).options

    options = asked(**on_h100(extra={"cpus-per-gpu": 12, "mem-per-gpu": "100G", "export": "ALL"}))
    assert options == {"partition": "h100", "gres": "gpu:8", "cpus-per-task": "96", "mem": "819200M"}
    with pytest.raises(ConfigError, match=r"cpus-per-gpu and slurm.cpus_per_task are both stated"):
        asked(**on_h100(cpus_per_task=4, extra={"cpus-per-gpu": 12}))
    with pytest.raises(ConfigError, match=r"asks for no GPU: state slurm.mem"):
        asked(partition="cpu", extra={"mem-per-gpu": "1G"})


def test_nothing_that_srun_takes_for_its_own_reaches_it() -> None:
    job = {
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NODELIST": "n[1-2]",
        "SLURM_HET_SIZE": "2",
        "SLURM_CONF": "/x",
        "PATH": "/bin",
    }
    kept = {"SLURM_NETWORK": "job_vni", "SLURM_TASK_PROLOG": "/site/prolog"}
    leaks = {"SLURM_EXPORT_ENV": "NONE", "SLURM_CPUS_PER_GPU": "12", "SLURM_MEM_PER_CPU": "1", "SRUN_OUTPUT": "x"}
    assert for_srun(job | kept | leaks) == job | kept


def test_the_variables_of_the_installed_srun_are_known() -> None:
    """Its manual's list of input variables, where there is one: a new one must be looked at."""
    if shutil.which("man") is None or subprocess.run(["man", "-w", "srun"], capture_output=True).returncode:
        pytest.skip("no manual of srun here")
    text = subprocess.run(["man", "srun"], capture_output=True, text=True, env={**os.environ, "MANWIDTH": "80"}).stdout
    section = text.partition("INPUT ENVIRONMENT VARIABLES")[2].partition("OUTPUT ENVIRONMENT VARIABLES")[0]
    named = {line.split()[0] for line in section.splitlines() if line.startswith("       S") and line[7:].strip()}
    named = {name for name in named if name.startswith(("SLURM_", "SRUN_"))}
    assert len(named) > 50
    of_the_job = {"SLURM_JOB_ID", "SLURM_JOB_NAME", "SLURM_JOB_NUM_NODES", "SLURM_NNODES", "SLURM_CONF"}
    on_purpose = {"SLURM_NETWORK", "SLURM_TASK_PROLOG", "SLURM_TASK_EPILOG"}
    messages = {name for name in named if "_MSG" in name or "PMI" in name or "DEBUG_FLAGS" in name}
    assert named - SRUN_INPUTS - of_the_job - on_purpose - messages <= {
        "SLURM_EXIT_ERROR",
        "SLURM_EXIT_IMMEDIATE",
        "SLURM_UMASK",
    }


def context(tmp_path: Path, **more: Any) -> StepContext:
    allocation = Allocation("7", (("n1", "n2"),), "n1", 0)
    return StepContext(allocation=allocation, run_dir=tmp_path, no_kill=True, **more)


def test_a_step_gets_the_whole_environment_whatever_the_job_was_sent_with(tmp_path: Path) -> None:
    command = context(tmp_path).srun(["n1"], 0, 1, "trainer", ["module"])
    assert "--export=ALL" in command


# --------------------------------------------------------------------------------------------------------------- GPUs


def test_preflight_lives_without_the_hosts_temporary_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", "/not/bound/in/the/container")
    facts = node_facts({"gpus_asked": 0, "ports": []}, tmp_path, 0.0)
    assert facts["tmp_free_gib"] is None
    assert not [problem for problem in facts["problems"] if "TMPDIR" in problem or "write" in problem]


# ----------------------------------------------------------------------------------------------------- excluded nodes


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    one = FakeSlurm(tmp_path)
    one.use(monkeypatch)
    one.behave("sinfo", say="\n".join(f"n{i} idle idle (null)" for i in range(1, 10)))
    monkeypatch.setattr(requeue, "KEPT_S", 0.0)
    monkeypatch.setattr(requeue, "KEPT_LOOK_S", 0.0)
    return one


def test_a_requeue_keeps_the_nodes_that_were_excluded_before(fake: FakeSlurm) -> None:
    job = fake.add(state="RUNNING", num_nodes=2, shown={"ExcNodeList": "n[7-8]"})
    assert restart_policy.return_to_queue(job, "requeue", 2, ["n3"], restarts=0)
    (update,) = [call for call in fake.calls("scontrol") if call[1] == "update"]
    assert update[2:] == [f"JobId={job}", "ExcNodeList=n[3,7-8]"]


def test_a_job_that_a_successor_follows_is_not_requeued_as_well(fake: FakeSlurm) -> None:
    job = fake.add(state="RUNNING", num_nodes=2)
    assert restart_policy.return_to_queue(job, "successor", 2, ["n3"], restarts=0)
    assert not fake.calls("scontrol")


def test_a_node_that_the_job_must_have_is_not_excluded(fake: FakeSlurm) -> None:
    """Slurm would keep it for ever: BadConstraints."""
    job = fake.add(state="RUNNING", num_nodes=2, shown={"ReqNodeList": "n[3-4]"})
    assert restart_policy.return_to_queue(job, "requeue", 2, ["n3"], restarts=0)
    assert not [call for call in fake.calls("scontrol") if call[1] == "update"]


def test_of_a_het_job_each_component_keeps_its_own(fake: FakeSlurm) -> None:
    job = fake.add(state="RUNNING", size=2, components={"0": {"ExcNodeList": "(null)"}, "1": {"ExcNodeList": "n5"}})
    assert restart_policy.return_to_queue(job, "requeue", 0, ["n3"], restarts=0)
    updates = [call[2:] for call in fake.calls("scontrol") if call[1] == "update"]
    assert updates == [[f"JobId={job}+0", "ExcNodeList=n3"], [f"JobId={job}+1", "ExcNodeList=n[3,5]"]]


def left_out(
    monkeypatch: pytest.MonkeyPatch, exclude: list[str], num_nodes: int, *lines: str, **tables: str
) -> list[str]:
    """What is changed of job 12 with these components; `tables`: what sinfo prints of each partition."""
    changed: list[str] = []
    job = "\n".join(f"{line} ExcNodeList=(null) ReqNodeList=(null)" for line in lines)

    def run_slurm(argv: list[str], timeout_s: float) -> str:
        if argv[0] == "sinfo":
            return tables[argv[-1]].replace("; ", "\n")
        if argv[1:3] == ["show", "reservation"]:
            nodes = {"mine": "r[1-2]", "more": "r3"}[argv[-1]]
            return f"ReservationName={argv[-1]} StartTime=now Nodes={nodes} NodeCnt=1 Flags=SPEC_NODES"
        if argv[1] == "update":
            changed.append(" ".join(argv[2:]))
        return job

    for module in (client, requeue):
        monkeypatch.setattr(module, "run_slurm", run_slurm)
    requeue.leave_out(client.parse_shown(job, "12"), "12", exclude, num_nodes)
    return changed


def test_of_a_het_job_each_component_looks_at_its_own_partition(monkeypatch: pytest.MonkeyPatch) -> None:
    het = (
        "JobId=12 HetJobId=12 HetJobOffset=0 Partition=train NumNodes=4 Features=(null)",
        "JobId=13 HetJobId=12 HetJobOffset=1 Partition=infer NumNodes=2 Features=(null)",
    )
    four = "; ".join(f"t{i} alloc - (null)" for i in range(1, 5))
    two, three = "i1 alloc - (null); i2 alloc - (null)", "i1 down* - (null); i2 idle - (null); i3 mix - (null)"
    assert left_out(monkeypatch, ["t2"], 0, *het, train=four, infer=two) == [], "it needs all four"
    assert left_out(monkeypatch, ["i1"], 0, *het, train=four, infer=two) == []
    assert left_out(monkeypatch, ["i1", "t2"], 0, *het, train=four, infer=three) == ["JobId=12+1 ExcNodeList=i1"]
    shared = [line.replace("infer", "train") for line in het]
    six = "; ".join(f"t{i} alloc - (null)" for i in range(1, 7))
    assert left_out(monkeypatch, ["t2"], 0, *shared, train=six) == [], "both take their nodes from there"


def test_nodes_that_the_job_cannot_get_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    job = "JobId=12 Partition=mixed NumNodes=2-2 Features={}"
    others = "h1 alloc - h100,ib; h2 idle - h100,ib; a1 drng - h100; a2 maint - h100; a3 idle* - h100; "
    others += "c1 idle - a100; c2 idle - a100"
    assert left_out(monkeypatch, ["h1"], 2, job.format("h100"), mixed=others) == []
    assert left_out(monkeypatch, ["h1"], 2, job.format("h100&ib"), mixed=f"{others}; h3 mix - h100,ib") == [
        "JobId=12 ExcNodeList=h1"
    ]
    assert left_out(monkeypatch, ["h1"], 2, job.format("h100|a100"), mixed=others) == ["JobId=12 ExcNodeList=h1"]
    assert left_out(monkeypatch, ["h1"], 2, job.format("[h100*1&a100*1]"), mixed=others) == [], "nobody can tell"


def test_of_reserved_nodes_a_job_gets_those_of_its_own_reservation_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    job = "JobId=12 Partition=p NumNodes=2 Features=(null) Reservation={}"
    nodes = "a1 alloc allocated (null); a2 idle idle (null); r1 resv idle+reserved (null); r2 mix MIXED+RESERVED (null)"
    assert left_out(monkeypatch, ["a1"], 2, job.format("(null)"), p=nodes) == [], "r1 and r2 are for others"
    assert left_out(monkeypatch, ["a1"], 2, job.format("(null)"), p=f"{nodes}; a3 idle idle (null)") == [
        "JobId=12 ExcNodeList=a1"
    ]
    held = f"{nodes}; r3 resv idle+reserved (null)"
    assert left_out(monkeypatch, ["r1"], 2, job.format("mine"), p=held) == [], "neither a1, a2 nor others' r3 are its"
    assert left_out(monkeypatch, ["a1"], 2, job.format("mine"), p=held) == ["JobId=12 ExcNodeList=a1"]
    both = left_out(monkeypatch, ["r1"], 2, job.format("mine,more"), p=held)
    assert both == ["JobId=12 ExcNodeList=r1"], "a newer Slurm takes several"


def test_what_a_site_says_around_its_nodes_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    table = "Maintenance!; Welcome to Foo, Slurm 23.11; ; h1 down* - (null); h2 idle - (null)"
    job = "JobId=12 Partition=p NumNodes=2 Features=(null)"
    assert left_out(monkeypatch, ["h1"], 2, job, p=table) == [], "one node alone is left"
    words = "\n".join(line.removesuffix(" - (null)") for line in table.split("; "))
    monkeypatch.setattr(requeue, "run_slurm", lambda *_: words)
    assert requeue.silent_nodes("h[1-2]") == ["h1"]


# ---------------------------------------------------------------------------------------------------------- stand-ins


def test_a_stand_in_is_ended_by_its_own_job_id(fake: FakeSlurm, tmp_path: Path) -> None:
    """Its name may be another run's: two sweeps can have points of one name."""
    spec = StepSpec("inference", [], 60.0, hosts=("n1",), options={"partition": "gpu"})
    run_dir = tmp_path / "100% done"
    fake.behave("sbatch", hang="after", say="")
    role = StepRole(spec, run_dir / "logs", dict(os.environ), {}, context(run_dir), lambda *_, **__: None, 1.0)
    role.is_substitute_job = True
    role.log_dir.mkdir(parents=True)
    role.log_file.write_text("41\n")  # an earlier attempt's
    role.start()
    assert role.substitute_job_id is None
    with role.log_file.open("a") as log:
        log.write("sbatch: a word of the site's\n4711;other\n99\n")
    assert role.substitute_job_id == "4711"
    role.kill()
    assert fake.calls("scancel") == [["scancel", "4711"]]
    (command,) = [argv for argv in [role.command] if argv[0] == "sbatch"]
    assert "--parsable" in command
    assert f"--output={tmp_path}/100%% done/logs/inference.log" in command


def test_site_profile_may_say_that_slurm_knows_no_gpus() -> None:
    assert SiteConfig.model_validate({"name": "x", "gpu_option": "none"}).gpu_option == "none"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("optionz: {qos: x}\n", r"site.yaml:1: optionz: unknown key; did you mean options\?"),
        ("het_jobs: true\ngpu_optoin: gres\n", r"site.yaml:2: gpu_optoin: unknown key; did you mean gpu_option\?"),
        ("partitions:\n  gpu: {gpus: 8}\n", r"site.yaml:2: partitions.gpu.gpus: unknown key; did you mean gpu\w+\?"),
        ("container: {image: x, imige: y}\n", r"container.imige: unknown key; did you mean image\?"),
        ("options: {extra: {gpus: 1}}\n", r"options.extra: --gpus would break the job: state slurm.gpus_per_node"),
        ("container: {image: x, mounts: ['a:b']}\n", r"container.mounts: 'a:b' is not host:container"),
    ],
)
def test_a_site_profile_with_a_wrong_key_names_file_line_and_the_nearest(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "site.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=words):
        parse_site(path)


@pytest.mark.parametrize("answer", ["JOBID PARTITION NAME", '{"jobs": []}'])
def test_an_answer_of_a_form_that_is_not_known_makes_no_job_lost(fake: FakeSlurm, answer: str) -> None:
    fake.behave("squeue", say=answer)
    with pytest.raises(SlurmError, match="a form that is not known here"):
        jobs(["100"])


def test_a_state_of_a_newer_slurm_is_no_end(fake: FakeSlurm) -> None:
    job = fake.add(state="HIBERNATING", comment="prime-hpc:x")
    info = jobs([job])[job]
    assert (info.state, info.is_active, info.is_pending) == ("HIBERNATING", True, False)
