"""Samplers and gates: what they decide, that mistakes are refused, and that nothing is lost or repeated over kills."""

import json
import random
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from loguru import logger
from pydantic import ValidationError

from prime_hpc.config import ConfigError, Experiment
from prime_hpc.config.sections.curriculum import CurriculumConfig, GateConfig, SamplerConfig
from prime_hpc.orchestrator.curriculum import CompletedGroup, Curriculum, DifficultyPool, make_gate
from prime_hpc.orchestrator.curriculum.samplers import MAX_SKIPS, unit_hash
from prime_hpc.orchestrator.errors import OrchestratorError
from prime_hpc.orchestrator.rollouts.episodes import Episode
from prime_hpc.orchestrator.rollouts.groups import Group, version_floor
from prime_hpc.orchestrator.rollouts.prompts import Draw, Prompt, PromptStream, SourceInfo
from tests.support.episodes import failed_episode, make_episode
from tests.unit.test_prompts import ACTIONS, Life, last_life, make_stream
from tests.unit.test_staleness import Run

NAMES = ["a", "b", "c"]
SOURCES = [SourceInfo("a", 2.0, 7), SourceInfo("b", 1.0, None), SourceInfo("c", 1.0, 3)]
POOLS = {"type": "difficulty_pool", "easy_above": 0.9, "hard_below": 0.1}


def make_curriculum(num_prompts: int = 2, **config: Any) -> Curriculum:
    return Curriculum(CurriculumConfig.model_validate(config), num_prompts=num_prompts, env_names=NAMES)


def make_group(prompt: Prompt, rewards: list[float], versions: list[int] | None = None) -> Group:
    slots: list[Episode | None] = [make_episode(versions, reward=reward) for reward in rewards]
    return Group(prompt, 0, 0, slots, num_ended=len(slots))


def completed(task: int, rewards: list[float]) -> CompletedGroup:
    return CompletedGroup("a", 0, task, 0, np.array(rewards))


# ---------------------------------------------------------------------------------------------------------- samplers


def draws_of(
    sampler: DifficultyPool, num_tasks: int, count: int, rewards: dict[int, float], seed: int = 0
) -> list[int]:
    """Tasks drawn from one environment, each group's rewards observed at once."""
    stream = PromptStream([SourceInfo("a", 1.0, num_tasks)], seed, sampler.choose)
    tasks = []
    for _ in range(count):
        task = stream.next().task
        sampler.observe(completed(task, [rewards.get(task, 0.5)] * 2))
        tasks.append(task)
    return tasks


