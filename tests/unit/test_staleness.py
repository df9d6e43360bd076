"""The staleness gate, the check of every token, and what happens to groups, for async levels 0, 1 and 2."""

import itertools
import json
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prime_hpc.orchestrator.rollouts.episodes import mask_older
from prime_hpc.orchestrator.rollouts.groups import Group, GroupBook, max_open_groups, version_floor
from prime_hpc.orchestrator.rollouts.prompts import Prompt, PromptStream, SourceInfo
from tests.support.episodes import failed_episode, make_episode


def prompt(position: int) -> Prompt:
    return Prompt(position, 0, position, position)


def make_book(async_level: int, *, group_size: int = 2, num_prompts: int = 2, last_batch: int = 50) -> GroupBook:
    return GroupBook(
        sizes=[group_size], num_prompts=num_prompts, async_level=async_level, last_batch=last_batch, minima=[2]
    )


def fill(book: GroupBook, position: int, versions: list[list[int]], served: int = 0) -> Group:
    """Open a group and end its episodes with these token versions."""
    group = book.open(prompt(position), served)
    for index, tokens in enumerate(versions):
        book.add(group, index, make_episode(tokens))
    return group


def test_dropped_and_rejected_groups_are_told_once() -> None:
    book = make_book(2)
    book.gate = lambda group: "no" if group.prompt.position == 1 else ""
    kept, rejected = (fill(book, position, [[0], [0]]) for position in (0, 1))
    dropped = book.open(prompt(2), 0)
    book.add(dropped, 0, failed_episode())
    book.add(dropped, 1, make_episode([0]))
    assert book.take_consumed() == [rejected, dropped] and book.take_consumed() == []
    assert list(book.complete) == [kept]


def test_a_group_waits_for_its_greedy_rollout_which_is_none_of_those_that_train() -> None:
    book = make_book(2)
    book.greedy = [0]
    group = fill(book, 0, [[3], [4]])
    assert group.num_rollouts == 3 and not book.complete
    book.add(group, 2, make_episode([1, 1], reward=0.25))
    assert list(book.complete) == [group] and len(group.usable) == 2 and len(group.ended) == 3
    assert group.greedy is not None and group.greedy.result.reward == 0.25
    assert (group.min_version(), group.max_version()) == (3, 4)  # however old the greedy one is
    with pytest.raises(AssertionError, match="ended twice"):
        book.add(group, 2, make_episode([1]))
    first = book.open(prompt(1), 0)
    book.add(first, 2, failed_episode())  # nothing to compare with
    for index in range(2):
        book.add(first, index, make_episode([0]))
    assert book.take_consumed() == [first] and book.drain_dropped() == [1]


@pytest.mark.parametrize(
    ("async_level", "floors"),
    [(0, [0, 1, 2, 3, 4]), (1, [0, 0, 1, 2, 3]), (2, [0, 0, 0, 1, 2])],
)
def test_the_floor_of_each_batch(async_level: int, floors: list[int]) -> None:
    assert [version_floor(step, async_level) for step in range(1, 6)] == floors


@pytest.mark.parametrize(
    ("async_level", "next_batch", "served", "batches"),
    [
        (0, 1, 0, 1),
        (0, 2, 0, 0),  # on-policy: batch 2 waits for version 1
        (0, 2, 1, 1),
        (1, 1, 0, 2),
        (1, 2, 0, 1),
        (1, 3, 0, 0),
        (2, 1, 0, 3),
        (2, 4, 1, 1),
        (2, 4, 3, 3),
        (2, 49, 48, 2),  # batch 50 is the last one
    ],
)
def test_the_gate(async_level: int, next_batch: int, served: int, batches: int) -> None:
    assert max_open_groups(next_batch, served, async_level, num_prompts=8, last_batch=50) == 8 * batches


def test_the_gate_counts_what_is_open() -> None:
    book = make_book(1)
    for position in range(4):
        assert book.may_open(0)
        book.open(prompt(position), 0)
    assert not book.may_open(0)
    assert book.may_open(1)


@pytest.mark.parametrize("async_level", [0, 1, 2])
def test_one_token_that_is_too_old_makes_a_group_stale(async_level: int) -> None:
    book = make_book(async_level)
    book.next_batch = 6
    floor = version_floor(6, async_level)
    kept = fill(book, 0, [[floor, floor + 1], [floor]])
    stale = fill(book, 1, [[floor, floor], [floor + 1, floor - 1, floor + 1]])
    assert list(book.complete) == [kept]
    assert book.take_stale() == [stale]
    assert book.take_stale() == []
    assert book.counts.stale == 1


