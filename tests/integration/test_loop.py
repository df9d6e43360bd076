"""The whole loop with real parts: vLLM, verifiers, FSDP2 ranks, files, supervisor; typed as a user types it.

One server, kept alive, serves most of these runs (`rl` without `--inference` attaches to it).
"""

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import yaml

from prime_hpc.observe.role_status import read_status
from tests.support import forked
from tests.support.runs import (
    ENVIRONMENT,
    background,
    command,
    free_port,
    rows,
    starter_tree,
    steps,
    used_prompts,
    wait_until,
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A starter model and an experiment on it: 4 prompts x 4 rollouts a step, two trainer ranks."""
    folder = tmp_path_factory.mktemp("loop")
    experiment = starter_tree(
        folder,
        output_dir=str(folder),
        name="base",
        max_steps=4,
        trainer={"num_ranks": 2, "optim": {"lr": 1e-3}},
    )
    (folder / "exp.yaml").write_text(yaml.safe_dump(experiment))
    return folder


@pytest.fixture(scope="module")
def server(work: Path) -> Iterator[str]:
    """Started by hand with the `inference` entrypoint."""
    port = free_port()
    config = {
        "model": {"name": str(work / "starter" / "model"), "dtype": "float32"},
        "cpu_kv_cache_gib": 0.25,
        "max_model_len": 128,
    }
    (work / "infer.yaml").write_text(yaml.safe_dump(config))
    log = work / "inference.log"
    flags = ("--server.port", port, "--output-dir", work, "--name", "kept")
    with background("inference", "@", work / "infer.yaml", *flags, log=log) as process:
        wait_until(lambda: "is ready at" in log.read_text() or process.poll() is not None, 240, "the server is ready")
        assert process.poll() is None, log.read_text()[-3000:]
        yield f"http://127.0.0.1:{port}/v1"


def attached(work: Path, server: str, name: str, *flags: object) -> tuple[int, str, Path]:
    words = ["rl", "@", work / "exp.yaml", "--name", name, "--orchestrator.client.base-url", server, *flags]
    done = forked.run(["tests.faults.entry", *map(str, words)], env=ENVIRONMENT, timeout=280)
    return done.returncode, done.stdout + done.stderr, work / name


LR_ZERO = ("--trainer.optim.lr", 0, "--trainer.optim.weight-decay", 0)


def assert_probabilities_are_the_engines(run_dir: Path, num_steps: int) -> None:
    table = rows(run_dir, "trainer")
    assert [row["step"] for row in table] == list(range(1, num_steps + 1))
    assert max(row["logprob_diff"] for row in table) < 1e-4
    assert max(row["ratio_max"] for row in table) < 1.01
    assert max(row["logprob_diff_max"] for row in table) < 0.01  # bounds the least ratio too
    assert {row["lag_max"] for row in table} <= {0, 1, 2}


def test_learning_rate_zero_keeps_the_engines_probabilities(work: Path, server: str) -> None:
    code, output, run_dir = attached(work, server, "lr0", *LR_ZERO, "--max-steps", 5)
    assert code == 0, output
    assert_probabilities_are_the_engines(run_dir, 5)


@pytest.mark.exhaustive
def test_the_second_backends_probabilities_are_the_trainers_too(work: Path) -> None:
    """Started by the run, with a sampling that truncates."""
    sampling = ("--orchestrator.sampling.temperature", 0.8, "--orchestrator.sampling.top-p", 0.9)
    servers = ("--inference.backend", "transformers", "--inference.num-replicas", 2)
    words = ["rl", "@", work / "exp.yaml", "--name", "lr0-second", *LR_ZERO, "--max-steps", 5, *sampling, *servers]
    done = forked.run(["tests.faults.entry", *map(str, words)], env=ENVIRONMENT, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    assert_probabilities_are_the_engines(work / "lr0-second", 5)


@pytest.mark.exhaustive
def test_the_same_model_teaches_nothing(work: Path, server: str) -> None:
    """The run starts its teacher, the very model that it trains: no token's advantage comes from there."""
    flags = (*LR_ZERO, "--max-steps", 10)
    teacher = ("--orchestrator.teacher.model", work / "starter" / "model", "--teacher-inference.cpu-kv-cache-gib", 0.25)
    opd = ("--orchestrator.advantage.type", "opd", "--orchestrator.advantage.reward-weight", 1)
    code, output, run_dir = attached(work, server, "taught", *flags, *teacher, *opd)
    assert code == 0, output
    gaps = [row["teacher/reverse_kl"] for row in rows(run_dir, "orchestrator") if "teacher/reverse_kl" in row]
    assert len(gaps) == 10 and max(map(abs, gaps)) < 1e-4
    assert "teacher server 0 is ready" in (run_dir / "logs/attempt_1/teacher/teacher.log").read_text()
    assert not members(run_dir, "inference")
    assert_probabilities_are_the_engines(run_dir, 10)


@pytest.mark.exhaustive
def test_two_lives_are_one_run(work: Path, server: str) -> None:
    code, output, run_dir = attached(work, server, "lives", "--max-steps", 2, "--ckpt", "--orchestrator.eval")
    assert code == 0, output
    assert (run_dir / "checkpoints" / "step_2" / "manifest.json").exists()
    first = [p for n in (1, 2) for p in used_prompts(run_dir, n)]
    code, output, run_dir = attached(work, server, "lives", "--max-steps", 4, "--ckpt.resume-step", 2)
    assert code == 0, output
    assert steps(run_dir) == [1, 2, 3, 4]
    second = [p for n in (3, 4) for p in used_prompts(run_dir, n)]
    assert len(set(first + second)) == 4 * 4
    batch = json.loads((run_dir / "rollouts" / "step_000003" / "manifest.json").read_text())
    assert batch["meta"]["policy_version"] == 2
    assert batch["meta"]["lag/max"] == 0  # the second attempt began with version 2 served
    attempts = [json.loads(line) for line in (run_dir / "attempts.jsonl").read_text().splitlines()]
    assert [(a["outcome"], a["resume_step"]) for a in attempts] == [("completed", None), ("completed", 2)]


def test_on_policy_has_no_lag(work: Path, server: str) -> None:
    code, output, run_dir = attached(work, server, "sync", "--async-level", 0, "--max-steps", 3)
    assert code == 0, output
    assert [row["lag_max"] for row in rows(run_dir, "trainer")] == [0, 0, 0]
    # on-policy in float32: what trained is what sampled, also after the weights moved
    assert max(row["logprob_diff_max"] for row in rows(run_dir, "trainer")) < 1e-3


def test_run_directory_is_complete(work: Path, server: str) -> None:
    run_dir = work / "sync"
    assert run_dir.exists(), "runs after test_on_policy_has_no_lag"
    for name in ("run.yaml", "lock.json", "reward.png", "configs/trainer.toml", "configs/orchestrator.toml"):
        assert (run_dir / name).stat().st_size > 0
    assert sorted(p.name for p in (run_dir / "rollouts").iterdir()) == [f"step_{n:06d}" for n in (1, 2, 3)]
    newest = run_dir / "weights" / "step_000003"
    assert {"config.json", "manifest.json", "tokenizer.json"} <= {p.name for p in newest.iterdir()}


def members(run_dir: Path, name: str) -> list[psutil.Process]:
    """Processes of one role of a run."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        line = process.info["cmdline"] or []
        if str(run_dir) in line and f"prime_hpc.{name}.main" in line:
            found.append(process)
    return found


@pytest.mark.exhaustive
def test_killed_server_is_restarted_and_a_killed_rank_ends_the_run(work: Path) -> None:
    run_dir = work / "killed"
    log = work / "killed.log"
    flags = [
        "--name",
        "killed",
        "--max-steps",
        1000,
        "--inference.server.port",
        0,
        "--inference.cpu-kv-cache-gib",
        0.25,
        "--orchestrator.adaptive-concurrency.most",
        64,
    ]
    with background("prime-hpc", "submit", work / "exp.yaml", *flags, log=log) as process:
        wait_until(lambda: len(steps(run_dir)) >= 2 or process.poll() is not None, 240, "two steps")
        assert process.poll() is None, log.read_text()[-3000:]
        for rank in (0, 1):  # the supervisor goes by the rank that is silent longest
            status = read_status(run_dir / "logs/latest/trainer", rank)
            assert status is not None and status["state"] == "ready"
        (server,) = members(run_dir, "inference")
        os.kill(server.pid, signal.SIGKILL)
        wait_until(lambda: "is started again (1/3)" in log.read_text(), 60, "the supervisor saw it")
        seen = len(steps(run_dir))
        wait_until(lambda: len(steps(run_dir)) >= seen + 4, 240, "the run went on")
        ranks = [
            p
            for p in members(run_dir, "trainer")
            if p.children() == [] or "prime_hpc.trainer.torchrun" not in p.cmdline()
        ]
        victim = next(p for p in ranks if p.environ().get("RANK") == "1")
        os.kill(victim.pid, signal.SIGKILL)
        assert process.wait(timeout=120) == 1
    text = log.read_text()
    assert "trainer rank 1 was killed by signal 9" in text
    sampled = [row for row in rows(run_dir, "orchestrator") if "queue/limit" in row]
    assert any(row.get("engines/kv_use", 0) > 0 for row in sampled), "vLLM tells its figures"
    assert all(1 <= row["queue/limit"] <= 64 for row in sampled)
    wait_until(lambda: not any(members(run_dir, r) for r in ("inference", "trainer", "orchestrator")), 10, "all gone")


@pytest.mark.exhaustive
@pytest.mark.parametrize("program", ["rl", "submit"])
def test_interrupt_ends_everything(work: Path, server: str, program: str) -> None:
    name = f"interrupted-{program}"
    run_dir, log = work / name, work / f"{name}.log"
    verb = ["rl", "@"] if program == "rl" else ["prime-hpc", "submit"]
    flags = ["--name", name, "--max-steps", 1000, "--orchestrator.client.base-url", server]
    with background(*verb, work / "exp.yaml", *flags, log=log) as process:
        wait_until(lambda: len(steps(run_dir)) >= 1 or process.poll() is not None, 120, "one step")
        os.killpg(process.pid, signal.SIGINT)  # what the terminal does on Ctrl-C
        assert process.wait(timeout=120) == 130, log.read_text()[-3000:]
    assert not any(members(run_dir, r) for r in ("trainer", "orchestrator"))
    (attempt,) = (json.loads(line) for line in (run_dir / "attempts.jsonl").read_text().splitlines())
    assert attempt["outcome"] == "interrupted"  # in good order, not by the reaper
    # the server is not ours to end
    check = f"import urllib.request as u; u.urlopen('{server[:-3]}/health', timeout=10)"
    assert command("python", "-c", check).returncode == 0
