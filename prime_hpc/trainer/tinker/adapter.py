"""One adapter in training, on every rank: a slot of the shared model, its gradients, its Adam, its saves.

All methods are collective. An adapter touches no other slot's tensors, so the order in which adapters take turns
changes no bit of any.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist

from prime_hpc.config.experiment import Experiment
from prime_hpc.config.named_code import Bounds
from prime_hpc.config.sections.trainer import TrainerConfig
from prime_hpc.store.checkpoint.checkpoints import load_checkpoint
from prime_hpc.store.model.fingerprint import model_identity
from prime_hpc.store.run_paths import RunPaths, claim_incarnation
from prime_hpc.trainer.batching.micro_batches import MicroBatch, batch_facts
from prime_hpc.trainer.checkpointing import dcp_state
from prime_hpc.trainer.checkpointing.checkpointer import Checkpointer
from prime_hpc.trainer.checkpointing.verify import verify_parts
from prime_hpc.trainer.multi.child_run import READ_S
from prime_hpc.trainer.optim import build_optimizer
from prime_hpc.trainer.parallel.distribute import reshard_all
from prime_hpc.trainer.parallel.gradients import local_gradients, squared_norm
from prime_hpc.trainer.rank_group import OF_A_RUN
from prime_hpc.trainer.tinker.batches import (
    BadRequestError,
    Collected,
    Example,
    part_of,
    per_example,
    retargeted,
    summed_loss,
)
from prime_hpc.trainer.tinker.paths import Saved, Shape
from prime_hpc.trainer.train_step import TrainStep
from prime_hpc.trainer.trainer import Base
from prime_hpc.trainer.weights.lora_files import AdapterPublisher, adapter_identity

_ATTENTION = ("attn", "attention", "mixer")
"""Parts of the names of the modules that `train_attn` is about; all others are `train_mlp`'s."""


@dataclass(frozen=True)
class AdamStep:
    """Parameters of one optimizer step (AdamW, arXiv 1711.05101)."""

    learning_rate: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    max_norm: float
    """Largest norm of the gradient; 0: not clipped."""


@dataclass(frozen=True)
class PassResult:
    """Rank 0: what a forward (and backward) pass computed."""

    logprobs: list[np.ndarray]
    """Of each example, [T] or [T, K]."""
    losses: list[np.ndarray]
    """Likewise, of each target."""
    loss: float
    """Their sum."""
    num_tokens: int


