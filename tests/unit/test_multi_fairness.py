"""Whose batch is next: the promises of `trainer/multi/fair_queue.py`, over random sizes, arrivals and pauses."""

from collections import defaultdict

from hypothesis import given, settings
from hypothesis import strategies as st

from prime_hpc.trainer.multi.fair_queue import PATIENCE, FairQueue


def run_always_ready(sizes: dict[str, list[int]], num_steps: int) -> tuple[list[str], dict[str, list[int]]]:
    """Every run has its next batch at once. Returns who was trained, and each one's tokens after every step."""
    queue = FairQueue(len(sizes))
    for name in sizes:
        queue.add(name)
    turns: defaultdict[str, int] = defaultdict(int)
    tokens = dict.fromkeys(sizes, 0)
    history: dict[str, list[int]] = {run: [] for run in sizes}
    order = []
    for _ in range(num_steps):
        run = queue.choose(set(sizes))
        assert run is not None
        size = sizes[run][turns[run] % len(sizes[run])]
        queue.trained(run, size, set(sizes))
        turns[run] += 1
        tokens[run] += size
        order.append(run)
        for name, done in tokens.items():
            history[name].append(done)
    return order, history


def waits(order: list[str], runs: set[str]) -> int:
    """The most steps of others between two of a run, or before its first."""
    last, worst = dict.fromkeys(runs, -1), 0
    for i, run in enumerate(order):
        worst = max(worst, i - last[run] - 1)
        last[run] = i
    return max(worst, *(len(order) - 1 - last[run] for run in runs))


def test_equal_batches_are_round_robin() -> None:
    order, _ = run_always_ready({"a": [10], "b": [10], "c": [10]}, 9)
    assert order == ["a", "b", "c"] * 3


@settings(deadline=None, max_examples=60)
@given(st.lists(st.lists(st.integers(100, 100 * PATIENCE // 2), min_size=1, max_size=5), min_size=2, max_size=5))
def test_tokens_are_shared_up_to_one_batch_of_each(batches: list[list[int]]) -> None:
    sizes = {f"run{i}": b for i, b in enumerate(batches)}
    _, history = run_always_ready(sizes, 120)
    for a in sizes:
        for b in sizes:
            apart = max(abs(x - y) for x, y in zip(history[a], history[b], strict=True))
            assert apart <= max(sizes[a]) + max(sizes[b])


@settings(deadline=None, max_examples=60)
@given(st.lists(st.lists(st.integers(0, 100_000), min_size=1, max_size=5), min_size=2, max_size=6))
def test_no_ready_run_waits_longer_than_the_bound(batches: list[list[int]]) -> None:
    sizes = {f"run{i}": b for i, b in enumerate(batches)}
    order, _ = run_always_ready(sizes, 300)
    assert waits(order, set(sizes)) <= FairQueue(len(sizes)).limit == PATIENCE * (len(sizes) - 1)


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_the_bound_holds_with_pauses_comers_and_goers(data: st.DataObject) -> None:
    num_slots = 4
    queue = FairQueue(num_slots)
    passed: defaultdict[str, int] = defaultdict(int)
    present: set[str] = set()
    for i in range(150):
        for name in ("a", "b", "c", "d"):
            coin = data.draw(st.integers(0, 19)) if i % 7 == 0 else 1
            if coin == 0 and name in present:
                queue.remove(name)
                present.discard(name)
                passed.pop(name, None)
            elif coin and name not in present:
                queue.add(name)
                present.add(name)
        idle = {name for name in present if passed[name] == 0 and data.draw(st.booleans())}
        ready = present - idle
        run = queue.choose(ready)
        assert (run is None) == (not ready)
        if run is None:
            continue
        queue.trained(run, data.draw(st.integers(1, 10_000)), ready)
        passed[run] = 0
        for name in ready - {run}:
            passed[name] += 1
            assert passed[name] <= queue.limit


def test_a_new_run_does_not_hold_the_others_up_until_it_has_caught_up() -> None:
    queue = FairQueue(3)
    queue.add("a")
    queue.add("b")
    for _ in range(100):
        run = queue.choose({"a", "b"})
        assert run is not None
        queue.trained(run, 1000, {"a", "b"})
    queue.add("new")
    order = []
    for _ in range(9):
        run = queue.choose({"a", "b", "new"})
        assert run is not None
        queue.trained(run, 1000, {"a", "b", "new"})
        order.append(run)
    assert order.count("new") <= 4


def test_idleness_earns_nothing() -> None:
    queue = FairQueue(2)
    queue.add("busy")
    queue.add("idle")
    for _ in range(50):
        assert queue.choose({"busy"}) == "busy"
        queue.trained("busy", 100, {"busy"})
    order = []
    for _ in range(10):
        run = queue.choose({"busy", "idle"})
        assert run is not None
        queue.trained(run, 100, {"busy", "idle"})
        order.append(run)
    assert 4 <= order.count("idle") <= 6


def test_nobody_is_ready_or_there() -> None:
    queue = FairQueue(2)
    assert queue.choose(set()) is None
    queue.add("a")
    assert queue.choose(set()) is None
    queue.remove("a")
    queue.remove("a")
    assert queue.choose({"a"}) is None
