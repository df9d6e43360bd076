"""A small run in a directory of its own, for tests of submit, cancel and resume against `fake_slurm`."""

import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from prime_hpc.config import Loaded, load_experiment
from prime_hpc.launch import cancel as cancel_module
from prime_hpc.launch.cancel import Ended, cancel_run
from prime_hpc.slurm import sbatch_errors
from prime_hpc.store.attempts import Attempt, write_attempt
from tests.support.fake_slurm import FakeSlurm


def use_fake_slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    """A Slurm that fails as it is told to, and no patience with it."""
    fake = FakeSlurm(tmp_path)
    fake.use(monkeypatch)
    monkeypatch.setattr(sbatch_errors, "QUEUE_ANSWER_S", 0.0)
    monkeypatch.setattr(cancel_module, "POLL_S", 0.05)
    monkeypatch.setattr(cancel_module, "ASK_EVERY_S", 0.2)
    monkeypatch.chdir(tmp_path)
    return fake


def write_config(tmp_path: Path) -> Path:
    """A supervised run that would fit one node."""
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    (model / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}" + b"x" * 990)
    (tmp_path / "site.yaml").write_text(f"scratch: {tmp_path}\ndevice: cpu\n")
    path = tmp_path / "exp.yaml"
    tree = {
        "kind": "sft",
        "name": "r",
        "launch": "slurm",
        "output_dir": str(tmp_path / "out"),
        "model": {"name": str(model)},
        "sft": {"data": {"type": "fake"}},
        "ckpt": {"interval": 5},
        "slurm": {"site": str(tmp_path / "site.yaml"), "time": "01:00:00", "partition": "gpu", "gpus_per_node": 1},
    }
    path.write_text(json.dumps(tree))
    return path


def load(config: Path, *flags: str) -> Loaded:
    return load_experiment([str(config), *flags], "submit")


def run_dir(config: Path) -> Path:
    return config.parent / "out" / "r"


def ended(config: Path, outcome: str = "failed", **fields: Any) -> Attempt:
    """The run's directory as after an attempt."""
    row = {"ended": time.time(), "outcome": outcome, "cause": "a test", "job_id": "100", **fields}
    attempt = Attempt(1, 1, time.time() - 60, "first start", **row)
    write_attempt(run_dir(config) / "attempts.jsonl", attempt)
    return attempt


def submit_in_a_process(config: Path, fake: FakeSlurm, *flags: str) -> "subprocess.Popen[str]":
    """`prime-hpc submit` as a user types it."""
    argv = [sys.executable, "-m", "prime_hpc.cli", "submit", str(config), *flags]
    return subprocess.Popen(
        argv, env=fake.environ, cwd=config.parent, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def wait_for(what: Callable[[], Any], timeout_s: float = 280.0) -> None:
    began = time.monotonic()
    while not what():
        assert time.monotonic() - began < timeout_s, "it never happened"
        time.sleep(0.02)


def cancel(config: Path, *, now: bool = False, timeout_s: float = 60.0) -> Ended:
    return cancel_run(run_dir(config), now=now, timeout_s=timeout_s, say=lambda text: None)


def cancel_beside(config: Path, other: Callable[[], None]) -> Ended:
    """Cancel while somebody else acts upon it."""
    thread = threading.Thread(target=other)
    thread.start()
    result = cancel(config)
    thread.join()
    return result
