"""`ckpt.interval = auto` with a clock of our own: when it saves, and what makes it change its mind."""

import json
from itertools import pairwise
from pathlib import Path

import pytest

from prime_hpc.config import Experiment
from prime_hpc.store.checkpoint.optimal_interval import DAY_S, HOUR_S
from prime_hpc.store.run_paths import RunPaths
from prime_hpc.trainer.checkpointing.checkpointer import SaveFigures
from prime_hpc.trainer.checkpointing.save_interval import FIRST_SAVE_S, SaveSchedule, build_schedule


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def saves(schedule: SaveSchedule, clock: Clock, num_steps: int, step_s: float, save_s: float) -> list[int]:
    """Drive a run; the steps after which it saved."""
    saved = []
    for step in range(1, num_steps + 1):
        clock.now += step_s
        if schedule.due():
            schedule.began()
            clock.now += save_s
            schedule.measured(SaveFigures(step, 1, save_s, save_s))
            saved.append(step)
    return saved


def gaps(saved: list[int]) -> set[int]:
    return {b - a for a, b in pairwise(saved[1:])}


def test_it_settles_at_the_best_interval() -> None:
    clock = Clock()
    schedule = SaveSchedule(mtbf=10 * HOUR_S, restart_s=0, guessed_save_s=5, clock=clock)
    saved = saves(schedule, clock, 400, step_s=30, save_s=10)
    assert saved[0] == FIRST_SAVE_S / 30  # sqrt(2 * 10 h * 5 s) is longer: the guess is not trusted that far
    best = (2 * 10 * HOUR_S * 10) ** 0.5 / 30
    assert gaps(saved) <= {round(best), round(best) + 1, round(best) - 1}
    assert schedule.plan is not None and schedule.plan.loss_percent == pytest.approx(
        100 * (20 / 36000) ** 0.5, rel=0.05
    )


def test_a_request_counts_and_dearer_saves_come_rarer() -> None:
    clock = Clock()
    schedule = SaveSchedule(mtbf=10 * HOUR_S, restart_s=0, guessed_save_s=1, clock=clock)
    assert not schedule.due()
    cheap = saves(schedule, clock, 200, step_s=30, save_s=1)
    clock.now += 30
    schedule.began()  # somebody asked for one
    assert not schedule.due()
    dear = saves(schedule, clock, 400, step_s=30, save_s=40)
    assert max(gaps(cheap)) < min(gaps(dear[4:]))


def test_news_only_when_there_are_some() -> None:
    clock = Clock()
    schedule = SaveSchedule(mtbf=10 * HOUR_S, restart_s=0, guessed_save_s=1, clock=clock)
    assert schedule.news() is None
    saves(schedule, clock, 60, step_s=30, save_s=10)
    said = schedule.news()
    assert said is not None and "ckpt.interval = auto: every" in said and "expected loss" in said
    assert schedule.news() is None


def test_facts_of_the_site_the_attempts_and_the_job(tmp_path: Path) -> None:
    rows = [
        {"attempt": 1, "began": 0.0, "ended": DAY_S, "outcome": "node_lost", "seconds": {"start": 90.0}},
        {"attempt": 2, "began": DAY_S, "ended": None, "nodes": {"trainer": ["a", "b"], "inference[0]": ["b", "c"]}},
    ]
    (tmp_path / "attempts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "site.yaml").write_text("name: here\nfailures_per_1000_node_days: 10\n")
    exp = Experiment.model_validate({"ckpt": {"interval": "auto"}, "slurm": {"restart": {"signal_lead_s": 30}}})
    job = {"SLURM_JOB_ID": "7", "SLURM_JOB_START_TIME": "1000", "SLURM_JOB_END_TIME": str(1000 + 4 * 3600)}
    clock = Clock()
    schedule = build_schedule(exp, RunPaths(tmp_path), 10**9, clock, job)
    clock.now += 60
    schedule.due()
    assert schedule.plan is not None
    prior = 1000 * DAY_S / (10 * 3)
    without_notice = 1 / ((prior + DAY_S) / 2)
    assert schedule.plan.mtbf_s == pytest.approx(1 / (without_notice + 1 / (4 * HOUR_S)))  # 30 s are too short
    local = build_schedule(exp, RunPaths(tmp_path / "fresh"), 10**9, clock, {})
    local.due()
    assert local.plan is not None and local.plan.mtbf_s == pytest.approx(1000 * DAY_S / 6.5)