def test_pools_draw_easy_and_hard_tasks_with_their_probabilities() -> None:
    config = SamplerConfig.model_validate({**POOLS, "easy_probability": 0.1, "hard_probability": 0.5})
    sampler = DifficultyPool(config, NAMES)
    rewards = {task: (1.0 if task < 100 else 0.0 if task < 200 else 0.5) for task in range(300)}
    tasks = draws_of(sampler, 300, 300 + 160 * 40, rewards)
    assert sorted(tasks[:300]) == list(range(300)), "what was never seen is drawn once first"
    counts = Counter(task // 100 for task in tasks[300:])
    # 40 more epochs: each normal task 40 times, easy ones 4 +- 0.19, hard ones 20 +- 0.32 (means over 100 tasks)
    assert 3900 <= counts[2] <= 4100
    assert 300 <= counts[0] <= 500
    assert 1850 <= counts[1] <= 2150
    row = sampler.metrics()
    assert (row["a/easy"], row["a/hard"]) == (100, 100)
    assert row["draws"] == len(tasks) and row["skipped"] > 5000
    assert sampler.metrics()["draws"] == 0


def test_the_latest_group_decides_the_pool() -> None:
    sampler = DifficultyPool(SamplerConfig.model_validate(POOLS), NAMES)
    PromptStream([SourceInfo("a", 1.0, 5)], 0, sampler.choose).next()
    for rewards, sizes in (([1.0, 0.8], (1, 0)), ([0.0, 0.2], (0, 1)), ([0.0, 1.0], (0, 0)), ([0.0, 0.0], (0, 1))):
        sampler.observe(completed(3, rewards))
        row = sampler.metrics()
        assert (row["a/easy"], row["a/hard"]) == sizes


def test_pools_of_a_million_tasks_are_stored_in_little_with_every_batch() -> None:
    num_tasks = 1_000_000
    old = {"0": {"walk": 7, "easy": list(range(0, num_tasks, 3)), "hard": list(range(1, num_tasks, 3))}}
    sampler, again = (DifficultyPool(SamplerConfig.model_validate(POOLS), NAMES) for _ in range(2))
    sampler.load_state_dict(old)  # as version 0.1.0 wrote it: 4.6 MB
    text = json.dumps(sampler.state_dict())
    assert len(text) < 400_000
    again.load_state_dict(json.loads(text))
    row = again.metrics()
    assert (row["a/easy"], row["a/hard"]) == (333_334, 333_333) and again.state_dict() == sampler.state_dict()
    again.observe(completed(0, [0.0, 0.0]))
    again.observe(completed(num_tasks + 5, [1.0, 1.0]))
    assert [again._pools[0].of(task) for task in (0, 1, 2, 3, num_tasks, num_tasks + 5)] == [2, 2, 0, 1, 0, 1]


def test_a_draw_ends_where_every_task_is_easy() -> None:
    for num_tasks in (5, MAX_SKIPS + 500):
        sampler = DifficultyPool(SamplerConfig.model_validate({**POOLS, "easy_probability": 0.0}), NAMES)
        draws_of(sampler, num_tasks, num_tasks, dict.fromkeys(range(num_tasks), 1.0))
        stream = PromptStream([SourceInfo("a", 1.0, num_tasks)], 0, sampler.choose)
        sampler.metrics()
        assert 0 <= stream.next().task < num_tasks
        row = sampler.metrics()
        assert row["forced"] == 1 and row["skipped"] == min(MAX_SKIPS, num_tasks)


def test_without_easy_or_hard_tasks_the_order_is_the_standard_one() -> None:
    curriculum = make_curriculum(sampler=POOLS)
    stream, standard = PromptStream(SOURCES, 3, curriculum.choose), make_stream()
    assert [stream.next() for _ in range(60)] == [standard.next() for _ in range(60)]


def test_the_standard_sampler_leaves_the_streams_state_as_it_was() -> None:
    curriculum = make_curriculum()
    assert curriculum.choose is None
    assert curriculum.batch_taken([]) == {} and curriculum.drain_metrics() == {}
    assert set(make_stream().state_dict([])) == {"format", "seed", "sources", "cursor", "counts", "credits", "pending"}


def test_hashes_are_pinned_and_uniform() -> None:
    assert unit_hash(0, 0, 0) == unit_hash(0, 0, 0) != unit_hash(0, 0, 1) != unit_hash(1, 0, 0)
    assert unit_hash(3, 1, 7) == 0.5053832274154476  # a run resumed on another machine agrees
    values = np.array([unit_hash(0, 0, k) for k in range(4000)])
    assert np.abs(np.histogram(values, bins=10, range=(0, 1))[0] - 400).max() < 5 * np.sqrt(400 * 0.9)


class Backwards:
    """A sampler of the user's own: counts down, remembers how far."""

    def __init__(self, start: int) -> None:
        self.next = start
        self.seen: list[int] = []

    def choose(self, draw: Draw) -> int:
        assert draw.num_tasks is not None
        self.next -= 1
        return self.next

    def observe(self, group: CompletedGroup) -> None:
        self.seen.append(group.task)

    def state_dict(self) -> dict[str, Any]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.next = state["next"]


def test_own_sampler_its_state_and_its_mistakes() -> None:
    own = {"type": f"{__name__}:Backwards", "args": {"start": 4}}
    sources = [SourceInfo("a", 1.0, 5)]
    curriculum = make_curriculum(sampler=own)
    stream = PromptStream(sources, 0, curriculum.choose)
    drawn = [stream.next() for _ in range(3)]
    assert [p.task for p in drawn] == [3, 2, 1]
    saved = json.loads(
        json.dumps([stream.state_dict(drawn[1:]), curriculum.batch_taken([make_group(drawn[0], [1.0])])])
    )
    again = make_curriculum(sampler=own)
    resumed = PromptStream(sources, 0, again.choose)
    resumed.load_state_dict(saved[0])
    again.load_state_dict(saved[1])
    assert [resumed.next() for _ in range(2)] == drawn[1:], "a chosen task stays with its position"
    assert resumed.next().task == 0
    with pytest.raises(OrchestratorError, match=r"chose task -1 of a, which has 5 tasks"):
        resumed.next()


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"sampler": {"type": "nowhere.at:All"}}, "cannot import"),
        ({"sampler": {"type": f"{__name__}:Backwards"}}, "start"),
        ({"sampler": {"type": f"{__name__}:even_positions"}}, "not a class with a method choose"),
        ({"gates": [{"type": f"{__name__}:NAMES"}]}, r"gates\.0\.type.*|is a list"),
        ({"gates": [{"type": f"{__name__}:Backwards", "args": {"start": 1}}]}, "method admits"),
    ],
)
def test_own_code_that_cannot_be_used_is_refused(config: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        make_curriculum(**config)


def test_another_sampler_at_a_resume_goes_on_where_the_standard_order_was() -> None:
    standard = make_stream()
    for _ in range(9):
        standard.next()
    curriculum = make_curriculum(sampler=POOLS)
    stream = PromptStream(SOURCES, 3, curriculum.choose)
    stream.load_state_dict(json.loads(json.dumps(standard.state_dict([]))))
    curriculum.load_state_dict({})
    assert [stream.next() for _ in range(20)] == [standard.next() for _ in range(20)]


# ------------------------------------------------------------------------------------------------------------- gates


def even_positions(group: CompletedGroup, add: int = 0) -> bool:
    """A gate of the user's own."""
    return (group.position + add) % 2 == 0


@pytest.mark.parametrize(
    ("gate", "rewards", "admitted"),
    [
        ({"type": "reward_range", "low": 0.2, "high": 0.8}, [0.0, 0.4], True),  # bounds belong to the range
        ({"type": "reward_range", "low": 0.2, "high": 0.8}, [0.8, 0.9], False),
        ({"type": "reward_range", "low": 0.2}, [5.0], True),
        ({"type": "reward_range", "high": 0.2}, [0.1, 0.4], False),
        ({"type": "advantage_range"}, [1.0, 1.0, 1.0], False),
        ({"type": "advantage_range"}, [0.1 + 0.2, 0.3, 0.3], False),  # equal but for rounding
        ({"type": "advantage_range"}, [0.0, 0.0, 1e-6], True),
        ({"type": "advantage_range", "low": 0.5}, [0.0, 1.0], True),
        ({"type": "advantage_range", "low": 0.6}, [0.0, 1.0], False),
        ({"type": "advantage_range", "high": 0.7}, [0.0, 0.0, 0.0, 1.0], False),
        ({"type": f"{__name__}:even_positions", "args": {"add": 1}}, [0.0], False),
    ],
)
def test_what_gates_admit(gate: dict[str, Any], rewards: list[float], admitted: bool) -> None:
    made = make_gate(GateConfig.model_validate(gate), "orchestrator.curriculum.gates.0.type")
    assert made.admits(completed(0, rewards)) is admitted


def test_the_first_gate_that_rejects_is_named_and_after_the_limit_all_are_admitted() -> None:
    gates = [{"type": "advantage_range"}, {"type": "reward_range", "high": 0.6, "name": "too_easy"}]
    curriculum = make_curriculum(num_prompts=2, gates=gates, max_rejected=1.5)
    rewards = [[1.0, 1.0], [0.0, 1.0], [0.6, 0.8], [0.0, 0.0], [1.0, 1.0], [0.5, 0.5]]
    groups = [make_group(Prompt(i, 0, i, i), r) for i, r in enumerate(rewards)]
    verdicts = [curriculum.judge(group) for group in groups]
    assert verdicts == ["advantage_range", "", "too_easy", "advantage_range", "", ""]
    assert curriculum.batch_taken(groups[1:2])["rejected"] == [[0, verdicts[0]], [2, verdicts[2]], [3, verdicts[3]]]
    assert curriculum.drain_metrics() == {
        "curriculum/rejected/advantage_range": 2,
        "curriculum/rejected/too_easy": 1,
        "curriculum/admitted_anyway": 2,
        "curriculum/reward_of_all": pytest.approx(3.7 / 6),
    }
    assert curriculum.judge(groups[0]) == "advantage_range", "each batch has its own limit"


def test_own_gate_that_fails_is_named_with_its_group() -> None:
    curriculum = make_curriculum(gates=[{"type": f"{__name__}:even_positions", "args": {"wrong": 1}, "name": "mine"}])
    with pytest.raises(OrchestratorError, match=r"mine failed on the group of prompt 4 \(a, task 2\): TypeError"):
        curriculum.judge(make_group(Prompt(4, 0, 4, 2), [0.0]))


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"sampler": {"type": "dificulty_pool"}}, "did you mean difficulty_pool"),
        ({"sampler": {"easy_above": 0.7}}, "only type = difficulty_pool has pools"),
        ({"sampler": {**POOLS, "hard_below": 0.9}}, r"must be less than easy_above"),
        ({"sampler": {**POOLS, "easy_above": float("nan")}}, "finite"),
        ({"sampler": {**POOLS, "easy_probability": 1.2}}, "less than or equal to 1"),
        ({"sampler": {**POOLS, "args": {"x": 1}}}, "own sampler"),
        ({"gates": [{"type": "reward_range"}]}, "admits everything"),
        ({"gates": [{"type": "reward_range", "low": 0.8, "high": 0.2}]}, "no group would be admitted"),
        ({"gates": [{"type": "advantage_range", "low": 0}]}, "must be above 0"),
        ({"gates": [{"type": "advantage_range", "args": {"x": 1}}]}, "own gate"),
        ({"gates": [{"type": "m:f", "low": 0.1}]}, "from `args`"),
        ({"gates": [{"type": "advantage_range"}] * 2}, "another `name`"),
        ({"max_rejected": 0}, "greater than 0"),
    ],
)
def test_nonsense_is_refused_with_its_remedy(config: dict[str, Any], named: str) -> None:
    with pytest.raises(ValidationError, match=named):
        CurriculumConfig.model_validate(config)


