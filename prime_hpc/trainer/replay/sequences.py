"""A rank's sequences by how far the trainer's log-probabilities are from the engine's."""

from dataclasses import replace

import numpy as np
import torch

from prime_hpc.store.batch.rank_batch import RankBatch
from prime_hpc.trainer.trainer import Trainer

SHOWN = 10
"""Sequences that are listed."""


@torch.no_grad()
def sequence_lines(trainer: Trainer, batch: RankBatch) -> list[str]:
    """Return a table of this rank's sequences: those with log-probabilities that are not finite first, then by
    mismatch."""
    rows: list[tuple[float, str]] = []
    batch = trainer.train_step.lay_out(replace(batch, ce_weights=None))
    for m in range(batch.num_micro_batches):
        micro = trainer.train_step.micro_batch(batch, m)
        with trainer.train_step.adapted(), trainer.train_step.policy.packing(micro):
            logprobs, _ = trainer.train_step.policy(micro)
        first = batch.micro_offsets[m]
        gap = (logprobs - micro.behaviour_logprobs).abs().cpu().numpy()
        for i in np.unique(micro.sequence.cpu().numpy()):
            own = (micro.sequence == i).cpu().numpy()
            bad, worst = int((~np.isfinite(gap[own])).sum()), float(gap[own].max())
            place = int(np.flatnonzero(np.diff(batch.seq_offsets[first:]) > 0)[i] + first)
            advantage = float(micro.advantages.cpu().numpy()[own].mean())
            text = (
                f"{batch.sample_ids[place]:>12} {batch.group_ids[place]:>10} {own.sum():>8} {bad:>8} {worst:>12.4g} "
                f"{advantage:>10.4g} {batch.rewards[place]:>10.4g}"
            )
            rows.append((np.inf if bad else worst, text))
    rows.sort(key=lambda row: -row[0])
    head = (
        f"{'sample':>12} {'prompt':>10} {'targets':>8} {'bad':>8} {'largest gap':>12} {'advantage':>10} {'reward':>10}"
    )
    return [
        f"{len(rows)} sequences with targets on rank {trainer.rank}, worst first:",
        head,
        *(t for _, t in rows[:SHOWN]),
    ]
