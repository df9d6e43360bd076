"""`prime-hpc report`: what it makes of run directories, whole, torn, foreign or long. The page itself is opened in
test_report_page.py."""

import json
import math
import os
import time
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from prime_hpc.cli import main
from prime_hpc.observe.metrics import MetricsWriter
from prime_hpc.orchestrator.metrics import MOST_SPANS, SampleLog, StepStats, joined
from prime_hpc.report import phases as phases_module
from prime_hpc.report import run_hours, series
from prime_hpc.report.page import SCRIPTS
from prime_hpc.report.phases import TRAINER, Phases, trainer_seconds
from prime_hpc.report.rollouts import choose_rollouts
from prime_hpc.report.series import Curves
from prime_hpc.store.attempts import Attempt, process_token, read_attempts, rewrite_row, write_attempt
from prime_hpc.store.run_paths import RunPaths
from prime_hpc.supervisor.attempt.early_end import write_early_end
from prime_hpc.supervisor.status_file import LiveStatus
from prime_hpc.supervisor.stop_requests import StopRequest
from tests.support.made_runs import (
    BEGAN,
    STEP_S,
    Life,
    add_batches,
    add_samples,
    config_of,
    log_at,
    make_run,
    make_runs_of_one_trainer,
)

FOUR_LIVES = [
    Life(0, 10, "requeued", "the time limit comes near", next="requeue"),
    Life(10, 17, "failed", "trainer rank 1 was killed", gap_s=20),
    Life(15, 25, "requeued", "node n2 is lost", gap_s=40, next="requeue"),
    Life(25, 40, gap_s=2),
]


def report(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, Any, str]:
    code = main(["report", *map(str, words), "--json"])
    out, err = capsys.readouterr()
    return code, json.loads(out) if out.startswith("{") else out, err


def data_of(page: Path) -> dict[str, Any]:
    text = page.read_text(encoding="utf-8")
    return json.loads(text.partition('id="data">')[2].partition("</script>")[0])


# ---------------------------------------------------------------------------------------------------- curves


def test_each_step_is_drawn_as_long_as_they_fit() -> None:
    curves = Curves()
    for step in range(1, 101):
        curves.add({"step": step, "time/step": 1.0, "loss": step / 2})
    table = curves.table(2000)
    assert (table["width"], table["steps"]) == (1, list(range(1, 101)))
    assert table["mean"]["loss"][:3] == [0.5, 1, 1.5] and table["low"] == {}


