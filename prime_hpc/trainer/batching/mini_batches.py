"""The mini-batches of a batch, each of which is an optimizer step (`trainer.num_mini_batches`).

The orchestrator has dealt the prompts and packed each mini-batch by itself (`RankBatch.mini_batches`); here they are
taken apart again, on any number of ranks. All ranks take the same steps: one that has fewer micro-batches of a
mini-batch than another computes on empty ones.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from prime_hpc.store.batch.rank_batch import RankBatch, select_micro_batches
from prime_hpc.trainer.batching.micro_batches import MicroBatch

_COUNTS = ("num_tokens", "num_sequences", "num_targets", "shared_tokens")
_BEFORE = ("logprob_diff", "logprob_diff_max", "ratio", "ratio_max", "kl", "mismatch_alarm")
"""Metrics of what engine and trainer compute differently: of the policy that no update has moved yet."""
Change = Callable[[int, MicroBatch], MicroBatch]
"""Returns what the i-th micro-batch of a batch is to be."""


@dataclass(frozen=True)
class MiniBatch:
    """One rank's part of a mini-batch."""

    batch: RankBatch
    source: list[int]
    """Of each of its micro-batches the number in the whole batch; -1 of those that are there for other ranks' alone."""

    def of(self, change: Change | None) -> Change | None:
        """Return what a change of the whole batch's micro-batches is for those of this one."""
        if change is None:
            return None
        return lambda i, micro: change(self.source[i], micro)


def of_micro_batch(values: Sequence[torch.Tensor], i: int) -> torch.Tensor:
    """Return what the whole batch's micro-batches say of the one that is number `i` of `MiniBatch.source`."""
    return values[i] if i >= 0 else values[i][:0]


def mini_batches(batch: RankBatch, number: int, device: torch.device) -> list[MiniBatch]:
    """Return the mini-batches of a batch, those left out that are empty on every rank. Collective with a `number` above
    1; a batch that was dealt into more has the others in its last one. The divisors of each are those of the step over
    `number`, so that all of them together weigh a group as one step of the whole batch does.
    """
    if number == 1:
        return [MiniBatch(batch, list(range(batch.num_micro_batches)))]
    dealt = np.minimum(batch.values("mini_batches"), number - 1)
    own: list[list[int]] = [[] for _ in range(number)]
    for i in range(batch.num_micro_batches):
        if len(chosen := dealt[batch.sequences_of(i)]):
            own[int(chosen[0])].append(i)
    most = torch.tensor([len(indices) for indices in own], device=device)
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    counts = most.tolist() if most.any() else [1] + [0] * (number - 1)
    totals: Any = None if batch.totals is None else batch.totals / number
    return [
        MiniBatch(
            replace(select_micro_batches([(batch, i) for i in indices], count), totals=totals),
            indices + [-1] * (count - len(indices)),
        )
        for indices, count in zip(own, counts, strict=True)
        if count
    ]


def metrics_of_updates(rows: Sequence[dict[str, float]], num_epochs: int) -> dict[str, float]:
    """Return a batch's metrics, of those of its updates.

    Counts are of the batch, as if it were computed once, `step_flops` of all. The mismatch to the engine is that of the
    first update, before which the policy has not moved; `kl_last` is `kl` of the last one. `loss`, `grad_norm` and a
    critic's figures are means over the updates that have targets, other figures means over targets. `num_updates` are
    those that had any.
    """
    if len(rows) == 1:
        return rows[0]
    trained = [row for row in rows if row["num_targets"]] or list(rows[:1])
    targets = [max(row["num_targets"], 1.0) for row in trained]
    found: dict[str, float] = {}
    for key in dict.fromkeys(key for row in rows for key in row):
        values = [row.get(key, 0.0) for row in trained]
        if key in _COUNTS:
            found[key] = sum(row[key] for row in rows) / num_epochs
        elif key == "step_flops":
            found[key] = sum(row[key] for row in rows)
        elif key in _BEFORE:
            found[key] = values[0]
        elif key.endswith("_max"):
            found[key] = max(values)
        elif key == "reward":
            weights = [row["num_sequences"] for row in rows]
            found[key] = sum(row[key] * n for row, n in zip(rows, weights, strict=True)) / max(sum(weights), 1.0)
        elif key in ("loss", "grad_norm", "lr", "echo_loss") or key.startswith("critic/"):
            found[key] = sum(values) / len(values)
        else:
            found[key] = sum(v * n for v, n in zip(values, targets, strict=True)) / sum(targets)
    kl = {"kl_last": trained[-1]["kl"]} if "kl" in trained[-1] else {}
    return found | kl | {"num_updates": float(len(trained)) if trained[0]["num_targets"] else 0.0}
