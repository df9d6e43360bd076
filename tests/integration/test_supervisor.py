"""The supervisor with real processes: readiness, restarts, culprits, and nothing left behind."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from loguru import logger

from prime_hpc.config import Experiment
from prime_hpc.store.attempts import begin, read_attempts
from prime_hpc.supervisor import supervisor
from prime_hpc.supervisor.attempt import fence
from prime_hpc.supervisor.roles import at_crash
from prime_hpc.supervisor.roles.process import one_after_another
from prime_hpc.supervisor.roles.spec import RoleSpec
from prime_hpc.supervisor.supervisor import RolePlan, Supervisor
from tests.support.processes import with_word
from tests.support.runs import free_port

ROOT = Path(__file__).resolve().parents[2]


def role(name: str, run_dir: Path, *actions: str, **options: object) -> RoleSpec:
    command = [sys.executable, "-m", "tests.support.scripted_role", name, str(run_dir), *actions]
    return RoleSpec(name, command, **{"start_timeout_s": 120.0, **options})  # type: ignore[arg-type]


def supervise(
    run_dir: Path, specs: list[RoleSpec], *, read: bool = True, tree: dict[str, Any] | None = None, **settings: object
) -> tuple[int, dict]:
    own = {"output_dir": str(run_dir.parent), "name": run_dir.name, "supervisor": {"grace_s": 2, **settings}}
    experiment = Experiment.model_validate(own | (tree or {}))
    attempts = run_dir / "attempts.jsonl"
    (run_dir / "incarnation").mkdir(exist_ok=True)
    (run_dir / "incarnation" / "000001").touch()  # the attempt's claim
    attempt = begin(attempts, incarnation=1, why="test", resume_step=None, job_id=None)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    code = Supervisor(experiment, run_dir, attempt, RolePlan(specs, {}, environment)).run()
    return code, dict(read_attempts(attempts)[-1]) if read else {}


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    path = tmp_path / "run"
    path.mkdir()
    return path


def test_run_ends_when_the_workers_are_done_and_servers_are_ended(run_dir: Path) -> None:
    port = free_port()
    server = role(
        "inference", run_dir, f"serve:{port}", f"child:{run_dir}", "sleep:300", health_url=f"http://127.0.0.1:{port}"
    )
    specs = [
        server,
        role("orchestrator", run_dir, "ready", "sleep:0.5", "done"),
        role("trainer", run_dir, "ready", "sleep:1", "done"),
    ]
    code, attempt = supervise(run_dir, specs)
    assert (code, attempt["outcome"]) == (0, "completed")
    assert not with_word(str(run_dir))


def test_a_service_is_told_with_its_address_and_key(run_dir: Path) -> None:
    lines: list[str] = []
    sink = logger.add(lines.append, format="{message}")
    code, _ = supervise(run_dir, [role("trainer", run_dir, "listens:http://n1:8780", "sleep:0.5", "done")])
    logger.remove(sink)
    told = f"s, at http://n1:8780; its key is in {run_dir}/tinker.key"
    assert code == 0 and any(line.startswith("trainer is ready after") and told in line for line in lines)


def test_roles_on_one_gpu_start_one_after_the_other(run_dir: Path) -> None:
    """Two servers and the trainer on GPU 0: each finds the files that the one before it has left when it was ready."""
    first, second, others = (run_dir / name for name in ("first", "second", "others"))
    ports = free_port(), free_port()
    on_gpu = {"environment": {"CUDA_VISIBLE_DEVICES": "0"}}

    def server(index: int, *actions: str) -> RoleSpec:
        end = f"serve:{ports[index]}", "sleep:300"
        url = f"http://127.0.0.1:{ports[index]}"
        return role("inference", run_dir, *actions, *end, health_url=url, index=index, **on_gpu)

    specs = one_after_another(
        [
            server(0, "sleep:1", f"touch:{first}"),
            server(1, f"require:{first}", "sleep:1", f"touch:{second}"),
            role("orchestrator", run_dir, f"touch:{others}", "ready", "done", environment={"CUDA_VISIBLE_DEVICES": ""}),
            role("trainer", run_dir, f"require:{second}", f"require:{others}", "ready", "done", **on_gpu),
        ]
    )
    assert [spec.after for spec in specs] == [(), ("inference[0]",), (), ("inference[0]", "inference[1]")]
    code, attempt = supervise(run_dir, specs)
    assert (code, attempt["outcome"]) == (0, "completed"), attempt["cause"]


def test_a_role_that_was_never_started_ends_with_the_run(run_dir: Path) -> None:
    on_gpu = {"environment": {"CUDA_VISIBLE_DEVICES": "0"}}
    server = role("inference", run_dir, "exit:3", health_url=f"http://127.0.0.1:{free_port()}", **on_gpu)
    code, attempt = supervise(run_dir, one_after_another([server, role("trainer", run_dir, "ready", **on_gpu)]))
    assert code == 1 and "exit code 3" in attempt["cause"]
    assert not (run_dir / "logs" / "attempt_1" / "trainer" / "trainer.log").exists()


def test_a_failed_role_ends_the_run_and_is_named(run_dir: Path) -> None:
    specs = [
        role("orchestrator", run_dir, "ready", "sleep:300"),
        role("trainer", run_dir, "ready", "fail:disk full at step 3", "exit:1"),
    ]
    code, attempt = supervise(run_dir, specs)
    assert code == 1
    assert attempt["cause"] == "trainer: disk full at step 3"


def test_an_attempt_is_written_down_as_one_that_would_end_so_again(run_dir: Path) -> None:
    code, attempt = supervise(run_dir, [role("orchestrator", run_dir, "refuse:no such argument", "exit:1")])
    assert (code, attempt["cause"]) == (1, "orchestrator: ValueError: no such argument") and attempt["permanent"]


def test_what_fails_after_a_newer_life_has_begun_is_called_fenced(run_dir: Path) -> None:
    """A newer attempt sweeps up what it finds: that, and not the missing file, is why the older one's roles fail."""
    newer = run_dir / "incarnation" / "000002"
    words: list[str] = []
    sink = logger.add(words.append, level="ERROR")
    try:
        actions = ("ready", f"touch:{newer}", "fail:its file is gone", "exit:1")
        code, attempt = supervise(run_dir, [role("trainer", run_dir, *actions)])
    finally:
        logger.remove(sink)
    assert code == 1 and attempt["ended"] is None  # the newer attempt writes down how this one ended
    assert "incarnation 2 has begun" in words[-1], words


