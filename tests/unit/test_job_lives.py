"""Lives of jobs in Slurm's accounting, and the report's hours beside them."""

import json
import stat
import time
from pathlib import Path
from typing import Any

import pytest

from prime_hpc.cli import main
from prime_hpc.launch.monitor.run_facts import Queue
from prime_hpc.launch.monitor.status import status_of
from prime_hpc.report.accounting import Devices, account, charged_hours
from prime_hpc.report.phases import AttemptSums
from prime_hpc.report.spans import held_spans, own_lives
from prime_hpc.report.usage import read_usage
from prime_hpc.slurm.queue_facts.job_lives import JobLife, job_lives
from prime_hpc.store.run_dirs import IN_PLACE
from tests.support.made_runs import BEGAN, Life, make_run

SACCT = """
12|12|2026-01-31T10:00:00|2026-01-31T11:00:00|3600|billing=32,cpu=32,gres/gpu:h100=8,gres/gpu=8,mem=4G,node=2
12|12|2026-01-31T12:00:00|Unknown|60|billing=32,cpu=32,gres/gpu:h100=8,gres/gpu=8,mem=4G,node=2
20+0|20|2026-01-31T10:00:00|2026-01-31T10:10:00|600|cpu=4,gres/gpu:a100=4
20+1|21|2026-01-31T10:00:01|2026-01-31T10:10:10|600|cpu=8
30_7|37|2026-01-31T10:00:00|2026-01-31T10:00:30|20|cpu=2
40|40|Unknown|Unknown|0|
41|41|None|2026-01-31T10:00:30|0|
torn
"""


def at(clock: str) -> float:
    return time.mktime(time.strptime(f"2026-01-31T{clock}", "%Y-%m-%dT%H:%M:%S"))


