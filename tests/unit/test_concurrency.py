"""Episodes in flight that follow the engines' own figures: the rule alone, a modelled engine, and scripted servers."""

import asyncio
import random
from collections.abc import Callable, Coroutine
from functools import partial
from itertools import pairwise
from typing import Any, cast

import pytest
from loguru import logger

from prime_hpc.client.figures import parse_figures
from prime_hpc.client.inference import InferenceError
from prime_hpc.config.sections.orchestrator import AdaptiveConcurrencyConfig
from prime_hpc.orchestrator.rollouts import concurrency, engine_figures
from prime_hpc.orchestrator.rollouts.concurrency import AdaptiveConcurrency, ServerLimit
from prime_hpc.orchestrator.rollouts.dispatcher import Dispatcher
from prime_hpc.orchestrator.rollouts.engine_figures import EngineFigures
from prime_hpc.orchestrator.rollouts.servers import ServerTable

WINDOW_S = 5.0


def make_limit(limit: float = 16.0, least: float = 1.0, most: float = 1000.0) -> ServerLimit:
    return ServerLimit(limit, least, most, since=0.0)


def look_for(limit: ServerLimit, seconds: int, start: int, **seen: Any) -> None:
    """Look once a second at a server whose figures do not change."""
    figures = {name: float(value) for name, value in seen.items() if name in ("running", "waiting", "kv_use")}
    for now in range(start + 1, start + seconds + 1):
        limit.look(figures, 0.0, seen["in_flight"], WINDOW_S, float(now))


# ---------------------------------------------------------------------------------------------------- the rule


@pytest.mark.parametrize(("kv_use", "expected"), [(0.01, 32.0), (0.6, 24.0), (0.89, 17.0), (0.97, 16.0)])
def test_a_limit_grows_as_far_as_the_cache_says_and_doubles_at_most(kv_use: float, expected: float) -> None:
    limit = make_limit()
    look_for(limit, 4, 0, running=16, waiting=0, kv_use=kv_use, in_flight=16)
    assert limit.limit == 16, "an episode shows its need at its end: nothing changes within a window"
    look_for(limit, 1, 4, running=16, waiting=0, kv_use=kv_use, in_flight=16)
    assert limit.limit == pytest.approx(expected)


def test_the_fullest_moment_of_a_window_counts() -> None:
    limit = make_limit()
    limit.look({"running": 16.0, "waiting": 0.0, "kv_use": 0.9}, 0.0, 16, WINDOW_S, 1.0)
    look_for(limit, 4, 1, running=4, waiting=0, kv_use=0.2, in_flight=16)
    assert limit.limit == 17, "0.2 alone would have doubled it"


def test_a_server_that_does_not_tell_its_cache_grows_more_slowly() -> None:
    limit = make_limit()
    look_for(limit, 5, 0, running=16, waiting=0, in_flight=16)
    assert limit.limit == 24


def test_nothing_grows_where_others_hold_the_episodes_back() -> None:
    limit = make_limit()
    look_for(limit, 20, 0, running=10, waiting=0, kv_use=0.1, in_flight=10)
    assert limit.limit == 16, "the batch or the versions allow no more: that says nothing of the engine"


def test_a_queue_that_is_never_empty_is_cut_to_a_tenth() -> None:
    limit = make_limit(limit=200.0)
    look_for(limit, 5, 0, running=64, waiting=136, kv_use=0.3, in_flight=200)
    assert limit.limit == pytest.approx(64 * 1.1)
    look_for(limit, 10, 5, running=64, waiting=6, kv_use=0.3, in_flight=70)
    assert limit.limit == pytest.approx(64 * 1.1), "and stays there"


def test_episodes_that_wait_for_tools_keep_their_share_when_the_queue_is_cut() -> None:
    limit = make_limit(limit=300.0)
    look_for(limit, 5, 0, running=50, waiting=50, kv_use=0.3, in_flight=300)
    assert limit.limit == pytest.approx(300 - 50 + 5), "200 of them ask nothing now, and still will"


def test_many_preemptions_cut_at_once_and_once_a_window() -> None:
    limit = make_limit(limit=100.0)
    full = {"running": 100.0, "waiting": 0.0, "kv_use": 1.0}
    limit.look(full, 30.0, 100, WINDOW_S, 1.0)
    assert limit.limit == 85, "by half their share"
    limit.look(full, 60.0, 96, WINDOW_S, 3.0)
    assert limit.limit == 85, "those that were too many are still ending"
    limit.look(full, 90.0, 85, WINDOW_S, 7.0)
    assert limit.limit == pytest.approx(85 * 0.75), "by a quarter at most"


