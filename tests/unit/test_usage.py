"""`prime-hpc usage`: hours of made-up runs, added up by run, sweep and user; with and without Slurm's accounting."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from prime_hpc.cli import main
from prime_hpc.launch.monitor.status import status_of
from prime_hpc.report import usage
from prime_hpc.report.run_view import limits_for, view_run
from prime_hpc.report.usage import NO_SWEEP, grouped, read_usage, totals
from prime_hpc.slurm.queue_facts.job_lives import JobLife
from prime_hpc.store.attempts import begin, write_attempt
from prime_hpc.store.run_dirs import read_rows
from tests.support.fake_slurm import FakeSlurm
from tests.support.made_runs import BEGAN, STEP_S, TRAINER, Life, config_of, make_run, make_runs_of_one_trainer

GPUS = {"gpus": 8.0, "cpus": 64.0, "nodes": 2.0}
ONE = [Life(0, 100, allocated=GPUS, gap_s=0)]
"""10 s of start, 200 s of steps, 1 s at the end, with 8 GPUs."""
TWO = [Life(0, 100, "failed", "x", allocated=GPUS, gap_s=0), Life(60, 200, allocated=GPUS, gap_s=40)]
WALL = 10 + 100 * STEP_S + 1
TRAIN = TRAINER["forward_backward"] + TRAINER["optim"]


def asked(capsys: pytest.CaptureFixture[str], *words: object) -> dict[str, Any]:
    assert main(["usage", *map(str, words), "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def with_jobs(run: Path, *jobs: str) -> Path:
    """The run, with these jobs for its attempts."""
    rows = read_rows(run / "attempts.jsonl")
    lines = [json.dumps(row | {"job_id": job}) for row, job in zip(rows, jobs, strict=True)]
    (run / "attempts.jsonl").write_text("\n".join(lines) + "\n")
    return run


def life(job: str, start: float, end: float) -> JobLife:
    """Of a job with the devices of `GPUS`."""
    return JobLife(frozenset({job}), start, end, 64.0, 8.0, 64 * (end - start), 8 * (end - start))


def test_a_run_of_one_attempt(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    [row] = asked(capsys, make_run(tmp_path / "one", ONE))["rows"]
    assert (row["name"], row["unit"], row["runs"], row["attempts"], row["by_slurm"]) == ("one", "GPU", 1, 1, 0)
    assert row["charged_hours"] == pytest.approx(8 * WALL / 3600)
    assert row["effective_hours"] == pytest.approx(8 * 100 * TRAIN / 3600)
    assert (row["lost_hours"], row["queued_hours"]) == (0, 0)


def test_what_was_done_again_is_lost_and_the_gap_is_queued(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    [row] = asked(capsys, make_run(tmp_path / "two", TWO))["rows"]
    assert row["queued_hours"] == pytest.approx(40 / 3600)
    assert row["lost_hours"] == pytest.approx(8 * 40 * (STEP_S - TRAINER["wait"]) / 3600)
    assert row["effective_hours"] == pytest.approx(8 * 200 * TRAIN / 3600)
    assert row["charged_hours"] == pytest.approx(8 * (2 * WALL + 40 * STEP_S) / 3600)


def test_the_first_job_s_wait_is_queued_also_after_a_resume(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`submit.json` is that of the newest submission."""
    run = make_run(tmp_path / "again", [])
    for number, sent in ((1, BEGAN - 7200), (2, BEGAN + 500)):
        record = {"token": "t", "state": "sent", "job_id": str(number), "time": sent, "command": [], "layout": "het"}
        (run / "submit.json").write_text(json.dumps(record))
        attempt = begin(run / "attempts.jsonl", incarnation=number, why="", resume_step=None, job_id=str(number))
        attempt.began, attempt.allocated = sent + 7200 * (number == 1) + 60, GPUS
        attempt.ended, attempt.outcome = attempt.began + 100, "failed"
        write_attempt(run / "attempts.jsonl", attempt)
        [row] = asked(capsys, run)["rows"]
        assert row["queued_hours"] == pytest.approx((7260 + (number == 2) * 400) / 3600)


