"""The checkpoint interval: against the published table, against brute force, and where its limits bite."""

import math
from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prime_hpc.store.checkpoint.optimal_interval import (
    DAY_S,
    HOUR_S,
    Events,
    best_interval_s,
    expected_loss_percent,
    learn,
    mtbf_s,
    plan_interval,
)


@pytest.mark.parametrize(
    ("nodes", "save_s", "minutes", "loss"),
    [(8, 5, 68, 0.25), (16, 30, 118, 0.85), (32, 120, 166, 2.4), (64, 30, 59, 1.7), (128, 5, 17, 0.98)],
)
def test_the_published_table(nodes: int, save_s: float, minutes: float, loss: float) -> None:
    """Young/Daly at 6.5 failures in 1000 node-days; Saxena's correction adds the save itself."""
    mtbf = mtbf_s(nodes, 6.5)
    assert mtbf / DAY_S == pytest.approx(1000 / (6.5 * nodes))
    interval = best_interval_s(save_s, mtbf)
    assert (interval - save_s) / 60 == pytest.approx(minutes, rel=0.02)
    assert expected_loss_percent(interval, save_s, mtbf) == pytest.approx(loss, rel=0.03)


@given(st.floats(0.1, 600), st.floats(3600, 1e8), st.floats(0, 1800))
def test_no_other_interval_loses_much_less(save_s: float, mtbf: float, restart_s: float) -> None:
    best = best_interval_s(save_s, mtbf, restart_s)
    loss = expected_loss_percent(best, save_s, mtbf, restart_s)
    for factor in (0.25, 0.5, 2, 4):
        other = expected_loss_percent(best * factor, save_s, mtbf, restart_s)
        if save_s < mtbf / 50 and restart_s < mtbf / 10:  # the first-order model holds
            assert other >= loss - 0.02 * loss
    assert best >= save_s


def test_dearer_saves_and_safer_nodes_make_it_longer() -> None:
    assert best_interval_s(10, 1e6) < best_interval_s(40, 1e6) < best_interval_s(40, 4e6)
    assert math.isinf(best_interval_s(10, math.inf))


def test_the_run_itself_teaches() -> None:
    site = mtbf_s(4, 6.5)
    day = DAY_S
    assert mtbf_s(4, 6.5, Events(0, 0, 10 * day)) > site
    assert mtbf_s(4, 6.5, Events(5, 0, day)) == pytest.approx((site + day) / 6)
    assert mtbf_s(4, 0, Events(4, 0, 2 * day)) == day / 2
    assert math.isinf(mtbf_s(4, 0))
    at_once = mtbf_s(1, 0, Events(1, 0, 0.0))
    assert plan_interval(save_s=1, step_s=1, mtbf=at_once).interval_s == HOUR_S


def test_learning_from_attempts() -> None:
    rows: list[dict[str, Any]] = [
        {"began": 0.0, "ended": 100.0, "outcome": "failed", "exit_code": 1, "seconds": {"start": 30.0}},
        {"began": 110.0, "ended": 111.0, "outcome": "failed", "exit_code": 2, "seconds": {}},
        {"began": 120.0, "ended": 220.0, "outcome": "preempted", "exit_code": 0, "seconds": {"start": 50.0}},
        {"began": 230.0, "ended": None, "outcome": None},
        {"began": 300.0, "ended": 400.0, "outcome": "requeued", "exit_code": 0},
        {"began": 410.0, "ended": None, "outcome": None},
    ]
    events = learn(rows)
    assert (events.num_failures, events.num_warned, events.seconds) == (2, 2, 371.0)
    assert events.restart_s == 40.0
    assert learn([]) == Events()
    by_hand: list[dict[str, Any]] = [{"ended": 5.0, "outcome": "failed"}, {"began": 7.0, "ended": None}, {"ended": 9.0}]
    assert learn(by_hand) == Events(2)


def test_never_rarer_than_hourly_while_that_is_cheap() -> None:
    assert plan_interval(save_s=1, step_s=10, mtbf=math.inf).interval_s == HOUR_S
    dear = plan_interval(save_s=60, step_s=10, mtbf=math.inf)
    assert dear.interval_s == 60 * 200
    assert dear.num_steps == 1200
    assert dear.loss_percent == pytest.approx(0.5)


def test_never_more_often_than_a_save_is_written_or_a_step_is_done() -> None:
    assert plan_interval(save_s=1, write_s=500, step_s=10, mtbf=1000).interval_s == 500
    plan = plan_interval(save_s=1, step_s=700, mtbf=1000)
    assert (plan.interval_s, plan.num_steps) == (700, 1)


def test_a_notice_that_is_too_short_counts_as_a_failure() -> None:
    plan = partial(plan_interval, save_s=20.0, step_s=60.0, mtbf=1e7, walltime_s=4 * HOUR_S)
    enough, short, none = plan(notice_s=120), plan(notice_s=60), plan()
    assert enough.mtbf_s == pytest.approx(1e7)
    assert short.mtbf_s == none.mtbf_s < 4 * HOUR_S
    assert short.interval_s < enough.interval_s
    assert short.loss_percent > enough.loss_percent
    assert "too short" in short.why and "too short" not in enough.why
    preempted = plan_interval(save_s=20, step_s=60, mtbf=1e7, notice_s=60, events=Events(0, 6, DAY_S))
    assert preempted.mtbf_s == pytest.approx(1 / (1e-7 + 6 / DAY_S))
