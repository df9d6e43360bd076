"""Some rollouts token by token, with the probabilities of engine and trainer: `metrics/tokens.jsonl`, for `report`.

About forty steps of a run, a few sequences of rank 0's first micro-batch each. What the trainer computes anyway is kept
until its step is over: no step computes more, and none but these copies anything from the device.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from loguru import logger
from numpy.typing import NDArray

from prime_hpc.config import Experiment
from prime_hpc.observe.metrics import MetricsWriter
from prime_hpc.store.batch.rank_batch import RankBatch
from prime_hpc.store.run_paths import RunPaths
from prime_hpc.trainer.batching.micro_batches import MicroBatch
from prime_hpc.trainer.objectives import LossStats, MicroBatchLoss

STEPS_LOGGED = 40
"""Steps of a run that are logged, about."""
MOST_TOKENS = 1500
"""Of one sequence."""
Watch = Callable[[RankBatch, MicroBatchLoss], MicroBatchLoss]
"""Is told of a batch as the model takes it; returns the objective that looks on."""


class TokenLog:
    """Of one run, on rank 0.
    `per_step`: sequences a step; those with the best and the worst reward first."""

    def __init__(self, path: Path, per_step: int, max_steps: int) -> None:
        self._path, self._per_step = path, per_step
        self._writer: MetricsWriter | None = None
        self._interval = max(1, max_steps // STEPS_LOGGED)
        self._batch: RankBatch | None = None
        self._seen: tuple[torch.Tensor, torch.Tensor] | None = None
        """Log-probabilities and advantages, as the objective has them: a critic's are not the batch's."""

    def is_due(self, step: int) -> bool:
        """Return whether a step is logged."""
        return step == 1 or step % self._interval == 0

    def watch(self, batch: RankBatch, objective: MicroBatchLoss) -> MicroBatchLoss:
        """Return the objective that keeps what it sees of its first micro-batch."""
        self._batch, self._seen = batch, None

        def watched(micro: MicroBatch, logprobs: torch.Tensor, weights: torch.Tensor) -> tuple[torch.Tensor, LossStats]:
            if self._seen is None:
                self._seen = logprobs.detach(), micro.advantages
            return objective(micro, logprobs, weights)

        return watched

    def write(self, step: int) -> None:
        """Write what was seen of a step; that it cannot is no reason to end a run."""
        batch, seen = self._batch, self._seen
        self._batch = self._seen = None
        if batch is None or seen is None:
            return
        try:
            logprobs, advantages = (values.float().cpu().numpy() for values in seen)
            rows = token_rows(batch.micro_batch(0), logprobs, advantages, self._per_step)
            if rows:
                self._writer = self._writer or MetricsWriter(self._path)
                for row in rows:
                    self._writer.log(step, **row)
        except (OSError, RuntimeError) as error:  # a device without memory
            self.close()  # the file is opened anew: a handle may be stale for ever
            logger.warning(f"{self._path}: rollouts of step {step} were not written: {error}")

    def close(self) -> None:
        """Close the file."""
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()


@contextmanager
def watching(log: TokenLog | None, step: int) -> Iterator[Watch | None]:
    """Give a step what looks on, where it is logged, and write what was seen, also of a step that is refused."""
    if log is None or not log.is_due(step):
        yield None
        return
    try:
        yield log.watch
    finally:
        log.write(step)


def open_token_log(experiment: Experiment, paths: RunPaths) -> TokenLog | None:
    """Return the run's; None where there is nothing to compare: no engine sampled, or it is off."""
    config = experiment.trainer
    if experiment.kind != "rl" or config.log_tokens == 0 or config.bench or config.data.fake is not None:
        return None
    return TokenLog(paths.metrics("tokens"), config.log_tokens, experiment.max_steps)


def token_rows(
    part: RankBatch, logprobs: NDArray[np.float32], advantages: NDArray[np.float32], count: int
) -> list[dict[str, Any]]:
    """Return rows of the sequences with the best and the worst reward; of their tokens' advantages the mean.
    `logprobs`, `advantages`: float32[N], the trainer's of its trained tokens, in their order."""
    mask = part.target_mask()
    both, gains = np.full((2, part.num_tokens), np.nan, np.float32)
    both[mask], gains[mask] = logprobs, advantages
    order = np.argsort(-part.rewards, kind="stable").tolist()
    chosen = [order.pop(0 if i % 2 == 0 else -1) for i in range(min(count, len(order)))]
    found = []
    for sequence in chosen:
        first, last = (int(offset) for offset in part.seq_offsets[sequence : sequence + 2])
        window = slice(first, min(last, first + MOST_TOKENS))
        sampled, trained = part.versions[window] >= 0, mask[window]
        if not trained.any():
            continue
        found.append(
            {
                "sample": int(part.sample_ids[sequence]),
                "group": int(part.group_ids[sequence]),
                "env": int(part.env_ids[sequence]),
                "reward": float(part.rewards[sequence]),
                "temperature": float(part.temperatures[sequence]),
                "advantage": round(float(gains[window][trained].mean(dtype=np.float64)), 6),
                "num_tokens": last - first,
                "ids": part.token_ids[window].tolist(),
                "logprobs": _rounded(part.logprobs[window], sampled),
                "trainer": _rounded(both[window], trained),
                "versions": part.versions[window].tolist(),
                "trained": trained.astype(int).tolist(),
            }
        )
    return found


def _rounded(values: NDArray[np.float32], there: NDArray[np.bool_]) -> list[float | None]:
    known = there & np.isfinite(values)
    return [round(v, 5) if k else None for v, k in zip(values.tolist(), known.tolist(), strict=True)]