def test_rows_by_run_sweep_and_user_and_their_total(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("a", "b"):
        make_run(tmp_path / "out" / "lr" / name, ONE)
    (tmp_path / "out" / "lr" / "points.jsonl").write_text("")
    make_run(tmp_path / "out" / "alone", TWO)
    make_run(tmp_path / "out" / "cpu", [Life(0, 10, gap_s=0)])
    rows = {row["name"]: row for row in asked(capsys, tmp_path / "out")["rows"]}
    assert set(rows) == {"alone", "cpu", "lr/a", "lr/b"}
    assert rows["cpu"]["unit"] == "process", "neither Slurm nor the job's environment tells what it held"
    found = asked(capsys, tmp_path / "out", "--by", "sweep")
    sweeps = {(row["name"], row["unit"]): row for row in found["rows"]}
    assert set(sweeps) == {("lr", "GPU"), (NO_SWEEP, "GPU"), (NO_SWEEP, "process")}
    assert sweeps["lr", "GPU"]["runs"] == 2
    assert sweeps["lr", "GPU"]["charged_hours"] == pytest.approx(2 * 8 * WALL / 3600)
    total = {row["unit"]: row for row in found["total"]}
    assert total["GPU"]["charged_hours"] == pytest.approx(
        sum(rows[n]["charged_hours"] for n in ("alone", "lr/a", "lr/b"))
    )
    assert (total["GPU"]["runs"], total["process"]["runs"]) == (3, 1)
    [gpu, _] = asked(capsys, tmp_path / "out", "--by", "user")["rows"]
    assert gpu["name"] == (tmp_path / "out").owner() and gpu["runs"] == 3
    assert main(["usage", str(tmp_path / "out")]) == 0
    said = capsys.readouterr().out
    assert "total" in said and "CHARGED" in said and "what the jobs held" in said
    for by, name in (("user", gpu["name"]), ("sweep", "lr")):
        assert main(["usage", str(tmp_path / "out"), "--by", by]) == 0
        head, *lines = (line.split() for line in capsys.readouterr().out.splitlines())
        assert head[:2] == [by.upper(), "RUNS"] and name in [line[0] for line in lines]


def test_since_takes_the_part_of_an_attempt(tmp_path: Path) -> None:
    run = make_run(tmp_path / "two", TWO)
    second = BEGAN + WALL + 40

    def of(since: float) -> usage.Usage | None:
        return next(iter(read_usage([(run, "two")], tmp_path, since)), None)

    half = of(second - 20)
    assert half is not None and half.queued == pytest.approx(20 / 3600)
    assert half.charged == pytest.approx(8 * (WALL + 40 * STEP_S) / 3600) and (half.lost, half.attempts) == (0, 1)
    last = of(second + (WALL + 40 * STEP_S) / 2)
    assert last is not None and last.charged == pytest.approx(8 * (WALL + 40 * STEP_S) / 7200) and last.queued == 0
    assert of(second + 10_000) is None


def test_a_job_that_is_in_the_queue_again_holds_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its node died without a word: the attempt that wrote no end was charged for all the time of its wait."""
    fake = FakeSlurm(tmp_path)
    fake.use(monkeypatch)
    run = make_run(tmp_path / "one", [Life(0, 100, None, allocated=GPUS, gap_s=0)])
    with_jobs(run, fake.add(state="PENDING", reason="BeginTime", restarts=1, comment="prime-hpc:t"))
    record = {"token": "t", "state": "sent", "job_id": "100", "time": BEGAN, "command": ["submit"], "layout": "packed"}
    (run / "submit.json").write_text(json.dumps(record))
    [row] = asked(capsys, run)["rows"]
    figures = view_run(run, status_of(run), limits_for(1))["figures"]
    for charged in (row["charged_hours"], figures["GPU-hours charged"]):
        assert charged == pytest.approx(8 * (WALL - 1) / 3600, abs=0.01)


def test_words_of_since(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_run(tmp_path / "one", ONE)  # in September 2026
    assert len(asked(capsys, tmp_path / "one", "--since", "2026-09-01")["rows"]) == 1
    assert asked(capsys, tmp_path / "one", "--since", "2126-01-01T12:00")["rows"] == []
    assert asked(capsys, tmp_path / "one", "--since", "5000w")["rows"]
    assert main(["usage", str(tmp_path / "one"), "--since", "yesterday"]) == 2
    assert "36h, 7d, 4w" in capsys.readouterr().err
    assert main(["usage", str(tmp_path / "one"), "--by", "colour"]) == 2
    assert "none of run, sweep, user" in capsys.readouterr().err
    assert main(["usage", str(tmp_path / "none")]) == 2


def test_slurm_s_word_counts_and_what_began_no_attempt_is_charged_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = with_jobs(make_run(tmp_path / "one", ONE), "7")
    record = {"state": "sent", "job_id": "7", "successor": "8", "time": BEGAN - 5}
    (run / "submit.json").write_text(json.dumps(record))
    lives = [life("7", BEGAN - 5, BEGAN + WALL + 3), life("8", BEGAN + 500, BEGAN + 560)]
    monkeypatch.setattr(usage, "ask_lives", lambda paths: {run: lives})
    [found] = read_usage([(run, "one")], tmp_path)
    assert found.charged == pytest.approx(8 * (WALL + 8 + 60) / 3600) and found.by_slurm == 1
    [late] = read_usage([(run, "one")], tmp_path, BEGAN + 530)
    assert late.charged == pytest.approx(8 * 30 / 3600) and late.effective == 0


def test_more_runs_than_a_page_shows_are_read_one_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(usage, "AT_ONCE", 3)
    runs = [(make_run(tmp_path / f"r{i}", [Life(0, 2, allocated=GPUS)]), f"r{i}") for i in range(7)]
    asked_at_once: list[int] = []
    real = usage.ask_lives

    def ask(paths: list[Path]) -> dict[Path, list[JobLife]]:
        asked_at_once.append(len(paths))
        return real(paths)

    monkeypatch.setattr(usage, "ask_lives", ask)
    [total] = totals(grouped(read_usage(iter(runs), tmp_path), "run"))
    assert total.runs == 7 and asked_at_once == [3, 3, 1]


def test_a_run_that_is_torn_or_never_began_costs_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_run(tmp_path / "out" / "whole", ONE)
    (tmp_path / "out" / "torn").mkdir()
    (tmp_path / "out" / "torn" / "run.yaml").write_text("[")
    (tmp_path / "out" / "torn" / "attempts.jsonl").write_text('{"attempt": 1, "began"')
    (tmp_path / "out" / "fresh").mkdir()
    (tmp_path / "out" / "fresh" / "run.yaml").write_text("name: fresh\n")
    assert [row["name"] for row in asked(capsys, tmp_path / "out")["rows"]] == ["whole"]
    by_hand = tmp_path / "out" / "torn" / "attempts.jsonl"
    by_hand.write_text('{"attempt": 1, "ended": 5.0}\n{"attempt": 2, "began": 9.0, "ended": 9.0}\n')
    [_, row] = asked(capsys, tmp_path / "out")["rows"]
    assert (row["name"], row["charged_hours"], row["queued_hours"]) == ("torn", 0, pytest.approx(4 / 3600))
    evaluation = make_run(tmp_path / "eval", ONE, config=config_of("eval", kind="eval"))
    [row] = asked(capsys, evaluation)["rows"]
    assert row["charged_hours"] > 0 and row["effective_hours"] == 0


def test_runs_that_share_a_trainer_are_counted_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    parent = make_runs_of_one_trainer(tmp_path / "many", {"a": 1e-3, "b": 1e-4}, steps=20)
    runs = [parent, parent / "run_a", parent / "run_b"]
    for run in runs:
        with_jobs(run, "7")
    monkeypatch.setattr(usage, "ask_lives", lambda paths: {path: [life("7", BEGAN, BEGAN + 3600)] for path in paths})
    found = asked(capsys, parent)
    assert [(row["name"], row["charged_hours"]) for row in found["rows"]] == [("many", pytest.approx(1 * 64))]
    assert found["total"][0]["runs"] == 1 and found["left_out"] == []
    alone = asked(capsys, parent / "run_a")
    assert alone["rows"] == [] and [row["name"] for row in alone["left_out"]] == ["run_a"]
    assert f"prime-hpc usage {parent}" in alone["left_out"][0]["why"]


def test_lives_of_other_jobs_with_its_ids_and_attempts_that_slurm_does_not_know(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An old job's rows are purged, its id is another job's on the cluster that is asked."""
    run = with_jobs(make_run(tmp_path / "two", TWO), "7", "8")
    (run / "submit.json").write_text(json.dumps({"state": "sent", "job_id": "8", "time": BEGAN + WALL}))
    second = BEGAN + WALL + 40
    held = 8 * (2 * WALL + 40 * STEP_S) / 3600

    def of(*lives: JobLife) -> usage.Usage:
        monkeypatch.setattr(usage, "ask_lives", lambda paths: {run: list(lives)})
        [found] = read_usage([(run, "two")], tmp_path)
        return found

    newest = life("8", second, second + WALL + 40 * STEP_S)
    for foreign in ([], [life("7", BEGAN - 1e6, BEGAN - 9e5)], [life("7", BEGAN + 1e6, BEGAN + 2e6)]):
        found = of(newest, *foreign)
        assert found.charged == pytest.approx(held) and found.by_slurm == 0, "what it does not know is what was held"
    whole = of(newest, life("7", BEGAN, BEGAN + WALL))
    assert whole.charged == pytest.approx(held) and whole.by_slurm == 1
    assert usage.accounted_note([whole]) == "charged: as Slurm accounted for"
    assert of().charged == pytest.approx(held)


def test_a_copy_of_a_run_is_not_counted_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Restored from an archive beside the run, or copied to be safe; one that went on since has hours of its own."""
    out = tmp_path / "out"
    shutil.copytree(make_run(out / "a", ONE), out / "b")
    found = asked(capsys, out)
    assert [(row["name"], row["attempts"]) for row in found["rows"]] == [("a", 1)]
    assert [row["name"] for row in found["left_out"]] == ["b"] and "a copy of a" in found["left_out"][0]["why"]
    assert [row["name"] for row in asked(capsys, out / "b")["rows"]] == ["b"]
    shutil.copytree(out / "a", out / "c")
    assert main(["usage", str(out)]) == 0
    (said,) = capsys.readouterr().err.splitlines()
    assert "b and 1 more left out: a copy of a" in said


def test_of_copies_that_went_on_the_shared_attempts_count_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    whole = with_jobs(make_run(out / "whole", TWO), "7", "8")
    first, last = (whole / "attempts.jsonl").read_text().splitlines()
    alone = asked(capsys, whole)["rows"]
    for name, attempts in {
        "copy": [first],
        "other": [first, json.dumps(json.loads(last) | {"pid": 9, "job_id": "9"})],
    }.items():
        shutil.copytree(whole, out / name)
        (out / name / "attempts.jsonl").write_text("\n".join([*attempts, ""]))
    second = BEGAN + WALL + 40
    lives = [life("7", BEGAN, BEGAN + WALL), *(life(job, second, second + WALL + 40 * STEP_S) for job in ("8", "9"))]
    for of_slurm in (False, True):
        of = {"copy": lives[:1], "whole": lives[:2], "other": [lives[0], lives[2]]} if of_slurm else {}
        monkeypatch.setattr(usage, "ask_lives", lambda paths, of=of: {path: of.get(path.name, []) for path in paths})
        found = asked(capsys, out)
        assert [(row["name"], row["attempts"]) for row in found["rows"]] == [("other", 2), ("whole", 1)]
        assert [row["name"] for row in found["left_out"]] == ["copy"]
        assert found["rows"][0]["charged_hours"] == pytest.approx(alone[0]["charged_hours"])
        charged = sum(row["charged_hours"] for row in found["rows"])
        assert charged == pytest.approx(sum(one.gpu_s for one in lives) / 3600)


def test_what_cannot_be_read_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    make_run(out / "whole", ONE)
    config = make_run(out / "config", [Life(0, 10, gap_s=0)])
    (config / "run.yaml").write_text("kind: [")
    attempts = make_run(out / "attempts", ONE)
    (attempts / "attempts.jsonl").unlink()
    (attempts / "attempts.jsonl").mkdir()
    found = asked(capsys, out)
    assert [row["name"] for row in found["rows"]] == ["whole"]
    assert {row["name"] for row in found["left_out"]} == {"config", "attempts"}
    assert main(["usage", str(out)]) == 0
    streams = capsys.readouterr()
    assert f"config left out: {config / 'run.yaml'}:" in streams.err and ": YAML syntax: " in streams.err
    assert len(streams.err.splitlines()) == 2, "a line each"
    assert "attempts left out: " in streams.err and "whole" in streams.out


def test_a_folder_without_runs_has_cost_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty").mkdir()
    assert asked(capsys, tmp_path / "empty")["rows"] == []
    assert main(["usage", str(tmp_path / "empty")]) == 0
    assert capsys.readouterr().out == "no run has cost anything yet\n"
    assert main(["usage", str(tmp_path / "empty"), "--since", "2020-02-03T04:05"]) == 0
    assert capsys.readouterr().out == "no run has cost anything since 2020-02-03 04:05\n"
    assert main(["report", str(tmp_path / "empty")]) == 2
