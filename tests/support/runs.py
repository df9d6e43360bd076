"""The product's own commands as a user types them, for the end-to-end tests."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent

ENVIRONMENT = {
    **os.environ,
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "OMP_NUM_THREADS": "1",
    # the tests' own tasksets are found as modules by any command, whatever started the tests
    "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
}
for name in [n for n in ENVIRONMENT if n.startswith(("PRIME_", "PRIMEHPC_"))]:
    del ENVIRONMENT[name]


def free_port() -> int:
    """A TCP port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def command(program: str, *arguments: object, timeout_s: float = 280) -> subprocess.CompletedProcess[str]:
    """Run a console script of this environment to its end."""
    return subprocess.run(
        [str(BIN / program), *map(str, arguments)],
        cwd=ROOT,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )


def starter_tree(folder: Path, **more: Any) -> dict[str, Any]:
    """An experiment on a starter model, which is made in `folder`: a step is 4 rollouts of 4 texts to reverse."""
    made = command("python", ROOT / "tools" / "make-starter", folder / "starter")
    assert made.returncode == 0, made.stderr
    return {
        "seq_len": 128,
        "model": {"name": str(folder / "starter" / "model"), "dtype": "float32"},
        "orchestrator": {
            "batch_size": 16,
            "rollouts_per_example": 4,
            "max_concurrent": 16,
            "sampling": {"max_tokens": 16},
            "env": [{"id": "reverse-text"}],
        },
        **more,
        "trainer": {"threads_per_rank": 1, "micro_batch_tokens": 1024, **more.get("trainer", {})},
    }


@contextmanager
def background(program: str, *arguments: object, log: Path) -> Iterator["subprocess.Popen[bytes]"]:
    """A console script that runs beside the test; interrupted at the end, killed if that does not help."""
    with log.open("wb") as file:
        process = subprocess.Popen(
            [str(BIN / program), *map(str, arguments)],
            cwd=ROOT,
            env=ENVIRONMENT,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(timeout=20)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def wait_until(condition: Callable[[], Any], timeout_s: float, what: str) -> Any:
    """Poll until the condition is true; fails with what was awaited."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        value = condition()
        if value:
            return value
        time.sleep(0.2)
    raise AssertionError(f"not within {timeout_s:.0f} s: {what}")


def rows(run_dir: Path, role: str) -> list[dict[str, Any]]:
    """A role's metrics, newest row of each step last."""
    path = run_dir / "metrics" / f"{role}.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def steps(run_dir: Path) -> list[int]:
    """Steps the trainer completed, in the order in which it did."""
    return [row["step"] for row in rows(run_dir, "trainer")]


def used_prompts(run_dir: Path, step: int) -> list[int]:
    """Positions in the prompt stream of batch `step`."""
    return json.loads((run_dir / "rollouts" / f"step_{step:06d}" / "orchestrator.json").read_text())["used"]
