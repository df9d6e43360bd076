"""A run that stands still, and who is named: by the supervisor itself, and by `prime-hpc why`."""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from prime_hpc.config import Experiment
from prime_hpc.runtime.process_tree import family
from prime_hpc.store.attempts import begin
from prime_hpc.store.run_paths import RunPaths, claim_incarnation
from prime_hpc.supervisor.roles.spec import RoleSpec
from prime_hpc.supervisor.supervisor import RolePlan, Supervisor
from tests.support.runs import ROOT, background, command, rows, wait_until

pytestmark = pytest.mark.slow
LIMIT_S = 120.0


def test_a_step_that_stands_still_is_looked_into_once_and_kept(tmp_path: Path) -> None:
    """A real supervisor and a scripted trainer, which stops itself at its third step."""
    run_dir = tmp_path / "run"
    actions = ["ready", "step:1", "sleep:0.5", "step:2", "doing:optim", "stop", "step:3", "sleep:3", "done"]
    script = [sys.executable, "-m", "tests.support.scripted_role", "trainer", str(run_dir), *actions]
    stalls = {"factor": 2, "least_s": 1.5}
    experiment = Experiment.model_validate(
        {"output_dir": str(tmp_path), "name": "run", "supervisor": {"grace_s": 2, "stalls": stalls}}
    )
    run_dir.mkdir()
    number = claim_incarnation(RunPaths(run_dir))
    attempt = begin(run_dir / "attempts.jsonl", incarnation=number, why="test", resume_step=None, job_id=None)
    seen: list[dict[str, Any]] = []
    folder = run_dir / "logs" / "attempt_1" / "stalls"

    def wake() -> None:
        wait_until(lambda: list(folder.glob("step_*.json")), LIMIT_S, "the cause was kept")
        kept = next(folder.glob("step_*.json"))
        seen.append(json.loads(kept.read_text()))
        shown = [sys.executable, "-m", "prime_hpc.cli", "status", str(run_dir), "--json"]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}

        def status() -> dict[str, Any]:
            seen.append(json.loads(subprocess.run(shown, env=environment, capture_output=True, check=True).stdout))
            return seen[-1]

        wait_until(lambda: status()["stall"], LIMIT_S, "the status says so")
        os.kill(seen[0]["diagnosis"]["pid"], signal.SIGCONT)

    waker = threading.Thread(target=wake)
    waker.start()
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    spec = RoleSpec("trainer", script, start_timeout_s=LIMIT_S)
    code = Supervisor(experiment, run_dir, attempt, RolePlan([spec], {}, environment)).run()
    waker.join()
    assert code == 0
    assert seen[0]["headline"].startswith("trainer rank 0 on ") and seen[0]["diagnosis"]["kind"] == "stopped"
    assert any("`optim`" in line for line in seen[0]["diagnosis"]["evidence"])
    name = f"step_{seen[0]['step']}"
    assert name in ("step_2", "step_3"), "it stopped behind its word of step 2, which may not have been sent yet"
    assert seen[-1]["stall"].startswith(f"{name.replace('_', ' ')} for ") and f"{name}.txt" in seen[-1]["stall"]
    assert [path.name for path in sorted(folder.iterdir())] == [f"{name}.json", f"{name}.txt"], "once"


# ------------------------------------------------------------------------------------------- a whole run


class Run:
    """A small run whose rewards, ranks, engine and files can be made to hang, one after the other."""

    def __init__(self, folder: Path, log: Path) -> None:
        self.dir, self.hang, self.log = folder / "mount" / "run", folder / "hang", log
        self.pid = 0

    def why(self, expected: str) -> dict[str, Any]:
        """Ask until somebody is named, as a user would who sees no step."""
        answer: dict[str, Any] = {}

        def asked() -> bool:
            done = command("prime-hpc", "why", self.dir, "--json", "--after", 3)
            assert done.returncode in (0, 1), done.stdout + done.stderr
            answer.update(json.loads(done.stdout), code=done.returncode)
            return answer["diagnosis"]["kind"] == expected and bool(answer["diagnosis"]["is_hang"])

        wait_until(asked, LIMIT_S, f"`why` names a cause of kind {expected}; last: {answer}")
        assert answer["code"] == 1
        return answer["diagnosis"]

    def process(self, module: str, number: int = 0) -> psutil.Process:
        found = [p for p in family(self.pid) if module in p.cmdline() and "torchrun" not in " ".join(p.cmdline())]
        return found[number]

    def goes_on(self) -> None:
        before = len(rows(self.dir, "trainer"))
        wait_until(lambda: len(rows(self.dir, "trainer")) > before + 1, LIMIT_S, f"it goes on: {self.log.read_text()}")


