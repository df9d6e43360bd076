"""Servers, failures, dispatch and the evaluation schedule, without any server."""

import asyncio
import itertools
from collections import Counter
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from prime_hpc.config.sections.orchestrator import EvalConfig
from prime_hpc.envs.samples import EpisodeResult, EpisodeState
from prime_hpc.orchestrator.errors import OrchestratorError
from prime_hpc.orchestrator.evaluation import (
    Evaluator,
    first_due,
    newest_evaluated,
    next_due,
    passes,
    rewards_text,
    summarize,
)
from prime_hpc.orchestrator.loop import Orchestrator
from prime_hpc.orchestrator.metrics import StepStats
from prime_hpc.orchestrator.rollouts.dispatcher import AT_ONCE, Dispatcher, Greedy, Job, Lane
from prime_hpc.orchestrator.rollouts.episodes import to_episode
from prime_hpc.orchestrator.rollouts.failures import (
    BARREN_WINDOWS,
    LEAST_WINDOW,
    MIN_EPISODES,
    BarrenGroups,
    FailureWindow,
)
from prime_hpc.orchestrator.rollouts.groups import Group
from prime_hpc.orchestrator.rollouts.prompts import SourceInfo
from prime_hpc.orchestrator.rollouts.servers import ServerTable
from prime_hpc.orchestrator.setup import make_endless_tasks
from tests.support.episodes import failed_result, make_result


def make_table(num_servers: int = 1, ready: bool = True) -> ServerTable:
    table = ServerTable([f"http://s{i}" for i in range(num_servers)], now=0.0)
    for i in range(num_servers if ready else 0):
        table.mark_ready(i, 0)
    return table


# ---------------------------------------------------------------------------------------------------- servers


def test_groups_go_to_the_least_loaded_server_in_turn() -> None:
    table = make_table(3)
    assert [table.pick() for _ in range(4)] == [0, 1, 2, 0]
    table.servers[1].in_flight = 5
    table.servers[2].in_flight = 5
    assert [table.pick() for _ in range(2)] == [0, 0]


def test_a_suspect_server_gets_nothing_and_does_not_hold_back_the_served_version() -> None:
    table = make_table(2)
    table.mark_ready(0, 7)
    assert table.served_version == 0
    assert table.mark_suspect(1, now=3.0)
    assert not table.mark_suspect(1, now=4.0)
    assert table.served_version == 7
    assert table.pick() == 0
    table.mark_suspect(0, now=5.0)
    assert table.pick() is None
    assert table.served_version == 7, "what was served last is remembered while all are down"
    assert table.all_down_since(now=8.0) == 3.0


# ---------------------------------------------------------------------------------------------------- failures


def test_too_many_failures_end_the_run_with_the_commonest_reason() -> None:
    window = FailureWindow(0.5)
    for i in range(MIN_EPISODES):
        window.add("" if i % 3 == 0 else f"TaskError: no key {i}" if i % 3 == 1 else "other")
    with pytest.raises(OrchestratorError, match=r"33 of the last 50 .* 17 times: TaskError: no key 49"):
        window.check()


def test_a_third_of_failures_goes_on_and_so_does_a_bad_start() -> None:
    window = FailureWindow(0.9)
    for _ in range(MIN_EPISODES - 1):
        window.add("boom")
    window.check()
    for i in range(200):
        window.add("boom" if i % 3 else "")
    window.check()
    assert window.share == pytest.approx(2 / 3, abs=0.01)


def test_what_many_in_flight_meet_in_a_second_ends_no_run() -> None:
    window = FailureWindow(0.9, most_in_flight=2000)
    for _ in range(5000):
        window.add("")
    for number in range(1800):
        window.check()
        window.add(f"the judge is away {number}")
    window.check()
    window.add("the judge is away 1800")
    assert window.share == 1801 / 2000
    with pytest.raises(OrchestratorError, match=r"1801 of the last 2000 .* 1801 times: the judge is away 1800"):
        window.check()
    for _ in range(2000):
        window.add("")
    assert window.share == 0


