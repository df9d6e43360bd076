"""A train step of a policy and its critic: values, advantages, both backward passes, both updates or none.

    values of all micro-batches (no gradient) -> GAE -> advantages, whitened over the batch -> the policy's step
                                                    -> returns -> the critic's step

Both losses and gradients are looked at before either model changes, so that a step that is refused leaves both as they
were; both models' gradients are in memory together.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from prime_hpc.store.batch.rank_batch import RankBatch
from prime_hpc.trainer.batching.micro_batches import BatchFacts, MicroBatch, batch_facts
from prime_hpc.trainer.batching.prefetch_to_device import MicroBatches
from prime_hpc.trainer.critic.gae import WHITEN_EPS, Estimates, estimate, value_loss
from prime_hpc.trainer.objectives import LossStats, MicroBatchLoss
from prime_hpc.trainer.parallel.distribute import reshard_all
from prime_hpc.trainer.token_log import Watch
from prime_hpc.trainer.train_step import StepRefused, TrainStep

SHOWN = ("loss", "grad_norm", "lr", "value", "return", "explained_variance", "advantage_std")
"""Figures of the critic's own step that the log shows, as `critic/NAME`."""
FORWARD = 4 / 3
"""A step's FLOPs with one more forward pass, where forward and backward pass are 1."""


class CriticStep(TrainStep):
    """The critic, its optimizer, and its part of a train step."""

    source: Path
    """Directory of the model that it began with."""
    called, section = "the critic's ", "trainer.critic"

    @torch.no_grad()
    def estimates(self, batch: RankBatch) -> list[Estimates]:
        """Return values, advantages and returns of the trained tokens of each micro-batch. Collective."""
        found, config = list[Estimates](), self._config.critic
        assert config is not None
        with MicroBatches(partial(self.micro_batch, batch), batch.num_micro_batches, self._device) as micros:
            for micro in micros:
                with self.policy.packing(micro):
                    values, _ = self.policy(micro)
                found.append(estimate(config, values, micro.advantages, micro.sequence))
        reshard_all(self.policy)
        return found

    @torch.no_grad()
    def moments(self, found: list[Estimates]) -> torch.Tensor:
        """float64[2, 4], mean and variance of advantages, returns, values and the values' errors over the batch, every
        token counted once. Collective."""
        columns = [
            torch.cat(parts)
            for parts in zip(*((e.advantages, e.returns, e.values, e.returns - e.values) for e in found), strict=True)
        ]
        table = torch.stack(columns)
        count = torch.full((4, 1), float(table.shape[1]), dtype=torch.float64, device=self._device)
        sums = torch.cat([count, table.sum(1, keepdim=True)], 1) * float(self._parallel.leads)
        dist.all_reduce(sums)
        count, means = sums[:, 0].clamp(min=1), sums[:, 1] / sums[:, 0].clamp(min=1)
        squares = (table - means[:, None]).square().sum(1) * float(self._parallel.leads)
        dist.all_reduce(squares)
        return torch.stack([means, squares / count])

    def learn(self, step: int, batch: RankBatch, found: list[Estimates]) -> dict[str, float]:
        """Accumulate the gradients of the loss of values; returns the figures of a step that is not applied yet.
        Collective. Raises NonFiniteError: its loss or gradient is not finite."""

        def with_returns(i: int, micro: MicroBatch) -> MicroBatch:
            return replace(micro, returns=found[i].returns.float())

        facts = batch_facts(batch, step)
        stats, num_shared = self.accumulate(batch, value_loss, facts, with_returns)
        metrics = self._reduce(step, facts, stats, num_shared)
        self._check_finite(step, batch, metrics)
        return metrics


class ActorCriticStep(TrainStep):
    """The policy's train step, with advantages by a critic that learns beside it."""

    critic: CriticStep

    def __init__(self, *args: Any, critic: CriticStep, **named: Any) -> None:
        """As of `TrainStep`."""
        super().__init__(*args, **named)
        assert self._config.critic is not None
        self.critic, self._how = critic, self._config.critic
        self._warms_up = False
        self._learned: dict[str, float] = {}
        """Figures of the critic's part of a step that is not applied yet."""

    def run(
        self, step: int, batch: RankBatch, objective: MicroBatchLoss, watch: Watch | None = None
    ) -> dict[str, float]:
        """As of `TrainStep`, of both models."""
        try:
            return super().run(step, batch, objective, watch)
        except StepRefused as error:
            error.batch = batch  # whole, as it came
            self.optimizer.zero_grad()
            self.critic.optimizer.zero_grad()
            raise

    def _changes(self, step: int, batch: RankBatch) -> Callable[[int, MicroBatch], MicroBatch] | None:
        """Accumulate the critic's gradients; what gives micro-batches their advantages."""
        self._warms_up = step <= self._how.warmup_steps
        change = super()._changes(step, batch)
        plain = replace(batch, ce_weights=None)  # what is only to be predicted has no value
        found = self.critic.estimates(plain)
        moments = self.critic.moments(found)
        self._learned = self.critic.learn(step, plain, found) | _shown(moments)
        mean, deviation = moments[0, 0], (moments[1, 0] + WHITEN_EPS).sqrt()

        def with_advantages(i: int, micro: MicroBatch) -> MicroBatch:
            micro = micro if change is None else change(i, micro)
            own = found[i].advantages
            own = ((own - mean) / deviation if self._how.whiten else own).float()
            if micro.trained is not None:
                own = torch.zeros_like(micro.advantages).index_copy(0, micro.trained, own)
            return replace(micro, advantages=own)

        return with_advantages

    def accumulate(
        self,
        batch: RankBatch,
        objective: MicroBatchLoss,
        facts: BatchFacts,
        change: Callable[[int, MicroBatch], MicroBatch] | None = None,
    ) -> tuple[LossStats, int]:
        """As of `TrainStep`; while only the critic learns, without gradients."""
        with torch.set_grad_enabled(torch.is_grad_enabled() and not self._warms_up):
            found = super().accumulate(batch, objective, facts, change)
        if self._warms_up:
            reshard_all(self.policy)
        return found

    def _apply(self, step: int, metrics: dict[str, float], *, trains: bool) -> None:
        """Update both models, the policy not while only the critic learns."""
        own = self._learned
        metrics |= {f"critic/{name}": own[name] for name in SHOWN}
        metrics["step_flops"] = (1 / 3 if self._warms_up else 1) * metrics["step_flops"] + FORWARD * own["step_flops"]
        super()._apply(step, metrics, trains=trains and not self._warms_up)
        self.critic._apply(step, own, trains=bool(own["num_targets"]))  # none where words are only to be predicted


def _shown(moments: torch.Tensor) -> dict[str, float]:
    """Figures of `CriticStep.moments`, of before the update."""
    means, variances = moments.tolist()
    explained = 1 - variances[3] / variances[1] if variances[1] > 0 else 0.0
    stated = {"value": means[2], "return": means[1], "explained_variance": explained}
    return stated | {"advantage_std": math.sqrt(variances[0]) if variances[0] >= 0 else math.nan}
