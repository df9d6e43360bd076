"""tools/gpu-check: what it does when a check hangs or breaks, what it writes, how it ends."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.processes import is_alive
from tests.support.runs import wait_until

TOOLS = Path(__file__).resolve().parents[2] / "tools"


@pytest.fixture
def runner(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(TOOLS / "benchmarks"))
    monkeypatch.syspath_prepend(str(TOOLS / "gpu_checks"))
    import _runner

    return _runner


def command(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def test_a_check_that_hangs_is_ended_with_what_it_started(
    runner: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "GRACE_S", 1.0)
    started = tmp_path / "pid"
    hangs = ["sh", "-c", f"setsid sleep 600 & echo $! > {started}; sleep 60"]
    check = runner.Check("x", "hangs", None, 60.0)
    setting = runner.Setting("cuda", str(tmp_path))
    other = subprocess.Popen(command("import time; time.sleep(60)"))  # of somebody else: it stays
    try:
        outcome = runner.in_child(check, setting, 3.0, hangs)
        assert outcome.verdict == "fail" and "not done within 3 s" in outcome.summary
        wait_until(lambda: not is_alive(int(started.read_text())), 200, "what it started is gone")
        assert other.poll() is None
    finally:
        other.kill()
        other.wait()


def test_a_check_that_breaks_says_its_last_words(runner: Any, tmp_path: Path) -> None:
    check, setting = runner.Check("x", "breaks", None, 60.0), runner.Setting("cpu", str(tmp_path))
    outcome = runner.in_child(check, setting, 60.0, command("print('hello'); raise ValueError('no such kernel')"))
    assert outcome.verdict == "fail" and "ValueError: no such kernel (exit code 1" in outcome.summary


def test_an_earlier_result_is_no_result_of_this_check(runner: Any, tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text(json.dumps({"verdict": "pass", "summary": "old"}))
    check, setting = runner.Check("x", "breaks", None, 60.0), runner.Setting("cpu", str(tmp_path))
    assert runner.in_child(check, setting, 60.0, command("raise SystemExit(3)")).verdict == "fail"


def test_the_table(runner: Any) -> None:
    row = {
        "check": "kernels",
        "what": "w",
        "verdict": "fail",
        "summary": "a | b\nc",
        "seconds": 1.2,
        "command": "x | y",
    }
    report: dict[str, Any] = {
        "device": "cpu",
        "gpus": [],
        "driver": None,
        "python": "3",
        "packages": {"torch": "2"},
        "commit": "c",
    }
    text = runner.render(report | {"model": "m", "seconds": 2.0, "checks": [row]})
    assert "nothing is said of a GPU" in text
    assert "| kernels: w | fail | a \\| b c | 1 | `x \\| y` |" in text


@pytest.mark.parametrize(("arguments", "code"), [((), 3), (("--only", "nothing"), 2), (("--list",), 0)])
def test_how_it_ends_without_running_anything(
    arguments: tuple[str, ...], code: int, runner: Any, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr(runner.check_machine, "usable_gpus", lambda: 0)
    try:
        found = runner.run_all(list(arguments), "usage")
    except SystemExit as end:
        found = end.code
    assert found == code
    if code == 3:
        assert "--device cpu" in capsys.readouterr().err


def test_what_is_no_failure_in_a_combination(runner: Any) -> None:
    holds = runner.check_training._holds
    plain = {"loss": [1.0, 0.9], "grad_norm": [2.0, 2.0], "graphs": 0}
    near = {"loss": [1.01, 0.9], "grad_norm": [2.0, 2.01], "graphs": 3}
    assert holds("compile", near, plain) and not holds("compile", near | {"graphs": 0}, plain)
    assert not holds("ac", near, plain)  # nothing was asked to be compiled
    assert holds("compile, fp8", {"refused": "no"}, plain) and not holds("plain", {"refused": "no"}, plain)
    assert not holds("compile", {"error": "AssertionError"}, plain)
    assert not holds("compile", near | {"loss": [1.2, 0.9]}, plain) and holds("compile, fp8", near, plain)


@pytest.mark.parametrize("mistake", [None, "window", "shared"])
def test_the_kernels_check_finds_a_wrong_kernel(
    mistake: str | None, runner: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As on a GPU, with a kernel of ours in the place of torch's: one that forgets the window, or reads a neighbour."""
    from prime_hpc.trainer.ops.attention import padded_attention

    kernels = runner.check_kernels
    monkeypatch.setattr(kernels, "LENGTHS", (40, 3, 90))

    def kernel(q: Any, k: Any, v: Any, plan: Any, scale: Any, window: Any) -> Any:
        if mistake == "shared" and plan.spread is not None:
            k = k.roll(1, 0)
        return padded_attention(q, k, v, plan, scale, None if mistake == "window" else window)

    monkeypatch.setattr(kernels, "_cuda_kernels", lambda: {"ours": kernel})
    monkeypatch.setattr(runner.Setting, "on_gpu", True)
    outcome = kernels.kernels(runner.Setting("cpu", str(tmp_path)))
    assert outcome.verdict == ("pass" if mistake is None else "fail"), outcome.summary
    assert ("too far: ['ours']" in outcome.summary) == (mistake is not None)
