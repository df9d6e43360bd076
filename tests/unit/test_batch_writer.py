"""What the orchestrator's writer of batches keeps for a trainer that crashes, and commits once more for its next
attempt."""

import asyncio
import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from prime_hpc.orchestrator.batching import batch_writer
from prime_hpc.orchestrator.batching.batch_writer import BatchContent, BatchWriter
from prime_hpc.runtime.role_context import LED
from prime_hpc.store.batch.rank_files import read_rank_batch
from prime_hpc.store.batches import remove_batches_after
from prime_hpc.store.errors import FencedError
from prime_hpc.store.manifest import read_manifest
from prime_hpc.store.messaging.bus import BusClient
from prime_hpc.store.messaging.file_transfer import HandoverServer
from prime_hpc.store.run_paths import RunPaths, claim_incarnation
from tests.unit.test_store_batches import assert_equal, make_rank


class Bus(BusClient):
    """Nobody is there; what was saved is what the test says."""

    def __init__(self) -> None:
        super().__init__(None, "orchestrator")
        self.saved = 0

    def latest(self, topic: str) -> dict[str, int] | None:
        return {"step": self.saved} if topic == "saved" and self.saved else None


@pytest.fixture
def paths(tmp_path: Path) -> RunPaths:
    paths = RunPaths(tmp_path)
    claim_incarnation(paths)
    return paths


def content(step: int) -> BatchContent:
    return BatchContent(step, [make_rank([20, 20], [2], seed=step)], {"step": step}, {})


def test_recorded_experts_count_among_what_is_kept() -> None:
    rank = make_rank([20, 20], [2])
    mixture = dataclasses.replace(rank, routed=np.zeros((40, 48, 8), np.uint8))
    plain, of_mixture = (BatchContent(1, [one], {}, {}).num_bytes for one in (rank, mixture))
    assert plain >= 15 * 40 and of_mixture - plain == 40 * 48 * 8


def writer_of(paths: RunPaths, bus: Bus, step: int = 0) -> BatchWriter:
    parts: Any = SimpleNamespace(paths=paths, bus=bus, handover=HandoverServer(bus), incarnation=1)
    return BatchWriter(parts, step)


async def write(writer: BatchWriter, *steps: int) -> None:
    for step in steps:
        await writer.write(content(step))


def test_what_comes_after_a_checkpoint_is_written_again_for_the_next_attempt(
    paths: RunPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(LED, "1")
    bus = Bus()

    async def play() -> None:
        writer = writer_of(paths, bus)
        await write(writer, 1, 2)
        bus.saved = 2
        await write(writer, 3, 4)
        assert await writer.hold() == (3, 4)
        late = asyncio.create_task(writer.write(content(5)))
        await asyncio.sleep(0.2)
        assert not late.done() and not paths.rollouts_step(5).exists()
        incarnation = claim_incarnation(paths)
        remove_batches_after(paths, 3, incarnation)
        assert await writer.go_on(incarnation, 3) == [4]
        await late

    asyncio.run(play())
    assert [read_manifest(paths.rollouts_step(step)).incarnation for step in (3, 4, 5)] == [1, 2, 2]
    assert_equal(read_rank_batch(paths.rollouts_step(4), 0), content(4).ranks[0])


def test_one_that_was_started_by_hand_keeps_nothing(paths: RunPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(LED, raising=False)

    async def play() -> None:
        writer = writer_of(paths, Bus(), step=6)
        await write(writer, 7)
        assert await writer.hold() == (8, 7)

    asyncio.run(play())


def test_with_too_many_since_a_checkpoint_none_is_kept_until_the_next(
    paths: RunPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(LED, "1")
    monkeypatch.setattr(batch_writer, "MOST_BYTES", 3 * content(1).num_bytes)
    bus = Bus()

    async def play() -> None:
        writer = writer_of(paths, bus)
        await write(writer, 1, 2, 3)
        assert await writer.hold() == (1, 3)
        writer._one.release()
        await write(writer, 4, 5)
        assert await writer.hold() == (6, 5)
        writer._one.release()
        bus.saved = 5
        await write(writer, 6)
        assert await writer.hold() == (6, 6)

    asyncio.run(play())


def test_a_batch_that_cannot_be_written_again_is_an_error_and_holds_nothing_up(
    paths: RunPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(LED, "1")

    async def play() -> None:
        writer = writer_of(paths, Bus())
        await write(writer, 1)
        await writer.hold()
        claim_incarnation(paths)
        claim_incarnation(paths)
        with pytest.raises(FencedError):  # a newer one than it was told of
            await writer.go_on(2, 0)
        with pytest.raises(FencedError):
            await asyncio.wait_for(writer.write(content(2)), 200)

    asyncio.run(play())