def test_a_gate_that_rejects_every_group_of_one_is_refused() -> None:
    tree: dict[str, Any] = {"name": "x", "model": {"name": "m"}, "orchestrator": {"rollouts_per_example": 1}}
    tree["orchestrator"] |= {"advantage": {"type": "none"}, "curriculum": {"gates": [{"type": "advantage_range"}]}}
    with pytest.raises(ValidationError, match=r"curriculum\.gates\.0: advantage_range .* at least 2"):
        Experiment.model_validate(tree)
    tree["orchestrator"] |= {"rollouts_per_example": 4, "env": [{"id": "a"}, {"id": "b", "rollouts_per_example": 1}]}
    with pytest.raises(ValidationError, match=r"curriculum\.gates\.0: advantage_range .* of each environment"):
        Experiment.model_validate(tree)


# ------------------------------------------------------------------------------------------- exactness over any kills


class PooledLife(Life):
    """With pools; every group that ends is observed."""

    def __init__(self, saved: str | None, drawn: dict[int, Prompt]) -> None:
        """`drawn`: in all lives, by position."""
        self.curriculum = make_curriculum(sampler={**POOLS, "easy_probability": 0.2, "hard_probability": 0.3})
        self.drawn = drawn
        super().__init__(saved)

    def open_stream(self, saved: str | None) -> PromptStream:
        stream = PromptStream(SOURCES, 3, self.curriculum.choose)
        if saved is not None:
            prompts, curriculum = json.loads(saved)
            stream.load_state_dict(prompts)
            self.curriculum.load_state_dict(curriculum)
        return stream

    def draw(self) -> Prompt:
        known, prompt = self.stream.cursor, self.stream.next()
        assert prompt.position >= known or self.drawn[prompt.position] == prompt
        self.drawn[prompt.position] = prompt
        return prompt

    def take(self, prompts: list[Prompt]) -> str:
        groups = [make_group(p, [reward_of(p)] * 2) for p in prompts]
        curriculum = self.curriculum.batch_taken(groups)
        return json.dumps([self.stream.state_dict(self.open), curriculum])


