"""The benchmarks of tools/ on small numbers: that what they compare is the same, and that their commands are valid."""

import importlib.util
import os
import sys
import time
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from prime_hpc.cli.common import load
from prime_hpc.config.experiment import Experiment

FOLDER = Path(__file__).resolve().parents[2] / "tools" / "benchmarks"


def benchmark(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(FOLDER))
    spec = importlib.util.spec_from_file_location(f"benchmark_{name}", FOLDER / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("objective", ["aipo", "grpo", "gspo"])
def test_the_loop_over_sequences_computes_the_same(objective: str, monkeypatch: pytest.MonkeyPatch) -> None:
    loss = benchmark("loss", monkeypatch)
    monkeypatch.setattr(loss, "NUM_TOKENS", 600)
    monkeypatch.setattr(loss, "NUM_SEQUENCES", 40)
    monkeypatch.setattr(loss, "NUM_PAIRS", 1)
    row = loss.compare(objective)
    assert row["num_ops"] == row["num_ops_of_16_sequences"]  # no loop over sequences
    assert row["loss_difference"] < 1e-6 and row["gradient_error"] < 1e-5 and row["statistics_error"] < 1e-5


def test_chunked_and_whole_logits_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    loss = benchmark("loss", monkeypatch)
    monkeypatch.setattr(loss, "VOCAB", 97)
    results = []
    for way in (loss.whole_logits, loss.chunked):
        hidden, weight, targets, temperatures, grad = loss.head_inputs(2100)  # more than two chunks
        logprobs = way(hidden, weight, targets, temperatures)
        (logprobs * grad).sum().backward()
        results.append([x.detach().numpy() for x in (logprobs, hidden.grad, weight.grad)])
    for a, b in zip(*results, strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-5)


def test_the_loops_experiments_are_valid(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loop = benchmark("loop", monkeypatch)
    for case in loop.CASES:
        experiment = Experiment.model_validate(loop.experiment(case, tmp_path / "model", tmp_path))
        assert experiment.orchestrator.batch_size == case.batch_size
        assert experiment.max_steps > case.warm + case.measured + experiment.async_level


def test_rates_leave_out_the_first_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = benchmark("loop", monkeypatch)

    class Clock:
        def between(self, begin: float, end: float) -> float:
            return 2 * (end - begin)

    row = loop.rate([100.0, 102.0, 104.0, 110.0], 8, 1, 2, Clock())
    assert (row["samples_per_s"], row["s_per_step"], row["cpu_s_per_sample"]) == (4.0, 2.0, 0.5)


def test_the_clock_counts_a_process_that_works(monkeypatch: pytest.MonkeyPatch) -> None:
    clock_of = benchmark("_clock", monkeypatch).TreeClock
    begin = time.time()
    with clock_of(os.getpid(), interval_s=0.05) as clock:
        used = time.process_time()
        while time.process_time() - used < 0.3:
            sum(range(1000))
    assert clock.between(begin, time.time()) > 0.2


@pytest.mark.parametrize("kind", ["rl", "sft"])
@pytest.mark.parametrize("per_row", [1, 8])
def test_the_commands_of_mfu_are_valid(
    kind: str, per_row: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mfu = benchmark("mfu", monkeypatch)
    for shape in (*mfu.SHAPES, *mfu.TINY):
        argv = mfu.command(kind, shape, tmp_path / "model", tmp_path / "run", per_row)
        experiment = load(argv[4:], argv[3], argv[3]).experiment
        assert experiment.trainer.bench and experiment.micro_batch_tokens == shape.row_tokens
        data = experiment.trainer.data.fake if kind == "rl" else experiment.sft.data
        assert data is not None and data.batch_size * (data.seq_len or 0) == shape.rows * shape.row_tokens


@pytest.mark.parametrize("stretched", [True, False])
def test_the_runs_of_simulate_are_valid(stretched: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    simulate = benchmark("simulate", monkeypatch)
    for name, changes in simulate.CASES.items():
        experiment = Experiment.model_validate(
            simulate.experiment(name, changes, tmp_path / "model", tmp_path, stretched=stretched)
        )
        assert experiment.max_steps > experiment.async_level + 6
        assert (experiment.inference is not None) and (experiment.inference.backend != "transformers") == stretched
    assert {name for names in simulate.CALIBRATIONS for name in names} <= set(simulate.CASES)


def test_the_async_levels_experiments_are_valid(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    levels = benchmark("async", monkeypatch)
    for level in levels.LEVELS:
        experiment = Experiment.model_validate(levels.experiment(level, 1, tmp_path / "model", tmp_path))
        assert (experiment.async_level, experiment.seed, experiment.orchestrator.env[0].args["p99_ratio"]) == (
            level,
            1,
            10,
        )
    tree = levels.evaluation(tmp_path / levels.name_of(2, 1), tmp_path / "model", tmp_path)
    evaluated = Experiment.model_validate(tree)
    assert evaluated.eval is not None and evaluated.eval.steps[-1] == levels.NUM_STEPS


@pytest.mark.parametrize(
    ("rewards", "wanted", "seconds"),
    [
        ({0: 0.2, 2: 0.4, 4: 0.8}, 0.6, 30.0),  # half way between versions 2 and 4
        ({0: 0.2, 2: 0.9, 4: 0.3}, 0.9, 20.0),
        ({0: 0.7}, 0.6, 0.0),
        ({0: 0.2, 2: 0.4}, 0.6, None),
    ],
)
def test_the_time_to_a_reward(
    rewards: dict[int, float], wanted: float, seconds: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    levels = benchmark("async", monkeypatch)
    assert levels.reached(rewards, {0: 0.0, 2: 20.0, 4: 40.0}, wanted) == pytest.approx(seconds)
