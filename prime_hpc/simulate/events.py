"""The loop of a run as discrete events: engines that sample, the gate of groups, the trainer, publishing and loading.

Engines share their speed: with n requests in flight an engine gives each of them one token in `a + b n` seconds, beyond
`max_num_seqs` they take turns. Who may start, what a batch takes and what grows stale is decided by the orchestrator's
own `GroupBook`. Large fleets are simulated in part: one in so many engines with its share of prompts and concurrency,
since engines are alike; the trainer's batch is scaled up again.
"""

import heapq
import itertools
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, NamedTuple

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


_RESULT = SimpleNamespace(samples=True)
_Seconds = Callable[[int], float]


class _Rollout:
    """An episode; `GroupBook` asks it as it asks the orchestrator's."""

    __slots__ = ("group", "index", "max_version", "min_version", "result", "start", "tokens", "usable", "version_sum")

    def __init__(self, group: Group, index: int, usable: bool) -> None:
        self.group, self.index, self.usable = group, index, usable
        self.min_version: int | None = None
        self.max_version: int | None = None
        self.tokens, self.version_sum, self.start, self.result = 0.0, 0.0, 0.0, _RESULT


class _Timeline:
    """Acts that are to come, by their time; of those at one moment the first that was entered comes first."""

    def __init__(self) -> None:
        self.now = 0.0
        self._numbers = itertools.count()
        self._acts: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []

    def at(self, seconds: float, act: Callable[..., None], *arguments: Any) -> None:
        heapq.heappush(self._acts, (self.now + seconds, next(self._numbers), act, arguments))

    def go_on(self) -> None:
        self.now, _, act, arguments = heapq.heappop(self._acts)
        act(*arguments)


class _Server:
    """One server: its clock counts tokens that each of its requests was given so far."""

    def __init__(self, index: int, time: _Timeline, token_s: _Seconds, on_sampled: Callable[..., None]) -> None:
        self.index, self._time, self._token_s, self._on_sampled = index, time, token_s, on_sampled
        self.count, self._stamp = 0, 0
        self.clock, self._since, self.area, self.idle = 0.0, 0.0, 0.0, 0.0
        self.paused = False
        self._numbers = itertools.count()
        self._ends: list[tuple[float, int, _Rollout]] = []
        """By its clock."""
        self.marks: list[tuple[float, int]] = [(0.0, 0)]
        """Clock from which on a version is served."""

    def advance(self) -> None:
        """Let it sample until now."""
        seconds, self._since = self._time.now - self._since, self._time.now
        self.area += seconds * self.count
        if not self.count:
            self.idle += seconds
        elif not self.paused and (token_s := self._token_s(self.count)) > 0:
            self.clock += seconds / token_s

    def enter(self, rollout: _Rollout) -> None:
        """Begin to sample an episode, which is counted already."""
        self.advance()
        rollout.start = self.clock
        heapq.heappush(self._ends, (self.clock + rollout.tokens, next(self._numbers), rollout))

    def drop(self, count: int) -> None:
        """Give up so many episodes, of groups that were abandoned."""
        self.advance()
        self.count -= count
        self._ends = [entry for entry in self._ends if not entry[2].group.abandoned]
        heapq.heapify(self._ends)

    def reschedule(self) -> None:
        """Say anew when its next episode ends: who samples beside it, or whether it may, has changed."""
        self._stamp += 1
        if self._ends and not self.paused:
            left = max(0.0, self._ends[0][0] - self.clock)
            self._time.at(left * self._token_s(self.count), self._sampled, self._stamp)

    def _sampled(self, stamp: int) -> None:
        if stamp != self._stamp:
            return
        self.advance()
        self.clock = max(self.clock, self._ends[0][0])
        ended = []
        while self._ends and self._ends[0][0] <= self.clock + 1e-9:
            rollout = heapq.heappop(self._ends)[2]
            if not rollout.group.abandoned:
                ended.append(rollout)
        self.count -= len(ended)
        for rollout in ended:
            self._note_versions(rollout)
        self._on_sampled(self, ended)

    def _note_versions(self, rollout: _Rollout) -> None:
        high, low = rollout.start + rollout.tokens, rollout.start
        for clock, version in reversed(self.marks):
            if (begin := max(clock, low)) < high:
                rollout.version_sum += (high - begin) * version
                high = begin
            rollout.min_version = version
            if rollout.max_version is None:
                rollout.max_version = version
            if clock <= low:
                break


