"""`prime-hpc simulate` from the runs that calibrate it to what it says, and what runs write down for it."""

import itertools
import json
import random
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from prime_hpc.cli import main
from prime_hpc.observe.bench import build_report, write_report
from prime_hpc.orchestrator.rollouts.server_load import MOST_EPISODES, LoadMeter
from prime_hpc.simulate.calibration import Calibration, Missing, calibrate, differences
from prime_hpc.simulate.measured import read_measured
from prime_hpc.simulate.predict import predict_step
from prime_hpc.simulate.text import commands
from prime_hpc.store.run_paths import RunPaths
from tests.support.measured_runs import OUTSIDE_S, SHARED_S, TOKEN_S, calibrated, make_measured, rows_of, tree_of


@pytest.mark.parametrize("level", [0, 1])
def test_a_run_calibrates(tmp_path: Path, level: int) -> None:
    run = read_measured(make_measured(tmp_path / "run", async_level=level), "run")
    assert run.steps == (2 + level, 30) and run.is_over and run.host == "other-node"
    found = calibrate([run])
    assert isinstance(found, Calibration)
    costs = found.costs
    assert (costs.token_s, costs.shared_token_s) == pytest.approx((TOKEN_S, SHARED_S), rel=1e-3)
    assert {round(rest, 3) for _, rest in costs.rollouts} == {OUTSIDE_S}
    assert costs.train_s(6400, 2) == pytest.approx(2.2) and costs.train_s(6400, 1) == pytest.approx(4.2)
    assert (costs.publish_s, costs.load_s, costs.pause_s) == pytest.approx((0.6, 0.4, 0.1))
    assert (costs.handover_s, costs.other_s, costs.trained_per_sampled) == pytest.approx((0.2, 0.2, 2.0))
    assert (found.start_s, found.absent) == (30.0, ("saving checkpoints",))
    assert 1 < found.curve.least < 6 and 14 < found.curve.most <= 16


def test_batches_of_several_sizes_tell_what_a_step_costs_without_tokens(tmp_path: Path) -> None:
    small, large = make_measured(tmp_path / "small"), make_measured(tmp_path / "large")
    path = RunPaths(large).metrics("trainer")
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    path.write_text(
        "".join(json.dumps(row | {"num_tokens": 12800.0, "time/forward_backward": 3.0}) + "\n" for row in rows)
    )
    costs = calibrated(small, large).costs
    assert costs.train_s(0, 2) == pytest.approx(0.2 + 1.0)
    assert costs.train_s(25_600, 2) == pytest.approx(0.2 + 5.0)


def test_several_updates_of_a_batch_are_costs_of_their_own(tmp_path: Path) -> None:
    several: dict[str, Any] = {"trainer__num_mini_batches": 2, "trainer__epochs_per_batch": 2, "async_level": 0}
    once, four = make_measured(tmp_path / "once", async_level=0), make_measured(tmp_path / "four", **several)
    costs, of_four = calibrated(once).costs, calibrated(four).costs
    assert costs.train_s(6400, 2, 2, 4) == pytest.approx(2 * 2.0 + 4 * 0.2)
    assert of_four.train_s(6400, 2, 2, 4) == pytest.approx(2.2)
    assert of_four.train_s(6400, 2) == pytest.approx(1.0 + 0.05)
    found, other = calibrated(once), read_measured(four, "four")
    assert differences(found.runs[0], other.experiment) == []
    seconds = [predict_step(run.setting, found, 0)[0].step_s for run in (found.runs[0], other)]
    assert seconds[1] - seconds[0] == pytest.approx(4.8 - 2.2, rel=0.1)  # lengths are drawn


def test_the_newest_steps_count_and_torn_foreign_and_broken_rows_do_not(tmp_path: Path) -> None:
    whole, torn = make_measured(tmp_path / "whole"), make_measured(tmp_path / "torn", [1, 2, 3, 7, 8, 20, 21, 22, 23])
    for role in ("trainer", "orchestrator"):
        with RunPaths(torn).metrics(role).open("a") as file:
            file.write('[1, 2]\nno json\n{"step": 24, "time/step": "nan", "reward/mean": 1, "episode_sample": "x"}\n')
            file.write('{"step": 25, "time/step": 4.0, "time/wait_rollouts": "inf", "time/forward_backward": "nan", ')
            file.write('"time/optim": 1, "num_tokens": 1, "episode_sample": [[1, "nan", 2], [1], null, [-1, 2, 3]]}\n')
            file.write('{"step": 26, "time/st')
    found = read_measured(torn, "torn")
    assert found.num_broken >= 6 and found.step_s == [4.0] * 7
    costs = calibrated(torn).costs
    assert (costs.token_s, costs.shared_token_s) == pytest.approx((TOKEN_S, SHARED_S), rel=1e-3)
    assert costs.train_s(6400, 2) == pytest.approx(calibrated(whole).costs.train_s(6400, 2))


def test_a_run_under_way_gives_what_it_has(tmp_path: Path) -> None:
    run = read_measured(make_measured(tmp_path / "run", range(1, 8), is_over=False), "run")
    assert not run.is_over and run.steps == (3, 7)
    assert isinstance(calibrate([run]), Calibration)