def sacct(folder: Path, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sacct that gives this answer, and notes what it was asked."""
    (folder / "bin").mkdir()
    (folder / "answer").write_text(text.strip().replace("|", "\x1f") + "\n")
    program = folder / "bin" / "sacct"
    program.write_text(f"#!/bin/sh\necho \"$@\" >> '{folder}/asked'\ncat '{folder}/answer'\n")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", str(folder / "bin"), prepend=":")


def test_lives_of_jobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sacct(tmp_path, SACCT, monkeypatch)
    lives = job_lives(["12", "20", "30_7", "kubernetes:r"])
    assert "-j 12,20,30_7 " in (tmp_path / "asked").read_text(), "a run's pods are no job of Slurm's"
    by_name = {name: [life for life in lives if name in life.names] for name in ("12", "20", "21", "30_7", "37")}
    first, second = by_name["12"]
    assert (first.start, first.end, first.cpus, first.gpus) == (at("10:00:00"), at("11:00:00"), 32, 8)
    assert (second.start, second.end, second.gpu_s) == (at("12:00:00"), None, 480)
    [het] = by_name["20"]  # its components live together
    assert (het.start, het.end, het.cpus, het.gpus) == (at("10:00:00"), at("10:10:10"), 12, 4)
    assert (het.cpu_s, het.gpu_s) == (7200, 2400)
    [task] = by_name["30_7"]
    assert by_name["37"] == [task] and task.gpus is None and task.cpu_s == 40  # 10 s of its 30 it was suspended
    assert len(lives) == 4  # what never held a node has no life


def test_no_accounting_has_no_lives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert job_lives(["12"]) == []
    assert job_lives([]) == []


def life(start: float, end: float | None, job: str = "7", gpus: float | None = 4.0) -> JobLife:
    seconds = (end if end is not None else 1000.0) - start
    return JobLife(frozenset({job}), start, end, 8.0, gpus, 8.0 * seconds, (gpus or 0.0) * seconds)


def attempt(
    number: int, began: float, ended: float | None, following: str | None = None, **more: Any
) -> dict[str, Any]:
    row = {"attempt": number, "began": began, "ended": ended, "job_id": "7", "next": following}
    return row | {"allocated": {"nodes": 1.0, "cpus": 8.0, "gpus": 4.0}} | more


def hours(attempts: list[dict[str, Any]], lives: list[JobLife]) -> dict[str, Any]:
    sums = [AttemptSums() for _ in attempts]
    return account(
        attempts, sums, sums, Devices("GPU", 2, 2), submitted=0.0, until=1000.0, goes_on=True, ready={}, lives=lives
    )


def test_attempts_of_one_life_share_it_without_a_gap() -> None:
    rows = [attempt(1, 105.0, 200.0, IN_PLACE), attempt(2, 203.0, 300.0, "requeue"), attempt(3, 410.0, 480.0)]
    lives = [life(100.0, 302.0), life(400.0, 485.0)]
    spent = hours(rows, lives)
    assert [(row["began"], row["wall"]) for row in spent["rows"]] == [(100, 103), (203, 99), (400, 85)]
    assert [row["waited"] for row in spent["rows"]] == [100, 0, 98]
    assert spent["total"]["held_hours"] == pytest.approx((202 + 85) * 4 / 3600)
    assert spent["slurm"]["hours"] == pytest.approx((202 + 85) * 4 / 3600)
    assert spent["slurm"]["difference"] == pytest.approx(0)
    for row in spent["rows"]:
        assert sum(row["trainer"].values()) == pytest.approx(row["wall"], abs=0.01)


def test_lives_close_together_and_an_end_before_the_last_word() -> None:
    """As `scontrol requeue` leaves it: for Slurm the life is over when its processes are told to end."""
    rows = [attempt(1, 101.5, 121.6, "slurm"), attempt(2, 134.0, 160.0)]
    lives = [life(100.0, 117.0), life(133.0, 165.0)]
    sums = [AttemptSums(first=105.0, last=121.0, seconds={"train": 15.0, "wait": 1.0}), AttemptSums()]
    spent = account(
        rows, sums, sums, Devices("GPU", 2, 2), submitted=0.0, until=0.0, goes_on=False, ready={}, lives=lives
    )
    assert [(row["began"], row["wall"]) for row in spent["rows"]] == [(100, 17), (133, 32)]
    assert spent["rows"][1]["waited"] == 16
    first = spent["rows"][0]["trainer"]
    assert (first["start"], first["wait"], first["train"], first["end"]) == (5, 0, 12, 0)
    assert spent["slurm"]["difference"] == pytest.approx(0)


def test_an_attempt_of_which_nobody_says_when_it_began_is_charged_for_nothing() -> None:
    torn = attempt(1, 0.0, 200.0)
    del torn["began"]
    rows = hours([torn, attempt(2, 300.0, 400.0)], [])["rows"]
    assert [(row["began"], row["wall"]) for row in rows] == [(200, 0), (300, 100)]


def test_an_attempt_that_wrote_no_end_ends_with_its_job() -> None:
    spent = hours([attempt(1, 105.0, None)], [life(100.0, 350.0)])
    [row] = spent["rows"]
    assert (row["wall"], row["ended"]) == (250, 350)
    [row] = hours([attempt(1, 105.0, None)], [life(100.0, None)])["rows"]
    assert row["ended"] is None and row["outcome"] == "under way"


def test_a_life_in_which_no_attempt_began_is_charged_too() -> None:
    spent = hours([attempt(1, 105.0, 200.0)], [life(20.0, 30.0), life(100.0, 200.0)])
    assert spent["slurm"]["without_attempt"] == pytest.approx(10 * 4 / 3600)
    assert spent["slurm"]["lives"] == 2 and spent["slurm"]["difference"] == pytest.approx(0)


def test_a_job_that_comes_again_after_the_last_attempt_is_the_runs() -> None:
    """And one that has its id later, or on another cluster, is not."""
    rows = [attempt(1, 105.0, 200.0), attempt(2, 305.0, 400.0, job_id="8")]
    record = {"job_id": "8", "successor": "9", "time": 250.0}
    mine = [life(100.0, 200.0), life(210.0, 220.0), life(300.0, 400.0, "8"), life(900.0, 910.0, "9")]
    others = [life(20.0, 30.0), life(900.0, 910.0), life(10.0, 20.0, "8")]
    assert own_lives([*mine, *others], rows, record) == mine
    assert own_lives(mine, rows, {}) == mine[:3]


def test_figures_of_a_run_that_slurm_knows_in_part() -> None:
    rows = [attempt(1, 105.0, 200.0), attempt(2, 305.0, 400.0, job_id="8")]
    spent = hours(rows, [life(300.0, 400.0, "8")])
    assert spent["slurm"]["unknown_attempts"] == 1 and spent["slurm"]["difference"] == pytest.approx(0)
    assert charged_hours(spent) == pytest.approx((95 + 100) * 4 / 3600)


def test_an_attempt_that_nobody_accounted_for_counts_by_its_roles() -> None:
    rows = [attempt(1, 105.0, 200.0, allocated={}), attempt(2, 305.0, 400.0, job_id="8")]
    spent = hours(rows, [life(300.0, 400.0, "8")])
    assert spent["rows"][0]["held_hours"] is None
    assert charged_hours(spent) == pytest.approx(spent["rows"][0]["device_hours"] + 100 * 4 / 3600)
    assert charged_hours(hours(rows[:1], [])) is None, "nothing says what its job held"


def test_what_the_attempts_say_is_held_against_what_slurm_charged() -> None:
    row = attempt(1, 100.0, 200.0, allocated={"nodes": 1.0, "cpus": 8.0, "gpus": 3.0})
    assert hours([row], [life(100.0, 200.0)])["slurm"]["difference"] == pytest.approx(-0.25)


def test_gpus_of_a_heterogeneous_job_come_from_the_accounting() -> None:
    row = attempt(1, 100.0, 200.0, allocated={"nodes": 2.0, "cpus": 8.0})
    assert hours([row], [life(100.0, 200.0)])["total"]["held_hours"] == pytest.approx(400 / 3600)
    assert hours([row], [])["total"]["held_hours"] is None
    # a site that accounts for no GPUs says nothing about their hours
    assert hours([row], [life(100.0, 200.0, gpus=None)])["slurm"] is None


def test_without_accounting_the_jobs_environment_tells_its_begin() -> None:
    held = {"nodes": 1.0, "cpus": 8.0, "gpus": 4.0, "since": 95.0}
    rows = [attempt(1, 105.0, 200.0, IN_PLACE, allocated=held), attempt(2, 203.0, 300.0, allocated=held)]
    assert [span.since for span in held_spans(rows, [])] == [95.0, None]
    spent = hours(rows, [])
    assert [row["began"] for row in spent["rows"]] == [95, 203] and spent["slurm"] is None


def test_lives_of_other_jobs_are_nobodys() -> None:
    [span] = held_spans([attempt(1, 105.0, 200.0)], [life(100.0, 210.0, job="8"), life(400.0, 500.0)])
    assert span.life is None and span.since is None


def test_the_report_asks_once_for_all_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = [make_run(tmp_path / name, [Life(0, 5, allocated={"nodes": 1.0, "cpus": 8.0})]) for name in ("a", "b")]
    for run, job in zip(runs, ("7", "8"), strict=True):
        file = run / "attempts.jsonl"
        row = json.loads(file.read_text())
        file.write_text(json.dumps(row | {"job_id": job}) + "\n")
        length = row["ended"] - row["began"]
    clock = [time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(BEGAN + shift)) for shift in (-3, length + 4)]
    text = "\n".join(f"{job}|{job}|{clock[0]}|{clock[1]}|{length + 7:.0f}|cpu=8" for job in ("7", "8"))
    sacct(tmp_path, text, monkeypatch)
    assert main(["report", *map(str, runs), "--output", str(tmp_path / "x.html"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["runs"]
    for one in found:
        assert one["accounting"]["slurm"]["lives"] == 1
        assert abs(one["accounting"]["slurm"]["difference"]) < 0.02
    [asked] = (tmp_path / "asked").read_text().splitlines()
    assert "-j 7,8" in asked


def test_each_cluster_is_asked_about_the_runs_that_were_sent_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = [make_run(tmp_path / name, [Life(0, 5)]) for name in ("here", "there", "gone")]
    for run, job, other in zip(runs, ("7", "8", "9"), (None, "north", "south"), strict=True):
        record = {"token": "t", "state": "sent", "job_id": job, "other_cluster": other, "time": BEGAN}
        (run / "submit.json").write_text(json.dumps(record))
    (runs[2] / "attempts.jsonl").unlink()
    sacct(tmp_path, SACCT, monkeypatch)
    list(read_usage([(run, run.name) for run in runs[:2]], tmp_path))
    asked = (tmp_path / "asked").read_text().splitlines()
    assert sorted(line.startswith("--clusters=north ") for line in asked) == [False, True]
    assert all("-j 8" in line if "north" in line else "-j 7" in line for line in asked)
    status_of(runs[2], ask=lambda wanted, by_token: Queue())  # what became of a job that Slurm does not know any more
    assert (tmp_path / "asked").read_text().splitlines()[-1].startswith("--clusters=south ")