@dataclass
class _Lane:
    """The server of a group, and its episodes that run."""

    server: _Server | None = None
    running: set[_Rollout] = field(default_factory=set)


class _Trainer:
    """Takes batches in their order; publishes after each step, and is free a while later."""

    def __init__(self, time: _Timeline, setting: Setting, costs: Costs, on_published: Callable[[int], None]) -> None:
        self._time, self._setting, self._costs, self._on_published = time, setting, costs, on_published
        self._training = False
        self.batches: dict[int, tuple[float, float]] = {}
        """That it can read -> tokens to train on, mean lag."""
        self.free_at: list[float] = [0.0]
        self.waits, self.lags, self.sizes = list[float](), list[float](), list[float]()

    def train(self) -> None:
        """Begin the next step if it can."""
        step = len(self.free_at)
        if self._training or step not in self.batches:
            return
        self._training = True
        tokens, lag = self.batches.pop(step)
        self.waits.append(self._time.now - self.free_at[-1])
        self.lags.append(lag)
        self.sizes.append(tokens)
        setting = self._setting
        busy = self._costs.train_s(tokens, setting.ranks, setting.epochs, setting.updates) + self._costs.publish_s
        self._time.at(busy, self._on_published, step)
        self._time.at(busy + self._costs.after_s(setting.save_interval), self._free)

    def _free(self) -> None:
        self._training = False
        self.free_at.append(self._time.now)
        self.train()


class _Totals(NamedTuple):
    """Sums since the beginning: requests in flight x seconds, seconds of idle servers, tokens, groups."""

    area: float
    idle: float
    sampled: float
    stale: int