@pytest.fixture(scope="module")
def mount(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, subprocess.Popen[bytes] | None]]:
    """A folder with `mount` in it, on a file system that can be stopped; None where bindfs cannot be had."""
    folder = tmp_path_factory.mktemp("why")
    (folder / "real").mkdir()
    (folder / "mount").mkdir()
    if shutil.which("bindfs") is None or not os.access("/dev/fuse", os.W_OK):
        yield folder, None
        return
    process = subprocess.Popen(["bindfs", "-f", str(folder / "real"), str(folder / "mount")])
    wait_until(lambda: os.path.ismount(folder / "mount"), LIMIT_S, "the mount")
    yield folder, process
    process.send_signal(signal.SIGCONT)
    process.terminate()
    process.wait(200)


@pytest.fixture(scope="module")
def run(mount: tuple[Path, Any]) -> Iterator[Run]:
    folder = mount[0]
    made = command("python", ROOT / "tools" / "make-starter", folder / "starter")
    assert made.returncode == 0, made.stderr
    one = Run(folder, folder / "log")
    env = {"id": "tests.support.trouble_taskset", "name": "trouble", "args": {"hang_while": str(one.hang)}}
    experiment = {
        "output_dir": str(folder / "mount"),
        "name": "run",
        "seq_len": 64,
        "max_steps": 100_000,
        "model": {"name": str(folder / "starter" / "model"), "dtype": "float32"},
        "trainer": {"num_ranks": 2, "threads_per_rank": 1, "micro_batch_tokens": 512},
        "inference": {"backend": "transformers", "cpu_kv_cache_gib": 0.1, "server": {"port": 0}},
        "orchestrator": {
            "batch_size": 4,
            "rollouts_per_example": 2,
            "max_concurrent": 4,
            "sampling": {"max_tokens": 8},
            "env": [env],
        },
    }
    (folder / "exp.yaml").write_text(yaml.safe_dump(experiment))
    with background("rl", "@", folder / "exp.yaml", log=one.log) as process:
        one.pid = process.pid
        wait_until(lambda: len(rows(one.dir, "trainer")) > 3 or process.poll() is not None, 240, "steps")
        assert process.poll() is None, one.log.read_text()
        yield one
        mount[1] and mount[1].send_signal(signal.SIGCONT)
        one.hang.unlink(missing_ok=True)
    done = command("prime-hpc", "why", one.dir)
    assert done.returncode == 3 and "the run is over" in done.stdout


@pytest.mark.exhaustive
@pytest.mark.timeout(600)
def test_nobody_hangs_in_a_run_that_goes_on(run: Run) -> None:
    done = command("prime-hpc", "why", run.dir)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("nobody hangs") and "trainer rank 1" in done.stdout


@pytest.mark.exhaustive
@pytest.mark.timeout(600)
def test_a_reward_function_that_sleeps_for_ever(run: Run) -> None:
    run.hang.touch()
    found = run.why("environment")
    assert "'trouble'" in found["culprit"] and "length (support/trouble_taskset.py:" in found["where"]
    run.hang.unlink()
    run.goes_on()


@pytest.mark.exhaustive
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("module", "number", "named"),
    [("prime_hpc.trainer.main", 1, "trainer rank "), ("prime_hpc.inference.main", 0, "inference server 0")],
)
def test_a_stopped_rank_and_a_stopped_engine(run: Run, module: str, number: int, named: str) -> None:
    process = run.process(module, number)
    process.suspend()
    try:
        found = run.why("stopped")
        assert found["culprit"].startswith(named) and found["pid"] == process.pid
    finally:
        process.resume()
    run.goes_on()


@pytest.mark.exhaustive
@pytest.mark.timeout(600)
def test_a_file_system_that_hangs(run: Run, mount: tuple[Path, subprocess.Popen[bytes] | None]) -> None:
    if mount[1] is None:
        pytest.skip("needs bindfs and /dev/fuse (apt-get install bindfs)")
    mount[1].send_signal(signal.SIGSTOP)
    try:
        began = time.monotonic()
        found = run.why("file system")
        assert "does not answer" in found["culprit"]
        assert time.monotonic() - began < LIMIT_S, "it never waits for ever"
    finally:
        mount[1].send_signal(signal.SIGCONT)
    run.goes_on()