def test_taking_a_batch_sends_back_what_is_too_old_for_the_next_one() -> None:
    book = make_book(0, num_prompts=1)
    first, second = fill(book, 0, [[0], [0]]), fill(book, 1, [[0], [0]])
    running = book.open(prompt(2), 0)
    book.add(running, 0, make_episode([0]))
    fresh = book.open(prompt(3), 1)
    assert book.take_batch() == [first]
    assert {id(g) for g in book.take_stale()} == {id(second), id(running)}
    assert running.abandoned
    book.add(running, 1, make_episode([0]))  # a late return of a group that was sent back changes nothing
    assert list(book.in_flight.values()) == [fresh]
    assert not book.complete


def test_a_group_that_the_next_batch_would_find_stale_goes_first() -> None:
    book = make_book(1, num_prompts=1)
    book.next_batch = 3
    newer, older = fill(book, 0, [[2], [2]]), fill(book, 1, [[1], [2]])
    assert book.take_batch() == [older]
    assert book.take_stale() == []
    assert book.take_batch() == [newer]


def test_a_prompt_that_came_back_once_is_waited_for() -> None:
    book = make_book(1, num_prompts=1)
    slow = book.open(prompt(0), 0)
    book.add(slow, 0, make_episode([0]))
    fill(book, 1, [[0], [0]])
    book.take_batch()
    fill(book, 2, [[1], [1]], served=1)
    book.take_batch()  # batch 3 allows version 1 and newer: the slow group is sent back
    assert book.take_stale() == [slow]
    again = book.open(prompt(0), 1)
    fill(book, 3, [[2], [2]], served=2)
    assert not book.batch_ready(), "batch 4 would find it stale again"
    book.add(again, 0, make_episode([1]))
    book.add(again, 1, make_episode([2]))
    assert book.batch_ready()
    assert book.take_batch() == [again]


def test_a_group_with_one_usable_rollout_is_dropped_and_said_so() -> None:
    book = make_book(0, group_size=3)
    group = book.open(prompt(7), 0)
    for index, episode in enumerate([failed_episode(), make_episode(), failed_episode()]):
        book.add(group, index, episode)
    assert book.num_open == 0
    assert book.counts.dropped == 1
    assert book.drain_dropped() == [7]
    assert book.drain_dropped() == []


def test_a_group_with_two_usable_rollouts_trains_with_them() -> None:
    book = make_book(0, group_size=3, num_prompts=1)
    group = book.open(prompt(7), 0)
    for index, episode in enumerate([make_episode(), failed_episode(), make_episode()]):
        book.add(group, index, episode)
    assert book.batch_ready()
    assert len(group.usable) == 2


def test_an_unusable_old_rollout_does_not_make_its_group_stale() -> None:
    book = make_book(0, group_size=3, num_prompts=1)
    book.next_batch = 4
    group = book.open(prompt(0), 3)
    for index, episode in enumerate([make_episode([3]), failed_episode(), make_episode([3])]):
        book.add(group, index, episode)
    assert book.batch_ready()


def test_where_old_tokens_are_masked_nothing_under_way_is_sent_back_or_waited_for() -> None:
    book = make_book(1)
    book.masks_stale = True
    long = book.open(prompt(0), 0)
    book.add(long, 0, make_episode([0]))
    for batch in (1, 2, 3, 4):
        for position in (2 * batch, 2 * batch + 1):
            fill(book, position, [[batch - 1], [batch - 1]], served=batch - 1)
        assert book.batch_ready()
        assert long not in book.take_batch() and not book.take_stale()
    book.add(long, 1, make_episode([0, 1, 2, 3]))  # batch 5 may train tokens of version 3
    assert list(book.complete) == [long] and book.mask_floor(5) == 3
    fill(book, 10, [[4], [4]], served=4)
    assert long in book.take_batch()


def test_others_stand_in_for_late_groups_but_for_no_more_than_are_needed() -> None:
    book = make_book(1, last_batch=4)
    book.masks_stale = True
    late = book.open(prompt(0), 0)
    positions = itertools.count(1)
    for batch in (1, 2):
        while book.may_open(batch - 1):
            fill(book, next(positions), [[batch - 1], [batch - 1]], served=batch - 1)
        assert book.num_open == 4 and late not in book.take_batch()
    while book.may_open(2):
        fill(book, next(positions), [[2], [2]], served=2)
    assert book.num_open == 4, "the run's last four groups: nobody else may begin"
    assert late not in book.take_batch() and not book.may_open(3)
    for index in (0, 1):
        book.add(late, index, make_episode([0, 3]))
    assert late in book.take_batch() and not book.in_flight and not book.complete

    book = make_book(1)
    book.masks_stale = True
    late = book.open(prompt(0), 0)
    for batch in (1, 2, 3):
        while book.may_open(batch - 1):
            fill(book, next(positions), [[batch - 1], [batch - 1]], served=batch - 1)
        assert book.num_open == (5 if batch == 3 else 4)
        book.take_batch()


