"""The trainer's batches without an orchestrator: what `trainer.data.fake`, and a bench without it, train on.

A bench of `rl` waits for the orchestrator's bench to end, so that the two never share a machine's cores, and takes the
shape of the batches that it wrote: lengths, trained tokens, micro-batches, ranks.
"""

import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from prime_hpc.config import Experiment
from prime_hpc.config.sections.trainer import FakeDataConfig
from prime_hpc.observe.bench import read_report
from prime_hpc.store.batch.rank_batch import RankBatch
from prime_hpc.store.errors import ArtifactTimeout
from prime_hpc.trainer.batching.micro_batches import build_rank_batch, fake_batch, with_fake_teacher
from prime_hpc.trainer.trainer import Trainer

LOOK_S = 0.5
"""Between two looks for the orchestrator's result."""

FakeSource = Callable[[int], RankBatch]
"""step -> this rank's batch."""


@dataclass(frozen=True)
class RankShape:
    """Shape of one rank's part of a batch."""

    lengths: list[int]
    """Tokens of each sequence."""
    trained: list[int]
    """Trained tokens of each, counted as its last ones."""
    micro_offsets: list[int]
    """First sequence of each micro-batch, and the number of sequences."""

    def batch(self, vocab_size: int, seed: int, step: int, part: int) -> RankBatch:
        """Random tokens and advantages of this shape, the same for the same arguments."""
        rng = np.random.default_rng([seed, step, part])
        ids = [rng.integers(0, vocab_size, n, dtype=np.int32) for n in self.lengths]
        masks = [np.arange(n) >= n - trained for n, trained in zip(self.lengths, self.trained, strict=True)]
        micro = [list(range(a, b)) for a, b in itertools.pairwise(self.micro_offsets)]
        return build_rank_batch(micro, ids, masks, rng.standard_normal(len(ids)).astype(np.float32))


def default_fake(experiment: Experiment) -> FakeDataConfig:
    """Return the batch shape of a bench whose config states none: the orchestrator's number of samples, all of
    `seq_len`."""
    return FakeDataConfig(
        batch_size=experiment.orchestrator.batch_size,
        seq_len=experiment.seq_len,
        micro_batch_size=max(1, experiment.micro_batch_tokens // experiment.seq_len),
    )


def fake_source(trainer: Trainer) -> FakeSource | None:
    """Build the source of fake batches; None where the orchestrator's are trained on. Collective. Raises
    ArtifactTimeout: a bench of `rl`, and the orchestrator's bench did not end within `trainer.batch_timeout_s`."""
    experiment = trainer.experiment
    bench, config = experiment.trainer.bench, experiment.trainer.data.fake
    (part, num_parts), seed, vocab = trainer.part, experiment.seed, trainer.vocab_size
    distillation, number = experiment.trainer.loss.distillation, experiment.trainer.num_mini_batches
    if config is None and not bench:
        return None

    def finished(batch: RankBatch) -> RankBatch:
        return _dealt(with_fake_teacher(batch, vocab, distillation), number)

    if config is None and experiment.orchestrator.bench:
        shapes = _await_shapes(trainer)
        if not shapes:  # told to stop while it waited: the loop sees that before it asks for a batch
            return lambda step: RankBatch.empty(1)
        own = shapes[part % len(shapes)]
        trainer.bench_setting["data"] = f"shaped like the orchestrator's batch: {len(own.lengths)} sequences a rank"
        return lambda step: finished(own.batch(vocab, seed, step, part))
    shape = config or default_fake(experiment)
    trainer.bench_setting["data"] = f"fake, {shape.batch_size} x {shape.seq_len} tokens, {shape.length} length"
    return lambda step: finished(fake_batch(shape, vocab, seed, step, part, num_parts))


def _dealt(batch: RankBatch, number: int) -> RankBatch:
    """Return a batch in mini-batches, its micro-batches being dealt out in turn."""
    micro = np.repeat(np.arange(batch.num_micro_batches), np.diff(batch.micro_offsets))
    return batch if number == 1 else replace(batch, mini_batches=(micro % number).astype(np.int32))


def _await_shapes(trainer: Trainer) -> list[RankShape]:
    """Return the shape of the last batch of the orchestrator's bench; [] after a stop. Collective: rank 0 looks."""
    end = time.monotonic() + trainer.experiment.trainer.batch_timeout_s
    while (found := trainer.control.broadcast(_look(trainer, end) if trainer.rank == 0 else None)) is None:
        continue
    return [RankShape(**rank) for rank in found]


def _look(trainer: Trainer, end: float) -> list[dict[str, Any]] | None:
    report = read_report(trainer.paths.root, "orchestrator")
    if report is not None and report.get("incarnation") == trainer.context.incarnation:
        shape: list[dict[str, Any]] = report["shape"]
        return shape
    if trainer.bus.latest("stop") is not None:
        return []
    if time.monotonic() > end:
        limit = trainer.experiment.trainer.batch_timeout_s
        raise ArtifactTimeout(f"no result of the orchestrator's bench within trainer.batch_timeout_s = {limit:g} s")
    time.sleep(LOOK_S)
    return None
