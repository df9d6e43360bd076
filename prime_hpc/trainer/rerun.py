"""Train again on a run's stored batches, without inference and without touching the run: `prime-hpc replay`.

    python -m prime_hpc.trainer.rerun RUN SCRATCH --after 0 --until 7

Also under torchrun with as many ranks as the run had. Starts from the base model (`--after 0`) or from the run's
checkpoint of that step, and writes one row a step into `SCRATCH/metrics/trainer.jsonl`. Same machine, same ranks, same
threads: the same losses to the last bit. SFT takes its batches from the data set instead.

Exit codes: 0 done; 1 a step was refused (its row says why) or something failed.
"""

import argparse
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch.distributed as dist
from loguru import logger

from prime_hpc.config import Experiment, load_run
from prime_hpc.observe.context import RoleContext
from prime_hpc.observe.logs import setup_logger
from prime_hpc.observe.metrics import MetricsWriter
from prime_hpc.observe.status import RoleStatus
from prime_hpc.store.batches import RankBatch, find_batch
from prime_hpc.store.checkpoints import resolve_resume
from prime_hpc.store.doorbell import Doorbell
from prime_hpc.store.layout import RunPaths
from prime_hpc.trainer.batches import read_own_batch
from prime_hpc.trainer.engine import Objective, StepRefused
from prime_hpc.trainer.main import seed_everything, start_process_group
from prime_hpc.trainer.session import Session, build_session


def source_paths(experiment: Experiment, run_dir: Path) -> RunPaths:
    """The run whose batches are trained on again."""
    return RunPaths(run_dir, experiment.ckpt.path if experiment.ckpt else None)


def plain(experiment: Experiment) -> Experiment:
    """The same training with everything off that would write, send or ask."""
    trainer = experiment.trainer.model_copy(update={"bench": False})
    return experiment.model_copy(update={"ckpt": None, "wandb": None, "trainer": trainer})


@contextmanager
def batches_of(session: Session, source: RunPaths, progress: dict[str, int]) -> Iterator[Callable[[int], RankBatch]]:
    """Step -> this rank's batch; SFT's come in the order of the steps after the one that `progress` is of."""
    if session.experiment.kind == "rl":
        yield lambda step: read_own_batch(find_batch(source, step), *session.part)
        return
    from prime_hpc.trainer.data.build import build_data

    data = build_data(session)
    data.start(progress)
    yield lambda step: data.next()[0]
    data.close()


def objective_of(experiment: Experiment) -> Objective:
    """What the run minimises."""
    from prime_hpc.trainer.rl import rl_objective
    from prime_hpc.trainer.sft import sft_objective

    return partial(rl_objective, experiment.trainer.loss) if experiment.kind == "rl" else sft_objective


def rerun(session: Session, source: RunPaths, start: int, stop: int, metrics: MetricsWriter | None) -> bool:
    """Steps `start` + 1 .. `stop`; False when a step is refused. Collective.

    Raises:
        StoreError: a checkpoint or a batch is not whole.
    """
    progress: dict[str, int] = {}
    if start:
        progress = session.saver.checkpointer.load(resolve_resume(source.checkpoints, start, deep=session.rank == 0))
    objective = objective_of(session.experiment)
    with batches_of(session, source, progress) as batch_of:
        for step in range(start + 1, stop + 1):
            try:
                values = session.engine.train_step(step, batch_of(step), objective)
            except StepRefused as error:
                logger.error(str(error))
                if metrics is not None:
                    metrics.log(step, refused=str(error))
                return False
            if metrics is not None:
                metrics.log(step, **values)
    return True


def main(arguments: list[str] | None = None) -> int:
    """Run; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m prime_hpc.trainer.rerun", description=__doc__.split("\n")[0])
    parser.add_argument("run_dir", type=Path, help="the run")
    parser.add_argument("scratch", type=Path, help="directory for what this writes")
    parser.add_argument("--after", type=int, default=0, help="0: the base model; else the step of a checkpoint")
    parser.add_argument("--until", type=int, required=True, help="last step")
    options = parser.parse_args(arguments)
    original = load_run(options.run_dir)
    experiment = plain(original)
    device = start_process_group(experiment)
    rank = dist.get_rank()
    setup_logger(f"rerun[{rank}]", level=experiment.log.level if rank == 0 else "WARNING")
    seed_everything(experiment.seed, rank)
    context = RoleContext("trainer", options.scratch, index=rank)
    doorbell = Doorbell(None, f"rerun[{rank}]")
    session = build_session(experiment, context, device, doorbell, RoleStatus(context, doorbell))
    passed = rerun(session, source_paths(original, options.run_dir), options.after, options.until, session.metrics)
    dist.barrier()
    session.close()
    dist.destroy_process_group()
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
