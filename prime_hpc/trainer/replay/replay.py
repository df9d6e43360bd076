"""The two ways to train again: a run's steps from the base model or a checkpoint, and one step that was kept.

Neither touches the run. Same machine, same ranks, same threads: the same losses to the last bit, on CUDA where the run
has `trainer.deterministic`. SFT takes its batches from the data set instead of the store.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from loguru import logger

from prime_hpc.config import Experiment, load_run
from prime_hpc.config.sections.inference import WeightsConfig
from prime_hpc.config.sections.parallel import ParallelConfig
from prime_hpc.observe.logs import setup_logger
from prime_hpc.observe.metrics import MetricsWriter
from prime_hpc.observe.role_status import RoleStatus
from prime_hpc.runtime.role_context import RoleContext
from prime_hpc.store.batch.rank_batch import RankBatch
from prime_hpc.store.batches import PastBatch, list_batches, read_state
from prime_hpc.store.checkpoint.checkpoints import resolve_resume
from prime_hpc.store.messaging.bus import BusClient
from prime_hpc.store.run_paths import RunPaths
from prime_hpc.trainer.batching.micro_batches import read_local_batch
from prime_hpc.trainer.data.build import RealData, build_data, without_padding
from prime_hpc.trainer.data.reference import References
from prime_hpc.trainer.main import seed_everything, start_process_group
from prime_hpc.trainer.objectives import loss_of
from prime_hpc.trainer.replay.dump_failed_step import UPDATES
from prime_hpc.trainer.sft import end_with
from prime_hpc.trainer.train_step import StepRefused
from prime_hpc.trainer.trainer import Trainer, build_trainer
from prime_hpc.trainer.weights.lora_files import read_adapter

Given = tuple[RankBatch, dict[str, float]]
"""A rank's batch, and what its step's metrics say of the data."""
SHOWN = 10
"""Sequences that are listed."""


@contextmanager
def opened(experiment: Experiment, scratch: Path) -> Iterator[Trainer]:
    """Yield a trainer on this rank that writes its metrics below `scratch` and hears nobody. Collective."""
    device = start_process_group(experiment)
    experiment, rank = plain(experiment, dist.get_world_size()), dist.get_rank()
    setup_logger(f"replay[{rank}]", level=experiment.log.level if rank == 0 else "WARNING")
    seed_everything(experiment.seed, rank)
    context = RoleContext("trainer", scratch, index=rank)
    bus = BusClient(None, f"replay[{rank}]")
    trainer = build_trainer(experiment, context, device, bus, RoleStatus(context, bus))
    yield trainer
    dist.barrier()
    trainer.close()
    dist.destroy_process_group()


def plain(experiment: Experiment, num_ranks: int) -> Experiment:
    """Return the same training with everything off that would write, send or ask; on another number of ranks than
    the run's own these share one copy of the model, whatever its layout was."""
    trainer = experiment.trainer.model_copy(update={"bench": False, "profile": None})
    if num_ranks != trainer.num_ranks:
        trainer = trainer.model_copy(update={"num_ranks": num_ranks, "parallel": ParallelConfig()})
    silent = {"ckpt": None, "wandb": None, "mlflow": None, "tensorboard": False, "weights": WeightsConfig()}
    return experiment.model_copy(update={**silent, "trainer": trainer})


@contextmanager
def batches_of(
    trainer: Trainer, source: RunPaths, start: int, progress: dict[str, int]
) -> Iterator[Callable[[int], Given]]:
    """Step -> this rank's batch and figures; SFT's come in order, from the step after `start`, which `progress` is
    of."""
    if trainer.experiment.kind == "rl":
        yield lambda step: (PastBatch(source, step).read(lambda at: read_local_batch(at, *trainer.part)), {})
        return
    data = build_data(trainer)
    if isinstance(data, RealData) and data.compares:
        data.references(References(source.reference_sums, trainer.source))
    data.start(progress)
    end_with(trainer, data.last_step(start))
    yield lambda step: (data.next()[0], data.figures)
    data.close()


def train_again(trainer: Trainer, source: RunPaths, start: int, stop: int, metrics: MetricsWriter | None) -> bool:
    """Train steps `start` + 1 .. `stop`; False when a step is refused. Collective.
    Raises StoreError: a checkpoint or a batch is not whole."""
    progress: dict[str, int] = {}
    if start:
        progress = trainer.saver.checkpointer.load(resolve_resume(source.checkpoints, start, deep=False))
    objective = loss_of(trainer.experiment)
    with batches_of(trainer, source, start, progress) as batch_of:
        for step in range(start + 1, stop + 1):
            try:
                batch, figures = batch_of(step)
                values = trainer.train_step.run(step, batch, objective) | figures
                without_padding(values)
            except StepRefused as error:
                logger.error(str(error))
                if metrics is not None:
                    metrics.log(step, refused=str(error))
                return False
            if metrics is not None:
                metrics.log(step, **values)
    return True


def run_steps(run_dir: Path, scratch: Path, start: int, stop: int) -> bool:
    """Train steps `start` + 1 .. `stop` of a run again, one row a step in `scratch`'s metrics. Collective.
    `start`: checkpoint to begin with; 0: the base model.
    Returns False when a step is refused; its row says why."""
    experiment = load_run(run_dir)
    source = RunPaths(run_dir, experiment.ckpt.path if experiment.ckpt else None)
    with opened(experiment, scratch) as trainer:
        return train_again(trainer, source, start, stop, trainer.metrics)


def kept_step(kept: RunPaths, scratch: Path) -> bool:
    """Compute a kept step again: prints its metrics or what refuses it, then its worst sequences. Collective.
    Returns whether it passes now."""
    [step] = list_batches(kept)
    with opened(load_run(kept.root), scratch) as trainer:
        if (adapters := trainer.train_step.policy.adapters) is not None:
            adapters.load(0, read_adapter(kept.weights_step(step - 1)))
        state = read_state(kept.rollouts_step(step))
        for name, tensor in trainer.train_step.state.items():
            if name in state:
                tensor.copy_(torch.tensor(state[name], dtype=tensor.dtype))
        batch = read_local_batch(kept.rollouts_step(step), *trainer.part)
        lines = sequence_lines(trainer, batch)
        try:
            metrics = trainer.train_step.run(step, batch, loss_of(trainer.experiment), done=state.get(UPDATES, 0))
            outcome = f"step {step} passes: " + " ".join(f"{k} {v:.4g}" for k, v in metrics.items())
            passes = True
        except StepRefused as error:
            outcome, passes = str(error), False
        if trainer.rank == 0:
            print("\n".join([outcome, *lines]), flush=True)
    return passes


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
