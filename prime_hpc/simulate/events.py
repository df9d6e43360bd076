"""The loop of a run as discrete events: engines that sample, the gate of groups, the trainer, publishing and loading.

Engines share their speed: with n requests in flight an engine gives each of them one token in `a + b n` seconds, beyond
`max_num_seqs` they take turns. Who may start, what a batch takes and what grows stale is decided by the orchestrator's
own `GroupBook`. Large fleets are simulated in part: one in so many engines with its share of prompts and concurrency,
since engines are alike; the trainer's batch is scaled up again.
"""

import heapq
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from prime_hpc.orchestrator.rollouts.groups import Group, GroupBook
from prime_hpc.orchestrator.rollouts.prompts import Prompt
from prime_hpc.simulate.costs import Costs
from prime_hpc.simulate.setting import Setting

MOST_ROLLOUTS = 8_000
"""Simulated of one shape."""
ROUGH_ROLLOUTS = 3_000
"""The same where a bound is all that is asked for."""
MOST_STEPS = 40
LEAST_STEPS = 6
NEVER = 1 << 40


@dataclass(frozen=True)
class Outcome:
    """Means over the simulated steps, after the first ones."""

    step_s: float
    trainer_idle: float
    """Share of the time in which the trainer waited for its batch."""
    engines_idle: float
    """Share of the time, over servers, with nothing in flight."""
    in_flight: float
    """Requests in flight at one engine, over time."""
    lag: float
    """Versions that the batch's tokens are behind."""
    stale: float
    """Groups that are sampled again, of those in batches."""
    batch_tokens: float
    sampled_per_s: float
    num_steps: int
    part: float
    """The fleet is so many times what was simulated."""


class _Result:
    samples = True


_RESULT = _Result()


class _Rollout:
    """An episode; `GroupBook` asks it as it asks the orchestrator's."""

    __slots__ = (
        "begun",
        "group",
        "index",
        "max_version",
        "min_version",
        "result",
        "start",
        "tokens",
        "usable",
        "version_sum",
    )

    def __init__(self, group: Group, index: int, tokens: float, usable: bool) -> None:
        self.group, self.index, self.tokens, self.usable = group, index, tokens, usable
        self.min_version: int | None = None
        self.max_version: int | None = None
        self.version_sum = 0.0
        self.start, self.begun, self.result = 0.0, False, _RESULT


@dataclass
class _Lane:
    """The server of a group, and its episodes that run."""

    server: int = -1
    running: set[_Rollout] = field(default_factory=set)


class _Server:
    """One server: its clock counts tokens that each of its requests was given so far."""

    def __init__(self) -> None:
        self.count, self.stamp = 0, 0
        self.clock, self.since, self.area, self.idle = 0.0, 0.0, 0.0, 0.0
        self.paused = False
        self.heap: list[tuple[float, int, _Rollout]] = []
        self.marks: list[tuple[float, int]] = [(0.0, 0)]
        """Clock from which on a version is served."""


