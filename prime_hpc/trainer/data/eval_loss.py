"""Loss and perplexity on held-out rows during SFT, of several sets each one's own besides that of all.

The rows are tokenised once and stay in memory, each on the rank that computes it. The loss is the sum of all ranks'
negative log-likelihoods in float64 over their number of targets, so it does not depend on packing or ranks. Of pairs
of preferences it is the mean over the pairs, and so are their rewards.
"""

import math
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.distributed as dist
from loguru import logger
from numpy.typing import NDArray

from prime_hpc.config.sections.sft import SFTSourceConfig
from prime_hpc.store.batch.rank_batch import RankBatch
from prime_hpc.trainer.batching.micro_batches import MicroBatch
from prime_hpc.trainer.data.build import open_together, recipe_of, shape_of
from prime_hpc.trainer.data.messages import SFTDataError
from prime_hpc.trainer.data.reference import References, attach
from prime_hpc.trainer.data.sources import Rows
from prime_hpc.trainer.data.stream import RowOrder, SampleStream
from prime_hpc.trainer.data.workers import Recipe, RowReader
from prime_hpc.trainer.objectives import LossStats, preference_loss, target_weights
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
        self._preference = experiment.sft.preference
        self._opened: list[tuple[Recipe, Rows, int]] = []
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
        self._opened.append((recipe, rows, tokenizer.fingerprint))
        return batches

    def references(self, references: References) -> list[tuple[NDArray[np.float64], list[RankBatch]]]:
        """Return of every set the table of the starting weights' log-probabilities, and its batches of pairs."""
        tables = [references.table(*opened) for opened in self._opened]
        return list(zip(tables, self._batches, strict=True))

    def attach(self, tables: Sequence[NDArray[np.float64]]) -> None:
        """Have the batches carry what the tables hold."""
        pairs = zip(self._batches, tables, strict=True)
        self._batches = [[attach(batch, table) for batch in batches] for batches, table in pairs]

    def is_due(self, step: int) -> bool:
        """Return whether version `step` is evaluated."""
        return step % self._interval == 0 or step == self._trainer.last_step

    @torch.no_grad()
    def evaluate(self) -> dict[str, float]:
        """`eval/loss` (nats a token), `eval/perplexity`, `eval/num_tokens`, `eval/seconds`; of pairs `eval/loss`,
        what `preference_loss` shows, and `eval/num_pairs`. Of each of several sets the same under `eval/ID`."""
        began = time.perf_counter()
        trainer = self._trainer
        policy, step = trainer.train_step.policy, trainer.train_step
        rows: list[torch.Tensor] = []
        names: list[str] = []
        with step.adapted():  # an adapter is gathered once, for all rows
            for batches in self._batches:
                total = LossStats({}, {})
                for batch in map(step.lay_out, batches):
                    for i in range(batch.num_micro_batches):
                        micro = step.micro_batch(batch, i)
                        with policy.packing(micro):
                            logprobs, _ = policy(micro)
                        total.add(LossStats({}, {}, self._sums(micro, logprobs)))
                names = list(total.totals)
                rows.append(torch.stack(list(total.totals.values())))
        reshard_all(policy)
        totals = torch.stack(rows)
        dist.all_reduce(totals if trainer.parallel.leads else totals.zero_())  # ranks of one part all have its sums
        figures = _figures("eval", names, totals.sum(0))
        for name, row in zip(self._ids, totals, strict=bool(self._ids)):
            figures |= _figures(f"eval/{name}", names, row)
        return figures | {"eval/seconds": round(time.perf_counter() - began, 4)}

    def _sums(self, micro: MicroBatch, logprobs: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return what a micro-batch adds to a set's sums, each a 0-dim float64; the last is the number that divides."""
        if self._preference is None:
            return {"loss": -logprobs.double().sum(), "num_tokens": _number(micro.num_targets, logprobs)}
        weights = target_weights(micro.sequence, micro.targets_of_sequence, "sequence", 0, 2)  # a pair counts 1
        loss, stats = preference_loss(self._preference, micro, logprobs, weights)
        num_pairs = _number(len(micro.targets_of_sequence) // 2, logprobs)
        return {"loss": loss.double(), **stats.totals, "num_pairs": num_pairs}


def _number(value: int, like: torch.Tensor) -> torch.Tensor:
    return torch.tensor(value, dtype=torch.float64, device=like.device)


def _figures(prefix: str, names: Sequence[str], totals: torch.Tensor) -> dict[str, float]:
    """Return what the sums float64[k] come to, divided by the last one."""
    *sums, count = totals.tolist()
    figures = {f"{prefix}/{name}": value / count for name, value in zip(names, sums, strict=False)}
    if names[-1] == "num_tokens":
        figures[f"{prefix}/perplexity"] = math.exp(min(figures[f"{prefix}/loss"], 700.0))
    return figures | {f"{prefix}/{names[-1]}": count}
