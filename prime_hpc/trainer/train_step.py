"""The train step that RL and SFT share.

    train_step = TrainStep(policy, optimizer, config, ...)
    metrics = train_step.run(step, rank_batch, objective)

`rl.py` and `sft.py` differ in where a `RankBatch` comes from and in the objective, a function of log-probabilities.
Gradients and losses carry the batch's global denominators, so that the result does not depend on how samples are
packed into micro-batches or spread over ranks.
"""

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from loguru import logger

from prime_hpc.config.sections.trainer import MismatchConfig, TrainerConfig
from prime_hpc.store.batch.rank_batch import RankBatch
from prime_hpc.trainer.batching.micro_batches import (
    BatchFacts,
    MicroBatch,
    batch_facts,
    make_micro_batch,
    objective_part,
    rows_fit,
    with_single_rows,
)
from prime_hpc.trainer.batching.mini_batches import Change, MiniBatch, metrics_of_updates, mini_batches, of_micro_batch
from prime_hpc.trainer.batching.prefetch_to_device import MicroBatches
from prime_hpc.trainer.batching.rows import group_rows
from prime_hpc.trainer.model.policy import Policy
from prime_hpc.trainer.objectives import LossStats, MicroBatchLoss, echo_loss, target_weights
from prime_hpc.trainer.objectives.correction import mean_factor
from prime_hpc.trainer.objectives.covariance import high_covariance
from prime_hpc.trainer.objectives.entropy import EntropyBonus
from prime_hpc.trainer.objectives.mismatch import MismatchAlarm
from prime_hpc.trainer.objectives.second_moment import beyond_second_moment
from prime_hpc.trainer.objectives.top_share import top_share_threshold
from prime_hpc.trainer.ops.router_replay import check_recorded
from prime_hpc.trainer.optim import learning_rate_factor, set_learning_rate
from prime_hpc.trainer.parallel.distribute import gathers_from_itself, reshard_all
from prime_hpc.trainer.parallel.gradients import local_gradients, spoiled, squared_norm, sum_over, whole_gradient_bytes
from prime_hpc.trainer.perf import FlopsModel, PhaseTimer
from prime_hpc.trainer.slow_ranks import SlowRanks
from prime_hpc.trainer.token_log import Watch

_SUMS = ("num_tokens", "num_sequences", "num_targets", "reward_sum", "lag_sum", "num_sampled")


class StepRefused(RuntimeError):
    """A step that was not applied: parameters are those of version `step` - 1, with the first `updates` updates by the
    batch, and nothing of it was published."""

    def __init__(self, message: str, step: int, batch: RankBatch) -> None:
        """`batch` is this rank's part of the batch, for `replay.py` to keep."""
        super().__init__(message)
        self.step, self.batch, self.updates = step, batch, 0


class NonFiniteError(StepRefused):
    """The loss or the gradient of a step is NaN or infinite."""


class MismatchError(StepRefused):
    """The trainer's log-probabilities are farther from the engine's than `trainer.loss.mismatch.stop` allows."""