def test_a_flood_is_cut_to_what_the_engine_runs() -> None:
    limit = make_limit(limit=512.0)
    limit.look({"running": 60.0, "waiting": 452.0, "kv_use": 1.0}, 40.0, 512, WINDOW_S, 1.0)
    assert limit.limit == pytest.approx(60 * 1.1)


def test_few_preemptions_cost_less_than_fewer_episodes_would() -> None:
    limit = make_limit(limit=100.0)
    for now in range(1, 6):
        limit.look({"running": 100.0, "waiting": 0.0, "kv_use": 0.99}, 1.0, 100, WINDOW_S, float(now))
    assert limit.limit == 100
    for now in range(6, 11):
        use = 0.95 if now == 8 else 0.8
        limit.look({"running": 100.0, "waiting": 0.0, "kv_use": use}, 1.0, 100, WINDOW_S, float(now))
    assert limit.limit == 103, "a cache that is full at times has room for some more"


def test_what_once_was_too_much_is_felt_for_and_then_forgotten() -> None:
    limit = make_limit(limit=100.0)
    limit.look({"running": 100.0, "waiting": 0.0, "kv_use": 1.0}, 50.0, 100, WINDOW_S, 1.0)
    assert limit.limit == 75
    seen, now = [], 1
    for _ in range(20):
        flight = round(limit.limit)
        look_for(limit, 5, now, running=flight, waiting=0, kv_use=0.3, in_flight=flight)
        now += 5
        seen.append(limit.limit)
    assert seen[0] == 90, "at once below what was too much"
    assert all(after <= before * 1.03 + 1e-9 for before, after in pairwise(seen[:10]))
    assert seen[-1] > 200, "episodes have grown shorter for good"


def test_limits_stay_within_their_bounds() -> None:
    limit = make_limit(limit=4.0, least=3.0, most=6.0)
    look_for(limit, 5, 0, running=4, waiting=0, kv_use=0.1, in_flight=4)
    assert limit.limit == 6
    limit.look({"running": 6.0, "waiting": 0.0, "kv_use": 1.0}, 6.0, 3, WINDOW_S, 20.0)
    assert limit.limit == 3


# ---------------------------------------------------------------------------------------------------- a modelled engine


class Engine:
    """One token a second for each of the requests that run; the last one in is thrown out when the cache is full."""

    def __init__(self, capacity: int, max_num_seqs: int, tool_s: int = 0) -> None:
        self.capacity, self.max_num_seqs, self.tool_s = capacity, max_num_seqs, tool_s
        self.rng = random.Random(0)
        self.running: list[list[int]] = []
        self.waiting: list[list[int]] = []
        self.tools: list[int] = []
        self.preempted = self.done = 0

    @property
    def in_flight(self) -> int:
        return len(self.running) + len(self.waiting) + len(self.tools)

    def step(self, room: int) -> None:
        """One second: [tokens so far, tokens in the end] of each request."""
        self.tools = [left - 1 for left in self.tools if left > 1]
        while self.in_flight < room:
            self.waiting.append([0, self.rng.randint(10, 40)])
        used = sum(tokens for tokens, _ in self.running)
        while self.waiting and len(self.running) < self.max_num_seqs and used + len(self.running) < self.capacity:
            used += self.waiting[0][0]
            self.running.append(self.waiting.pop(0))
        for request in self.running:
            request[0] += 1
        ended = [request for request in self.running if request[0] >= request[1]]
        self.running = [request for request in self.running if request[0] < request[1]]
        self.done += len(ended)
        self.tools += [self.tool_s] * len(ended) if self.tool_s else []
        while sum(tokens for tokens, _ in self.running) > self.capacity:
            self.waiting.insert(0, [0, self.running.pop()[1]])
            self.preempted += 1

    def figures(self) -> dict[str, float]:
        used = sum(tokens for tokens, _ in self.running)
        return {"running": len(self.running), "waiting": len(self.waiting), "kv_use": min(1.0, used / self.capacity)}


