"""The two ends of a batch's way, as processes of their own, and batches of any size. For `latency` and `wire`."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from prime_hpc.store.batch.rank_batch import RankBatch
from prime_hpc.store.batch.rank_files import read_rank_batches, write_batch
from prime_hpc.store.messaging.bus import BusClient
from prime_hpc.store.messaging.file_transfer import Handover, HandoverServer
from prime_hpc.store.run_paths import RunPaths
from prime_hpc.store.waiting import wait_for_artifact

NUM_RANKS = 2
RANK_TOKENS = 65_536
DEADLINE_S = 120.0


@dataclass(frozen=True)
class Case:
    """One way from a writer to a reader."""

    name: str
    written: Path
    read: Path
    has_bus: bool
    has_handover: bool


def make_rank(seed: int) -> RankBatch:
    """Sequences of 1,024 random tokens."""
    return make_rank_of([1024] * (RANK_TOKENS // 1024), seed)


def make_rank_of(lengths: Sequence[int], seed: int) -> RankBatch:
    """Random sequences of these lengths in one micro-batch, 80 % of the tokens trained."""
    rng = np.random.default_rng(seed)
    num_tokens, num = sum(lengths), len(lengths)
    mask = rng.random(num_tokens) < 0.8
    return RankBatch(
        token_ids=rng.integers(0, 150_000, num_tokens, dtype=np.int32),
        loss_mask=mask,
        logprobs=np.where(mask, -rng.random(num_tokens), 0).astype(np.float32),
        versions=np.where(mask, rng.integers(5, 8, num_tokens), -1).astype(np.int32),
        advantages=rng.standard_normal(num_tokens).astype(np.float32),
        seq_offsets=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        micro_offsets=np.array([0, num], np.int64),
        temperatures=np.ones(num, np.float32),
        rewards=rng.random(num).astype(np.float32),
        sample_ids=np.arange(num, dtype=np.int64),
        group_ids=np.arange(num, dtype=np.int64) // 8,
        env_ids=np.zeros(num, np.int32),
    )


def write(case: Case, address: str | None, pipe: Any) -> None:
    """The writing process: a batch each time it is told a step; answers when the commit was done."""
    bus = BusClient(address, "orchestrator")
    server = HandoverServer(bus if case.has_handover else BusClient(None, "orchestrator"))
    paths, ranks = RunPaths(case.written), [make_rank(r) for r in range(NUM_RANKS)]
    while (step := pipe.recv()) is not None:
        began = time.monotonic()
        manifest = write_batch(paths, step, ranks, state={"step": step})
        committed = time.monotonic()
        bus.publish("batch", step=step, digest=manifest.digest, source=server.offer(paths.rollouts_step(step)))
        pipe.send((began, committed))
    server.close()
    bus.close()


def read(case: Case, address: str | None, pipe: Any) -> None:
    """The reading process: waits for the step that it is told, as trainer rank 0 does; answers when it had it."""
    bus = BusClient(address, "trainer")
    handover = Handover(bus, "batch", "step") if case.has_handover else None
    paths = RunPaths(case.read)
    while (step := pipe.recv()) is not None:
        directory = paths.rollouts_step(step)
        wait_for_artifact(
            directory,
            deadline_s=DEADLINE_S,
            bus=bus,
            topic="batch",
            key={"step": step},
            names=(),
            handover=handover,
        )
        batch = read_rank_batches(directory, lambda _: [1], handover=handover, deadline_s=DEADLINE_S)[0]
        total = int(batch.token_ids.sum())  # every page is here
        pipe.send((time.monotonic(), total))
    bus.close()