class Simulation:
    """One shape, from its first step on: the orchestrator between engines and trainer."""

    def __init__(self, setting: Setting, costs: Costs, seed: int, most_rollouts: int = MOST_ROLLOUTS) -> None:
        """Set the run up; `costs` are of a calibration."""
        self.setting, self.costs, self.rng = setting, costs, random.Random(seed)
        self.warm = 3 + setting.async_level
        num_rollouts = setting.group_size + setting.greedy
        per_step = setting.num_prompts * num_rollouts
        self.num_steps = max(LEAST_STEPS, min(MOST_STEPS, most_rollouts // per_step - self.warm))
        most = max(1, most_rollouts // ((self.warm + self.num_steps) * num_rollouts))
        self.num_prompts = min(setting.num_prompts, most)
        self.part = setting.num_prompts / self.num_prompts
        num_servers = max(1, round(setting.servers / self.part))
        self.engines = setting.servers * setting.engines / self.part / num_servers
        self.max_concurrent = max(1, round(setting.max_concurrent / self.part))
        self.time = _Timeline()
        self.servers = [_Server(i, self.time, self._token_s, self._sampled) for i in range(num_servers)]
        self.trainer = _Trainer(self.time, setting, costs, self._published)
        self.book = GroupBook(
            num_prompts=self.num_prompts,
            async_level=setting.async_level,
            last_batch=NEVER,
            sizes=[setting.group_size],
            minima=[1],
            greedy=[0] if setting.greedy else [],
            masks_stale=setting.masks_stale,
        )
        self.turn = self.running = self.num_stale = 0
        self.positions = itertools.count()
        self.queue: deque[_Rollout] = deque()
        self.returned: deque[Prompt] = deque()
        self.changed: set[_Server] = set()
        self.served = self.published = 0
        self.loading = self.writing = False
        self.sampled = 0.0

    def run(self) -> Outcome:
        """Let so many steps pass; the same seed gives the same outcome."""
        self._after_change()
        begin, end = self._totals_at(self.warm), self._totals_at(self.warm + self.num_steps)
        trainer, steps = self.trainer, slice(self.warm, self.warm + self.num_steps)
        seconds = max(1e-12, trainer.free_at[steps.stop] - trainer.free_at[steps.start])
        return Outcome(
            step_s=seconds / self.num_steps,
            trainer_idle=sum(trainer.waits[steps]) / seconds,
            engines_idle=(end.idle - begin.idle) / seconds / len(self.servers),
            in_flight=(end.area - begin.area) / seconds / (len(self.servers) * self.engines),
            lag=sum(trainer.lags[steps]) / self.num_steps,
            stale=(end.stale - begin.stale) / self.num_steps / self.num_prompts,
            batch_tokens=sum(trainer.sizes[steps]) / self.num_steps,
            sampled_per_s=(end.sampled - begin.sampled) * self.part / seconds,
            num_steps=self.num_steps,
            part=self.part,
        )

    def _totals_at(self, step: int) -> _Totals:
        """Go on until the trainer has done so many steps."""
        while len(self.trainer.free_at) <= step:
            self.time.go_on()
        for server in self.servers:
            server.advance()
        area, idle = sum(s.area for s in self.servers), sum(s.idle for s in self.servers)
        return _Totals(area, idle, self.sampled, self.num_stale)

    def _token_s(self, count: int) -> float:
        per_engine = count / self.engines
        turns = max(1.0, per_engine / self.setting.max_num_seqs) if self.setting.max_num_seqs else 1.0
        return self.costs.token_s * turns + self.costs.shared_token_s * per_engine

    def _after_change(self) -> None:
        self._collect()
        self._pump()
        self._reschedule()

    def _reschedule(self) -> None:
        for server in sorted(self.changed, key=lambda server: server.index):
            server.reschedule()
        self.changed.clear()

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
            prompt = Prompt(position := next(self.positions), 0, position, 0)
        group = self.book.open(prompt, self.served)
        group.lane = _Lane()
        usable = self.costs.dropped_share <= 0 or self.rng.random() >= self.costs.dropped_share
        self.queue.extend(_Rollout(group, index, usable) for index in range(group.num_rollouts))
        return True

    def _start(self, rollout: _Rollout) -> None:
        lane: _Lane = rollout.group.lane
        if lane.server is None:
            order = [*self.servers[self.turn :], *self.servers[: self.turn]]
            lane.server = min(order, key=lambda server: server.count)
            self.turn = (lane.server.index + 1) % len(self.servers)
        lane.server.advance()
        lane.server.count += 1
        self.running += 1
        lane.running.add(rollout)
        self.changed.add(lane.server)
        rollout.tokens, rollout_s = self.costs.draw(self.rng)
        if rollout_s > 0:
            self.time.at(rollout_s, self._begin, lane.server, rollout)
        else:
            lane.server.enter(rollout)

    def _begin(self, server: _Server, rollout: _Rollout) -> None:
        if not rollout.group.abandoned:
            server.enter(rollout)
            self.changed.add(server)
            self._reschedule()

    def _sampled(self, server: _Server, ended: list[_Rollout]) -> None:
        self.running -= len(ended)
        self.changed.add(server)
        for rollout in ended:
            self.sampled += rollout.tokens
            rollout.group.lane.running.discard(rollout)
            self.book.add(rollout.group, rollout.index, rollout)  # type: ignore[arg-type]
            self._send_back()
        self._after_change()

    def _send_back(self) -> None:
        for group in sorted(self.book.take_stale(), key=lambda g: -g.prompt.position):
            lane: _Lane = group.lane
            self.num_stale += 1
            if lane.running and lane.server is not None:
                lane.server.drop(len(lane.running))
                self.running -= len(lane.running)
                lane.running.clear()
                self.changed.add(lane.server)
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
        self.writing = True
        batch = tokens * self.costs.trained_per_sampled * self.part, lag
        self.time.at(self.costs.handover_s, self._written, step, batch)

    def _written(self, step: int, batch: tuple[float, float]) -> None:
        self.writing, self.trainer.batches[step] = False, batch
        self.trainer.train()
        self._after_change()

    def _published(self, version: int) -> None:
        self.published = version
        self._load()

    def _load(self) -> None:
        if self.loading or self.published <= self.served:
            return
        self.loading = True
        pause = min(self.costs.pause_s, self.costs.load_s)
        if pause > 0:
            self.time.at(self.costs.load_s - pause, self._pause)
        self.time.at(self.costs.load_s, self._loaded, self.published)

    def _pause(self) -> None:
        for server in self.servers:
            server.advance()
            server.paused = True
        self.changed.update(self.servers)
        self._reschedule()

    def _loaded(self, version: int) -> None:
        self.loading, self.served = False, version
        for server in self.servers:
            server.advance()
            server.paused = False
            server.marks = [*server.marks[-64:], (server.clock, version)]
        self.changed.update(self.servers)
        self._load()
        self._after_change()


def simulate(setting: Setting, costs: Costs, seed: int, most_rollouts: int = MOST_ROLLOUTS) -> Outcome:
    """Return how a run of this shape goes, by the calibrated costs."""
    return Simulation(setting, costs, seed, most_rollouts).run()
