"""Empty seats: how many, and why; what comes of them in the step's line, the split of devices and the report."""

import asyncio
import itertools
import json
import time
from functools import partial
from pathlib import Path

import pytest

from prime_hpc.envs.samples import EpisodeResult
from prime_hpc.orchestrator.rollouts.dispatcher import Dispatcher, Job, Lane
from prime_hpc.orchestrator.rollouts.groups import GroupBook
from prime_hpc.orchestrator.rollouts.prompts import Prompt
from prime_hpc.orchestrator.rollouts.seats import CAUSES, MEMORY, SeatMeter, why_empty
from prime_hpc.orchestrator.rollouts.servers import ServerTable
from prime_hpc.report.phases import empty_seats
from prime_hpc.store.run_paths import RunPaths
from prime_hpc.supervisor.attempt.device_split import best_split, engines_idle_s, idle_shares
from tests.support.episodes import make_episode, make_result


def test_a_single_long_episode_leaves_most_seats_empty() -> None:
    meter = SeatMeter(0.0)
    meter.look(4, "tail", 0.0)
    meter.look(1, "tail", 2.0)  # three of four end after 2 s, the last one after 10 s
    meter.look(0, "gate", 10.0)
    row = meter.drain(8, 20.0)
    assert row["queue/seats"] == 4
    assert row["queue/empty_tail"] == pytest.approx(8 * 3 / (20 * 4))
    assert row["queue/empty_gate"] == pytest.approx(10 * 4 / (20 * 4))
    assert row["queue/empty_seats"] == pytest.approx(sum(row[f"queue/empty_{cause}"] for cause in CAUSES))


def test_seats_are_never_more_than_may_be_filled_and_are_forgotten_after_some_steps() -> None:
    meter = SeatMeter(0.0)
    meter.look(6, "", 0.0)
    row = meter.drain(4, 1.0)
    assert row == {"queue/seats": 4.0, "queue/empty_seats": 0.0} | {f"queue/empty_{cause}": 0.0 for cause in CAUSES}
    meter.look(1, "gate", 1.0)
    for step in range(2, MEMORY + 1):
        assert meter.drain(8, float(step))["queue/empty_gate"] == pytest.approx(5 / 6)
    assert meter.drain(8, MEMORY + 1.0)["queue/seats"] == 1


def test_batches_written_one_after_the_other_do_not_hide_that_nothing_is_in_flight() -> None:
    meter = SeatMeter(0.0)
    meter.look(6, "tail", 0.0)
    meter.look(0, "gate", 1.0)
    for moment in (1.0, 1.001, 1.002):
        meter.drain(8, moment)
    row = meter.drain(8, 11.002)
    assert row["queue/empty_gate"] == row["queue/empty_seats"] == pytest.approx(1.0)


def test_a_step_without_any_time_or_episode() -> None:
    meter = SeatMeter(5.0)
    assert set(meter.drain(4, 5.0).values()) == {0.0}
    meter.look(0, "servers", 5.0)
    assert meter.drain(4, 6.0)["queue/empty_seats"] == 0.0  # nothing was ever in flight: no seat is known


def book(async_level: int, last_batch: int = 9) -> GroupBook:
    return GroupBook(sizes=[1], num_prompts=2, async_level=async_level, last_batch=last_batch, minima=[1])


@pytest.mark.parametrize("level", [0, 2])
def test_why_no_more_groups_begin(level: int) -> None:
    groups, table = book(level), ServerTable(["http://one"], 0.0)
    assert why_empty(table, groups, False) == "servers"
    table.mark_ready(0, 0)
    assert why_empty(table, groups, False) == ""
    opened = [groups.open(Prompt(position, 0, position, position), 0) for position in range(2 * (level + 1))]
    assert why_empty(table, groups, False) == "tail"  # batch 1 is what the trainer waits for
    for group in opened[:2]:
        groups.add(group, 0, make_episode([0]))
    groups.take_batch()
    assert why_empty(table, groups, False) == "gate"  # the trainer has it, and version 1 is not there
    assert why_empty(table, groups, True) == "weights"
    table.mark_ready(0, 1)
    assert why_empty(table, groups, True) == ""  # room for one batch more
    table.mark_ready(0, 8)
    while groups.may_open(8):
        groups.open(Prompt(100 + groups.num_open, 0, 0, 0), 8)
    assert why_empty(table, groups, False) == "end"