def reward_of(prompt: Prompt) -> float:
    """0, 0.5 or 1 by position: tasks change their pools."""
    return random.Random(prompt.position).choice([0.0, 0.5, 1.0])


@settings(max_examples=200, deadline=None)
@given(ACTIONS)
def test_pools_lose_and_repeat_no_position_and_keep_each_ones_task(actions: list[tuple[str, int]]) -> None:
    drawn: dict[int, Prompt] = {}
    life = last_life(lambda saved: PooledLife(saved, drawn), actions)
    saved = json.dumps([life.stream.state_dict(life.open), life.curriculum.state_dict()])
    resumed = PooledLife(saved, drawn)
    rest = [life.stream.next() for _ in range(life.stream.num_pending)]
    everything = [*life.used, *life.dropped, *life.open, *rest]
    assert sorted(p.position for p in everything) == list(range(life.stream.cursor))
    assert all(drawn[p.position] == p for p in everything)
    # What comes next is the same in an attempt that goes on and in one that was killed here.
    for _ in range(resumed.stream.num_pending):
        resumed.stream.next()
    assert [resumed.stream.next() for _ in range(30)] == [life.stream.next() for _ in range(30)]


@pytest.fixture(scope="module")
def quiet() -> Iterator[None]:
    """Hundreds of simulated runs warn of the same."""
    logger.disable("prime_hpc.orchestrator.curriculum")
    yield
    logger.enable("prime_hpc.orchestrator.curriculum")


