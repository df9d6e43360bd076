"""`prime-hpc shell`: the way to a role on this machine and through a stand-in srun, and what is refused."""

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from prime_hpc.cli import main
from prime_hpc.launch.monitor.run_facts import RunStatus
from prime_hpc.launch.monitor.where_to import NotThereError, way_to
from prime_hpc.launch.monitor.who_hangs import Target, find_target
from prime_hpc.store.attempts import process_token
from prime_hpc.supervisor.roles.shell_on_node import shown_environment
from tests.support.fake_slurm import FakeSlurm

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 280.0
KEY, BUS = "c2VjcmV0LWtleS1vZi10aGUtYXR0ZW1wdA", "YnVzLXNlY3JldA-of-the-bus"
SCRIPT = """
import sys, time
from prime_hpc.runtime import activity
activity.introduce("trainer", int(sys.argv[2]), sys.argv[1])
print("there", flush=True)
time.sleep(1000)
"""
SRUN = """#!/bin/sh
echo "$*" >>'{log}'
while [ "${{1#-}}" != "$1" ]; do shift; done
SLURM_JOB_ID=100 SLURM_STEP_ID=7 SLURMD_NODENAME=n2 exec "$@"
"""


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A run under way, as its files say: two trainer ranks on two nodes, two servers of which one is away."""
    path = tmp_path / "run"
    path.mkdir()
    (path / "run.yaml").write_text("trainer: {num_ranks: 2, backend: gloo}\n")
    return path


def is_under_way(path: Path, job_id: str | None, **fields: Any) -> None:
    """Write what supervisor and client would have."""
    now = time.time()
    nodes = {"trainer": ["n1", "n2"], "inference[0]": ["n3"], "inference[1]": ["n9"], "orchestrator": ["n1"]}
    row = {"attempt": 1, "began": now - 9, "why": "first start", "host": socket.gethostname(), "pid": os.getpid()}
    row |= {"process": process_token(os.getpid()), "job_id": job_id, "ended": None, "restarts": 0, "nodes": nodes}
    row |= fields
    (path / "attempts.jsonl").write_text(json.dumps(row) + "\n")
    roles = {"trainer": "ready", "inference[0]": "ready", "inference[1]": "away", "orchestrator": "ready"}
    word = {"time": now, "state": "running", "attempt": 1, "roles": roles, "nodes": nodes}
    (path / "status.json").write_text(json.dumps(word))
    sent = {"token": "tok", "state": "sent" if job_id else "local", "job_id": job_id, "time": now - 20}
    (path / "submit.json").write_text(json.dumps(sent))


@pytest.fixture
def rank(run_dir: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Rank 1, with an environment as a supervisor gives it."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "RANK": "1",
        "CUDA_VISIBLE_DEVICES": "3",
        "PRIMEHPC_ATTEMPT": "1",
        "PRIMEHPC_BUS": f"{BUS}@127.0.0.1:1234",
        "PRIMEHPC_INFERENCE_API_KEY": KEY,
        "VLLM_API_KEY": KEY,
        "HF_TOKEN": "hf_of_the_user",
        "HEADERS": f"Authorization: Bearer {KEY}",
        "SLURM_STEP_ID": "2",
    }
    words = [sys.executable, "-P", "-c", SCRIPT, str(run_dir), "1"]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, env=environment, cwd=run_dir)
    assert process.stdout is not None and process.stdout.readline() == b"there\n"
    yield process
    process.kill()
    process.wait(LIMIT_S)


def shell(*words: object, environ: dict[str, str] | None = None, said: str = "") -> tuple[int, str, str]:
    environment = {**(environ or os.environ), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-P", "-m", "prime_hpc.cli", "shell", *map(str, words)]
    done = subprocess.run(
        command, input=said, capture_output=True, text=True, env=environment, timeout=LIMIT_S, check=False
    )
    return done.returncode, done.stdout, done.stderr


def variables(text: str) -> dict[str, str]:
    return {name: value for name, _, value in (line.partition("=") for line in text.splitlines())}


def test_between_two_attempts_no_role_runs(run_dir: Path) -> None:
    nodes = {"trainer": ["n1"]}
    status = RunStatus("run", str(run_dir), "requeued", is_between=True, nodes=nodes, job_id="7")
    with pytest.raises(NotThereError, match="trainer does not run now: the run is requeued, between two attempts"):
        way_to(Target(run_dir, status), "trainer", 0, [], terminal=False, environ={})


def test_on_this_machine(run_dir: Path, rank: subprocess.Popen[bytes]) -> None:
    is_under_way(run_dir, None)
    at = (run_dir, "--role", "trainer", "--rank", 1)
    code, out, err = shell(*at, "--", "env", "-u", "none")
    assert code == 0, err
    assert err.startswith(f"{socket.gethostname()}: trainer rank 1, pid {rank.pid}, run {run_dir}, attempt 1")
    assert "without HEADERS, HF_TOKEN, VLLM_API_KEY" in err
    found = variables(out)
    assert (found["RANK"], found["CUDA_VISIBLE_DEVICES"]) == ("1", "3")
    assert found["VIRTUAL_ENV"] == sys.prefix and found["PATH"].startswith(f"{sys.prefix}/bin:")
    assert not {"HF_TOKEN", "PRIMEHPC_BUS", "PRIMEHPC_INFERENCE_API_KEY", "SLURM_STEP_ID"} & found.keys()
    for secret in (KEY, BUS, "hf_of_the_user"):
        assert secret not in out + err
    code, out, _ = shell(*at, said="pwd; exit 5\n")  # no command: a shell
    assert (code, out.strip()) == (5, str(run_dir))
    code, out, _ = shell(*at, "--", "echo", "-h", "--help")
    assert (code, out) == (0, "-h --help\n"), "flags after -- are the command's"
    assert shell(*at, "--", "no-such-command")[0] == 127
    assert shell(run_dir, "--role", "trainer", "--rank", 0)[0] == 3, "that rank has no process"


def test_in_a_job(run_dir: Path, rank: subprocess.Popen[bytes], tmp_path: Path) -> None:
    fake = FakeSlurm(tmp_path)
    job = fake.add(state="RUNNING", nodes="n[1-3]", comment="prime-hpc:tok", reason=None)
    log = tmp_path / "srun.log"
    (fake.bin / "srun").write_text(SRUN.format(log=log))
    is_under_way(run_dir, job)
    at = (run_dir, "--role", "trainer", "--rank", 1)
    code, out, err = shell(*at, "--", "env", environ=fake.environ)
    assert code == 0, err
    assert err.startswith(f"n2: trainer rank 1, pid {rank.pid}")
    found = variables(out)
    assert (found["SLURM_STEP_ID"], found["RANK"]) == ("7", "1"), "the shell is a step of its own"
    (asked,) = log.read_text().splitlines()
    for word in (f"--jobid={job}", "--overlap", "--nodelist=n2", "--unbuffered", "--mpi=none", "--cpu-bind=none"):
        assert word in asked.split()
    assert "--pty" not in asked, "there is no terminal"


@pytest.mark.parametrize(
    ("config", "is_undone"),
    [
        ("TaskPlugin              = task/affinity,task/cgroup\n", True),
        ("TaskPlugin              = task/none\nTaskPluginParam         = (null type)\n", False),
        ("TaskPlugin              = (null)\n", False),
    ],
)
def test_nothing_is_said_of_bindings_where_slurm_makes_none(
    run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, config: str, is_undone: bool
) -> None:
    """srun would say that the cluster cannot, before the shell's first line, to whoever wants none."""
    fake = FakeSlurm(tmp_path)
    fake.use(monkeypatch)
    job = fake.add(state="RUNNING", nodes="n[1-3]", comment="prime-hpc:tok", reason=None)
    is_under_way(run_dir, job)
    fake.behave("scontrol", say=config)
    target = find_target(str(run_dir))
    way = way_to(target, "trainer", 1, [], terminal=False, environ={})
    assert ("--cpu-bind=none" in way.command) == is_undone