def test_rollouts_that_train_though_a_deadline_cut_them_off_are_no_failures() -> None:
    cut_off = EpisodeResult(EpisodeState.TIMEOUT, usable=False, reason="no end after 120 s", error_type="Timeout")
    loop: Any = Mock(failures=FailureWindow(0.9), stats=StepStats(0.0))
    for timeout_reward, share in ((-1.0, 0.0), (None, 0.5)):
        episode = to_episode(cut_off, 100, timeout_reward=timeout_reward)
        Orchestrator._count(loop, Group(Mock(), 0, 0, [None]), 0, episode)
        assert loop.failures.share == share


def test_groups_that_are_dropped_in_a_row_are_told_of_and_end_the_run_unless_failures_never_may() -> None:
    few = ["no end after 2 s", "", "no end after 3 s", "no end after 4 s"]  # of four, one may train
    num_groups = BARREN_WINDOWS * LEAST_WINDOW // len(few)
    groups, patient = BarrenGroups(0.9), BarrenGroups(1.0)
    for barren in (groups, patient):
        for _ in range(num_groups - 1):
            barren.add(few)
            barren.check()
    groups.begin_anew()  # one that trains
    for _ in range(num_groups - 1):
        groups.add(few)
        groups.check()
    patient.add(few)
    patient.check()
    groups.add(few)
    with pytest.raises(OrchestratorError, match=rf"{num_groups} groups in a row .* 200 of the last 200 .*after 4 s"):
        groups.check()


def test_a_steps_episodes_tell_what_their_time_was_for() -> None:
    stats = StepStats(0.0)
    assert not any(key.startswith("episode_time/") for key in stats.drain(1.0))
    for engine in range(101):
        seconds = {"engine": float(engine), "environment": 2.0, "reward": 0.0}
        stats.add_episode(to_episode(replace(make_result(), seconds=seconds), 100))
    stats.add_episode(to_episode(failed_result(), 100))  # nothing is known of it
    row = stats.drain(2.0)
    assert (row["episode_time/engine_mean"], row["episode_time/engine_p99"]) == (50.0, 99.0)
    assert (row["episode_time/environment_mean"], row["episode_time/reward_p99"]) == (2.0, 0.0)
    assert not any(key.startswith("episode_time/") for key in stats.drain(3.0))


# ---------------------------------------------------------------------------------------------------- dispatch


class Runner:
    """Plays episodes as told: a list of results per task, or an event to wait for."""

    def __init__(self, results: dict[int, list[EpisodeResult]] | None = None, delay_s: float = 0.0) -> None:
        self.results = results or {}
        self.delay_s = delay_s
        self.running = 0
        self.peak = 0
        self.urls: Counter[int] = Counter()

    async def run_episode(self, source_index: int, task_index: int, url_index: int) -> EpisodeResult:
        self.running += 1
        self.peak = max(self.peak, self.running)
        self.urls[url_index] += 1
        try:
            await asyncio.sleep(self.delay_s)
        finally:
            self.running -= 1
        scripted = self.results.get(task_index)
        return scripted.pop(0) if scripted else make_result([0], reward=float(task_index))


def make_dispatcher(table: ServerTable, max_concurrent: int = 4) -> tuple[Dispatcher, list[int]]:
    errors: list[int] = []
    dispatcher = Dispatcher(table, max_concurrent, refill=lambda: False, on_server_error=errors.append)
    return dispatcher, errors


