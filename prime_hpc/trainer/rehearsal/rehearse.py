"""Two steps of the real trainer in the pretended world, and what they took."""

import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode

from prime_hpc.config import Experiment
from prime_hpc.config.sections.trainer import FakeDataConfig
from prime_hpc.store.batch.rank_batch import RankBatch
from prime_hpc.trainer.batching.micro_batches import as_pairs, fake_batch, with_fake_teacher
from prime_hpc.trainer.model.policy import Policy
from prime_hpc.trainer.objectives import loss_of
from prime_hpc.trainer.parallel.gradients import whole_gradient_bytes
from prime_hpc.trainer.rehearsal.images import PretendedImages
from prime_hpc.trainer.rehearsal.pretend import (
    NotCompiledError,
    flash_workspace,
    gloo_workspace,
    pretended,
    shortened,
    start_fake_process_group,
)
from prime_hpc.trainer.rehearsal.tracker import CompilingMemoryTracker, MemoryTracker
from prime_hpc.trainer.train_step import TrainStep
from prime_hpc.trainer.trainer import Base, build_train_step, load_base

CPU = torch.device("cpu")
MICRO_BATCHES = (1, 2)
"""Of each step: the first step makes the optimizer's state, the second one meets it; its first micro-batch makes
gradients, its second one adds to them. Any number more takes no more memory."""
WITH_MOMENTS = 12
"""Bytes of a parameter and its AdamW moments, which stay between the steps of its run."""
CUDA_GRANULE = 512
"""Bytes that CUDA's caching allocator rounds up to."""


def rehearse(experiment: Experiment, folder: Path) -> dict[str, Any]:
    """Run it, in a process that has no process group.
    Returns `peak` (bytes), `by_kind` (bytes), `phase`, and what was rehearsed.
    Raises ValueError: a model, layout or dtype that cannot work; says which key to change."""
    began = time.perf_counter()
    notes: list[str] = []
    on_gpu = experiment.device != "cpu" and experiment.trainer.backend != "gloo"
    try:
        tracker, base = _in_group(experiment, on_gpu, folder)
    except NotCompiledError as error:  # a real rank's compiler, which has values, may know what to do
        notes.append(f"{error}; these are the figures without model.compile, with which activations take less")
        eager = experiment.model.model_copy(update={"compile": False})
        tracker, base = _in_group(experiment.model_copy(update={"model": eager}), on_gpu, folder)
    if isinstance(images := base.policy.image_inputs, PretendedImages):
        notes.append(images.words)
    if experiment.trainer.parallel_dims.ep > 1:
        notes.append("every expert gets the same number of tokens")
    if (others := experiment.trainer.max_concurrent_runs - 1) and (adapters := base.policy.adapters) is not None:
        more = others * adapters.num_parameters * WITH_MOMENTS / experiment.trainer.num_ranks / 2**30
        notes.append(f"of one run's adapter: those of {others} more take up to {more:.2f} GiB a rank besides")
    return {
        "peak": tracker.peak.total,
        "by_kind": tracker.peak.by_kind,
        "phase": tracker.peak.phase,
        "num_params": sum(p.numel() for p in base.policy.parameters()),
        "world_size": experiment.trainer.num_ranks,
        "device": "cuda" if on_gpu else "cpu",
        "no_sync": experiment.trainer.defers_sync(whole_gradient_bytes(base.policy)),
        "notes": notes,
        "seconds": round(time.perf_counter() - began, 1),
    }


def _in_group(experiment: Experiment, on_gpu: bool, folder: Path) -> tuple[MemoryTracker, Base]:
    start_fake_process_group(experiment.trainer.num_ranks)
    try:
        return _run(experiment, on_gpu, folder)
    finally:
        dist.destroy_process_group()


def _run(experiment: Experiment, on_gpu: bool, folder: Path) -> tuple[MemoryTracker, Base]:
    once = {"num_mini_batches": 1, "epochs_per_batch": 1}  # more updates take no more memory
    experiment = experiment.model_copy(update={"trainer": experiment.trainer.model_copy(update=once)})
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    kind = CompilingMemoryTracker if experiment.model.compile else MemoryTracker
    tracker = kind(granule=CUDA_GRANULE if on_gpu else 1, workspace=flash_workspace if on_gpu else gloo_workspace)
    sees = experiment.model.vision is not None
    with pretended(tracker, fake, on_gpu=on_gpu, folder=folder, sees=sees):
        tracker.phase = "loading"
        base = load_base(experiment, CPU)
        vocab = base.policy.hf.get_input_embeddings().weight.shape[0]
        tracker.vocab_sizes = (vocab, vocab // base.policy.parallel.dims.tp)
        with fake, tracker:
            with tracker.kind("weights"):
                train_step = build_train_step(base, experiment)
            try:
                train(train_step, experiment, tracker, base.policy)
            except NotCompiledError:
                raise
            except RuntimeError as error:  # JetMoe's experts split their rows by what the router chose
                name, reason = type(base.policy.hf).__name__, shortened(error)
                raise ValueError(
                    f"model.name = {experiment.model.name}: {name} computes nothing without values ({reason}); "
                    "plan without --rehearse has an estimate, and a short run with --bench measures"
                ) from error
    return tracker, base


def train(train_step: TrainStep, experiment: Experiment, tracker: MemoryTracker, policy: Policy) -> None:
    """Train some steps on full micro-batches, each phase under its name."""
    for optimizer in [each.optimizer for each in (train_step, train_step.critic) if each is not None]:

        def counted_step(*args: Any, original: Any = optimizer.step, **kwargs: Any) -> Any:
            tracker.phase = f"step {step}, optimizer"
            with tracker.kind("optimizer"):
                return original(*args, **kwargs)

        optimizer.step = counted_step  # type: ignore[method-assign]
    objective = loss_of(experiment)
    for step, num_micro_batches in enumerate(MICRO_BATCHES, 1):
        tracker.phase = f"step {step}, forward and backward"
        batch = full_batch(experiment, policy, num_micro_batches)
        with tracker.kind("activations"):
            train_step.run(step, batch, objective)


def full_batch(experiment: Experiment, policy: Policy, num_micro_batches: int) -> RankBatch:
    """Micro-batches as large as the config allows, of samples as long as they may be, all of whose tokens train."""
    sft = experiment.sft.data
    longest = (sft.seq_len if experiment.kind == "sft" else None) or experiment.seq_len
    sides = experiment.sft.num_sides if experiment.kind == "sft" else 1
    if experiment.kind == "sft" and not sft.pack:
        rows = sft.micro_batch_size * sides
    else:
        rows = max(1, experiment.micro_batch_tokens // longest // sides) * sides
    shape = FakeDataConfig(batch_size=num_micro_batches * rows, seq_len=longest, micro_batch_size=rows)
    vocab_size = policy.hf.config.get_text_config().vocab_size
    batch = fake_batch(shape, vocab_size, 0, 1, 0, 1)
    batch = with_fake_teacher(batch, vocab_size, experiment.trainer.loss.distillation)
    if sides > 1:
        batch = as_pairs(batch, scores=policy.scores)
    images = policy.image_inputs
    return images.show(batch, longest) if isinstance(images, PretendedImages) else batch