@pytest.mark.parametrize("roles", ["go on, and make their folders again", "fail of it"])
def test_a_run_directory_that_is_moved_ends_the_run_with_a_code_of_its_own(
    run_dir: Path, roles: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fence, "SURE_S", 0.5)
    monkeypatch.setattr(fence, "FENCE_LOOK_S", 0.2)
    marker, moved = run_dir.parent / "is ready", run_dir.parent / "moved"
    words: list[str] = []
    sink = logger.add(words.append, level="ERROR")

    def move() -> None:
        while not marker.exists():
            time.sleep(0.02)
        run_dir.rename(moved)
        if roles != "fail of it":
            (run_dir / "checkpoints").mkdir(parents=True)
        marker.with_name("moved away").touch()

    mover = threading.Thread(target=move)
    mover.start()
    actions = ["ready", f"touch:{marker}", f"await:{marker.with_name('moved away')}"]
    actions += ["fail:no such file", "exit:1"] if roles == "fail of it" else ["sleep:300"]
    try:
        code = supervise(run_dir, [role("trainer", run_dir, *actions)], read=False)[0]
    finally:
        logger.remove(sink)
        mover.join()
    assert code == fence.EXIT_GONE == 66
    assert "was deleted or moved" in words[-1] and "resume" in words[-1], words
    assert not (run_dir / "attempts.jsonl").exists() and read_attempts(moved / "attempts.jsonl")[0]["ended"] is None


