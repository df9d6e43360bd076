"""Loss and perplexity on held-out rows during SFT, of several sets each one's own besides that of all.

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

from prime_hpc.config.sections.sft import SFTSourceConfig
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
        """Tokenise the rows. Raises SFTDataError: they cannot be had, or hold nothing that is trained."""
        experiment, self._trainer = trainer.experiment, trainer
        config = experiment.sft.eval
        assert config is not None
        self._interval = config.interval
        sources = experiment.sft.eval_sources.values()
        self._batches = [self._tokenised(source, config.num_rows) for source in sources]
        self._ids = [one.id for one in config.sets]
        if trainer.rank == 0:
            logger.info(f"held out: {', '.join(source.label for source in sources)}, every {self._interval} steps")

    def _tokenised(self, source: SFTSourceConfig, most: int | None) -> list[RankBatch]:
        """Return the batches of one source's first rows, so many at most."""
        trainer, experiment = self._trainer, self._trainer.experiment
        ranks = RankGroup(experiment.trainer.batch_timeout_s)
        recipe = recipe_of(experiment, source, trainer.source, trainer.vocab_size)
        rows = open_together(recipe, ranks)
        tokenizer = recipe.load_tokenizer()
        num_rows = min(rows.num_rows, most or rows.num_rows)
        stream = SampleStream(
            RowReader(recipe, rows, tokenizer),
            RowOrder(rows.num_rows, seed=0, shuffle=False),
            replace(shape_of(experiment, tokenizer.pad_id(trainer.vocab_size)), batch_size=_BATCH, batch_tokens=None),
            ranks,
            share=trainer.part[0],
            num_shares=trainer.part[1],
            last_row=num_rows,
        )
        batches: list[RankBatch] = []
        while (batch := stream.next()) is not None:
            batches.append(batch.ranked)
        if not batches:
            raise SFTDataError(f"sft.eval: no row of {source.label} can be evaluated on (see sft.data.loss_roles)")
        return batches

    def is_due(self, step: int) -> bool:
        """Return whether version `step` is evaluated."""
        return step % self._interval == 0 or step == self._trainer.last_step

    @torch.no_grad()
    def evaluate(self) -> dict[str, float]:
        """`eval/loss` (nats a token), `eval/perplexity`, `eval/num_tokens`, `eval/seconds`; of each of several sets
        `eval/ID/loss`, `eval/ID/perplexity`, `eval/ID/num_tokens`."""
        began = time.perf_counter()
        trainer = self._trainer
        policy, device = trainer.train_step.policy, trainer.device
        totals = torch.zeros(len(self._batches), 2, dtype=torch.float64, device=device)
        with trainer.train_step.adapted():  # an adapter is gathered once, for all rows
            for total, batches in zip(totals, self._batches, strict=True):
                for batch in map(trainer.train_step.lay_out, batches):
                    for i in range(batch.num_micro_batches):
                        micro = trainer.train_step.micro_batch(batch, i)
                        with policy.packing(micro):
                            logprobs, _ = policy(micro)
                        total[0] -= logprobs.double().sum()
                        total[1] += micro.num_targets
        reshard_all(policy)
        dist.all_reduce(totals if trainer.parallel.leads else totals.zero_())  # ranks of one part all have its sums
        figures = _figures("eval", totals.sum(0))
        for name, total in zip(self._ids, totals, strict=bool(self._ids)):
            figures |= _figures(f"eval/{name}", total)
        return figures | {"eval/seconds": round(time.perf_counter() - began, 4)}


def _figures(name: str, total: torch.Tensor) -> dict[str, float]:
    """Return what the sums float64[2] of negative log-likelihoods and of targets come to."""
    loss = float(total[0] / total[1])
    return {
        f"{name}/loss": loss,
        f"{name}/perplexity": math.exp(min(loss, 700.0)),
        f"{name}/num_tokens": float(total[1]),
    }
