"""The prompt stream: the same for everybody, and every position in exactly one place over any kill and resume."""

import json
from collections import Counter
from collections.abc import Callable
from typing import TypeVar

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prime_hpc.orchestrator.errors import OrchestratorError
from prime_hpc.orchestrator.rollouts.prompts import Prompt, PromptStream, SourceInfo, shuffled_tasks

SOURCES = [SourceInfo("a", 2.0, 7), SourceInfo("b", 1.0, None), SourceInfo("c", 1.0, 3)]


def make_stream(seed: int = 3) -> PromptStream:
    return PromptStream(SOURCES, seed)


def test_the_same_seed_gives_the_same_stream_and_another_one_does_not() -> None:
    first, again, other = make_stream(), make_stream(), make_stream(4)
    drawn = [first.next() for _ in range(60)]
    assert drawn == [again.next() for _ in range(60)]
    assert drawn != [other.next() for _ in range(60)]
    assert [p.position for p in drawn] == list(range(60))


def test_every_epoch_holds_each_task_once_in_another_order() -> None:
    stream = PromptStream([SourceInfo("a", 1.0, 50)], 0)
    epochs = [[stream.next().task for _ in range(50)] for _ in range(3)]
    assert all(sorted(epoch) == list(range(50)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]
    assert epochs[0] != sorted(epochs[0])


def test_the_shuffle_is_pinned_so_that_a_resumed_run_on_another_machine_agrees() -> None:
    assert shuffled_tasks(10, seed=0, source=0, epoch=0).tolist() == [9, 3, 6, 2, 0, 8, 7, 5, 1, 4]


def test_a_shuffle_moves_tasks_everywhere() -> None:
    places = np.array([np.argsort(shuffled_tasks(20, seed, 0, 0)) for seed in range(400)])
    assert np.abs(places.mean(axis=0) - 9.5).max() < 1.5  # uniform: mean 9.5, standard error 0.29


def test_ratios_hold_over_every_short_stretch() -> None:
    stream = make_stream()
    drawn = [stream.next().source for _ in range(400)]
    for start in range(0, 400, 8):
        assert Counter(drawn[start : start + 8]) == {0: 4, 1: 2, 2: 2}


def test_what_is_put_back_comes_next() -> None:
    stream = make_stream()
    first, second = stream.next(), stream.next()
    stream.put_back(second)
    stream.put_back(first)
    assert [stream.next(), stream.next()] == [first, second]
    assert stream.next().position == 2


def test_a_resumed_stream_first_repeats_what_no_batch_holds_then_goes_on() -> None:
    stream = make_stream()
    first, second, third, fourth = (stream.next() for _ in range(4))
    stream.put_back(third)
    resumed = make_stream()
    resumed.load_state_dict(json.loads(json.dumps(stream.state_dict([fourth, first]))))  # `second` is in a batch
    assert resumed.num_pending == 3
    assert [resumed.next() for _ in range(3)] == [first, third, fourth]
    assert [resumed.next() for _ in range(20)] == [make_after(4 + i) for i in range(20)]
    assert second.position == 1


def make_after(position: int) -> Prompt:
    """The stream's prompt at a position, drawn by a fresh stream."""
    stream = make_stream()
    return [stream.next() for _ in range(position + 1)][-1]


def test_a_stream_resumed_in_any_epoch_goes_on_with_its_tasks() -> None:
    whole = PromptStream([SourceInfo("a", 1.0, 3)], 0)
    drawn = [whole.next() for _ in range(12)]
    for cut in range(12):
        begun, resumed = (PromptStream([SourceInfo("a", 1.0, 3)], 0) for _ in range(2))
        for _ in range(cut):
            begun.next()
        resumed.load_state_dict(begun.state_dict([]))
        assert [resumed.next() for _ in range(12 - cut)] == drawn[cut:]


def test_the_state_is_small_json() -> None:
    stream = make_stream()
    outstanding = [stream.next() for _ in range(40)]
    assert len(json.dumps(stream.state_dict(outstanding))) < 1500


@pytest.mark.parametrize(
    ("sources", "seed", "named"),
    [
        ([SourceInfo("a", 2.0, 8), *SOURCES[1:]], 3, "environments"),
        (SOURCES[:2], 3, "environments"),
        (SOURCES, 9, "seed"),
    ],
)
def test_resuming_with_other_environments_is_refused(sources: list[SourceInfo], seed: int, named: str) -> None:
    with pytest.raises(OrchestratorError, match=named):
        PromptStream(sources, seed).load_state_dict(make_stream().state_dict([]))


def test_other_ratios_at_a_resume_hold_from_there_on() -> None:
    stream = PromptStream([SourceInfo("a", 1.0, None), SourceInfo("b", 1.0, None)], 0)
    for _ in range(1000):
        stream.next()
    resumed = PromptStream([SourceInfo("a", 3.0, None), SourceInfo("b", 1.0, None)], 0)
    resumed.load_state_dict(stream.state_dict([]))
    assert Counter(resumed.next().source for _ in range(40)) == {0: 30, 1: 10}


def test_an_environment_without_tasks_is_refused() -> None:
    with pytest.raises(OrchestratorError, match="no tasks"):
        SourceInfo("empty", 1.0, 0)
    with pytest.raises(OrchestratorError, match=r"orchestrator\.env"):
        PromptStream([], 0)


class Life:
    """One process of a run: draws, ends groups in any order, writes batches; may be killed anywhere."""

    def __init__(self, saved: str | None) -> None:
        self.used: list[Prompt] = []
        self.dropped: list[Prompt] = []
        self.open: list[Prompt] = []
        self.stream = self.open_stream(saved)

    def open_stream(self, saved: str | None) -> PromptStream:
        stream = make_stream()
        if saved is not None:
            stream.load_state_dict(json.loads(saved))
        return stream

    def draw(self) -> Prompt:
        return self.stream.next()

    def take(self, prompts: list[Prompt]) -> str:
        """Write a batch of prompts; returns the state after it."""
        return json.dumps(self.stream.state_dict(self.open))

    def write_batch(self, size: int) -> str | None:
        """Take `size` open prompts into a batch, newest first (any order must do); None if there are too few."""
        if len(self.open) < size:
            return None
        taken = [self.open.pop() for _ in range(size)]
        self.used += taken
        return self.take(taken)


L = TypeVar("L", bound=Life)


def last_life(begin: Callable[[str | None], L], actions: list[tuple[str, int]]) -> L:
    """Act, over any kills; returns the life that is left."""
    life = begin(None)
    saves: list[tuple[str | None, list[Prompt], list[Prompt]]] = [(None, [], [])]
    for action, number in actions:
        if action == "draw":
            life.open += [life.draw() for _ in range(number)]
        elif action == "drop" and number < len(life.open):
            life.dropped.append(life.open.pop(number))
        elif action == "send_back" and number < len(life.open):
            life.stream.put_back(life.open.pop(number))
        elif action == "batch":
            saved = life.write_batch(number)
            if saved is not None:
                saves.append((saved, list(life.used), list(life.dropped)))
        elif action == "kill":  # resume at one of the last batches; what came after it never happened
            saves = saves[: max(1, len(saves) - number)]
            saved, used, dropped = saves[-1]
            life = begin(saved)
            life.used, life.dropped = list(used), list(dropped)
    return life


ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("draw"), st.integers(1, 6)),
        st.tuples(st.just("drop"), st.integers(0, 5)),
        st.tuples(st.just("send_back"), st.integers(0, 5)),
        st.tuples(st.just("batch"), st.integers(1, 4)),
        st.tuples(st.just("kill"), st.integers(0, 3)),
    ),
    max_size=60,
)


@settings(max_examples=300, deadline=None)
@given(ACTIONS)
def test_every_prompt_is_in_exactly_one_place_over_any_kills(actions: list[tuple[str, int]]) -> None:
    life = last_life(Life, actions)
    rest = []
    while life.stream.num_pending:
        rest.append(life.stream.next())
    seen = [p.position for p in [*life.used, *life.dropped, *life.open, *rest]]
    assert sorted(seen) == list(range(life.stream.cursor))
    reference = make_stream()
    stream = {p.position: p for p in (reference.next() for _ in range(life.stream.cursor))}
    assert all(stream[p.position] == p for p in [*life.used, *life.dropped, *life.open, *rest])
