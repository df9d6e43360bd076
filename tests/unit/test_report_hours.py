"""The hours that a report counts: of every attempt, of the trainer and of the engines, by their cause."""

import json
import os
import time
from pathlib import Path

import pytest

from prime_hpc.observe.metrics import MetricsWriter
from prime_hpc.store.attempts import Attempt, process_token, read_attempts, rewrite_row, write_attempt
from prime_hpc.store.run_paths import RunPaths
from prime_hpc.supervisor.attempt.early_end import write_early_end
from prime_hpc.supervisor.stop_requests import StopRequest
from tests.support.made_runs import BEGAN, STEP_S, Life, config_of, log_at, make_run, make_runs_of_one_trainer
from tests.unit.test_report import FOUR_LIVES, data_of, report


def test_the_time_of_every_attempt_adds_up(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(tmp_path / "four", FOUR_LIVES)
    code, found, _ = report(capsys, run)
    assert code == 0
    [one] = found["runs"]
    rows, total = one["accounting"]["rows"], one["accounting"]["total"]
    assert [row["cause"] for row in rows] == [life.cause for life in FOUR_LIVES]
    for row in rows:
        assert sum(row["trainer"].values()) == pytest.approx(row["wall"], abs=0.01)
        assert sum(row["engines"].values()) == pytest.approx(row["wall"], abs=0.01)
    # attempt 2 went on to step 17, attempt 3 began again at 15
    assert (rows[1]["lost_steps"], rows[1]["steps"]) == (2, 7)
    assert rows[1]["trainer"]["lost"] == pytest.approx(2 * (STEP_S - 0.5), abs=0.01)
    assert [row["waited"] for row in rows[1:]] == pytest.approx([20, 40, 2])
    assert total["trainer"]["train"] == pytest.approx(40 * 1.0, abs=0.05)
    split = one["split"]
    assert (split["trainer"], split["engines"], split["suggested_trainer"] + split["suggested_engines"]) == (2, 2, 4)
    assert 0.2 < split["trainer_idle"] < 0.3 and split["overlap"]
    assert total["effective"] == pytest.approx(total["trainer"]["train"] / (total["wall"] + total["waited"]))
    assert one["accounting"]["unit"] == "process" and total["device_hours"] == pytest.approx(total["wall"] * 4 / 3600)
    assert rows[0]["engines"]["load"] == pytest.approx(10 * 0.05, abs=0.01)  # the pauses, not the loads
    lanes = data_of(run / "report.html")["runs"][0]["lanes"]
    states = [span["state"] for span in lanes["job"]]
    assert states == ["start", "run", "queue", "start", "run", "down", "start", "run", "queue", "start", "run"]
    assert lanes["trainer"]["placed"] and len(lanes["trainer"]["steps"]) == 42
    first = lanes["orchestrator"]["spans"]["wait_weights"][0]
    assert first[1] - first[0] == pytest.approx(0.5)


def test_held_devices_are_the_allocations(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    held = {"nodes": 2.0, "cpus": 32.0, "gpus": 8.0}
    run = make_run(tmp_path / "gpus", [Life(0, 5, allocated=held), Life(5, 9, allocated=held)])
    accounting = report(capsys, run)[1]["runs"][0]["accounting"]
    assert accounting["unit"] == "GPU"
    assert accounting["total"]["held_hours"] == pytest.approx(accounting["total"]["wall"] * 8 / 3600)


def test_a_killed_attempt_was_ready_when_its_roles_were(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(tmp_path / "killed", [Life(0, 3)])
    [row] = read_attempts(run / "attempts.jsonl")
    rewrite_row(run / "attempts.jsonl", row | {"seconds": {}, "ended": None, "outcome": None, "process": "gone"})
    states = [("trainer", "starting", 0), ("engine", "starting", 0), ("trainer", "ready", 3), ("engine", "ready", 9)]
    lines = [{"time": BEGAN + 5 + s, "attempt": 1, "role": role, "state": state} for role, state, s in states]
    (run / "metrics" / "roles.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    [accounted] = report(capsys, run)[1]["runs"][0]["accounting"]["rows"]
    assert accounted["trainer"]["start"] == pytest.approx(9)
    assert accounted["wall"] == pytest.approx(10 + 3 * STEP_S)  # until its last step: more is not known
    assert accounted["outcome"] is None, "it is not under way"
    (run / "status.json").write_text(json.dumps({"time": BEGAN + 5 + 90, "attempt": 1, "state": "running"}))
    [accounted] = report(capsys, run)[1]["runs"][0]["accounting"]["rows"]
    assert accounted["wall"] == 90, "its supervisor saw it stand for so long"


def test_a_step_that_hangs_is_charged_while_it_hangs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(tmp_path / "hangs", [Life(0, 3)])
    [row] = read_attempts(run / "attempts.jsonl")
    late = time.time() - BEGAN - 600  # its last step was ten minutes ago
    row |= {"ended": None, "outcome": None, "pid": os.getpid(), "process": process_token(os.getpid())}
    rewrite_row(run / "attempts.jsonl", {**row, "began": BEGAN + 5 + late})
    for role in ("trainer", "orchestrator"):
        file = run / "metrics" / f"{role}.jsonl"
        steps = [json.loads(line) for line in file.read_text().splitlines()]
        file.write_text("".join(json.dumps(step | {"time": step["time"] + late}) + "\n" for step in steps))
    [accounted] = report(capsys, run)[1]["runs"][0]["accounting"]["rows"]
    assert accounted["outcome"] == "under way" and accounted["wall"] >= 590
    assert accounted["trainer"]["other"] > 500 and accounted["trainer"]["end"] == 0, "it has not come to its end"
    assert accounted["engines"]["end"] == 0


def test_an_attempt_that_never_began_does_no_step_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(tmp_path / "unread", [Life(0, 20, "requeued", "the time limit comes near", next="requeue")])
    early = StopRequest("run.yaml cannot be read", "failed", 74, False, 0.0)
    write_early_end(RunPaths(run), early, "7")
    [first, second] = report(capsys, run)[1]["runs"][0]["accounting"]["rows"]
    assert (first["steps"], first["lost_steps"], second["steps"]) == (20, 0, 0)


def test_engines_of_a_run_without_steps_sample(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(tmp_path / "scored", [Life(0, 0)], config=config_of("scored", kind="eval"))
    [row] = report(capsys, run)[1]["runs"][0]["accounting"]["rows"]
    assert (row["engines"]["start"], row["engines"]["sample"]) == (10, 1)


def test_engines_that_evaluate_sft_are_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    evaluation = {"interval": 5, "env": [{"id": "reverse-text"}]}
    run = make_run(tmp_path / "sft", [Life(0, 10)], config=config_of("sft", kind="sft", orchestrator__eval=evaluation))
    (run / "metrics" / "orchestrator.jsonl").unlink()
    writer = MetricsWriter(run / "metrics" / "orchestrator.jsonl")
    log_at(writer, 5, BEGAN + 30, **{"eval/seconds": 4.0, "eval/reverse-text/mean_reward": 0.5})
    writer.close()
    accounting = report(capsys, run)[1]["runs"][0]["accounting"]
    [row] = accounting["rows"]
    assert (accounting["trainer_devices"], accounting["engine_devices"]) == (2, 2)
    assert row["engines"] == {"start": 10, "load": 0, "tail": 0, "idle": 17, "end": 0, "sample": 4}
    plain = make_run(tmp_path / "plain", [Life(0, 10)], config=config_of("plain", kind="sft"))
    assert report(capsys, plain)[1]["runs"][0]["accounting"]["engine_devices"] == 0


def test_seats_that_were_empty_for_the_start_are_no_idle_engines(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The engines were ready before the trainer, and had sampled what it takes first."""
    run = make_run(tmp_path / "early", [Life(0, 2, start_s=100.0)])
    writer = MetricsWriter(run / "metrics" / "orchestrator.jsonl")
    seats = {"reward/mean": 0.5, "queue/empty_tail": 0.0}
    log_at(writer, 1, BEGAN + 5 + 20, **seats, **{"time/step": 10.0, "queue/empty_seats": 0.0})
    log_at(writer, 2, BEGAN + 5 + 102, **seats, **{"time/step": 82.0, "queue/empty_seats": 0.5})
    writer.close()
    lines = (run / "metrics" / "orchestrator.jsonl").read_text().splitlines()[-2:]
    (run / "metrics" / "orchestrator.jsonl").write_text("\n".join(lines) + "\n")
    [row] = report(capsys, run)[1]["runs"][0]["accounting"]["rows"]
    assert (row["engines"]["start"], row["engines"]["idle"]) == (100, 1), "of 2 s after it half of the seats"


def test_hours_of_one_trainer_are_counted_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    parent = make_runs_of_one_trainer(tmp_path / "many", {"fast": 1e-2, "slow": 1e-3}, steps=10)
    report(capsys, parent)
    whole, *below = data_of(parent / "report.html")["runs"]
    total = whole["accounting"]["total"]
    assert total["trainer"]["train"] == pytest.approx(20 * 0.9) and total["lost_s"] == 0
    assert total["engines"]["sample"] > 10, "told by the orchestrators of its runs"
    assert sum(total["engines"].values()) == pytest.approx(total["wall"], abs=0.01)
    assert whole["figures"]["process-hours"] == pytest.approx(total["device_hours"])
    assert [run["parent"] for run in below] == ["many", "many"] and whole["parent"] is None
    assert not any("process-hours" in run["figures"] or run["split"] for run in below)


def test_a_step_of_one_trainer_is_lost_where_its_run_did_it_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    parent = make_runs_of_one_trainer(tmp_path / "many", {"fast": 1e-2, "slow": 1e-3}, steps=10)
    ended = read_attempts(parent / "attempts.jsonl")[0]["ended"] or 0.0
    for folder, step in ((parent, None), (parent / "run_fast", 7), (parent / "run_slow", 10)):
        second = Attempt(2, 2, ended + 5, "resumes", resume_step=step, ended=ended + 50, outcome="completed")
        write_attempt(folder / "attempts.jsonl", second)
    report(capsys, parent)
    total = data_of(parent / "report.html")["runs"][0]["accounting"]["total"]
    assert total["lost_steps"] == 3, "steps 8 to 10 of the fast run"


def test_engines_of_an_attempt_into_which_the_orchestrator_went_on_sample_from_its_begin(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run(tmp_path / "kept", FOUR_LIVES)
    _, before, _ = report(capsys, run)
    third = read_attempts(run / "attempts.jsonl")[2]
    rewrite_row(run / "attempts.jsonl", {**third, "kept": ["inference[0]", "orchestrator"]})
    code, found, _ = report(capsys, run)
    assert code == 0
    old, new = (one["runs"][0]["accounting"]["rows"][2] for one in (before, found))
    assert old["engines"]["start"] > 0 and new["engines"]["start"] == 0
    assert new["trainer"] == old["trainer"], "the trainer did start"
    assert sum(new["engines"].values()) == pytest.approx(new["wall"], abs=0.01)
