"""A train step of a policy and its critic: values, advantages, both backward passes, both updates or none.

    values of all micro-batches (no gradient) -> GAE -> advantages, whitened over the batch -> the policy's updates
                                                    -> returns -> the critic's updates

Values, advantages and returns are made once a batch; every mini-batch is one update of both. Both losses and gradients
are looked at before either model changes, so that an update that is refused leaves both as they were; both models'
gradients are in memory together.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from prime_hpc.store.batch.rank_batch import RankBatch
from prime_hpc.trainer.batching.micro_batches import BatchFacts, MicroBatch, batch_facts
from prime_hpc.trainer.batching.mini_batches import Change, MiniBatch, of_micro_batch
from prime_hpc.trainer.batching.prefetch_to_device import MicroBatches
from prime_hpc.trainer.critic.gae import WHITEN_EPS, Estimates, estimate, value_loss
from prime_hpc.trainer.objectives import LossStats, MicroBatchLoss
from prime_hpc.trainer.objectives.kl import KLCoefficient, kl_estimate
from prime_hpc.trainer.parallel.distribute import reshard_all
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
    def estimates(self, batch: RankBatch, penalties: Sequence[torch.Tensor] | None = None) -> list[Estimates]:
        """Return values, advantages and returns of the trained tokens of each micro-batch. Collective. `penalties`: of
        each, what is taken off its tokens' rewards."""
        found, config = list[Estimates](), self._config.critic
        assert config is not None
        with MicroBatches(partial(self.micro_batch, batch), batch.num_micro_batches, self._device) as micros:
            for i, micro in enumerate(micros):
                with self.policy.packing(micro):
                    values, _ = self.policy(micro)
                rewards = micro.advantages if penalties is None else micro.advantages - penalties[i]
                found.append(estimate(config, values, rewards, micro.sequence))
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

    def learn(self, step: int, part: MiniBatch, found: list[Estimates]) -> dict[str, float]:
        """Accumulate the gradients of the loss of a mini-batch's values; returns the figures of an update that is not
        applied yet. Collective. `found`: of the whole batch. Raises NonFiniteError: its loss or gradient is not
        finite."""
        returns, values = [each.returns for each in found], [each.values for each in found]

        def with_returns(i: int, micro: MicroBatch) -> MicroBatch:
            own, old = of_micro_batch(returns, i), of_micro_batch(values, i)
            return replace(micro, returns=own.float(), old_values=old.float())

        batch = replace(part.batch, ce_weights=None)
        facts = batch_facts(batch, step)
        loss = partial(value_loss, clip=self._config.critic.value_clip if self._config.critic else None)
        stats, num_shared = self.accumulate(batch, loss, facts, part.of(with_returns))
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
        self.critic, self._how, kl = critic, self._config.critic, self._config.loss.kl
        self._kl = KLCoefficient(kl) if kl is not None and kl.in_rewards else None
        self._warms_up = False
        self._found: list[Estimates] = []
        self._shown: dict[str, float] = {}
        self._of_rewards: dict[str, float] = {}
        """Of the whole batch."""
        self._learned: dict[str, float] = {}
        """Figures of the critic's part of an update that is not applied yet."""

    def _changes(self, step: int, batch: RankBatch) -> Change:
        """Make values and advantages of the whole batch; return what gives micro-batches theirs."""
        self._warms_up = step <= self._how.warmup_steps
        change = super()._changes(step, batch)
        plain = replace(batch, ce_weights=None)  # what is only to be predicted has no value
        self._found = self.critic.estimates(plain, self._penalties(plain))
        moments = self.critic.moments(self._found)
        self._shown = _shown(moments)
        advantages = [each.advantages for each in self._found]
        mean, deviation = moments[0, 0], (moments[1, 0] + WHITEN_EPS).sqrt()

        def with_advantages(i: int, micro: MicroBatch) -> MicroBatch:
            micro = micro if change is None else change(i, micro)
            own = of_micro_batch(advantages, i)
            own = ((own - mean) / deviation if self._how.whiten else own).float()
            if micro.trained is not None:
                own = torch.zeros_like(micro.advantages).index_copy(0, micro.trained, own)
            return replace(micro, advantages=own)

        return with_advantages

    @torch.no_grad()
    def _penalties(self, batch: RankBatch) -> list[torch.Tensor] | None:
        """Return what each micro-batch's trained tokens lose of their rewards for their distance to the reference.
        Collective."""
        if self._kl is None:
            return None
        at = [batch.target_mask()[batch.tokens_of(i)] for i in range(batch.num_micro_batches)]
        sampled = [
            torch.from_numpy(batch.logprobs[batch.tokens_of(i)][mask]).to(self._device) for i, mask in enumerate(at)
        ]
        references, estimator = self._references(batch), self._kl.estimator
        estimates = [kl_estimate(mu, other, estimator) for mu, other in zip(sampled, references, strict=True)]
        every = torch.cat(estimates).double()
        sums = torch.stack([every.sum(), torch.full_like(every.sum(), len(every))]) * float(self._parallel.leads)
        dist.all_reduce(sums)
        total, count = sums.tolist()
        self._of_rewards = {"kl_penalty": total / max(count, 1.0), "kl_coef": self._kl.value}
        return [self._kl.value * estimate for estimate in estimates]

    def _update_by(
        self, step: int, part: MiniBatch, objective: MicroBatchLoss, change: Change | None, *, first: bool
    ) -> tuple[dict[str, float], bool]:
        """As of `TrainStep`, of both models."""
        try:
            with self.timer("forward_backward", on_device=True):
                self._learned = self.critic.learn(step, part, self._found) | self._shown
            return super()._update_by(step, part, objective, change, first=first)
        except StepRefused:
            self.optimizer.zero_grad()
            self.critic.optimizer.zero_grad()
            raise

    def accumulate(
        self,
        batch: RankBatch,
        objective: MicroBatchLoss,
        facts: BatchFacts,
        change: Change | None = None,
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
        metrics |= {f"critic/{name}": own[name] for name in SHOWN} | self._of_rewards
        metrics["step_flops"] = (1 / 3 if self._warms_up else 1) * metrics["step_flops"] + FORWARD * own["step_flops"]
        super()._apply(step, metrics, trains=trains and not self._warms_up)
        self.critic._apply(step, own, trains=bool(own["num_targets"]))  # none where words are only to be predicted

    def _observe(self, metrics: dict[str, float]) -> None:
        """As of `TrainStep`; of a step in which the policy stays, nothing."""
        if not self._warms_up:
            super()._observe(metrics)
            if self._kl is not None:
                self._kl.observe(metrics["kl_penalty"], metrics["num_sequences"])

    @property
    def state(self) -> dict[str, torch.Tensor]:
        """As of `TrainStep`."""
        return super().state | ({} if self._kl is None else {"kl_coef": self._kl.state})


def _shown(moments: torch.Tensor) -> dict[str, float]:
    """Figures of `CriticStep.moments`, of before the update."""
    means, variances = moments.tolist()
    explained = 1 - variances[3] / variances[1] if variances[1] > 0 else 0.0
    stated = {"value": means[2], "return": means[1], "explained_variance": explained}
    return stated | {"advantage_std": math.sqrt(variances[0]) if variances[0] >= 0 else math.nan}
