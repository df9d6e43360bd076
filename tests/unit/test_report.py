"""`prime-hpc report`: what it makes of run directories, whole, torn, foreign or long. The page itself is opened in
test_report_page.py."""

import json
import math
import re
import shutil
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from prime_hpc.cli import main
from prime_hpc.observe.metric_names import is_known
from prime_hpc.observe.metrics import MetricsWriter
from prime_hpc.orchestrator.metrics import MOST_SPANS, SampleLog, StepStats, joined
from prime_hpc.report import phases as phases_module
from prime_hpc.report import run_hours, series
from prime_hpc.report.page import SCRIPTS
from prime_hpc.report.phases import TRAINER, Phases, trainer_seconds
from prime_hpc.report.rollouts import choose_rollouts
from prime_hpc.report.series import Curves
from prime_hpc.store.run_paths import RunPaths
from prime_hpc.supervisor.status_file import LiveStatus
from tests.support.made_runs import BEGAN, Life, add_batches, add_samples, config_of, log_at, make_run

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


def test_the_last_value_is_that_of_the_last_step_alone() -> None:
    """Of a long run `report` gave the mean of the last hundreds of steps for it, and `diff` the value."""
    curves = Curves(max_cells=4)
    for step in range(1, 14):
        curves.add({"step": step, "time/step": 1.0, "loss": float(step)} | ({"kl": step / 10} if step % 3 == 0 else {}))
    assert curves.last_values() == {"time/step": 1.0, "loss": 13.0, "kl": 1.2}
    curves.add({"step": 12, "time/step": 1.0, "loss": 40.0})
    found = curves.last_values()
    assert (found["loss"], found["kl"]) == (40.0, pytest.approx(0.9)), "its next value is still to come"


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
    rows = [(1, 1.0), (2, "nan"), (3, math.inf), (4, None), (6, 2.0), (7, 4), (8, True), (9, 10**400)]
    for first in range(len(rows)):  # whatever a metric is in the first row, it may be something else in the next one
        curves = Curves()
        for number, (_, value) in enumerate(rows[first:] + rows[:first]):
            curves.add({"step": number, "time/step": 1.0, "loss": value})
        table = curves.table(10)
        means = table["mean"]["loss"][-first:] + table["mean"]["loss"][:-first] if first else table["mean"]["loss"]
        assert means == [1, None, None, None, 2, 4, None, None]
        assert curves.faults.not_finite == {"loss": 3}


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


def test_changes_of_roles_become_lanes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(tmp_path / "roles", [Life(0, 3)])
    live = LiveStatus(run, attempt=1)
    live.write(roles={"trainer": "starting", "inference-0": "starting"})
    live.write(roles={"trainer": "running", "inference-0": "starting"})
    live.write(roles={"trainer": "running", "inference-0": "starting"})
    assert (run / "metrics" / "roles.jsonl").read_text().count("\n") == 3
    live.write(now=True, loss=float("nan"))
    assert '"loss": "nan"' in (run / "status.json").read_text(), "NaN is no JSON"
    rows = [json.loads(line) for line in (run / "metrics" / "roles.jsonl").read_text().splitlines()]
    for row, moment in zip(rows, (BEGAN + 5, BEGAN + 5, BEGAN + 15), strict=True):
        row["time"] = moment
    (run / "metrics" / "roles.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert report(capsys, run)[0] == 0
    roles = data_of(run / "report.html")["runs"][0]["lanes"]["roles"]
    assert roles["trainer"] == [["starting", 0.0, 10.0], ["running", 10.0, 17.0]]
    assert roles["inference-0"] == [["starting", 0.0, 17.0]]


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
    assert (found["left_out"], found["unread"][0]["name"]) == (1, "theirs")
    assert f"theirs left out: {theirs}: Permission denied\n" in said
    assert main(["usage", str(tmp_path / "out")]) == 0
    streams = capsys.readouterr()
    assert "mine" in streams.out and f"theirs left out: {theirs}: Permission denied\n" in streams.err
    code, _, said = report(capsys, theirs, "--output", tmp_path / "x.html")
    assert (
        code == 2
        and f"none of {theirs} can be read: {theirs}: Permission denied\n" in said
        and not (tmp_path / "x.html").exists()
    )


def test_the_curves_of_the_page_are_metrics_that_are_written() -> None:
    """The KL to a reference model had a curve of a name that no trainer writes."""
    script = (Path(phases_module.__file__).parent / "assets" / "charts.js").read_text()
    named = re.findall(r'\["(trainer|orchestrator)", "([^"]+)",', script)
    assert len(named) > 40
    assert [f"{role}.{name}" for role, name in named if not is_known(f"{role}.{name}")] == []


def test_of_copies_that_went_on_the_sums_count_each_attempt_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An archive beside the run that went on from it, and another one that did so too."""
    whole = make_run(tmp_path / "whole", FOUR_LIVES[:2])
    first, last = (whole / "attempts.jsonl").read_text().splitlines()
    for name, attempts in {"archive": [first], "other": [first, json.dumps(json.loads(last) | {"pid": 9})]}.items():
        shutil.copytree(whole, tmp_path / name)
        (tmp_path / name / "attempts.jsonl").write_text("\n".join([*attempts, ""]))
    page = tmp_path / "page.html"
    named = (tmp_path / name for name in ("archive", "whole", "other"))
    code, _, _ = report(capsys, *named, "--output", page)
    runs = {run["name"]: run for run in data_of(page)["runs"]}
    assert code == 0 and list(runs) == ["archive", "whole", "other"], "as they were named"
    assert runs["archive"]["copy_of"] == "other" or runs["archive"]["copy_of"] == "whole"
    assert runs["whole"]["copy_of"] is None and runs["whole"]["sums"] is None
    sums, both = runs["other"]["sums"], runs["other"]["figures"]
    assert (sums["figures"]["attempts"], both["attempts"]) == (1.0, 2.0)
    (row,) = runs["other"]["accounting"]["rows"][1:]
    assert sums["figures"]["hours"] == pytest.approx(row["wall"] / 3600) and sums["total"]["wall"] == row["wall"]
    assert any("went on from a copy of whole" in note for note in runs["other"]["notes"])
