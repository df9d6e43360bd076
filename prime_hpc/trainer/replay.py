"""Keep the batch and the weights of a step that was refused (NaN, mismatch), and compute that step again to see why.

    python -m prime_hpc.trainer.replay RUN_DIR/failed/step_000007

Also under torchrun, for a model that needs more than one rank. Prints the step's metrics or what refuses it, then the
batch's sequences, worst first. `main.py` calls `keep_for_replay` before the run ends; a restart of the run rewinds its
own batches and weights, but never touches `failed/`.
"""

import argparse
import sys
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from loguru import logger

from prime_hpc.config import load_run, write_snapshot
from prime_hpc.observe.context import RoleContext
from prime_hpc.observe.status import RoleStatus
from prime_hpc.store import files
from prime_hpc.store.batches import RankBatch, list_batches, write_batch
from prime_hpc.store.doorbell import Doorbell
from prime_hpc.store.layout import RunPaths
from prime_hpc.trainer.batches import make_micro_batch, read_own_batch
from prime_hpc.trainer.engine import Objective, StepRefused
from prime_hpc.trainer.lora import load_slot
from prime_hpc.trainer.lora.files import read_adapter
from prime_hpc.trainer.model import compute_dtype
from prime_hpc.trainer.publish import build_publisher
from prime_hpc.trainer.session import Session, build_session

SHOWN = 10
"""Sequences that a replay lists."""


def keep_for_replay(session: Session, error: StepRefused) -> None:
    """Write batch, weights and config of the refused step into `<run>/failed/step_<n>`. Collective.

    Raises:
        StoreError: the disk is full, or a newer life of the run has begun.
    """
    experiment, step = session.experiment, error.step
    kept = RunPaths(session.paths.failed_step(step))
    if session.rank == 0 and kept.root.exists():  # of an earlier attempt at this step
        files.discard(kept.root)
    parts: list[RankBatch | None] | None = [None] * session.world_size if session.rank == 0 else None
    dist.gather_object(error.batch, parts)
    publisher = build_publisher(
        session.engine.policy,
        session.source,
        kept,
        dtype=compute_dtype(experiment.model),
        incarnation=0,
        model_name=experiment.model.name,
        slot=session.engine.slot,
    )
    publisher.publish(step - 1)
    if parts is not None:
        own = parts[:: session.parallel.layout.ranks_per_part]  # ranks that share a part of the batch hold it alike
        write_batch(kept, step, [part for part in own if part is not None], state={})
        if session.engine.policy.adapters is None:  # else the kept version is an adapter, see `main`
            model = experiment.model.model_copy(update={"name": str(kept.weights_step(step - 1).resolve())})
            experiment = experiment.model_copy(update={"model": model})
        write_snapshot(experiment, kept.root, ["trainer.replay"])
        logger.error(
            f"batch {step} and weights version {step - 1} are kept in {kept.root}; compute the step again with: "
            f"python -m prime_hpc.trainer.replay {kept.root}"
        )


def main(arguments: list[str] | None = None) -> int:
    """Replay; exit code 0 where the step passes now, 1 where it is refused again, 2 for a wrong directory."""
    from prime_hpc.trainer.main import seed_everything, start_process_group
    from prime_hpc.trainer.rl import rl_objective
    from prime_hpc.trainer.sft import sft_objective

    parser = argparse.ArgumentParser(prog="python -m prime_hpc.trainer.replay", description=__doc__.split("\n")[0])
    parser.add_argument("kept", type=Path, help="RUN_DIR/failed/step_<n>")
    kept = RunPaths(parser.parse_args(arguments).kept)
    steps = list_batches(kept)
    if len(steps) != 1 or not kept.run_yaml.exists():
        print(f"error: {kept.root} holds no kept step: expected RUN_DIR/failed/step_<n>", file=sys.stderr)
        return 2
    [step] = steps
    experiment = load_run(kept.root)
    device = start_process_group(experiment)
    seed_everything(experiment.seed, dist.get_rank())
    context = RoleContext.from_env("trainer", kept.root, index=dist.get_rank())
    doorbell = Doorbell(None, "replay", incarnation=0)
    session = build_session(experiment, context, device, doorbell, RoleStatus(context, doorbell))
    if session.engine.policy.adapters is not None:
        load_slot(session.engine.policy, 0, read_adapter(kept.weights_step(step - 1)))
    objective: Objective = sft_objective
    if experiment.kind == "rl":
        objective = partial(rl_objective, experiment.trainer.loss)
    batch = read_own_batch(kept.rollouts_step(step), *session.part)
    lines = sequence_lines(session, batch)
    try:
        metrics = session.engine.train_step(step, batch, objective)
        outcome = f"step {step} passes: " + " ".join(f"{k} {v:.4g}" for k, v in metrics.items())
    except StepRefused as error:
        metrics, outcome = None, str(error)
    if session.rank == 0:
        print("\n".join([outcome, *lines]))
    session.close()
    dist.destroy_process_group()
    return 0 if metrics is not None else 1


@torch.no_grad()
def sequence_lines(session: Session, batch: RankBatch) -> list[str]:
    """A table of this rank's sequences: those with log-probabilities that are not finite first, then by mismatch."""
    rows: list[tuple[float, str]] = []
    for m in range(batch.num_micro_batches):
        micro = make_micro_batch(batch, m, session.device, session.parallel)
        with session.engine.adapted(), session.engine.policy.packing(micro):
            logprobs, _ = session.engine.policy(micro)
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
        f"{len(rows)} sequences with targets on rank {session.rank}, worst first:",
        head,
        *(t for _, t in rows[:SHOWN]),
    ]


if __name__ == "__main__":
    sys.exit(main())