def test_a_peak_of_one_step_is_seen_among_a_hundred_thousand() -> None:
    curves = Curves(max_cells=1024)
    for step in range(100_000):
        curves.add({"step": step, "time/step": 1.0, "loss": 1.0 if step != 77_777 else 50.0})
    table = curves.table(200)
    assert len(table["steps"]) <= 200 and table["width"] == 512
    place = table["steps"].index(77_777 // 512 * 512)
    assert (table["low"]["loss"][place], table["high"]["loss"][place]) == (1, 50)
    assert table["mean"]["loss"][place] == pytest.approx(1 + 49 / 512, rel=1e-4)
    assert max(value for i, value in enumerate(table["high"]["loss"]) if i != place) == 1


def test_steps_done_again_replace_what_stood_there() -> None:
    curves = Curves()
    for step, value in [(1, 1.0), (2, 2.0), (3, 3.0), (4, 4.0), (3, 30.0)]:
        curves.add({"step": step, "time/step": 1.0, "loss": value})
    curves.add({"step": 1, "eval/e/mean_reward": 0.5})  # of an earlier version, after a later batch: nothing goes back
    table = curves.table(10)
    assert (table["steps"], table["mean"]["loss"]) == ([1, 2, 3], [1, 2, 30])
    assert curves.points == {"eval/e/mean_reward": {1: 0.5}}


def test_versions_that_a_run_went_back_behind_were_evaluated_in_vain() -> None:
    curves = Curves()
    for step in (*range(1, 7), 3, 4):
        curves.add({"step": step, "reward/mean": 1.0})
        if step % 2 == 0:
            curves.add({"step": step, "eval/e/mean_reward": step / 10})
    curves.add({"step": 4, "time/step": 1.0, "eval/loss": 0.5})  # of SFT, in the step's own row
    assert curves.points == {"eval/e/mean_reward": {2: 0.2}, "eval/loss": {4: 0.5}}


def test_a_step_that_cannot_be_is_left_out() -> None:
    curves, phases = Curves(max_cells=64), Phases(TRAINER, [{"began": 0.0}])
    for step in (1, 2, 10**15, 10**30):
        row = {"step": step, "time": 1.0, "time/step": 1.0, "loss": 2.0}
        curves.add(row)
        phases.add(row, trainer_seconds(row))
    assert (curves.last_step, curves.num_rows, phases.sums[0].num_steps) == (10**15, 3, 3)
    assert len(curves.table(10)["steps"]) <= 10


def test_gaps_and_values_that_are_not_finite() -> None:
    curves = Curves()
    for step, value in [(1, 1.0), (2, "nan"), (3, math.inf), (4, None), (6, 2.0)]:
        curves.add({"step": step, "time/step": 1.0, "loss": value})
    table = curves.table(10)
    assert table["mean"]["loss"] == [1, None, None, None, None, 2]
    assert curves.faults.not_finite == {"loss": 2}


def test_memory_is_bounded_whatever_the_number_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(series, "_PENDING", 128)

    ours = [tracemalloc.Filter(True, str(module.__file__)) for module in (series, phases_module)]

    def held() -> int:  # by these modules alone: other threads of the process allocate too
        return sum(trace.size for trace in tracemalloc.take_snapshot().filter_traces(ours).traces)

    def most_held(num_rows: int) -> int:
        curves, phases = Curves(max_cells=256), Phases(TRAINER, [{"began": 0.0}], most_blocks=256)
        tracemalloc.start()
        sizes = []
        for step in range(num_rows):
            row = {"step": step, "time": 2.0 * step, "time/step": 1.0, "time/wait": 0.5, "loss": 1.0}
            curves.add(row)
            phases.add(row, trainer_seconds(row))
            if step % 100 == 0:
                sizes.append(held())
        table = curves.table(100)
        sizes.append(held())
        tracemalloc.stop()
        assert len(table["steps"]) <= 100
        return max(sizes)

    few = most_held(1000)
    assert few > 10_000
    assert most_held(4000) < 1.3 * few


# ------------------------------------------------------------------------------------- accounting, timeline


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


def test_changes_of_roles_become_lanes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(tmp_path / "roles", [Life(0, 3)])
    live = LiveStatus(run, attempt=1)
    live.write(roles={"trainer": "starting", "inference-0": "starting"})
    live.write(roles={"trainer": "running", "inference-0": "starting"})
    live.write(roles={"trainer": "running", "inference-0": "starting"})
    assert (run / "metrics" / "roles.jsonl").read_text().count("\n") == 3
    rows = [json.loads(line) for line in (run / "metrics" / "roles.jsonl").read_text().splitlines()]
    for row, moment in zip(rows, (BEGAN + 5, BEGAN + 5, BEGAN + 15), strict=True):
        row["time"] = moment
    (run / "metrics" / "roles.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert report(capsys, run)[0] == 0
    roles = data_of(run / "report.html")["runs"][0]["lanes"]["roles"]
    assert roles["trainer"] == [["starting", 0.0, 10.0], ["running", 10.0, 17.0]]
    assert roles["inference-0"] == [["starting", 0.0, 17.0]]


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


def test_waits_are_placed_and_bounded() -> None:
    stats = StepStats(0.0)
    stats.add_wait("rollouts", 0.0, 1.0)
    stats.add_wait("rollouts", 1.001, 2.0)
    stats.add_wait("weights", 2.5, 3.0)
    row = stats.drain(4.0, [("load", 1.5, 1.75)])
    assert row["time/wait_rollouts"] == pytest.approx(1.999)
    assert row["spans"] == [["wait_rollouts", 4.0, 2.0], ["load", 2.5, 0.25], ["wait_weights", 1.5, 0.5]]
    many = joined([("a" if i % 2 else "b", float(i), i + 0.5) for i in range(1000)])
    assert len(many) <= MOST_SPANS and min(s[1] for s in many) == 0 and max(s[2] for s in many) == 999.5


# -------------------------------------------------------------------------------------------------- bad input


def test_no_run_is_refused_and_nothing_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "folder").mkdir()
    code, _, err = report(capsys, tmp_path / "folder")
    assert code == 2 and "no run" in err and str(tmp_path / "folder") in err
    assert list((tmp_path / "folder").iterdir()) == []
    code, _, err = report(capsys, tmp_path / "absent")
    assert code == 2 and "no run" in err


def test_a_page_that_cannot_be_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(tmp_path / "run", [Life(0, 2)])
    code, _, err = report(capsys, run, "--output", tmp_path / "none" / "x.html")
    assert code == 2 and "is no directory" in err
    code, _, err = report(capsys, run, "--output", tmp_path)
    assert code == 2 and "name a file" in err


def test_an_existing_page_is_replaced_whole(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, page = make_run(tmp_path / "run", [Life(0, 2)]), tmp_path / "page.html"
    page.write_text("old")
    with page.open() as old:
        assert report(capsys, run, "--output", page)[0] == 0
        assert old.read() == "old"  # another file took the name: a reader of the old one is not disturbed
    assert page.read_text().startswith("<!doctype html>")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["page.html", "run"]


def test_half_written_foreign_and_broken_directories(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(tmp_path / "run", [Life(0, 4, outcome=None)])
    add_batches(run, [1, 2])
    (run / "rollouts" / "step_000002" / "rank_0000.safetensors").write_bytes(b"short")
    with (run / "metrics" / "trainer.jsonl").open("ab") as file:
        file.write(b'[1, 2]\n\xff\xfe\n{"step": "x", "time/step": 1}\n{"step": 5, "time": "nan", "time/step"')
    with (run / "attempts.jsonl").open("ab") as file:
        file.write(b'{"attempt": 2, "began": null, "seconds": 7, "nodes": [], "later": {}}\n{"atte')
    code, found, _ = report(capsys, run)
    assert code == 0
    notes = "\n".join(found["runs"][0]["notes"])
    assert "3 torn or foreign lines" in notes and "batch 2" in notes and "token ids are shown" in notes
    (run / "run.yaml").write_text("kind: [rl\n")
    for name in ("metrics/trainer.jsonl", "metrics/orchestrator.jsonl", "attempts.jsonl"):
        (run / name).unlink()
    (run / "metrics" / "trainer.jsonl").symlink_to("trainer.jsonl")
    code, found, _ = report(capsys, run)
    assert code == 0 and "run.yaml" in found["runs"][0]["notes"][0]
    assert "metrics/trainer.jsonl: cannot be read: Too many levels" in "\n".join(found["runs"][0]["notes"])
    assert main(["metrics", str(run)]) == 2 and "trainer.jsonl cannot be read" in capsys.readouterr().err


def test_integers_that_no_float_holds_are_not_finite(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, huge = make_run(tmp_path / "run", [Life(0, 4, outcome=None)]), 10**400
    for name in ("trainer", "orchestrator", "roles", "gpus"):
        with (run / "metrics" / f"{name}.jsonl").open("a") as file:
            file.write(
                json.dumps({"step": 5, "time": huge, "time/step": huge, "loss": huge, "reward/mean": huge}) + "\n"
            )
    with (run / "attempts.jsonl").open("a") as file:
        file.write(json.dumps({"attempt": 2, "began": huge, "ended": huge, "seconds": {"run": huge}}) + "\n")
    (run / "status.json").write_text(json.dumps({"attempt": 2, "time": huge, "step": huge, "max_steps": huge}))
    for verb in (
        ["report", str(run), "--json"],
        ["metrics", str(run)],
        ["status", str(run)],
        ["diff", str(run), str(run)],
        ["usage", str(run)],
    ):
        assert main(verb) == 0, verb
    capsys.readouterr()
    assert "not finite: time/step (1 rows), loss (1 rows)" in "\n".join(report(capsys, run)[1]["runs"][0]["notes"])


def test_nothing_of_a_rollout_ends_the_data_and_secrets_stay_hidden(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run(tmp_path / "run", [Life(0, 3)])
    evil = "</script><script>document.title='run'</script><!--"
    add_samples(run, [evil, "\u2028 &amp; \ud83d"])
    assert report(capsys, run)[0] == 0
    text = (run / "report.html").read_text(encoding="utf-8")
    assert evil not in text and text.count("</script>") == 2 + len(SCRIPTS)  # the trouble's, the data, ours
    assert "sk-hidden" not in text
    assert evil in [row["completion"] for row in data_of(run / "report.html")["runs"][0]["rollouts"]]


def test_a_sample_that_is_no_utf8_ends_nobody(tmp_path: Path) -> None:
    log = SampleLog(tmp_path / "samples.jsonl", 2)
    log.write(1, [{"completion": "half a pair: \ud83d"}])
    log.close()
    assert json.loads((tmp_path / "samples.jsonl").read_text())["completion"] == "half a pair: ?"


# --------------------------------------------------------------------------------------- several runs, size


def test_runs_of_one_trainer_come_with_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    parent = make_run(tmp_path / "many", [Life(0, 4)])
    child = make_run(parent / "run_a", [Life(0, 2)])
    (child / "metrics" / "trainer.jsonl").unlink()  # the parent's trainer writes of all its runs
    writer = MetricsWriter(parent / "metrics" / "trainer.jsonl")
    for step, own in ((5, 1), (6, 2)):
        log_at(writer, step, BEGAN + 30 + step, loss=0.25 * own, **{"run": "run_a", "run/step": own, "time/step": 1.0})
    writer.close()
    code, found, _ = report(capsys, parent)
    assert code == 0 and [run["name"] for run in found["runs"]] == ["many", "many/run_a"]
    curves = data_of(parent / "report.html")["runs"][1]["curves"]["trainer"]
    assert (curves["steps"], curves["mean"]["loss"]) == ([1, 2], [0.25, 0.5])
    of_parent = data_of(parent / "report.html")["runs"][0]["curves"]["trainer"]
    assert of_parent["steps"][-2:] == [5, 6] and of_parent["mean"]["loss"][-2:] == [None, None], "nobody's own loss"


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


def test_several_runs_state_what_they_share_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for lr in (1e-6, 3e-6):
        name = f"lr{lr:g}"
        make_run(tmp_path / "sweep" / name, [Life(0, 3)], config=config_of(name, trainer__optim__lr=lr))
    code, found, _ = report(capsys, tmp_path / "sweep")
    assert code == 0 and [run["name"] for run in found["runs"]] == ["lr1e-06", "lr3e-06"]
    data = data_of(tmp_path / "sweep" / "report.html")
    assert [run["config"]["trainer.optim.lr"] for run in data["runs"]] == [1e-6, 3e-6]
    assert data["common"]["trainer.num_ranks"] == 2 and "trainer.num_ranks" not in data["runs"][0]["config"]


def test_a_thousand_steps_stay_small(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(tmp_path / "long", [Life(0, 1000)])
    add_batches(run, range(1, 60), sequences=64)
    code, found, _ = report(capsys, run)
    assert code == 0 and found["bytes"] < 5e6
    facts = data_of(run / "report.html")["runs"][0]
    assert facts["rollout_facts"]["stored_steps"] == 59 and len(facts["rollouts"]) > 100
    kinds = {row["kind"] for row in facts["rollouts"]}
    assert kinds == {"best", "worst", "random"}


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


def test_logged_tokens_with_figures_that_are_not_finite(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(tmp_path / "run", [Life(0, 4)])
    row = {"step": 2, "env": 0, "ids": [5], "logprobs": [-1.0], "trainer": [-math.inf], "versions": [1], "trained": [1]}
    row |= {"sample": 1, "group": 1, "reward": math.inf, "advantage": "nan", "temperature": 1.0, "num_tokens": 1}
    foreign = {**row, "step": [2]}
    (run / "metrics" / "tokens.jsonl").write_text(f"{json.dumps(row)}\n{json.dumps(foreign)}\n")
    code, _, _ = report(capsys, run)
    [shown] = data_of(run / "report.html")["runs"][0]["rollouts"]
    assert code == 0 and (shown["reward"], shown["advantage"], shown["trainer"]) == (None, None, [None])


def test_a_log_of_tokens_of_any_length_is_read_in_little_memory(tmp_path: Path) -> None:
    def most_held(num_steps: int) -> int:
        row = {"env": 0, "ids": [5] * 300, "logprobs": [-1.5] * 300, "trainer": [-1.5] * 300, "versions": [1] * 300}
        row |= {"trained": [1] * 300, "sample": 1, "group": 1, "reward": 1.0, "advantage": 0.5, "temperature": 1.0}
        text = json.dumps(row | {"num_tokens": 300})[1:]
        paths = RunPaths(tmp_path / str(num_steps))
        paths.metrics("tokens").parent.mkdir(parents=True)
        paths.metrics("tokens").write_text("".join(f'{{"step": {n}, {text}\n' for n in range(num_steps)))
        tracemalloc.start()
        chosen = choose_rollouts(paths, ["e"], "m", 10**6)
        most = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert [one["step"] for one in chosen.rollouts[:2]] == [0, num_steps - 1]
        return most

    few = most_held(100)
    assert most_held(600) < 2 * few


def test_a_run_that_cannot_be_read_is_named_and_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    mine, theirs = (make_run(tmp_path / "out" / name, [Life(0, 4)]) for name in ("mine", "theirs"))
    real = run_hours.list_children

    def list_children(path: Path) -> list[str]:
        if path == theirs:
            raise PermissionError(13, "Permission denied", str(path))
        return real(path)

    monkeypatch.setattr(run_hours, "list_children", list_children)
    code, found, said = report(capsys, tmp_path / "out")
    assert code == 0 and [run["path"] for run in found["runs"]] == [str(mine)]
    assert (found["left_out"], found["unread"][0]["name"]) == (1, "theirs") and "theirs left out: " in said
    assert main(["usage", str(tmp_path / "out")]) == 0
    streams = capsys.readouterr()
    assert "mine" in streams.out and "theirs left out: " in streams.err
    code, _, said = report(capsys, theirs, "--output", tmp_path / "x.html")
    assert code == 2 and "none of" in said and not (tmp_path / "x.html").exists()