def play(engine: Engine, seconds: int, room: Callable[[], int], limit: ServerLimit | None = None) -> tuple[int, int]:
    """Return the episodes done and the requests preempted in the second half."""
    preempted = 0
    for now in range(1, seconds + 1):
        if now == seconds // 2:
            engine.done, start = 0, engine.preempted
        engine.step(room())
        if limit is not None:
            limit.look(engine.figures(), engine.preempted - preempted, engine.in_flight, 25.0, float(now))
            preempted = engine.preempted
    return engine.done, engine.preempted - start


@pytest.mark.parametrize("first", [2, 30, 400])
@pytest.mark.parametrize(
    ("capacity", "max_num_seqs", "tool_s"),
    [(1000, 1000, 0), (100_000, 48, 0), (100_000, 48, 60), (1000, 1000, 60)],
    ids=["cache", "seats", "seats and tools", "cache and tools"],
)
def test_a_modelled_engine_does_as_much_as_with_the_best_constant(
    capacity: int, max_num_seqs: int, tool_s: int, first: int
) -> None:
    constants = [4, 8, 16, 24, 32, 40, 48, 56, 64, 96, 128, 160, 192]
    by_hand = [play(Engine(capacity, max_num_seqs, tool_s), 2000, partial(int, n)) for n in constants]
    best = max(done for done, preempted in by_hand if preempted <= 0.2 * done)
    limit = make_limit(float(first))
    done, preempted = play(Engine(capacity, max_num_seqs, tool_s), 2000, lambda: round(limit.limit), limit)
    assert done >= 0.93 * best, f"{done} episodes, {best} with the best of {by_hand}; limit {limit.limit:.0f}"
    assert preempted <= 0.2 * done


# ---------------------------------------------------------------------------------------------------- scripted servers


class Server:
    """Tells what it is told to tell."""

    def __init__(self, **figures: float) -> None:
        self.figures: dict[str, float] = {"running": 8.0, "waiting": 0.0, "kv_use": 0.2, "preempted": 0.0, **figures}
        self.error: InferenceError | None = None
        self.num_asked = 0

    async def load(self) -> dict[str, float]:
        self.num_asked += 1
        if self.error is not None:
            raise self.error
        return dict(self.figures)

    async def asked(self, times: int) -> None:
        """Until it was asked so many times more, and what it said was heard."""
        wanted = self.num_asked + times
        async with asyncio.timeout(200):
            while self.num_asked < wanted:
                await asyncio.sleep(0)
        await asyncio.sleep(0)


class World:
    """An adaptive concurrency over scripted servers, with as many episodes at each as it allows."""

    def __init__(self, servers: list[Server], start: int = 16, least: int = 1, most: int = 1000) -> None:
        self.table = ServerTable([f"http://s{i}" for i in range(len(servers))], now=0.0)
        for index in range(len(servers)):
            self.table.mark_ready(index, 0)
            self.table.servers[index].in_flight = 10_000
        self.loading: set[int] = set()
        self.dispatcher = Dispatcher(self.table, start, refill=lambda: False, on_server_error=lambda _: None)
        config = AdaptiveConcurrencyConfig(least=least, most=most)
        self.engines = EngineFigures(self.table, cast(Any, servers), self.loading.__contains__)
        self.adaptive = AdaptiveConcurrency(config, self.dispatcher, self.table, self.engines)

    @property
    def room(self) -> int:
        return self.dispatcher.max_concurrent


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(concurrency, "EVERY_S", 0.0)
    monkeypatch.setattr(engine_figures, "EVERY_S", 0.0)
    monkeypatch.setattr(concurrency, "WINDOW_S", (0.0, 0.0))


