"""Environments whose code runs in sandboxes, through real verifiers and bubblewrap against a scripted server."""

import asyncio
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from prime_hpc.config.sections.orchestrator import EnvConfig, SandboxConfig
from prime_hpc.config.sections.sampling import SamplingConfig
from prime_hpc.envs.env_config import sandbox_of
from prime_hpc.envs.errors import EnvError
from prime_hpc.envs.samples import EpisodeState
from prime_hpc.envs.sandbox.sandbox_runtime import open_pool, sandbox_box
from prime_hpc.envs.sandbox.warm_pool import WarmPool
from prime_hpc.envs.task_sources import EnvSource
from tests.support.env_world import World
from tests.support.sandboxes import needs_sandboxes
from tests.support.tool_replies import PROBLEM
from tests.unit.test_envs_benchmarks import Trace

pytestmark = [pytest.mark.slow, needs_sandboxes()]


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that every user can read."""
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        Path(name).chmod(0o755)
        yield Path(name)


def call(code: str) -> str:
    return f"<tool_call>\n{json.dumps({'name': 'python', 'arguments': {'code': code}})}\n</tool_call>"


@pytest.mark.parametrize("env_args", [{}, {"timeout": {"episode": 100.0}}], ids=["plain", "through-verifiers"])
def test_a_model_runs_python_and_files_stay_for_the_episode(world: World, env_args: dict[str, Any]) -> None:
    env = EnvConfig(id="python-tool", args={"num_tasks": 2}, env_args=env_args)
    answers = [EnvSource(env, "train", 0).task(index).data.answer for index in range(2)]
    replies = [
        call("open('kept', 'w').write('3')"),
        call("import os; print(open('kept').read(), os.getcwd(), sorted(os.environ))\nraise ValueError('told')"),
        f"It is {answers[0]}.",
        call("print(open('kept').read())"),  # of the next episode: another sandbox
        "It is 0.",
    ]
    world.script = lambda prompt, number: replies[number]

    async def run() -> list[Any]:
        async with world.pool(env, sampling=SamplingConfig(max_tokens=400)) as pool:
            return [await pool.run_episode(0, index) for index in range(2)]

    first, second = asyncio.run(run())
    assert first.usable and first.reward == 1.0 and first.metrics["tool_calls"] == 2, first
    assert "3 /work ['HOME', 'LANG'" in first.completion_text and "failed: ValueError: told" in first.completion_text
    assert second.usable and second.reward == 0.0 and "FileNotFoundError" in second.completion_text


@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.exhaustive)])
def test_humaneval_is_checked_in_a_sandbox(world: World, tmp_path: Path, workers: int) -> None:
    """The right answer passes, a wrong one does not, nor one that reads the host or ends before its checks."""
    data, secret = tmp_path / "humaneval.jsonl", tmp_path / "secret"
    data.write_text(json.dumps(PROBLEM) + "\n")
    secret.write_text("2")
    secret.chmod(0o644)
    reads = f"def double(x):\n    return x * int(open({str(secret)!r}).read())"
    leaves = "import os\nos._exit(0)\ndef double(x):\n    return 1"
    replies = ["    return 2 * x", "    return x", reads, leaves]
    world.script = lambda prompt, number: f"```python\n{replies[number]}\n```"
    env = EnvConfig(
        id="humaneval", args={"data": str(data)}, sandbox=SandboxConfig(memory_mib=256, warm=1), workers=workers
    )

    async def run() -> list[Any]:
        async with world.pool(env, sampling=SamplingConfig(max_tokens=400)) as pool:
            return [await pool.run_episode(0, 0) for _ in replies]

    results = asyncio.run(run())
    assert [result.reward for result in results] == [1.0, 0.0, 0.0, 0.0], results
    assert all(result.usable and result.metrics["ran_without_network"] == 1.0 for result in results)


def test_a_contest_s_output_is_read_as_far_as_the_expected_one_goes(world: World, tmp_path: Path) -> None:
    """Beyond `output_kib`, that is, and however much a program writes to its error output."""
    num_lines, data = 100_000, tmp_path / "livecodebench.jsonl"
    test = {"input": "", "output": "".join(f"{i}\n" for i in range(num_lines)), "testtype": "stdin"}
    row = {"question_id": "1", "question_content": "Count.", "public_test_cases": json.dumps([test])}
    data.write_text(json.dumps(row) + "\n")
    right = f"for i in range({num_lines}): print(i)"
    loud = f"{right}\nprint('.' * (1 << 20), file=sys.stderr)"
    env = EnvConfig(
        id="livecodebench",
        args={"data": str(data), "time_limit_s": 60},
        sandbox=SandboxConfig(memory_mib=256, output_kib=16, warm=0),
    )
    (task,) = (EnvSource(env, "train", 0).task(0),)
    (reward,) = task.hooks("reward")

    async def run() -> list[str]:
        said = []
        async with open_pool("contest", WarmPool(sandbox_of(env) or SandboxConfig())):
            for program in (right, loud, f"{right}\nprint(1)", f"{right}\nprint('.' * (4 << 20))"):
                trace = Trace(f"```python\n{program}\n```")
                async with sandbox_box("contest") as box:
                    assert await reward(trace, runtime=box) == float(trace.info["outcome"] == "passed")
                said.append(trace.info["outcome"])
        return said

    reasons = ["passed", "passed", "failed: another output", "failed: more output than expected"]
    assert asyncio.run(run()) == reasons


def test_an_episode_without_a_sandbox_has_failed_and_is_no_zero(
    world: World, open_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run began with sandboxes; then the node makes none any more."""
    bwrap = open_folder / "bwrap"
    bwrap.symlink_to(str(shutil.which("bwrap")))
    monkeypatch.setenv("PATH", f"{open_folder}:{os.environ['PATH']}")
    world.script = lambda prompt, number: call("print(1)") if number % 2 == 0 else "1"

    async def run() -> list[Any]:
        async with world.pool(EnvConfig(id="python-tool", sandbox=SandboxConfig(warm=0))) as pool:
            first = await pool.run_episode(0, 0)
            bwrap.unlink()
            return [first, *(await asyncio.gather(pool.run_episode(0, 1), pool.run_episode(0, 2)))]

    results = asyncio.run(run())
    lost = [result for result in results if result.state is EpisodeState.FAILED]
    assert results[0].usable and lost
    assert all("sandbox" in result.reason and not result.usable for result in lost), lost


def test_what_a_sandbox_cannot_do_is_refused_at_the_start(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert sandbox_of(EnvConfig(id="python-tool")) == SandboxConfig() and sandbox_of(EnvConfig(id="calculator")) is None
    two = EnvConfig(id="python-tool", env_args={"agent": {"runtime": {"type": "docker"}}})
    with pytest.raises(EnvError, match="a sandbox and a runtime of its own.*docker"):
        EnvSource(two, "train", 0)
    with pytest.raises(EnvError, match="harness 'null' is a program that runs in the sandbox"):
        EnvSource(EnvConfig(id="reverse-text", harness="null", sandbox=SandboxConfig()), "train", 0)
    data = tmp_path / "humaneval.jsonl"
    data.write_text(json.dumps(PROBLEM) + "\n")
    with pytest.raises(EnvError, match=r"sandbox: \{\}.*allow_code_execution"):
        EnvSource(EnvConfig(id="humaneval", args={"data": str(data)}), "train", 0)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(EnvError, match="no bubblewrap .*apt-get install bubblewrap"):
        world.play(EnvConfig(id="python-tool"))