class GatedRun(Run):
    """The simulated run of test_staleness with pools and gates; a group's rewards follow from its task and its try."""

    def __init__(self, async_level: int, failing: float, rng: random.Random, max_rejected: float) -> None:
        self.config = CurriculumConfig.model_validate(
            {
                "sampler": {**POOLS, "easy_probability": 0.2, "hard_probability": 0.3},
                "gates": [{"type": "reward_range", "low": 0.3, "high": 0.7}],
                "max_rejected": max_rejected,
            }
        )
        super().__init__(async_level, failing, rng)

    def begin(self, step: int) -> None:
        super().begin(step)
        self.curriculum = Curriculum(self.config, num_prompts=2, env_names=["a"])
        self.stream = PromptStream([SourceInfo("a", 1.0, 5)], 0, self.curriculum.choose)
        if step:
            state = json.loads(self.saves[-1][0])
            self.stream.load_state_dict(state)
            self.curriculum.load_state_dict(state["curriculum"])
        self.book.gate = self.curriculum.judge

    def end_one_episode(self) -> None:
        group, index, started = self.running.pop(self.rng.randrange(len(self.running)))
        if not group.abandoned:
            versions = sorted(self.rng.choices(range(started, self.served + 1), k=3))
            fails = self.rng.random() < self.failing
            reward = [0.0, 0.5, 1.0][group.prompt.position % 3]
            self.book.add(group, index, failed_episode() if fails else make_episode(versions, reward=reward))

    def take_batch(self) -> None:
        groups = self.book.take_batch()
        step = self.written + 1
        assert len(groups) == 2
        for group in groups:
            oldest = group.min_version()
            assert oldest is not None and version_floor(step, self.async_level) <= oldest <= step - 1
        self.used += [g.prompt.position for g in groups]
        before = {position for position, _ in self.curriculum._rejected}
        state = self.stream.state_dict(self.book.outstanding())
        state["curriculum"] = self.curriculum.batch_taken(groups)
        assert len(before) <= self.curriculum.max_rejected
        assert before <= set(self.dropped)
        self.saves.append((json.dumps(state), list(self.used), list(self.dropped)))
        self.send_back()


@pytest.mark.usefixtures("quiet")
@settings(max_examples=150, deadline=None)
@given(st.integers(0, 2), st.integers(0, 2**32), st.floats(0.0, 0.3), st.sampled_from([0.5, 2.0, 50.0]))
def test_gates_and_pools_keep_the_bound_and_every_prompt_over_any_kills(
    async_level: int, seed: int, failing: float, max_rejected: float
) -> None:
    run = GatedRun(async_level, failing, random.Random(seed), max_rejected)
    for _ in range(20_000):
        if run.written == Run.LAST:
            break
        run.turn()
        if async_level == 0:
            assert run.book.counts.stale == 0
    assert run.written == Run.LAST, "the schedule got stuck"
    if max_rejected == 50.0:
        assert all(position % 3 == 1 for position in run.used), "only groups of mean reward 0.5 were admitted"
    rest = [p.position for p in run.book.outstanding()] + [
        run.stream.next().position for _ in range(run.stream.num_pending)
    ]
    assert sorted([*run.used, *run.dropped, *rest]) == list(range(run.stream.cursor))