class Adapter:
    """An adapter that holds a slot."""

    def __init__(self, base: Base, experiment: Experiment, slot: int, shape: Shape, paths: RunPaths) -> None:
        """Begin as the base model. `shape`: of the adapter; its rank is at most the service's."""
        self.slot, self.steps, self._shape = slot, 0, shape
        self._base, self._paths, self._budget = base, paths, experiment.micro_batch_tokens
        self._refusal: str | None = None
        policy = base.policy
        assert policy.adapters is not None
        policy.adapters.reset(slot, shape.seed, shape.rank)
        named = policy.adapters.named_parameters(slot)
        self._parameters = list(named.values())
        trained = [p for name, p in named.items() if _is_trained(name, shape)]
        self._trained: list[torch.Tensor] = list(trained)
        # Adam's own parameters and the losses come with each step
        reshard = experiment.trainer.reshard_after_forward
        config = TrainerConfig(reshard_after_forward=reshard, share_prefixes=False, no_sync=False)
        self._optimizer = build_optimizer(policy, config.optim, trained)
        self._train_step = TrainStep(
            policy,
            self._optimizer,
            config,
            max_steps=1,
            normalize="token",
            device=base.device,
            peak_flops=base.peak_flops,
            with_entropy=False,
            slot=slot,
            row_tokens=self._budget,
        )
        base.control.from_first(lambda: claim_incarnation(paths, after=0), OF_A_RUN)  # nobody else's, ever
        identity = adapter_identity(policy.adapters.config_of(slot), base.source)
        meta = {"model": experiment.model.name, "kind": "tinker", "identity": model_identity(base.source)}
        self._checkpointer = Checkpointer(
            policy, self._optimizer, paths, incarnation=1, meta=meta | {"adapter": identity}, slot=slot
        )
        self._publisher = AdapterPublisher(
            policy, base.source, paths, incarnation=1, model_name=experiment.model.name, slot=slot
        )

    # ------------------------------------------------------------------------------------------------ training

    def run_pass(
        self, examples: Sequence[Example], loss_fn: str, bounds: Bounds, *, forward_only: bool
    ) -> PassResult | None:
        """Do a forward pass, and a backward pass whose gradients are added to those that are there.
        Returns the result on rank 0, None elsewhere."""
        step, parallel = self._train_step, self._base.policy.parallel
        part = part_of(examples, parallel.data_rank, parallel.dims.num_data_ranks, self._budget)
        batch, collected = step.lay_out(part), Collected([], [])
        objective = summed_loss(loss_fn, bounds, collected)

        def retarget(index: int, micro: MicroBatch) -> MicroBatch:
            return retargeted(micro, [examples[i] for i in batch.sample_ids[batch.sequences_of(index)]])

        with torch.set_grad_enabled(not forward_only), step.adapted():
            stats, _ = step.accumulate(batch, objective, batch_facts(batch, 1), retarget)
        if forward_only:
            reshard_all(self._base.policy)
        own = (per_example(batch, examples, collected), float(stats.totals["loss"])) if parallel.leads else ({}, 0.0)
        rows = self._base.control.gather(own)
        if rows is None:
            return None
        of_example = {i: arrays for found, _ in rows for i, arrays in found.items()}
        return PassResult(
            [of_example[i][0] for i in range(len(examples))],
            [of_example[i][1] for i in range(len(examples))],
            sum(loss for _, loss in rows),
            sum(len(e.tokens) for e in examples),
        )

    def refuse_step(self, why: str) -> None:
        """Drop the gradients: those of a pass that failed are missing among them. The next step is refused."""
        self._refusal = why
        self._drop_gradients()

    def update(self, adam: AdamStep) -> dict[str, float]:
        """Step the optimizer with the gradients that are there, and drop them; returns metrics.
        Raises BadRequestError: the gradients are not whole or not finite; weights and optimizer are as before."""
        if self._refusal is not None:
            why, self._refusal = self._refusal, None
            raise BadRequestError(f"no step was taken, and the gradients were dropped: {why}")
        squared = squared_norm(self._trained, self._base.device)
        dist.all_reduce(squared)
        norm = math.sqrt(squared.item()) if squared.item() >= 0 else math.nan
        if not math.isfinite(norm):
            self._drop_gradients()
            raise BadRequestError(
                f"no step was taken: the gradient's norm is {norm}. The gradients were dropped, the weights are as "
                "before; look at the data of the last forward_backward, or lower the learning rate"
            )
        if adam.max_norm > 0 and norm > adam.max_norm:
            torch._foreach_mul_(local_gradients(self._trained), adam.max_norm / (norm + 1e-6))
        for group in self._optimizer.param_groups:
            group["lr"], group["betas"] = adam.learning_rate, adam.betas
            group["eps"], group["weight_decay"] = adam.eps, adam.weight_decay
        self._optimizer.step()
        self._drop_gradients()
        self.steps += 1
        return {"grad_norm:mean": norm, "lr:mean": adam.learning_rate, "steps:max": float(self.steps)}

    def _drop_gradients(self) -> None:
        for parameter in self._parameters:
            parameter.grad = None

    # ------------------------------------------------------------------------------------------------ saves

    @property
    def has_optimizer(self) -> bool:
        """True if the optimizer has a state: from its first step on."""
        return bool(self._optimizer.state)

    def save(self, number: int) -> None:
        """Write weights and optimizer as checkpoint `number`. Raises StoreError: disk full, fenced."""
        self._checkpointer.save(number, progress={"steps": self.steps}, batch_dir=None)

    def publish(self, number: int) -> None:
        """Write the weights for the engines as version `number`. Raises StoreError: disk full, fenced."""
        self._publisher.publish(number)

    def load(self, saved: Saved, *, with_optimizer: bool) -> None:
        """Take the weights of a save, and its optimizer's state; without, the optimizer begins anew.

        Raises:
            BadRequestError: it is of another model, or of another shape.
            StoreError: it cannot be read. Either way this adapter is as before.
        """
        policy, has_optimizer = self._base.policy, with_optimizer and saved.save.has_optimizer
        on_all = self._base.control.on_all
        info = on_all(lambda: load_checkpoint(saved.run.checkpoints, saved.save.number), OF_A_RUN)
        verify_parts(info, self._paths, READ_S)
        metadata = on_all(lambda: dcp_state.read_metadata(info.trainer_dir), OF_A_RUN)
        problems = self._checkpointer.mismatches(info)
        if has_optimizer:
            problems += _other_parts(saved.shape, self._shape)
        weights = dcp_state.named_state(policy, self._optimizer, self.slot)
        problems = problems or dcp_state.differences(metadata, weights, with_optimizer=False)
        _refuse(saved, problems)
        before, gradients = dict(self._optimizer.state), [parameter.grad for parameter in self._parameters]
        self._optimizer.state.clear()
        try:
            if has_optimizer:
                dcp_state.create_optimizer_state(self._optimizer)
                dcp_state.drop_unsaved_state(policy, self._optimizer, metadata, self.slot)
            state = dcp_state.named_state(policy, self._optimizer, self.slot)
            _refuse(saved, dcp_state.differences(metadata, state) if has_optimizer else [])
            loaded = {name: torch.empty_like(tensor) for name, tensor in state.items()}  # some of it may be filled
            dcp_state.load_state(info.trainer_dir, loaded)
        except Exception:
            self._optimizer.state.clear()
            self._optimizer.state.update(before)
            for parameter, gradient in zip(self._parameters, gradients, strict=True):
                parameter.grad = gradient
            raise
        for name, tensor in state.items():
            tensor.copy_(loaded[name])
        self._drop_gradients()
        self._refusal = None
        self.steps = saved.save.steps if with_optimizer else 0

    def close(self) -> None:
        """Give its slot back."""
        self._drop_gradients()
        self._checkpointer.close()


def _is_trained(name: str, shape: Shape) -> bool:
    """Return whether a parameter is of the parts that the adapter was asked to train."""
    is_attention = any(part in name for part in _ATTENTION)
    return shape.train_attn if is_attention else shape.train_mlp


def _refuse(saved: Saved, problems: list[str]) -> None:
    if problems:
        raise BadRequestError(f"{saved.path} cannot be loaded here: {'; '.join(problems)}")


def _other_parts(then: Shape, now: Shape) -> list[str]:
    """Why the optimizer's state of one adapter is not another one's: each has it of the parts that it trains."""
    named = [("train_attn", then.train_attn, now.train_attn), ("train_mlp", then.train_mlp, now.train_mlp)]
    cure = "load the weights without the optimizer"
    return [
        f"its optimizer's state is of {key}={was}, this adapter has {key}={here}: {cure}"
        for key, was, here in named
        if was != here
    ]
