"""Loss and perplexity on held-out rows during SFT.

The rows are tokenised once and stay in memory, each on the rank that computes it. The loss is the sum of all ranks'
negative log-likelihoods in float64 over their number of targets, so it does not depend on packing or ranks.
"""

import math
import time
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from loguru import logger

from prime_hpc.store.batch.rank_batch import RankBatch
from prime_hpc.trainer.data.build import open_together, recipe_of, shape_of
from prime_hpc.trainer.data.messages import SFTDataError
from prime_hpc.trainer.data.stream import RowOrder, SampleStream
from prime_hpc.trainer.data.workers import RowReader
from prime_hpc.trainer.parallel.distribute import reshard_all
from prime_hpc.trainer.rank_group import RankGroup

if TYPE_CHECKING:
    from prime_hpc.trainer.trainer import Trainer

_BATCH = 256
"""Samples that are tokenised and packed together."""


class HeldOut:
    """Computes the held-out loss of the current weights. Its methods are collective."""

    def __init__(self, trainer: "Trainer") -> None:
        """Tokenise the rows.

        Raises:
            SFTDataError: they cannot be had, or hold nothing that is trained.
        """
        experiment, self._trainer = trainer.experiment, trainer
        config, source = experiment.sft.eval, experiment.sft.eval_source
        assert config is not None and source is not None
        self._interval = config.interval
        ranks = RankGroup(experiment.trainer.batch_timeout_s)
        recipe = recipe_of(experiment, source, trainer.source, trainer.vocab_size)
        rows = open_together(recipe, ranks)
        tokenizer = recipe.load_tokenizer()
        num_rows = min(rows.num_rows, config.num_rows or rows.num_rows)
        stream = SampleStream(
            RowReader(recipe, rows, tokenizer),
            RowOrder(rows.num_rows, seed=0, shuffle=False),
            replace(shape_of(experiment, tokenizer.pad_id(trainer.vocab_size)), batch_size=_BATCH, batch_tokens=None),
            ranks,
            share=trainer.part[0],
            num_shares=trainer.part[1],
            last_row=num_rows,
        )
        self._batches: list[RankBatch] = []
        while (batch := stream.next()) is not None:
            self._batches.append(batch.ranked)
        if not self._batches:
            raise SFTDataError(f"sft.eval: no row of {source.label} can be evaluated on (see sft.data.loss_roles)")
        if trainer.rank == 0:
            logger.info(f"held out: {num_rows:,} rows of {source.label}, every {self._interval} steps")

    def is_due(self, step: int) -> bool:
        """Return whether version `step` is evaluated."""
        return step % self._interval == 0 or step == self._trainer.last_step

    @torch.no_grad()
    def evaluate(self) -> dict[str, float]:
        """`eval/loss` (nats a token), `eval/perplexity`, `eval/num_tokens`, `eval/seconds`."""
        began = time.perf_counter()
        trainer = self._trainer
        policy, device = trainer.train_step.policy, trainer.device
        total = torch.zeros(2, dtype=torch.float64, device=device)
        with trainer.train_step.adapted():  # an adapter is gathered once, for all rows
            for batch in map(trainer.train_step.lay_out, self._batches):
                for i in range(batch.num_micro_batches):
                    micro = trainer.train_step.micro_batch(batch, i)
                    with policy.packing(micro):
                        logprobs, _ = policy(micro)
                    total[0] -= logprobs.double().sum()
                    total[1] += micro.num_targets
        reshard_all(policy)
        dist.all_reduce(total if trainer.parallel.leads else total.zero_())  # ranks of one part all have its sums
        loss = float(total[0] / total[1])
        return {
            "eval/loss": loss,
            "eval/perplexity": math.exp(min(loss, 700.0)),
            "eval/num_tokens": float(total[1]),
            "eval/seconds": round(time.perf_counter() - began, 4),
        }