@pytest.mark.parametrize("level", [0, 2])
def test_a_bench_is_gated_as_a_run_whose_trainer_takes_no_time(level: int) -> None:
    groups = GroupBook(sizes=[1], num_prompts=2, async_level=1 << 30, ahead=level, last_batch=9, minima=[1])
    positions = itertools.count()
    for batch in range(1, 10):
        while groups.may_open(0):  # version 0 is served to the end
            groups.open(Prompt(next(positions), 0, 0, 0), 0)
        assert groups.num_open == 2 * min(level + 1, 10 - batch)
        assert groups.held_by(0) == ("end" if batch + level >= 9 else "tail")
        for group in list(groups.in_flight.values())[:2]:
            groups.add(group, 0, make_episode([0]))
        assert len(groups.take_batch()) == 2
    assert not groups.may_open(0)


def test_the_dispatcher_counts_its_seats() -> None:
    class Runner:
        async def run_episode(self, source_index: int, task_index: int, url_index: int) -> EpisodeResult:
            if task_index == 0:
                await over.wait()
            return make_result([0])

    over = asyncio.Event()

    async def scenario() -> None:
        table = ServerTable(["http://one"], 0.0)
        table.mark_ready(0, 0)
        dispatcher = Dispatcher(
            table, 4, refill=lambda: False, on_server_error=lambda _: None, why_empty=lambda: "tail"
        )
        left = {0, 1, 2, 3}

        def take(task: int, _: EpisodeResult) -> None:
            left.discard(task)

        for task in sorted(left):
            dispatcher.add(Job(Runner(), 0, task, Lane(), partial(take, task)))
        began = time.monotonic()
        dispatcher.pump()
        while left != {0}:
            await asyncio.sleep(0.005)
        await asyncio.sleep(3 * (time.monotonic() - began))  # three seats are empty for three quarters of the time
        over.set()
        while left:
            await asyncio.sleep(0.005)
        row = dispatcher.drain_load()
        assert row["queue/seats"] == 4 and row["queue/idle_share"] < 0.5
        assert row["queue/empty_tail"] == row["queue/empty_seats"] > 0.3

    asyncio.run(scenario())


def test_empty_seats_are_idle_engines_and_a_tail_is_no_reason_for_another_split() -> None:
    trained = [{"time/step": 10.0, "time/wait": 6.0}] * 3
    seats = {"queue/empty_seats": 0.5, "queue/empty_tail": 0.4, "time/weight_pause": 1.0}
    idle = idle_shares(trained, [{"time/step": 10.0, **seats}] * 3)
    assert idle is not None
    assert (idle.trainer, idle.engines, idle.tail) == pytest.approx((0.6, 0.55, 0.4))
    assert engines_idle_s({"time/step": 10.0, "time/wait_weights": 2.0, "time/weight_pause": 1.0}) == 3.0
    without = best_split(6, 2, trainer_idle=0.6, engines_idle=0.2, overlap=True)
    tailed = best_split(6, 2, trainer_idle=0.6, engines_idle=0.2, overlap=True, tail=0.2)
    assert without[:2] == tailed[:2] and 0 < tailed[2] < without[2]


def test_rows_that_count_no_seats_or_count_them_wrong() -> None:
    assert empty_seats({"queue/empty_seats": 0.5, "queue/empty_tail": 0.2}) == pytest.approx(
        {"empty_tail": 0.2, "empty_other": 0.3}
    )
    for broken in ({}, {"queue/empty_seats": "nan", "queue/empty_tail": 0.1}, {"queue/empty_seats": 0.1}):
        assert empty_seats(broken) == {}
    assert empty_seats({"queue/empty_seats": 0.1, "queue/empty_tail": 0.3}) == {}


def test_the_steps_line_names_the_tail(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from prime_hpc.observe.console import Console
    from prime_hpc.observe.logs import setup_logger

    setup_logger("supervisor")
    console = Console(tmp_path, 40, kind="rl")
    seats = {"queue/empty_tail": 0.3, "queue/empty_gate": 0.1, "queue/empty_weights": 0.05}
    trained = {"step": 1, "loss": 0.1, "kl": 0.0, "ratio": 1.0, "tokens_per_s": 1.0, "time/step": 2.0, "time/wait": 0.0}
    RunPaths(tmp_path).metrics("trainer").parent.mkdir()
    for role, row in (("orchestrator", {"step": 1, "reward/mean": 0.2, **seats}), ("trainer", trained)):
        RunPaths(tmp_path).metrics(role).write_text(json.dumps(row) + "\n")
    console.tick({})
    assert "inference waits for weights 15%, 30% of the seats empty for the last replies" in capsys.readouterr().out
