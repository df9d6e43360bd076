"""The benchmarks of tools/ on small numbers: that what they compare is the same, and that their commands are valid."""

import asyncio
import importlib.util
import os
import shutil
import subprocess
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


@pytest.mark.parametrize("workers", [0, 2])
def test_the_run_of_flight_is_valid_and_no_group_of_it_grows_stale(
    workers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flight = benchmark("flight", monkeypatch)
    experiment = flight.experiment(tmp_path / "model", tmp_path / "run", workers, 5)
    assert experiment.trainer.num_ranks == 256 and experiment.orchestrator.max_concurrent == 8192
    assert experiment.async_level * experiment.orchestrator.batch_size > 2 * experiment.orchestrator.max_concurrent


def test_the_place_of_a_reply_is_taken_by_the_request_that_follows_all_in_flight(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flight = benchmark("flight", monkeypatch)
    monkeypatch.setattr(flight, "IN_FLIGHT", 4)
    # four places on two servers, given free at 10, 11, 12 and 13; each is taken 0.1 s later, the last one after 2 s
    np.savez(tmp_path / "servers-0.npz", came=np.array([0.0, 0.1, 10.1, 12.1]), left=np.array([10.0, 12.0]))
    np.savez(tmp_path / "servers-1.npz", came=np.array([0.2, 0.3, 11.1, 15.0]), left=np.array([11.0, 13.0]))
    found = flight.seat_delays(tmp_path, 10.0, 16.0)
    assert found["p50_s"] == pytest.approx(0.1) and found["max_s"] == pytest.approx(2.0)
    assert flight.seat_delays(tmp_path, 10.5, 13.5)["max_s"] == pytest.approx(0.1)


def test_the_slope_of_memory_is_that_of_the_second_half(monkeypatch: pytest.MonkeyPatch) -> None:
    flight = benchmark("flight", monkeypatch)
    rows = [(7.0 + t, min(t, 50) * 2**20 + max(0, t - 50) * 2**10, 0, t) for t in range(101)]
    found = flight.memory(rows, 7.0)
    assert found["rss_growth_mib_per_minute"] == pytest.approx(60 / 1024, rel=0.05)
    assert found["rss_workers_gib"] == 0.0
    assert (found["rss_mib_by_minute"], found["held_by_minute"]) == ([0, 50], [0, 60])


def test_scripted_servers_answer_what_the_orchestrators_client_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from contextlib import ExitStack

    from prime_hpc.client.inference import InferenceClient
    from prime_hpc.envs.model_client import parse_choice
    from tests.support.tiny_tokenizer import make_tokenizer

    flight = benchmark("flight", monkeypatch)
    for name, value in {"NUM_SERVERS": 2, "SERVER_PROCESSES": 1, "DELAY_S": 0.05}.items():
        monkeypatch.setattr(flight, name, value)
    monkeypatch.setenv("PYTHONPATH", str(FOLDER.parents[1]))
    tokenizer = make_tokenizer(tmp_path)

    async def ask(url: str) -> None:
        async with InferenceClient(url, api_key="") as client:
            assert await client.health() and await client.policy_version() == 0
            assert (await client.update_weights("somewhere", 7))["changed"]
            answer = await client.complete({"model": "policy", "token_ids": [1, 2], "sampling_params": {}})
            ids, logprobs, versions = parse_choice(answer["choices"][0])
            assert 64 <= len(ids) <= 512 and ids[-1] == tokenizer.eos_token_id and set(versions.tolist()) == {7}
            assert len(logprobs) == len(ids)

    with ExitStack() as stack:
        first, second = flight.start_servers(stack, tmp_path, tmp_path)
        assert first.url != second.url
        asyncio.run(ask(first.url))
    with np.load(tmp_path / "servers-0.npz") as log:
        assert len(log["came"]) == len(log["left"]) == 1 and log["left"][0] > log["came"][0]


def test_one_slow_round_of_eval_s_benchmark_changes_no_ratio(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    bench = benchmark("eval", monkeypatch)
    bare, ours = iter([0.0, 100.0, 400.0, *[100.0] * 6, 1.0]), iter([80.0, 3.0, *[80.0] * 6, 900.0])
    server = iter(range(100))  # CPU seconds so far: one more each time

    async def rate(url: str, prompts: list[list[int]]) -> float:
        return next(bare)

    monkeypatch.setattr(bench, "_prompts", lambda model: [])
    monkeypatch.setattr(bench, "_bare", rate)
    monkeypatch.setattr(bench, "_ours", lambda *given: (next(ours), 0.1, 1.0, 1.0))
    monkeypatch.setattr(bench, "_cpu_s", lambda pid: next(server))
    found = bench._rounds(0, "", tmp_path, tmp_path, {})
    assert found["ratio_to_engine"] == pytest.approx(0.8)
    assert found["cpu_ms"]["bare_server"] == found["cpu_ms"]["eval_server"] == found["cpu_ms"]["eval"] == 1.0
    assert found["ratio_by_cpu"] == pytest.approx(0.5, abs=0.05)
    assert "0.800" in bench.render(found)
    with pytest.raises(StopIteration):
        next(ours)


def test_a_process_s_cpu_time_is_counted_with_its_children_s(monkeypatch: pytest.MonkeyPatch) -> None:
    before = benchmark("eval", monkeypatch)._cpu_s(os.getpid())
    end = time.process_time() + 0.1
    while time.process_time() < end:
        pass
    assert benchmark("eval", monkeypatch)._cpu_s(os.getpid()) >= before + 0.05


def test_memory_that_is_given_out_again_was_free(monkeypatch: pytest.MonkeyPatch) -> None:
    live = benchmark("rehearse", monkeypatch).Live()
    totals = []
    for address, size in (
        *((1000, 100), (2000, 50), (1000, -100)),
        (2000, 50),  # what was there must have gone, though nobody saw it
        (1990, 20),  # over its beginning
        *((3000, 10), (3010, 10)),  # neighbours
        (2900, 200),  # over both
        (5000, -7),  # was there before anybody looked
    ):
        live.change(address, size)
        totals.append(live.total)
    assert totals == [100, 150, 50, 50, 20, 30, 40, 220, 220]


ENDLESS = """
import time

def run():
    try:
        print("runs", flush=True)
        time.sleep(1000)
    finally:
        print("its servers end", flush=True)
"""


def test_one_that_is_told_to_end_ends_what_it_started(tmp_path: Path) -> None:
    """`timeout 60 tools/bench routing` left two engines."""
    (tmp_path / "tools" / "benchmarks").mkdir(parents=True)
    (tmp_path / "tools" / "benchmarks" / "endless.py").write_text(ENDLESS)
    shutil.copy(FOLDER.parent / "bench", tmp_path / "tools")
    words = [sys.executable, str(tmp_path / "tools" / "bench"), "endless"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "runs\n"
        process.terminate()
        assert process.communicate(timeout=200)[0] == "its servers end\n" and process.returncode == 143