def test_a_run_directory_that_goes_while_the_roles_end_is_gone_too(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the job would ask the directory whether it comes back, and come back without an answer."""
    monkeypatch.setattr(fence, "SURE_S", 0.5)
    end_roles = supervisor.end_roles

    def end(*arguments: Any) -> list[int]:
        run_dir.rename(run_dir.parent / "moved")
        return end_roles(*arguments)

    monkeypatch.setattr(supervisor, "end_roles", end)
    assert supervise(run_dir, [role("trainer", run_dir, "ready", "exit:1")], read=False)[0] == fence.EXIT_GONE


def test_exit_code_zero_without_done_is_a_failure(run_dir: Path) -> None:
    code, attempt = supervise(run_dir, [role("trainer", run_dir, "ready", "exit:0")])
    assert code == 1
    assert "exit code 0" in attempt["cause"]


def test_killed_role_is_named_with_its_signal(run_dir: Path) -> None:
    code, attempt = supervise(run_dir, [role("trainer", run_dir, "ready", "kill")])
    assert code == 1
    assert attempt["cause"] == "trainer was killed by signal 9"


def test_role_that_never_becomes_ready_is_named(run_dir: Path) -> None:
    specs = [role("trainer", run_dir, "sleep:300", start_timeout_s=1.0)]
    code, attempt = supervise(run_dir, specs)
    assert code == 1
    assert "trainer was not ready within 1 s" in attempt["cause"]


def test_a_supervisor_that_a_newer_life_has_replaced_ends_and_writes_nothing(run_dir: Path) -> None:
    (run_dir / "incarnation").mkdir()
    (run_dir / "incarnation" / "000002").touch()
    code, attempt = supervise(run_dir, [role("trainer", run_dir, "ready", f"child:{run_dir}", "sleep:300")])
    assert code == 1
    assert attempt["ended"] is None  # its end is the newer attempt's to write
    assert not (run_dir / "status.json").exists() and not with_word(str(run_dir))


def test_silent_role_is_found(run_dir: Path) -> None:
    code, attempt = supervise(run_dir, [role("trainer", run_dir, "ready", "sleep:300")], heartbeat_timeout_s=1)
    assert code == 1
    assert "no sign of life" in attempt["cause"]


def test_dead_server_is_started_again_and_the_run_goes_on(run_dir: Path) -> None:
    port = free_port()
    once, again = f"once:{run_dir / 'died'}:kill", run_dir / "again"
    server = role(
        "inference",
        run_dir,
        f"serve:{port}",
        "sleep:1",
        once,
        f"touch:{again}",
        "sleep:300",
        max_restarts=1,
        health_url=f"http://127.0.0.1:{port}",
    )
    code, _ = supervise(run_dir, [server, role("trainer", run_dir, "ready", f"await:{again}", "done")])
    assert code == 0
    log = (run_dir / "logs" / "attempt_1" / "inference" / "inference.log").read_text()
    assert log.count("$ ") == 2


def test_server_that_always_dies_ends_the_run(run_dir: Path) -> None:
    server = role("inference", run_dir, "exit:0", max_restarts=2, health_url="http://127.0.0.1:1")
    code, attempt = supervise(run_dir, [server, role("trainer", run_dir, "ready", "sleep:300")])
    assert code == 1
    assert "inference[0] ended with exit code 0" in attempt["cause"]


def test_a_trainer_that_is_well_saves_before_another_crash_ends_the_attempt(run_dir: Path) -> None:
    go = run_dir / "go"
    trainer = role("trainer", run_dir, f"saves:{run_dir / 'saved'}", "ready", "sleep:1", f"touch:{go}", "sleep:300")
    code, attempt = supervise(run_dir, [trainer, role("orchestrator", run_dir, "ready", f"await:{go}", "fail:a bug")])
    assert (code, attempt["outcome"], attempt["cause"]) == (1, "failed", "orchestrator: a bug")
    assert (run_dir / "saved").read_text() == "19999"


def test_a_trainer_of_many_runs_saves_them_before_a_crash_ends_the_attempt(run_dir: Path) -> None:
    go, port = run_dir / "go", free_port()
    trainer = role("trainer", run_dir, f"ends:{run_dir / 'saved'}", "ready", "sleep:1", f"touch:{go}", "sleep:300")
    url = f"http://127.0.0.1:{port}"
    server = role("inference", run_dir, f"serve:{port}", f"await:{go}", "exit:3", health_url=url)
    tree = {"trainer": {"max_concurrent_runs": 2}, "model": {"lora": {}}, "inference": {}}
    code, attempt = supervise(run_dir, [server, trainer], tree=tree)
    assert (code, attempt["cause"]) == (1, "inference[0] ended with exit code 3")
    assert (run_dir / "saved").read_text() == "inference[0] has crashed"


def test_one_that_crashed_itself_or_does_not_answer_is_not_waited_for(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(at_crash, "LEAST_S", 1.0)
    go = run_dir / "go"
    ends = [f"touch:{go}", "sleep:300"]
    fails = ["ready", f"await:{go}", "sleep:1", "fail:a bug"]
    code, attempt = supervise(
        run_dir, [role("trainer", run_dir, "ready", *ends), role("orchestrator", run_dir, *fails)]
    )
    assert (code, attempt["cause"]) == (1, "orchestrator: a bug")
    saved = f"saves:{run_dir / 'saved'}"
    code, attempt = supervise(
        run_dir, [role("trainer", run_dir, saved, *fails), role("orchestrator", run_dir, "ready", *ends)]
    )
    assert (code, attempt["cause"]) == (1, "trainer: a bug") and not (run_dir / "saved").exists()


def start_apart(run_dir: Path, terminal: int | None = None) -> tuple[subprocess.Popen[bytes], str]:
    """A supervisor in a process of its own, with roles that have children in other sessions.

    Args:
        run_dir: the run's.
        terminal: a terminal that it is to belong to.
    """
    marker = f"stray-{run_dir}"
    code = (
        "import fcntl, os, signal, sys, termios\n"
        "signal.signal(signal.SIGHUP, signal.SIG_DFL)\n"  # a nohup before the tests is not for it
        "os.isatty(0) and fcntl.ioctl(0, termios.TIOCSCTTY, 0)\n"
        "from pathlib import Path; from tests.integration.test_supervisor import role, supervise\n"
        f"run = Path({str(run_dir)!r})\n"
        f"specs = [role('trainer', run, 'ready', 'child:{marker}', 'sleep:300')]\n"
        "sys.exit(supervise(run, specs)[0])"
    )
    standard: dict[str, Any] = {} if terminal is None else dict.fromkeys(("stdin", "stdout", "stderr"), terminal)
    process = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, start_new_session=True, **standard)
    deadline = time.monotonic() + 120
    while not with_word(marker) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert with_word(marker), "the role's child never started"
    return process, marker


def gone(marker: str, within_s: float) -> bool:
    deadline = time.monotonic() + within_s
    while with_word(marker) and time.monotonic() < deadline:
        time.sleep(0.1)
    return not with_word(marker)


def test_interrupt_ends_everything(run_dir: Path) -> None:
    with (run_dir / "said.txt").open("w") as said:
        process, marker = start_apart(run_dir, said.fileno())
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=200) == 130
    assert gone(marker, 30)
    text = (run_dir / "said.txt").read_text()
    assert "interrupted by SIGINT" in text and "ERROR" not in text, text


def test_a_terminal_that_is_closed_ends_everything_and_is_named(run_dir: Path) -> None:
    ours, theirs = os.openpty()
    process, marker = start_apart(run_dir, theirs)
    os.close(theirs)
    os.close(ours)
    assert process.wait(timeout=200) == 128 + signal.SIGHUP
    assert gone(marker, 30)
    row = read_attempts(run_dir / "attempts.jsonl")[-1]
    assert (row["outcome"], row["cause"]) == ("interrupted", "interrupted by SIGHUP")


def test_killed_supervisor_leaves_nothing_behind(run_dir: Path) -> None:
    process, marker = start_apart(run_dir)
    process.kill()
    process.wait()
    assert gone(marker, 60)


def test_a_role_that_cannot_write_its_status_is_heard_over_the_bus(run_dir: Path) -> None:
    blocked = run_dir / "logs" / "attempt_1" / "trainer" / "status.json"
    blocked.mkdir(parents=True)  # no file can take this name: what a full disk does, without one
    code, attempt = supervise(run_dir, [role("trainer", run_dir, "ready", "fail:disk full", "sleep:0.5", "exit:1")])
    assert code == 1
    assert attempt["cause"] == "trainer: disk full"


def test_what_ran_beside_it_before_is_none_of_the_run(run_dir: Path) -> None:
    other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    try:
        code, _ = supervise(run_dir, [role("trainer", run_dir, "ready", "done")])
        assert code == 0 and other.poll() is None
    finally:
        other.kill()
        other.wait()