async def until(condition: object, timeout_s: float = 5.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():  # type: ignore[operator]
            await asyncio.sleep(0.001)


def test_an_endless_task_that_cannot_be_made_again_keeps_no_run_from_resuming() -> None:
    asked: list[tuple[str, int]] = []

    def source(name: str, num_tasks: int | None) -> SimpleNamespace:
        def task(number: int) -> None:
            asked.append((name, number))
            if name == "broken":
                raise ZeroDivisionError("its code")

        return SimpleNamespace(num_tasks=num_tasks, task=task)

    sources = [source("list", 9), source("broken", None), source("unused", None), source("fine", None)]
    pool: Any = SimpleNamespace(sources=sources)
    make_endless_tasks(pool, {"prompts": {"counts": [5, 700, 0, 300]}})
    assert asked == [("broken", 699), ("fine", 299)]


def test_concurrency_is_bounded_and_every_job_ends_once() -> None:
    async def scenario() -> None:
        dispatcher, _ = make_dispatcher(make_table())
        runner = Runner()
        ended: Counter[int] = Counter()

        def count(task: int, _: EpisodeResult) -> None:
            ended[task] += 1

        for task in range(50):
            dispatcher.add(Job(runner, 0, task, Lane(), partial(count, task)))
        dispatcher.pump()
        await until(lambda: len(ended) == 50 and not dispatcher.num_running)
        assert set(ended.values()) == {1}
        assert runner.peak == 4
        row = dispatcher.load.drain(asyncio.get_running_loop().time())
        sample = row["episode_sample"]
        assert isinstance(sample, list) and len(sample) == 32
        assert all(seconds >= 0 and 0 < in_flight <= 4 for seconds, _, in_flight in sample)

    asyncio.run(scenario())


def test_a_greedy_rollout_whose_server_ended_is_greedy_when_it_is_played_again() -> None:
    asked: list[bool] = []

    class Pool(Runner):
        async def run_episode(
            self, source_index: int, task_index: int, url_index: int, *, greedy: bool = False
        ) -> EpisodeResult:
            asked.append(greedy)
            return await super().run_episode(source_index, task_index, url_index)

    async def scenario() -> None:
        dispatcher, errors = make_dispatcher(make_table())
        ended: list[EpisodeResult] = []
        pool = Pool({0: [failed_result(error_type="ProviderError"), make_result([0], reward=0.5)]})
        dispatcher.add(Job(Greedy(pool), 0, 0, Lane(), ended.append))
        dispatcher.pump()
        await until(lambda: ended)
        assert [result.reward for result in ended] == [0.5] and asked == [True, True] and errors == [0]

    asyncio.run(scenario())


def test_an_error_in_taking_an_episode_ends_the_run_and_not_only_a_callback() -> None:
    async def scenario() -> None:
        dispatcher, _ = make_dispatcher(make_table())

        def take(result: EpisodeResult) -> None:
            raise KeyError("a bug")

        dispatcher.add(Job(Runner({}), 0, 0, Lane(), take))
        dispatcher.pump()
        await until(lambda: not dispatcher.num_running)
        with pytest.raises(KeyError, match="a bug"):
            dispatcher.pump()

    asyncio.run(scenario())


def test_thousands_start_a_few_at_a_time_and_the_loop_has_its_turns() -> None:
    async def scenario() -> None:
        dispatcher, _ = make_dispatcher(make_table(), max_concurrent=10 * AT_ONCE)
        runner = Runner(delay_s=60)
        for _ in range(20 * AT_ONCE):
            dispatcher.add(Job(runner, 0, 0, Lane(), lambda result: None))
        dispatcher.pump()
        dispatcher.pump()
        assert dispatcher.num_running == AT_ONCE
        seen = [dispatcher.num_running]
        while seen[-1] < 10 * AT_ONCE:
            await asyncio.sleep(0)
            seen.append(dispatcher.num_running)
        assert max(b - a for a, b in itertools.pairwise(seen)) == AT_ONCE
        await asyncio.sleep(0.01)
        assert dispatcher.num_running == runner.running == 10 * AT_ONCE
        await dispatcher.close()

    asyncio.run(scenario())


def test_a_lane_stays_on_one_server_and_moves_when_that_fails() -> None:
    async def scenario() -> None:
        table = make_table(2)
        dispatcher, errors = make_dispatcher(table, max_concurrent=1)

        def suspect(url_index: int) -> None:
            errors.append(url_index)
            table.mark_suspect(url_index, 0.0)

        dispatcher._on_server_error = suspect
        runner = Runner({2: [failed_result("refused", "ProviderError")]})
        ended: list[EpisodeResult] = []
        lane = Lane()
        for task in range(4):
            dispatcher.add(Job(runner, 0, task, lane, ended.append))
        dispatcher.pump()
        await until(lambda: len(ended) == 4)
        assert errors == [0]
        assert all(r.usable for r in ended)
        assert runner.urls == {0: 3, 1: 2}

    asyncio.run(scenario())


def test_a_server_error_is_tried_again_once_and_an_environments_is_not() -> None:
    async def scenario() -> None:
        dispatcher, errors = make_dispatcher(make_table())
        broken = failed_result("down", "ProviderError")
        runner = Runner({0: [broken, make_result([0])], 1: [broken, broken, broken], 2: [failed_result()]})
        ended: dict[int, EpisodeResult] = {}
        for task in range(3):
            dispatcher.add(Job(runner, 0, task, Lane(), partial(ended.__setitem__, task)))
        dispatcher.pump()
        await until(lambda: len(ended) == 3)
        assert ended[0].usable
        assert ended[1].reason == "down"
        assert ended[2].error_type == "TaskError"
        assert [dispatcher.drain_load()["episodes/server_retries"] for _ in range(2)] == [2, 0], "since the last step"
        assert len(errors) == 3

    asyncio.run(scenario())


def test_nothing_starts_while_no_server_is_ready() -> None:
    async def scenario() -> None:
        table = make_table(ready=False)
        dispatcher, _ = make_dispatcher(table)
        ended: list[EpisodeResult] = []
        dispatcher.add(Job(Runner(), 0, 0, Lane(), ended.append))
        dispatcher.pump()
        assert dispatcher.num_running == 0
        table.mark_ready(0, 0)
        dispatcher.pump()
        await until(lambda: len(ended) == 1)

    asyncio.run(scenario())


def test_a_cancelled_lane_ends_all_its_episodes_also_those_that_never_ran() -> None:
    async def scenario() -> None:
        table = make_table()
        dispatcher, _ = make_dispatcher(table)
        ended: list[EpisodeResult] = []
        lane = Lane()
        for task in range(6):
            dispatcher.add(Job(Runner(delay_s=60), 0, task, lane, ended.append))
        dispatcher.pump()
        dispatcher.cancel(lane)  # before the tasks took their first step
        await until(lambda: not dispatcher.num_running)
        assert [r.state for r in ended] == [EpisodeState.CANCELLED] * 4
        assert table.servers[0].in_flight == 0
        dispatcher.pump()
        assert dispatcher.num_running == 0

    asyncio.run(scenario())


def test_an_environment_that_raises_is_one_failed_episode() -> None:
    class Broken:
        async def run_episode(self, source_index: int, task_index: int, url_index: int) -> EpisodeResult:
            raise KeyError("oops")

    async def scenario() -> None:
        dispatcher, _ = make_dispatcher(make_table())
        ended: list[EpisodeResult] = []
        dispatcher.add(Job(Broken(), 0, 0, Lane(), ended.append))
        dispatcher.pump()
        await until(lambda: len(ended) == 1)
        assert (ended[0].state, ended[0].error_type) == (EpisodeState.FAILED, "KeyError")

    asyncio.run(scenario())


def test_closing_cancels_what_runs() -> None:
    async def scenario() -> None:
        dispatcher, _ = make_dispatcher(make_table())
        runner = Runner(delay_s=60)
        dispatcher.add(Job(runner, 0, 0, Lane(), lambda r: None))
        dispatcher.pump()
        await until(lambda: runner.running == 1)
        await dispatcher.close()
        assert runner.running == 0

    asyncio.run(scenario())


# ---------------------------------------------------------------------------------------------------- evaluation


@pytest.mark.parametrize(
    ("start", "interval", "last", "due"),
    [(0, 20, 50, [0, 20, 40, 50]), (10, 20, 50, [20, 40, 50]), (20, 20, 40, [20, 40]), (0, 100, 7, [0, 7])],
)
def test_when_evaluations_are_due(start: int, interval: int, last: int, due: list[int]) -> None:
    found = []
    version: int | None = first_due(start, interval, last)
    while version is not None:
        found.append(version)
        version = next_due(version, interval, last)
    assert found == due


@pytest.mark.parametrize(
    ("start", "newest", "due"),
    [(12, -1, 12), (12, 0, 12), (12, 10, 20), (10, 0, 10), (0, -1, 0), (3, 0, 10), (3, -1, 3)],
)
def test_an_evaluation_that_was_cut_off_is_made_up_for_where_the_run_goes_on(start: int, newest: int, due: int) -> None:
    """It ran beside steps that a checkpoint holds."""
    assert first_due(start, 10, 40, newest) == due


def test_what_was_evaluated_is_known_by_environment() -> None:
    rows: list[dict[str, float]] = [
        {"step": 0, "eval/a/num_episodes": 4, "eval/b/num_episodes": 4, "eval/a/mean_reward": 0.5},
        {"step": 3, "reward/mean": 1.0},
        {"step": 10, "eval/a/num_episodes": 4},
    ]
    assert newest_evaluated(rows) == {"a": 10, "b": 0}


def test_evaluations_run_one_after_another_and_a_skipped_version_is_made_up_for() -> None:
    async def scenario() -> None:
        dispatcher, _ = make_dispatcher(make_table())
        reports: list[tuple[int, dict[str, float], list[dict[str, object]]]] = []
        evaluator = Evaluator(
            EvalConfig(interval=5, num_examples=3, rollouts_per_example=2),
            Runner(),
            [SourceInfo("a", 1.0, None), SourceInfo("b", 1.0, 2)],
            dispatcher,
            start_version=0,
            last_version=12,
            on_report=lambda v, row, samples: reports.append((v, row, samples)),
        )
        evaluator.served(0)
        evaluator.served(0)
        assert evaluator.pending
        await until(lambda: len(reports) == 1)
        for version in (1, 4, 6, 8, 12):
            evaluator.served(version)
        await until(lambda: len(reports) == 2)
        evaluator.served(12)
        await until(lambda: len(reports) == 3)
        assert not evaluator.pending
        assert [version for version, _, _ in reports] == [0, 6, 12]
        row = reports[0][1]
        assert (row["eval/a/num_episodes"], row["eval/b/num_episodes"]) == (6, 4)
        assert row["eval/a/mean_reward"] == 1.0
        assert row["eval/b/mean_reward"] == 0.5
        assert [s["task"] for s in reports[0][2]] == [0, 0, 1, 1, 2, 2, 0, 0, 1, 1]

    asyncio.run(scenario())


def test_episodes_that_fail_or_time_out_count_as_reward_0() -> None:
    late = replace(failed_result(), state=EpisodeState.TIMEOUT)
    row = summarize([make_result([0], reward=1.0), failed_result(), make_result([0], reward=0.5), late])
    assert (row["mean_reward"], row["mean_reward_completed"]) == (1.5 / 4, 0.75)
    assert (row["num_episodes"], row["num_failed"], row["num_timeout"]) == (4, 2, 1)
    row = summarize([failed_result()])
    assert row["mean_reward"] == 0.0 and "mean_reward_completed" not in row
    assert rewards_text({f"eval/a/b/{k}": v for k, v in row.items()}) == "a/b 0.000 (1 of 1 failed or timed out)"


def test_pass_at_k_of_several_rollouts_a_task() -> None:
    def of(task: int, *rewards: float | None) -> list[tuple[int, EpisodeResult]]:
        return [(task, failed_result() if r is None else make_result([0], reward=r)) for r in rewards]

    results = of(3, 1.0, 0.0, 0.0, 0.0) + of(5, 0.1 + 0.2, 0.3, None, 0.29)
    assert passes(results, 0.3) == pytest.approx(
        {"pass@1": (1 / 4 + 2 / 4) / 2, "pass@2": (2 / 4 + 5 / 6) / 2, "pass@4": 1.0}
    )
    assert passes(results, 1.0)["pass@4"] == 0.5
    assert passes(of(1, None, None) + of(2, 0.0, 0.0), 0.0)["pass@2"] == 0.5, "what failed has not passed"
    assert passes(of(1, 1.0) + of(2, 1.0), 1.0) == {}, "one rollout a task: the mean reward says it"


def test_an_environments_metric_takes_the_place_of_no_figure_of_an_evaluation() -> None:
    own = {"mean_reward": 0.25, "mean_reward_se": 0.1, "num_failed": 3.0, "solved": 1.0, "judge/mean_reward": 0.2}
    own["pass@2"] = 0.3
    row = summarize([replace(make_result([0], reward=1.0), metrics=own), failed_result()])
    assert (row["mean_reward"], row["num_failed"], row["solved"]) == (0.5, 1, 1.0) and "mean_reward_se" not in row
    assert {k: v for k, v in row.items() if k.endswith("_own")} == {
        f"{k}_own": v for k, v in own.items() if k != "solved"
    }
    assert rewards_text({f"eval/a/{k}": v for k, v in row.items()}) == "a 0.500 (1 of 2 failed or timed out)"