def test_what_is_missing_is_named_and_nothing_is_made_up(tmp_path: Path) -> None:
    assert isinstance(nothing := calibrate([]), Missing) and len(nothing.lines) == 2
    run = make_measured(tmp_path / "run")
    RunPaths(run).metrics("trainer").unlink()
    no_trainer = calibrate([read_measured(run, "run")])
    assert isinstance(no_trainer, Missing) and "trainer's tokens/s" in " ".join(no_trainer.lines)
    old = make_measured(tmp_path / "old")
    path = RunPaths(old).metrics("orchestrator")
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    path.write_text("".join(json.dumps(row | {"episode_sample": None}) + "\n" for row in rows))
    no_episodes = calibrate([read_measured(old, "old")])
    assert isinstance(no_episodes, Missing) and "episode_sample" in no_episodes.lines[0]
    dropped = read_measured(make_measured(tmp_path / "dropped"), "dropped")
    dropped.groups_dropped = dropped.groups
    assert isinstance(calibrate([dropped]), Missing)


def test_a_bench_calibrates_without_publishing(tmp_path: Path) -> None:
    run, rng = make_measured(tmp_path / "run", []), random.Random(0)
    rows = [rows_of(step, rng, 0) for step in range(1, 6)]
    for role, index in (("trainer", 0), ("orchestrator", 1)):
        report = build_report(
            role, kind="rl", setting={}, figures={}, phases={}, rows=[row[index] | {"step": 1} for row in rows]
        )
        write_report(run, report)
    with RunPaths(run).metrics("trainer").open("a") as file:  # its trainer writes them, as ever
        file.write("".join(json.dumps(row[0] | {"step": step}) + "\n" for step, row in enumerate(rows, start=1)))
    found = read_measured(run, "run")
    found.setting = replace(found.setting, async_level=0)
    assert found.is_bench and found.step_s == [] and len(found.train) == 4
    calibration = calibrate([found])
    assert isinstance(calibration, Calibration)
    assert calibration.absent == ("publishing and loading weights", "saving checkpoints")
    assert (calibration.costs.publish_s, calibration.costs.load_s) == (0, 0)
    assert calibration.costs.token_s == pytest.approx(TOKEN_S, rel=0.05)


# --------------------------------------------------------------------------------------------------- the verb


def simulated(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str, str]:
    code = main(["simulate", *map(str, words)])
    out, err = capsys.readouterr()
    return code, out, err


def file_of(tmp_path: Path, **changes: Any) -> Path:
    path = tmp_path / "exp.yaml"
    path.write_text(yaml.safe_dump(tree_of("exp", tmp_path, **changes)))
    return path


def test_the_verb_predicts_shapes_and_states_its_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, file = make_measured(tmp_path / "run"), file_of(tmp_path)
    code, out, _ = simulated(capsys, file, "--from", run, "--json")
    found = json.loads(out)
    assert code == 0
    [error] = found["error"]
    assert error["measured_s"] == 4.0 and error["error"] == pytest.approx(error["predicted"]["step_s"] / 4 - 1)
    [asked] = [row for row in found["shapes"] if row["is_asked"]]
    assert asked["outcome"]["step_s"] == pytest.approx(error["predicted"]["step_s"])  # it is the same shape
    assert {(row["setting"]["ranks"], row["devices"]) for row in found["shapes"]} == {(1, 4), (2, 4), (3, 4)}
    assert asked["hours"] == pytest.approx((40 * asked["outcome"]["step_s"] + 30) / 3600)
    assert asked["device_hours"] == pytest.approx(4 * asked["hours"])
    assert any("machine other-node" in note for note in found["notes"])
    code, out, _ = simulated(capsys, file, "--from", run, "--shape", "trainer=1,inference=7,async=0")
    assert code == 0 and "trainer=1,inference=7,async=0" in out and "asked" in out and "measured 4 s" in out
    header = out.splitlines().index(next(line for line in out.splitlines() if line.startswith("shape ")))
    table = list(itertools.takewhile(bool, out.splitlines()[header - 1 :]))
    assert len(table) >= 4 and max(map(len, table)) <= 130 and "loss" not in table[1], "nothing is saved there"


def test_a_device_that_is_not_stated_is_no_difference(tmp_path: Path) -> None:
    run = read_measured(make_measured(tmp_path / "run"), "run")
    stated, auto = (run.experiment.model_copy(update={"device": name}) for name in ("cpu", "auto"))
    assert differences(replace(run, experiment=stated), auto) == []
    assert differences(replace(run, experiment=stated), auto.model_copy(update={"device": "cuda"})) == [
        "device cpu, here cuda"
    ]


def test_commands_that_measure_can_be_pasted() -> None:
    for command in commands("my exp.yaml", "first")[1:]:
        assert "my exp.yaml" in shlex.split(command, comments=True)


def test_the_experiments_own_run_calibrates_where_none_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = file_of(tmp_path)
    assert simulated(capsys, file)[0] == 1
    make_measured(tmp_path / "exp")
    code, out, _ = simulated(capsys, file)
    assert code == 0 and "exp: steps 3 to 30" in out