def test_what_is_not_there(
    run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    fake = FakeSlurm(tmp_path)
    fake.use(monkeypatch)
    job = fake.add(state="RUNNING", nodes="n[1-3]", comment="prime-hpc:tok", reason=None)
    is_under_way(run_dir, job)
    for words, exit_code, said in (
        (("--role", "trainer", "--rank", "2"), 2, "ranks 0 to 1"),
        (("--role", "inference", "--rank", "1"), 3, "inference[1] has no node"),
        (("--role", "inference", "--rank", "5"), 2, "no inference[5]; it has inference[0]"),
        (("--role", "teacher"), 2, "no teacher[0]"),
        (("--role", "nobody"), 2, "no role 'nobody'"),
        (("--role", "slurm"), 2, "supervisor"),
        (("--",), 2, "a command is missing"),
    ):
        refusal(capsys, run_dir, *words, code=exit_code, said=said)
    at = ("--role", "trainer", "--rank", "1")
    fake.behave("sinfo", say="Welcome to Foo\nn2 down*\nn2 down*")
    refusal(capsys, run_dir, *at, code=3, said="node n2 is lost: Slurm says down*")
    fake.change(job, nodes="n1")
    refusal(capsys, run_dir, *at, code=3, said="node n2 is no longer of job")


def refusal(capsys: pytest.CaptureFixture, *words: object, code: int, said: str) -> None:
    """Ask in this process, which no shell takes over."""
    assert main(["shell", *map(str, words)]) == code
    told = str(capsys.readouterr().err)
    assert said in told, (words, told)


def test_of_a_het_job_the_component_that_has_the_node(run_dir: Path, tmp_path: Path) -> None:
    fake = FakeSlurm(tmp_path)
    job = fake.add(state="RUNNING", nodes="n[1-3]", comment="prime-hpc:tok", reason=None, size=2)
    log = tmp_path / "srun.log"
    (fake.bin / "srun").write_text(SRUN.format(log=log))
    is_under_way(run_dir, job)
    assert shell(run_dir, "--role", "trainer", "--rank", 1, environ=fake.environ)[0] == 3, "no process is there"
    assert "--het-group=0" in log.read_text().split()


def test_nothing_runs(
    run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    fake = FakeSlurm(tmp_path)
    fake.use(monkeypatch)
    refusal(capsys, run_dir, code=3, said="the run is not started")
    is_under_way(run_dir, None, ended=time.time(), outcome="completed", cause="done")
    refusal(capsys, run_dir, code=3, said="the run is over")
    is_under_way(run_dir, fake.add(state="PENDING", comment="prime-hpc:tok"))
    refusal(capsys, run_dir, code=3, said="waits in the queue")
    is_under_way(run_dir, None, host="elsewhere")
    refusal(capsys, run_dir, code=3, said="the run is on elsewhere")
    is_under_way(run_dir, None)
    (run_dir / "run.yaml").write_text("trainer: {num_ranks")
    refusal(capsys, run_dir, "--role", "trainer", code=2, said="run.yaml")
    refusal(capsys, tmp_path / "none", code=2, said="no run")


@pytest.mark.exhaustive
def test_in_a_container_of_the_users_own(run_dir: Path) -> None:
    """A mount and a user namespace, as apptainer and enroot make them."""
    box = ["unshare", "--user", "--map-root-user", "--mount", "--fork", "--kill-child"]
    if subprocess.run([*box, "true"], capture_output=True, check=False).returncode:
        pytest.skip("user namespaces are not allowed here")
    is_under_way(run_dir, None)
    words = ["sh", "-c", 'mount -t tmpfs none "$0" && exec "$@"', "/mnt", sys.executable, "-P", "-c", SCRIPT]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen([*box, *words, str(run_dir), "0"], stdout=subprocess.PIPE, env=environment)
    try:
        assert process.stdout is not None and process.stdout.readline() == b"there\n"
        code, out, err = shell(run_dir, "--role", "trainer", "--", "stat", "-f", "-c", "%T", "/mnt")
        assert code == 0 and "in the container of process" in err, err
        assert out.strip() == "tmpfs"
    finally:
        process.kill()
        process.wait(LIMIT_S)


def test_a_secret_is_left_out_by_its_name_its_value_or_because_it_is_ours() -> None:
    role = {"A": "1", "WANDB_API_KEY": "abcdefgh1234", "B": "x abcdefgh1234", "PROXY": "http://me:pw@host/"}
    role |= {"PRIMEHPC_BUS": "long-secret@host:1", "C": "long-secret", "PRIMEHPC_LED": "1", "KEYBOARD": "us"}
    shown, hidden = shown_environment(role, {"TERM": "xterm", "SLURM_JOB_ID": "5", "OTHER": "no"})
    assert shown == {"A": "1", "KEYBOARD": "us", "TERM": "xterm", "SLURM_JOB_ID": "5"}
    assert hidden == ["B", "C", "PROXY", "WANDB_API_KEY"]