class TrainStep:
    """Forward, backward, clip, update, measure: one batch at a time, in one optimizer step or several."""

    called, section = "", "trainer.optim"
    """Words for its loss and gradient where they are not the policy's, and the section of its optimizer."""
    critic: "TrainStep | None" = None
    """Another model's step, which is a part of this one."""

    def __init__(
        self,
        policy: Policy,
        optimizer: torch.optim.Optimizer,
        config: TrainerConfig,
        *,
        max_steps: int,
        normalize: str,
        device: torch.device,
        peak_flops: float,
        with_entropy: bool = True,
        batch_tokens: int = 1,
        mismatch: MismatchConfig | None = None,
        reference: Policy | None = None,
        slot: int = 0,
        row_tokens: int = 0,
        slow_ranks: SlowRanks | None = None,
        together: int = 1,
        entropy: EntropyBonus | None = None,
        top_entropy: float | None = None,
        updates: tuple[int, int] = (1, 1),
    ) -> None:
        """Args:
        max_steps: length of the schedule.
        normalize: `token`, `sequence` or `batch`, see `objectives.target_weights`.
        peak_flops: FLOP/s of one rank, for MFU.
        with_entropy: measure the policy's entropy at the targets.
        batch_tokens: constant of `normalize = batch`.
        mismatch: alarm on the metric `kl`; None: none.
        reference: frozen, sharded model whose log-probabilities the objective needs; the policy itself: its base
            model, where it has adapters.
        slot: adapter that is trained, where the policy has any.
        row_tokens: rows times their length in one micro-batch, where each sample has a row of its own.
        slow_ranks: compares the ranks' own times; None: nobody does.
        together: sequences that follow each other and share a micro-batch: 2 of a pair.
        entropy: bonus for the entropy, beside the objective (needs `with_entropy`).
        top_entropy: share of the batch's targets, those of the highest entropy, that the objective trains; None: all.
        updates: mini-batches of a batch, each an optimizer step, and passes over them.
        """
        self.policy = policy
        self.optimizer = optimizer
        self.timer = PhaseTimer.of(device)
        self._config, self.max_steps = config, max_steps
        self._normalize, self._device = normalize, device
        self._reshard = config.reshard_after_forward and not gathers_from_itself(policy.parallel)
        self._no_sync = config.defers_sync(whole_gradient_bytes(policy))
        self._mismatch = None if mismatch is None else MismatchAlarm(mismatch)
        self._batch_tokens, self._reference = batch_tokens, reference
        self._row_tokens, self._together = row_tokens, together
        self._kl_in_rewards = config.loss.kl is not None and config.loss.kl.in_rewards
        self._slow_ranks, self.entropy, self._top_entropy = slow_ranks, entropy, top_entropy
        self._counts_all, (self._num_mini_batches, self._num_epochs) = config.loss.denominators == "all", updates
        self._peak_flops, self._with_entropy = peak_flops, with_entropy
        self._flops = FlopsModel.of(policy.hf, 0 if policy.adapters is None else policy.adapters.num_parameters)
        self._parallel = policy.parallel
        self.slot = slot
        self._parameters: list[torch.Tensor] = [p for p in policy.parameters() if p.requires_grad]
        if policy.adapters is not None:
            self._parameters = [p for group in optimizer.param_groups for p in group["params"]]

    @property
    def state(self) -> dict[str, torch.Tensor]:
        """Small tensors in host memory that a checkpoint keeps of it, the same on all ranks."""
        return {} if self.entropy is None else {"entropy_bonus": self.entropy.state}

    def run(
        self, step: int, batch: RankBatch, objective: MicroBatchLoss, watch: Watch | None = None, done: int = 0
    ) -> dict[str, float]:
        """Turn version step - 1 into version `step`. Collective.

        Args:
            step: 1-based.
            batch: this rank's part; all ranks have the same number of micro-batches.
            watch: wraps the objective, to keep what it sees.
            done: updates by this batch that the parameters have already (`StepRefused.updates`).

        Returns:
            metrics of the whole batch, the same on every rank; of several updates see `metrics_of_updates`.

        A batch without any target changes nothing: the optimizer does not step.

        Raises:
            NonFiniteError: NaN or infinite loss or gradient; parameters are as before the update.
            MismatchError: the mismatch to the engine exceeds its limit; parameters are as before.
        """
        if batch.num_micro_batches == 0:
            batch = RankBatch.empty(1)
        if self.policy.replays_routers:
            check_recorded(self.policy.hf, batch)
        with self.timer("forward_backward", on_device=True), self.adapted():
            laid_out = self.lay_out(batch)
            change = self._changes(step, laid_out)
            parts = mini_batches(laid_out, self._num_mini_batches, self._device)
            watched = objective if watch is None else watch(parts[0].batch, objective)
        rows, trained = list[dict[str, float]](), False
        for number, part in list(enumerate(parts * self._num_epochs))[done:]:
            try:
                metrics, trains = self._update_by(step, part, watched, change, first=not (done or trained))
            except StepRefused as error:
                error.batch, error.updates = batch, number
                raise
            rows.append(metrics)
            trained |= trains
        if not trained and dist.get_rank() == 0:
            logger.warning(f"step {step}: no token of the batch trains (every label is masked); weights stay")
        metrics = metrics_of_updates(rows, self._num_epochs)
        if trained:
            self._observe(metrics)
        return metrics

    def _update_by(
        self, step: int, part: MiniBatch, objective: MicroBatchLoss, change: Change | None, *, first: bool
    ) -> tuple[dict[str, float], bool]:
        """Do one optimizer step. Collective. Returns its metrics, and whether anything trained; `first`: of its batch.
        Raises as `run`."""
        facts = batch_facts(part.batch, step)
        with self.timer("forward_backward", on_device=True), self.adapted():
            stats, num_shared = self.accumulate(part.batch, objective, facts, part.of(change))
        with self.timer("optim", on_device=True):
            metrics = self._reduce(step, facts, stats, num_shared, first=first)
            self._check_finite(step, part.batch, metrics)
            if first and self._mismatch is not None and (why := self._mismatch.check(step, metrics)):
                self.optimizer.zero_grad()
                raise MismatchError(why, step, part.batch)
            trains = bool(metrics["num_targets"] or "echo_loss" in stats.totals)
            self._apply(step, metrics, trains=trains)
        return metrics, trains

    def _changes(self, step: int, batch: RankBatch) -> Change | None:
        """Return what the micro-batches of a whole batch are to be in this step, see `accumulate`. Collective."""
        marks = self._marks(batch, step)

        def marked(i: int, micro: MicroBatch) -> MicroBatch:
            own: dict[str, Any] = {name: of_micro_batch(of, i) for name, of in marks.items()}
            return replace(micro, **own)

        return marked if marks else None

    def _apply(self, step: int, metrics: dict[str, float], *, trains: bool) -> None:
        """Update by the gradients that were accumulated, or drop them; the metrics are known to be finite."""
        if not trains:
            self.optimizer.zero_grad()
            return
        self._update(step, metrics)

    def _observe(self, metrics: dict[str, float]) -> None:
        """Take note of a step that has trained."""
        if self.entropy is not None and metrics["num_targets"]:
            self.entropy.observe(metrics["entropy"])

    def lay_out(self, batch: RankBatch) -> RankBatch:
        """Return the batch as the model takes it. With each sample in a row of its own, and where a batch was not
        dealt out like that, micro-batches are made of samples of similar length, as many on every rank. Collective
        then."""
        if not self.policy.single_rows:
            return batch
        lengths, dealt = np.diff(batch.seq_offsets), batch.values("mini_batches")
        groups = [
            own[group]
            for own in (np.flatnonzero(dealt == k) for k in np.unique(dealt))
            for group in group_rows(lengths[own], self._row_tokens, self._together)
        ]
        most = torch.tensor([max(len(groups), 1), not rows_fit(batch, self._row_tokens)], device=self._device)
        dist.all_reduce(most, op=dist.ReduceOp.MAX)
        num_micro_batches, mismatches = most.tolist()
        return with_single_rows(batch, groups, num_micro_batches) if mismatches else batch

    def micro_batch(self, batch: RankBatch, index: int, stream: Any = None) -> MicroBatch:
        """Return the `index`-th micro-batch of a batch of `lay_out`; `stream`: of its copy to the device."""
        return make_micro_batch(
            batch,
            index,
            self._device,
            self._parallel,
            share_prefixes=self._config.share_prefixes,
            single_rows=self.policy.single_rows,
            pads=self.policy.pads_rows,
            stream=stream,
            image_inputs=self.policy.image_inputs,
            scores=self.policy.scores and not self.policy.is_critic,
        )

    def adapted(self) -> AbstractContextManager[None]:
        """Context of forward and backward passes through this engine's adapter, if any. Collective."""
        return self.policy.adapters.use(self.slot) if self.policy.adapters is not None else nullcontext()

    def _global_denominators(self, facts: BatchFacts, batch: RankBatch) -> tuple[float, float, int]:
        """Targets, sequences that have any, and tokens of the cross-entropy beside them, over all of the batch; targets
        and rollouts of the whole step where the batch tells these and they are asked for."""
        own = [facts.num_targets, facts.num_trained_sequences, facts.num_echo]
        counts = torch.tensor(own, device=self._device)
        dist.all_reduce(counts if self._parallel.leads else counts.zero_())
        num_targets, num_sequences, num_echo = counts.tolist()
        if self._counts_all and batch.totals is not None:
            num_targets, num_sequences = batch.totals.tolist()
        return num_targets, num_sequences, num_echo

    def accumulate(
        self,
        batch: RankBatch,
        objective: MicroBatchLoss,
        facts: BatchFacts,
        change: Change | None = None,
    ) -> tuple[LossStats, int]:
        """Accumulate gradients over the micro-batches, inside `adapted`; under `no_grad` compute the losses alone.
        Collective.

        Args:
            batch: of `lay_out`.
            change: returns what the i-th micro-batch is to be, e.g. with other targets than its own tokens.

        Between the batch's denominators and the last backward pass the host waits for the device in no micro-batch:
        kernels are launched ahead of it, and statistics stay there.

        Returns:
            the micro-batches' sums and maxima; tokens that were computed with another sample's.
        """
        total, num_shared = LossStats({}, {}), 0
        with MicroBatches(partial(self.micro_batch, batch), batch.num_micro_batches, self._device) as micros:
            denominators = self._global_denominators(facts, batch)
            for i, micro in enumerate(micros):
                last = i == len(micros) - 1
                num_shared += micro.num_shared
                changed = micro if change is None else change(i, micro)
                self._prepare_backward(last)
                with self.policy.packing(changed):
                    total.add(self._micro_batch(changed, objective, *denominators))
        if self._parallel.tp is not None:
            sum_over([p for m in self.policy.partly_used for p in m.parameters()], self._parallel.tp)
        return total, num_shared

    def _marks(self, batch: RankBatch, step: int) -> dict[str, Sequence[torch.Tensor]]:
        """Return what the whole batch decides of its targets: fields of each micro-batch. Collective."""
        marks: dict[str, Sequence[torch.Tensor]] = {}
        correction, several = self._config.loss.correction, self._num_mini_batches * self._num_epochs > 1
        decoupled = correction is not None and (several or correction.batch_normalize)
        limit, leads = self._config.loss.second_moment, self._parallel.leads
        if self._top_entropy is not None or decoupled or limit is not None:
            old, high = self._look(batch, self._top_entropy)
            marks |= ({"old_logprobs": old} if decoupled else {}) | ({"high_entropy": high} if high else {})
        if correction is not None and correction.batch_normalize:
            with MicroBatches(partial(self.micro_batch, batch), batch.num_micro_batches, self._device) as micros:
                mean = mean_factor(correction, micros, old, counts=leads)
            marks["correction_mean"] = [mean.expand(len(own)) for own in old]
        if limit is not None:
            with MicroBatches(partial(self.micro_batch, batch), batch.num_micro_batches, self._device) as micros:
                marks["far"] = beyond_second_moment(limit, micros, old, counts=leads)
        if self._reference is not None and self._num_epochs > 1 and not self._kl_in_rewards:
            marks["reference_logprobs"] = self._references(batch)
        if (covariance := self._config.loss.covariance) is not None:
            marks["high_covariance"] = high_covariance(covariance, batch, step, self._device, counts=leads)
        return marks

    @torch.no_grad()
    def _look(self, batch: RankBatch, share: float | None) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Return the log-probabilities of each micro-batch's targets, and with a `share` which are of high entropy, by
        a forward pass over all of them. Collective."""
        found, entropies, counted = list[torch.Tensor](), list[torch.Tensor](), list[torch.Tensor]()
        with MicroBatches(partial(self.micro_batch, batch), batch.num_micro_batches, self._device) as micros:
            for micro in micros:
                with self.policy.packing(micro):
                    logprobs, entropy = self.policy(micro, with_entropy=share is not None)
                found.append(logprobs)
                if share is not None:
                    entropies.append(entropy)
                    counted.append(entropy if micro.trained is None else entropy.index_select(0, micro.trained))
        reshard_all(self.policy)
        if share is None:
            return found, []
        threshold = top_share_threshold(torch.cat(counted), share, counts=self._parallel.leads)
        return found, [entropy >= threshold for entropy in entropies]

    def _micro_batch(
        self, micro: MicroBatch, objective: MicroBatchLoss, num_targets: float, num_sequences: float, num_echo: int
    ) -> LossStats:
        """Forward and backward pass of one micro-batch; its statistics."""
        if self._reference is not None and micro.reference_logprobs is None and not self._kl_in_rewards:
            micro.reference_logprobs = self._reference_logprobs(micro)
        distils = self._config.loss.distillation is not None and micro.teacher_ids is not None
        logprobs, entropy = self.policy(micro, self._with_entropy, distils)
        if distils:
            logprobs, micro.listed_logprobs = logprobs[:, 0], logprobs[:, 1:]
        echo = echo_loss(micro, logprobs, num_echo) if num_echo else None
        if micro.trained is not None:
            logprobs = logprobs.index_select(0, micro.trained)
            entropy = entropy.index_select(0, micro.trained) if self._with_entropy else entropy
            micro = objective_part(micro)
        rollouts = micro.targets_of_rollout if self._counts_all else None
        weights = target_weights(
            micro.sequence,
            micro.targets_of_sequence if rollouts is None else rollouts,
            self._normalize,
            num_targets,
            num_sequences,
            self._batch_tokens,
        )
        loss, stats = objective(micro, logprobs, weights)
        if echo is not None:
            loss, stats.totals["echo_loss"] = loss + echo, echo.detach()
        if self.entropy is not None and (coef := self.entropy.coef):
            loss = loss - coef * (weights * entropy).sum()
        if torch.is_grad_enabled():
            loss.backward()
        stats.totals["loss"] = loss.detach()
        if self._with_entropy:
            stats.sums["entropy"] = entropy.detach().sum()
        return stats

    def _prepare_backward(self, last: bool) -> None:
        """Tell FSDP what to do with the coming backward pass' gradients, and with the parameters it gathered.

        Each micro-batch's are reduced and scattered at once: a rank then holds its shard of them, and never more than
        one block's whole ones. Copies of the model (`dp_replicate`) add theirs up with the last one only. With
        `no_sync` all of it waits for the last one.
        """
        policy: Any = self.policy
        sync = last or not self._no_sync
        policy.set_requires_gradient_sync(sync)
        policy.set_requires_all_reduce(last)
        policy.set_is_last_backward(sync)  # lets go of the buffer of the last reduction
        policy.set_reshard_after_backward(last or self._reshard)

    @torch.no_grad()
    def _references(self, batch: RankBatch) -> list[torch.Tensor]:
        """Return the frozen model's log-probabilities of each micro-batch's targets, for all updates. Collective."""
        found = []
        with MicroBatches(partial(self.micro_batch, batch), batch.num_micro_batches, self._device) as micros:
            for micro in micros:
                with self.policy.packing(micro):
                    found.append(self._reference_logprobs(micro))
        return found

    @torch.no_grad()
    def _reference_logprobs(self, micro: MicroBatch) -> torch.Tensor:
        """float32[N], the frozen model's log-probabilities of the targets."""
        assert self._reference is not None
        adapters = self._reference.adapters  # of the policy itself, where that is its own reference
        with adapters.off() if adapters is not None else nullcontext():
            logprobs, _ = self._reference(micro)
        reshard_all(self._reference)
        return logprobs

    def _reduce(
        self, step: int, facts: BatchFacts, stats: LossStats, num_shared: int, *, first: bool = True
    ) -> dict[str, float]:
        """Gather every rank's sums and maxima in one collective and make the step's metrics of them.

        Ranks that work on one part of the batch all have that part's sums: the first one's count.
        """
        sums, maxima = stats.sums | stats.totals, stats.maxima
        slow_ranks = self._slow_ranks if first else None
        own = [] if slow_ranks is None else slow_ranks.take(step)
        names = [*_SUMS, "lag_max", "shared_tokens", "attention_flops", *sums, *maxima, "squared_grad_norm"]
        known = [*own, *(float(getattr(facts, k)) for k in (*_SUMS, "lag_max")), float(num_shared)]
        known.append(self._flops.attention_flops(facts.lengths))
        counted = torch.tensor(known, dtype=torch.float64, device=self._device)
        measured = [v.double() for v in (*sums.values(), *maxima.values())]
        row = torch.cat([counted, torch.stack([*measured, squared_norm(self._parameters, self._device)])])
        table = torch.empty((dist.get_world_size(), row.numel()), dtype=torch.float64, device=self._device)
        dist.all_gather_single(table, row[None])
        everyone = table.cpu().numpy()
        parts = everyone[:: self._parallel.dims.ranks_per_part, len(own) :]
        columns = dict(zip(names, parts.T, strict=True))
        top = {k: float(np.max(columns[k])) for k in (*maxima, "lag_max")}
        total = {k: float(np.sum(v)) for k, v in columns.items() if k not in top}
        total["squared_grad_norm"] = float(np.sum(everyone[:, -1]))
        if slow_ranks is not None:
            slow_ranks.compare(step, everyone[:, : len(own)])
        return self._metrics(step, total, top, stats)

    def _metrics(self, step: int, total: dict[str, float], top: dict[str, float], stats: LossStats) -> dict[str, float]:
        """Means over targets, and what else the log shows; `step_flops` and counts are of the whole batch."""
        targets = max(total["num_targets"], 1.0)
        counts = {k: total[k] for k in ("num_tokens", "num_sequences", "num_targets", "shared_tokens")}
        computed = total["num_tokens"] - total["shared_tokens"]
        return {
            **{k: total[k] for k in stats.totals},
            "grad_norm": math.sqrt(total["squared_grad_norm"]) if total["squared_grad_norm"] >= 0 else math.nan,
            "lr": self._config.optim.lr * learning_rate_factor(self._config.scheduler, step, self.max_steps),
            "reward": total["reward_sum"] / max(total["num_sequences"], 1.0),
            **{k: total[k] / targets for k in stats.sums},
            **top,
            "lag_mean": total["lag_sum"] / max(total["num_sampled"], 1.0),
            **counts,
            "step_flops": self._flops.step_flops(computed, total["num_targets"], total["attention_flops"]),
            **({} if self.entropy is None else {"entropy_coef": self.entropy.coef}),
        }

    def _check_finite(self, step: int, batch: RankBatch, metrics: dict[str, float]) -> None:
        bad = [k for k in ("loss", "grad_norm") if not math.isfinite(metrics[k])]
        if bad:
            where = "" if "loss" in bad else spoiled(self.policy, self.slot)
            self.optimizer.zero_grad()
            raise NonFiniteError(
                f"step {step}: {' and '.join(f'{self.called}{k} = {metrics[k]}' for k in bad)}{where}; stopped before "
                f"version {step} was made or published. Version {step - 1} is intact. Look at batch {step} (rewards, "
                f"advantages), or lower {self.section}.lr or trainer.optim.max_norm",
                step,
                batch,
            )

    @torch.no_grad()
    def _update(self, step: int, metrics: dict[str, float]) -> None:
        """Clip by the global norm, step the optimizer at this step's learning rate."""
        limit = self._config.optim.max_norm
        if limit > 0 and metrics["grad_norm"] > limit:
            torch._foreach_mul_(local_gradients(self._parameters), limit / (metrics["grad_norm"] + 1e-6))
        set_learning_rate(self.optimizer, metrics["lr"])
        self.optimizer.step()
        self.optimizer.zero_grad()

    def throughput(self, metrics: dict[str, float], seconds: float) -> dict[str, float]:
        """Tokens/s of the batch and MFU over all ranks, for `seconds` of training."""
        seconds = max(seconds, 1e-9)
        peak = self._peak_flops * dist.get_world_size()
        return {"tokens_per_s": metrics["num_tokens"] / seconds, "mfu": metrics["step_flops"] / seconds / peak}
