"""Ranks that are slower than the others for long: by numbers, and what one rank measures of itself."""

import math
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from loguru import logger

from prime_hpc.trainer.slow_ranks import COLUMNS, EVERY, IN_A_ROW, SlowRanks

CPU = torch.device("cpu")
NAN = math.nan
NODES = ["n0", "n0", "n1", "n1"]

pytestmark = pytest.mark.usefixtures("group")


@pytest.fixture
def said() -> Iterator[list[str]]:
    """What the log says."""
    lines: list[str] = []
    handler = logger.add(lambda message: lines.append(message.record["message"]), level="INFO", format="{message}")
    yield lines
    logger.remove(handler)


def row(**columns: list[float]) -> np.ndarray:
    """A table of four ranks; what is not stated was not measured."""
    return np.array([columns.get(name, [NAN] * 4) for name in COLUMNS]).T


def look(ranks: SlowRanks, times: int, **columns: list[float]) -> dict[str, float]:
    for step in range(times):
        ranks.compare(step, row(**columns))
    return ranks.figures


def test_a_slow_device_is_told_of_once_with_node_rank_and_figure(said: list[str]) -> None:
    ranks = SlowRanks(torch.device("cuda"), NODES)
    slow, even = [0.0102, 0.01, 0.013, 0.0099], [0.0102, 0.01, 0.012, 0.0099]
    metrics = look(ranks, IN_A_ROW - 1, product_s=slow)
    assert metrics == {"ranks/product_rank": 2.0, "ranks/product_ratio": 1.3, "ranks/slow": 0.0}
    assert (
        look(ranks, 5) == {"ranks/slow": 0.0} and not said
    )  # steps in which nobody measured say nothing, and forget nothing
    look(ranks, IN_A_ROW, product_s=slow)
    assert look(ranks, 1)["ranks/slow"] == 1
    (line,) = said
    assert "wait for rank 2 on node n1, slow 4 times in a row" in line and "n1 added to slurm.exclude" in line
    assert "rank 2 computes a matrix product in 13 ms, the median rank in 10 ms; its GPU" in line
    metrics = look(ranks, IN_A_ROW, product_s=even)
    assert metrics["ranks/product_ratio"] == 1.2 and metrics["ranks/slow"] == 0 and len(said) == 1
    look(ranks, IN_A_ROW, product_s=slow)
    assert len(said) == 2, "it was as quick as the others in between"


def test_a_rank_that_is_slow_now_and_then_is_not_told_of(said: list[str]) -> None:
    ranks = SlowRanks(CPU, NODES)
    for number in range(4 * IN_A_ROW):
        product = [0.01] * 4
        product[number % 4] = 0.05
        ranks.compare(number, row(product_s=product))
    assert not said


def test_a_node_of_which_all_ranks_are_slow_is_one_line_also_where_it_is_half_of_them(said: list[str]) -> None:
    metrics = look(SlowRanks(CPU, NODES), 9, read_s=[0.1, 0.12, 0.9, 1.0])
    assert metrics == {"ranks/read_rank": 3.0, "ranks/read_excess_s": 0.88, "ranks/slow": 2.0}
    (line,) = said
    assert "ranks 2, 3 on node n1" in line
    assert "rank 3 reads its part of a batch in 1.00 s, the median rank in 0.12 s; the mount" in line


@pytest.mark.parametrize(
    ("read", "is_told"),
    [([0.01, 0.01, 0.01, 0.19], False), ([1.0, 1.0, 1.0, 1.9], False), ([1.0, 1.0, 1.0, 2.1], True)],
    ids=["many times of next to nothing", "much, and not twice as much", "both"],
)
def test_reading_is_slow_by_share_and_seconds(said: list[str], read: list[float], is_told: bool) -> None:
    look(SlowRanks(CPU, NODES), IN_A_ROW, read_s=read)
    assert bool(said) == is_told


@pytest.mark.parametrize(
    ("seconds", "sizes", "told"),
    [
        ([1.0, 1.0, 1.0, 2.4], [1e9] * 4, "rank 3 writes its files"),
        ([1.0, 1.0, 1.0, 2.4], [1e9, 1e9, 1e9, 2e9], ""),  # twice as much to write
        ([1.0, 1.0, 1.0, 1.0], [1e9, 1e9, 1e9, 1e3], ""),  # as slow with next to nothing: an fsync
        ([1.0, 1.0, 1.0, 9.0], [1e9, 1e9, 1e9, 2e9], "rank 3 writes its files"),
        ([1.0, NAN, 1.0, 9.0], [1e9, NAN, 1e9, 1e9], "rank 3 writes its files"),
    ],
)
def test_writing_is_slow_by_its_bytes(said: list[str], seconds: list[float], sizes: list[float], told: str) -> None:
    look(SlowRanks(CPU, NODES), IN_A_ROW, write_s=seconds, write_bytes=sizes)
    assert len(said) == bool(told) and told in "".join(said)


def test_a_rank_alone_is_not_slow_and_a_node_alone_cannot_be_left_out(said: list[str]) -> None:
    alone = SlowRanks(CPU, ["n0"])
    for step in range(3 * EVERY):
        assert math.isnan(alone.take(step)[0])
        alone.compare(step, np.array([[0.1, 9.0, 9.0, 1.0]]))
    assert not said and alone.figures == {}
    two = SlowRanks(CPU, ["n0", "n0"])
    for step in range(IN_A_ROW):
        two.compare(step, np.array([[0.1, NAN, NAN, NAN], [0.2, NAN, NAN, NAN]]))
    assert "rank 1 on node n0" in said[0] and "exclude" not in said[0]


def test_a_rank_s_own_times_are_told_once_and_cost_no_random_number() -> None:
    ranks, state = SlowRanks(CPU, NODES), torch.get_rng_state()
    assert all(math.isnan(value) for value in ranks.take(EVERY))  # its product is told with the next step's
    with ranks.reading():
        pass
    ranks.wrote(1.0, 10)
    ranks.wrote(0.5, 20)
    ranks.wrote(3.0, 0)  # no files of its own
    product, read, seconds, num_bytes = ranks.take(EVERY + 1)
    assert product > 0 and read > 0 and (seconds, num_bytes) == (1.5, 30.0)
    assert all(math.isnan(value) for value in ranks.take(EVERY + 2))
    assert torch.equal(torch.get_rng_state(), state)


def test_a_product_is_read_with_the_next_step_and_its_shortest_try_counts() -> None:
    class Event:
        """Of a device that has done nothing of this step yet."""

        def __init__(self, at_ms: float) -> None:
            self.at_ms = at_ms

        def elapsed_time(self, later: "Event") -> float:
            assert is_over, "the host would wait"
            return later.at_ms - self.at_ms

    class Device(SlowRanks):
        def _mark(self) -> Event:
            return Event(next(moments))

    moments, is_over = iter([100.0, 103.0, 105.0, 109.0]), False
    ranks = Device(CPU, NODES)
    assert math.isnan(ranks.take(EVERY)[0])
    is_over = True
    assert ranks.take(EVERY + 1)[0] == pytest.approx(0.002)