class Simulation:
    """One shape, from its first step on."""

    def __init__(self, setting: Setting, costs: Costs, seed: int, most_rollouts: int = MOST_ROLLOUTS) -> None:
        """Set the run up; `costs` are of a calibration."""
        self.setting, self.costs, self.rng = setting, costs, random.Random(seed)
        self.warm = 3 + setting.async_level
        per_step = setting.num_prompts * setting.group_size
        self.num_steps = max(LEAST_STEPS, min(MOST_STEPS, most_rollouts // per_step - self.warm))
        most = max(1, most_rollouts // ((self.warm + self.num_steps) * setting.group_size))
        self.num_prompts = min(setting.num_prompts, most)
        self.part = setting.num_prompts / self.num_prompts
        num_servers = max(1, round(setting.servers / self.part))
        self.engines = setting.servers * setting.engines / self.part / num_servers
        self.max_concurrent = max(1, round(setting.max_concurrent / self.part))
        self.servers = [_Server() for _ in range(num_servers)]
        self.book = GroupBook(
            num_prompts=self.num_prompts,
            async_level=setting.async_level,
            last_batch=NEVER,
            sizes=[setting.group_size],
            minima=[1],
            masks_stale=setting.masks_stale,
        )
        self.events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self.now, self.serial, self.turn, self.running, self.position = 0.0, 0, 0, 0, 0
        self.queue: deque[_Rollout] = deque()
        self.returned: deque[Prompt] = deque()
        self.dirty: set[int] = set()
        self.served = self.published = self.written = 0
        self.loading = self.writing = self.training = False
        self.batches: dict[int, tuple[float, float]] = {}
        """Written batch -> tokens to train on, mean lag."""
        self.free_at: list[float] = [0.0]
        self.waits: list[float] = []
        self.lags: list[float] = []
        self.sizes: list[float] = []
        self.num_stale = 0
        self.begin_of_window: tuple[float, float, float, int] | None = None
        self.sampled = 0.0

    def run(self) -> Outcome:
        """Let so many steps pass; the same seed gives the same outcome."""
        last = self.warm + self.num_steps
        self._after_change()
        while len(self.free_at) <= last:
            self.now, _, act, arguments = heapq.heappop(self.events)
            act(*arguments)
        area, idle, sampled, stale = self._totals()
        assert self.begin_of_window is not None
        begin = self.begin_of_window
        seconds = max(1e-12, self.free_at[last] - self.free_at[self.warm])
        count, engines = len(self.servers), len(self.servers) * self.engines
        return Outcome(
            step_s=seconds / self.num_steps,
            trainer_idle=sum(self.waits[self.warm : last]) / seconds,
            engines_idle=(idle - begin[1]) / seconds / count,
            in_flight=(area - begin[0]) / seconds / engines,
            lag=sum(self.lags[self.warm : last]) / self.num_steps,
            stale=(stale - begin[3]) / self.num_steps / self.num_prompts,
            batch_tokens=sum(self.sizes[self.warm : last]) / self.num_steps,
            sampled_per_s=(sampled - begin[2]) * self.part / seconds,
            num_steps=self.num_steps,
            part=self.part,
        )

    # ------------------------------------------------------------------------------------------------ time

    def _at(self, seconds: float, act: Callable[..., None], *arguments: Any) -> None:
        self.serial += 1
        heapq.heappush(self.events, (self.now + seconds, self.serial, act, arguments))

    def _token_s(self, count: int) -> float:
        per_engine = count / self.engines
        turns = max(1.0, per_engine / self.setting.max_num_seqs) if self.setting.max_num_seqs else 1.0
        return self.costs.token_s * turns + self.costs.shared_token_s * per_engine

    def _advance(self, server: _Server) -> None:
        seconds = self.now - server.since
        if seconds <= 0:
            return
        server.since = self.now
        server.area += seconds * server.count
        if not server.count:
            server.idle += seconds
        elif not server.paused and (token_s := self._token_s(server.count)) > 0:
            server.clock += seconds / token_s

    def _totals(self) -> tuple[float, float, float, int]:
        for server in self.servers:
            self._advance(server)
        return sum(s.area for s in self.servers), sum(s.idle for s in self.servers), self.sampled, self.num_stale

    def _reschedule(self) -> None:
        for index in sorted(self.dirty):
            server = self.servers[index]
            server.stamp += 1
            if server.heap and not server.paused:
                left = max(0.0, server.heap[0][0] - server.clock)
                self._at(left * self._token_s(server.count), self._sampled, index, server.stamp)
        self.dirty.clear()

    def _after_change(self) -> None:
        self._collect()
        self._pump()
        self._reschedule()

    # ------------------------------------------------------------------------------------------------ episodes

    def _pump(self) -> None:
        while self.running < self.max_concurrent:
            if not self.queue and not self._open_group():
                return
            rollout = self.queue.popleft()
            if not rollout.group.abandoned:
                self._start(rollout)

    def _open_group(self) -> bool:
        if not self.book.may_open(self.served):
            return False
        if self.returned:
            prompt = self.returned.popleft()
        else:
            prompt = Prompt(self.position, 0, self.position, 0)
            self.position += 1
        group = self.book.open(prompt, self.served)
        group.lane = _Lane()
        usable = self.costs.dropped_share <= 0 or self.rng.random() >= self.costs.dropped_share
        for index in range(self.setting.group_size):
            self.queue.append(_Rollout(group, index, 0.0, usable))
        return True

    def _start(self, rollout: _Rollout) -> None:
        lane: _Lane = rollout.group.lane
        if lane.server < 0:
            count = len(self.servers)
            order = range(self.turn, self.turn + count)
            lane.server = min(order, key=lambda i: self.servers[i % count].count) % count
            self.turn = (lane.server + 1) % count
        server = self.servers[lane.server]
        self._advance(server)
        server.count += 1
        self.running += 1
        lane.running.add(rollout)
        self.dirty.add(lane.server)
        tokens, rollout_s = self.costs.draw(self.rng)
        rollout.tokens = tokens
        if rollout_s > 0:
            self._at(rollout_s, self._begin, rollout)
        else:
            self._enter(rollout)

    def _begin(self, rollout: _Rollout) -> None:
        if not rollout.group.abandoned:
            self._enter(rollout)
            self._reschedule()

    def _enter(self, rollout: _Rollout) -> None:
        index = rollout.group.lane.server
        server = self.servers[index]
        self._advance(server)
        rollout.start, rollout.begun = server.clock, True
        self.serial += 1
        heapq.heappush(server.heap, (server.clock + rollout.tokens, self.serial, rollout))
        self.dirty.add(index)

    def _sampled(self, index: int, stamp: int) -> None:
        server = self.servers[index]
        if stamp != server.stamp:
            return
        self._advance(server)
        server.clock = max(server.clock, server.heap[0][0])
        ended = []
        while server.heap and server.heap[0][0] <= server.clock + 1e-9:
            rollout = heapq.heappop(server.heap)[2]
            if not rollout.group.abandoned:
                ended.append(rollout)
                server.count -= 1
                self.running -= 1
        self.dirty.add(index)
        for rollout in ended:
            self._end(server, rollout)
        self._after_change()

    def _end(self, server: _Server, rollout: _Rollout) -> None:
        self.sampled += rollout.tokens
        high, low = rollout.start + rollout.tokens, rollout.start
        for clock, version in reversed(server.marks):
            if (begin := max(clock, low)) < high:
                rollout.version_sum += (high - begin) * version
                high = begin
            rollout.min_version = version
            if rollout.max_version is None:
                rollout.max_version = version
            if clock <= low:
                break
        rollout.group.lane.running.discard(rollout)
        self.book.add(rollout.group, rollout.index, rollout)  # type: ignore[arg-type]
        self._send_back()

    def _send_back(self) -> None:
        for group in sorted(self.book.take_stale(), key=lambda g: -g.prompt.position):
            lane: _Lane = group.lane
            self.num_stale += 1
            if lane.running:
                server = self.servers[lane.server]
                self._advance(server)
                server.count -= len(lane.running)
                self.running -= len(lane.running)
                lane.running.clear()
                server.heap = [entry for entry in server.heap if not entry[2].group.abandoned]
                heapq.heapify(server.heap)
                self.dirty.add(lane.server)
            self.returned.appendleft(group.prompt)
        self.book.take_consumed()

    # ------------------------------------------------------------------------------------------------ steps

    def _collect(self) -> None:
        if self.writing or not self.book.batch_ready():
            return
        step = self.book.next_batch
        groups = self.book.take_batch()
        self._send_back()
        rollouts: list[Any] = [slot for group in groups for slot in group.slots]
        tokens = sum(rollout.tokens for rollout in rollouts)
        versions = sum(rollout.version_sum for rollout in rollouts)
        lag = step - 1 - versions / tokens if tokens > 0 else 0.0
        self.batches[step] = (tokens * self.costs.trained_per_sampled * self.part, lag)
        self.writing = True
        self._at(self.costs.handover_s, self._written, step)

    def _written(self, step: int) -> None:
        self.writing, self.written = False, step
        self._train()
        self._after_change()

    def _train(self) -> None:
        step = len(self.free_at)
        if self.training or step > self.written:
            return
        self.training = True
        tokens, lag = self.batches.pop(step)
        self.waits.append(self.now - self.free_at[-1])
        self.lags.append(lag)
        self.sizes.append(tokens)
        busy = self.costs.train_s(tokens, self.setting.ranks) + self.costs.publish_s
        self._at(busy, self._published, step)
        self._at(busy + self.costs.after_s(self.setting.save_interval), self._free)

    def _published(self, version: int) -> None:
        self.published = version
        self._load()

    def _free(self) -> None:
        self.training = False
        self.free_at.append(self.now)
        if len(self.free_at) == self.warm + 1:
            self.begin_of_window = self._totals()
        self._train()

    def _load(self) -> None:
        if self.loading or self.published <= self.served:
            return
        self.loading = True
        pause = min(self.costs.pause_s, self.costs.load_s)
        if pause > 0:
            self._at(self.costs.load_s - pause, self._pause)
        self._at(self.costs.load_s, self._loaded, self.published)

    def _pause(self) -> None:
        for index, server in enumerate(self.servers):
            self._advance(server)
            server.paused = True
            self.dirty.add(index)
        self._reschedule()

    def _loaded(self, version: int) -> None:
        self.loading, self.served = False, version
        for index, server in enumerate(self.servers):
            self._advance(server)
            server.paused = False
            server.marks = [*server.marks[-64:], (server.clock, version)]
            self.dirty.add(index)
        self._load()
        self._after_change()


def simulate(setting: Setting, costs: Costs, seed: int, most_rollouts: int = MOST_ROLLOUTS) -> Outcome:
    """Return how a run of this shape goes, by the calibrated costs."""
    return Simulation(setting, costs, seed, most_rollouts).run()