def test_a_group_without_a_token_that_is_young_enough_is_sampled_again_and_goes_first() -> None:
    """Nobody waits for it: what it samples last is young enough whenever that ends."""
    book = make_book(1)
    book.masks_stale = True
    book.next_batch = 4
    old = fill(book, 0, [[0], [1]], served=1)
    assert book.take_stale() == [old] and not book.complete
    again = book.open(prompt(0), 2)
    for position in (1, 2, 3, 4):
        fill(book, position, [[3], [3]], served=3)
    assert again.attempt == 1 and book.batch_ready() and again not in book.take_batch()
    for index in (0, 1):
        book.add(again, index, make_episode([2, 3]))
    assert book.batch_ready() and book.take_batch()[0] is again


class Run:
    """A simulated run: episodes end in any order, versions come late, groups fail, the process is killed anywhere."""

    LAST = 8

    def __init__(self, async_level: int, failing: float, rng: random.Random, masks: bool = False) -> None:
        self.async_level, self.failing, self.rng, self.masks = async_level, failing, rng, masks
        self.returned: list[Group] = []
        self.saves: list[tuple[str, list[int], list[int]]] = []
        self.begin(0)

    def begin(self, step: int) -> None:
        """An attempt that resumes after batch `step`; later batches and versions are gone."""
        del self.saves[step:]
        self.stream = PromptStream([SourceInfo("a", 1.0, 5)], 0)
        self.used: list[int] = []
        self.dropped: list[int] = []
        if step:
            state, used, dropped = self.saves[-1]
            self.stream.load_state_dict(json.loads(state))
            self.used, self.dropped = list(used), list(dropped)
        self.book = make_book(self.async_level, group_size=3, num_prompts=2, last_batch=self.LAST)
        self.book.next_batch = step + 1
        self.book.masks_stale = self.masks
        self.served = step
        self.running: list[tuple[Group, int, int]] = []

    @property
    def written(self) -> int:
        return len(self.saves)

    def turn(self) -> None:
        """Dispatch what the gate allows, then let one thing happen."""
        while self.book.may_open(self.served):
            group = self.book.open(self.stream.next(), self.served)
            self.running += [(group, index, self.served) for index in range(3)]
        choice = self.rng.random()
        if choice < 0.6 and self.running:
            self.end_one_episode()
        elif choice < 0.8 and self.served < self.written:
            self.served += 1
        elif choice > 0.99 and self.written:
            self.begin(self.rng.randint(max(0, self.written - 2), self.written))
        self.send_back()
        if self.book.batch_ready():
            self.take_batch()

    def end_one_episode(self) -> None:
        group, index, started = self.running.pop(self.rng.randrange(len(self.running)))
        if not group.abandoned:
            versions = sorted(self.rng.choices(range(started, self.served + 1), k=3))
            fails = self.rng.random() < self.failing
            self.book.add(group, index, failed_episode() if fails else make_episode(versions))

    def send_back(self) -> None:
        self.dropped += self.book.drain_dropped()
        for group in self.book.take_stale():
            self.returned.append(group)
            self.running = [r for r in self.running if r[0] is not group]
            self.stream.put_back(group.prompt)

    def take_batch(self) -> None:
        groups = self.book.take_batch()
        step = self.written + 1
        assert len(groups) == 2
        floor = version_floor(step, self.async_level)
        for group in groups:
            trained = [episode for slot in group.usable if (episode := mask_older(slot, floor)).min_version is not None]
            assert trained and all(floor <= (episode.min_version or 0) <= step - 1 for episode in trained)
            assert self.masks or trained == group.usable, "there is nothing to mask"
        self.used += [g.prompt.position for g in groups]
        state = json.dumps(self.stream.state_dict(self.book.outstanding()))
        self.saves.append((state, list(self.used), list(self.dropped)))
        self.send_back()


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 2), st.integers(0, 2**32), st.floats(0.0, 0.5), st.booleans())
def test_any_schedule_with_any_kills_keeps_the_bound_and_every_prompt(
    async_level: int, seed: int, failing: float, masks: bool
) -> None:
    run = Run(async_level, failing, random.Random(seed), masks)
    for _ in range(20_000):
        if run.written == Run.LAST:
            break
        run.turn()
        if async_level == 0:
            assert run.book.counts.stale == 0, "the gate alone keeps an on-policy run free of stale groups"
    assert run.written == Run.LAST, "the schedule got stuck"
    assert not masks or all(group.num_ended == 3 for group in run.returned), "what is under way goes on"
    rest = [p.position for p in run.book.outstanding()] + [
        run.stream.next().position for _ in range(run.stream.num_pending)
    ]
    assert sorted([*run.used, *run.dropped, *rest]) == list(range(run.stream.cursor))