def test_without_a_calibration_it_says_what_measures_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = file_of(tmp_path)
    code, out, _ = simulated(capsys, file)
    assert code == 1 and "nothing is predicted" in out
    assert f"rl @ {file} --bench --name exp-bench" in out and "s/step" not in out
    code, out, err = simulated(capsys, file, "--json")
    assert code == 1 and len(json.loads(out)["missing"]) == 2 and "--bench" in err


def test_a_calibration_of_something_else_is_called_that(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_measured(tmp_path / "run", model__name="a/model", slurm__partition="h100", is_over=False)
    file = file_of(tmp_path, model__name="b/model")
    code, out, _ = simulated(capsys, file, "--from", run)
    assert code == 0 and "note: run is a calibration of something else: machine other-node" in out
    assert "model.name a/model, here b/model" in out and "slurm.partition h100, here not stated" in out
    assert "run has not ended" in out


def test_loads_that_were_not_measured_are_marked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, file = make_measured(tmp_path / "run"), file_of(tmp_path)
    words = (file, "--from", run, "--shape", "batch=512,concurrent=512")
    code, out, _ = simulated(capsys, *words)
    assert code == 0 and "requests in flight at an engine, measured" in out
    _, out, _ = simulated(capsys, *words, "--json")
    rows = {row["is_asked"]: row for row in json.loads(out)["shapes"]}
    low, high = rows[False]["range_s"]
    assert low <= rows[False]["outcome"]["step_s"] <= high and low < 0.8 * high
    assert rows[True]["range_s"] is None


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--shape", "trainer=0"], "at least 1"),
        (["--shape", "trainer=two"], "whole number"),
        (["--shape", "gpus=8"], "is none of trainer, inference"),
        (["--shape", "trainer=1,trainer=2"], "stated twice"),
        (["--shape", "batch=33"], "no multiple of group 4"),
        (["--shape", "inference=5,servers=2"], "cannot be shared out over 2 servers"),
        (["--shape", "trainer=3", "--trainer.parallel.tp", "2"], "trainer.parallel"),
        (["--shape", "inference=3", "--inference.tensor-parallel-size", "2"], "multiple of 2"),
        (["--kind", "sft", "--sft.data.type", "fake"], "only kind: rl"),
        (["--from", "nowhere"], "nowhere"),
        (["--shape"], "needs a value"),
    ],
)
def test_bad_words_are_refused(words: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = simulated(capsys, file_of(tmp_path), *words)
    assert code == 2 and said in err


@pytest.mark.parametrize("text", [None, "", "name: [", "colour: blue\n", "kind: sft\n"])
def test_a_run_that_is_half_written_or_of_another_version_is_named(
    text: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_measured(tmp_path / "run")
    if text is None:
        (run / "run.yaml").unlink()
    else:
        (run / "run.yaml").write_text(text)
    code, out, err = simulated(capsys, file_of(tmp_path), "--from", run)
    if text == "":  # all defaults: a run, of another model
        assert code == 0 and "calibration of something else" in out
    else:
        assert code == 2 and "run" in err and "s/step" not in out


def test_bytes_that_are_no_metrics_calibrate_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_measured(tmp_path / "run")
    for role in ("trainer", "orchestrator"):
        RunPaths(run).metrics(role).write_bytes(bytes(range(256)) * 20)
    (run / "attempts.jsonl").write_bytes(b"\xff\n{}")
    (run / "bench").mkdir()
    (run / "bench" / "trainer.json").write_text('{"schema": 1, "steps": "none"}')
    assert simulated(capsys, file_of(tmp_path), "--from", run)[0] == 1


# ------------------------------------------------------------------------------------- what the run writes down


def test_the_load_of_servers_is_their_time() -> None:
    meter = LoadMeter(2, 10.0)
    first = meter.begin(0, 10.0)
    second = meter.begin(0, 12.0)
    assert meter.end(0, first, 14.0) == (4.0, 1.5)
    assert meter.end(0, second, 16.0) == (4.0, 1.5)
    row = meter.drain(20.0)
    assert row["queue/in_flight_mean"] == pytest.approx(8 / 10)
    assert row["queue/idle_share"] == pytest.approx((4 + 10) / 20)
    assert row["episode_sample"] == []
    third = meter.begin(1, 20.0)
    assert meter.end(1, third, 20.0) == (0.0, 1.0)
    meter.keep(1.0, 7, 1.0)
    assert meter.drain(30.0)["episode_sample"] == [[1.0, 7, 1.0]]


def test_the_sample_of_episodes_is_bounded_and_drawn_from_all() -> None:
    meter = LoadMeter(1, 0.0)
    for number in range(10_000):
        meter.keep(1.0, number, 1.0)
    sample = meter.drain(1.0)["episode_sample"]
    assert isinstance(sample, list) and len(sample) == MOST_EPISODES
    assert min(tokens for _, tokens, _ in sample) < 3000 and max(tokens for _, tokens, _ in sample) > 7000