def run(scenario: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(scenario())


def test_the_room_is_what_the_ready_servers_may_have() -> None:
    async def scenario() -> None:
        servers = [Server(kv_use=0.6), Server(kv_use=0.9)]
        world = World(servers, start=16)
        task = asyncio.create_task(world.adaptive.run())
        while world.table.servers[0].limit < 20:
            await servers[0].asked(1)
        servers[0].figures["kv_use"] = 0.9
        await servers[0].asked(4)
        limits = [server.limit for server in world.table.servers]
        assert limits[1] == 8, "its cache is full enough"
        assert world.room == round(sum(limits))
        assert world.table.pick() in (0, 1)
        world.table.servers[0].in_flight = world.table.servers[1].in_flight = 10
        assert [world.table.pick() for _ in range(2)] == [0, 0], "the one farthest below its limit"
        world.table.mark_suspect(0, now=1.0)
        await servers[1].asked(3)
        assert world.room == 8, "a server that is away takes none"
        task.cancel()

    run(scenario)


def test_what_an_update_of_the_weights_throws_out_counts_for_nothing() -> None:
    async def scenario() -> None:
        server = Server(kv_use=0.9)
        world = World([server], start=64)
        task = asyncio.create_task(world.adaptive.run())
        await server.asked(6)
        world.loading.add(0)
        server.figures["preempted"] = 60.0
        for _ in range(20):
            await asyncio.sleep(0)
        world.table.mark_ready(0, 1)
        world.loading.clear()
        await server.asked(1)
        server.figures["preempted"] = 64.0
        await server.asked(8)
        assert world.room == 64
        server.figures["preempted"] = 68.0
        await server.asked(3)
        assert world.room == 48, "and what it throws out of its own accord does"
        assert world.adaptive.drain()["engines/preempted"] == 4
        task.cancel()

    run(scenario)


@pytest.mark.parametrize("case", ["refuses", "tells nothing"])
def test_figures_that_never_come_leave_the_constant_and_are_told_once(case: str) -> None:
    told: list[str] = []
    sink = logger.add(told.append, level="WARNING", format="{message}")

    async def scenario() -> None:
        server = Server()
        server.error = InferenceError("GET http://s0/metrics: 404 Not Found", 404) if case == "refuses" else None
        server.figures = {}
        world = World([server], start=64)
        task = asyncio.create_task(world.adaptive.run())
        await server.asked(20)
        assert world.room == 64
        assert not task.done()
        task.cancel()

    try:
        run(scenario)
    finally:
        logger.remove(sink)
    assert len(told) == 1 and "http://s0 does not tell how busy it is" in told[0]


def test_a_server_that_was_started_again_counts_from_zero() -> None:
    async def scenario() -> None:
        server = Server(kv_use=0.9, preempted=500.0)
        world = World([server], start=64)
        task = asyncio.create_task(world.adaptive.run())
        await server.asked(6)
        server.figures["preempted"] = 0.0
        await server.asked(6)
        assert world.room == 64
        task.cancel()

    run(scenario)


def test_what_taking_an_episode_raises_ends_the_run() -> None:
    async def scenario() -> None:
        world = World([Server()])
        world.dispatcher.broken = KeyError("a bug")
        with pytest.raises(KeyError, match="a bug"):
            await world.adaptive.run()

    run(scenario)


def test_a_constant_number_of_episodes_has_the_engines_figures_too() -> None:
    async def scenario() -> None:
        busy = Server(kv_use=0.9, waiting=6.0, preempted=3.0)
        silent, reticent = Server(), Server()
        silent.figures, reticent.figures = {}, {"running": 8.0, "waiting": 2.0}  # as our backend over transformers
        world = World([busy, silent, reticent], start=64)
        assert world.engines.drain() == {}, "nobody has told anything"
        task = asyncio.create_task(world.engines.run())
        await busy.asked(4)
        busy.figures["preempted"] = 5.0
        await busy.asked(3)
        row = world.engines.drain()
        assert (row["engines/kv_use"], row["engines/preempted"]) == (0.9, 2.0) and 2 < row["engines/waiting"] < 6
        busy.error = InferenceError("gone")
        await reticent.asked(4)
        world.engines.drain()
        await reticent.asked(4)
        assert world.engines.drain() == {"engines/waiting": 2.0}
        assert not task.done() and world.room == 64
        task.cancel()

    run(scenario)


def test_figures_are_read_from_what_vllm_answers() -> None:
    text = """# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="policy"} 12.0
vllm:num_requests_running{engine="1",model_name="policy"} 3.0
vllm:num_requests_waiting{engine="0",model_name="a b"} 5.0
vllm:num_requests_waiting_by_reason{engine="0",reason="capacity"} 99.0
vllm:kv_cache_usage_perc{engine="0",model_name="policy"} 0.25
vllm:kv_cache_usage_perc{engine="1",model_name="policy"} 0.75
vllm:num_preemptions_total{engine="0",model_name="policy"} 7.0
vllm:num_preemptions_created{engine="0",model_name="policy"} 1.7e+09
vllm:generation_tokens_total{engine="0",model_name="policy"} nonsense
"""
    assert parse_figures(text) == {"running": 15.0, "waiting": 5.0, "kv_use": 0.75, "preempted": 7.0}
