"""The RL loop: wait for batch n, turn version n - 1 into n, publish it, checkpoint, again.

orchestrator --rollouts/step_n--> [wait] -> [train] -> [publish] --weights/step_n--> orchestrator, engines
"""

import time
from dataclasses import dataclass, field
from pathlib import Path

import torch
from loguru import logger

from prime_hpc.runtime import activity
from prime_hpc.runtime.clock import AwakeClock
from prime_hpc.store.batch.rank_batch import RankBatch
from prime_hpc.store.errors import ArtifactError, ArtifactTimeout, WaitCancelled
from prime_hpc.store.io.files import VISIBLE_S
from prime_hpc.store.waiting import ListingPace, wait_for_artifact
from prime_hpc.trainer.batching.micro_batches import read_local_batch
from prime_hpc.trainer.bench import finish_bench
from prime_hpc.trainer.data.fake import fake_source
from prime_hpc.trainer.objectives import loss_of
from prime_hpc.trainer.trainer import Signal, Trainer

LOOK_S = 5.0
"""How long rank 0 waits for a batch before it tells the others that it is still waiting."""
TOLD_S = 30.0
"""How long before the log says so: by hand nobody else does; again after twice as long, and so on."""


@dataclass
class _Patience:
    """How long rank 0 waits on for one batch. Neither a save nor time in which the job is suspended counts."""

    limit_s: float
    clock: AwakeClock = field(default_factory=lambda: AwakeClock(max_gap_s=2 * LOOK_S))
    pace: ListingPace = field(default_factory=ListingPace)
    told_s: float = TOLD_S
    broken_since: float | None = None
    """Since when the batch is not what its manifest says, or not there at all though it was announced."""

    def __post_init__(self) -> None:
        self._end = self.clock.now() + self.limit_s

    def remaining(self) -> float:
        """Return the seconds before it is too late."""
        return self._end - self.clock.now()

    def bears(self, *, is_broken: bool) -> bool:
        """Return whether to look again after a look in vain.

        What was announced may be out of sight for as long as a network file system's client remembers that it was not
        there; what is broken for longer stays so.
        """
        now = self.clock.now()
        self.broken_since = (now if self.broken_since is None else self.broken_since) if is_broken else None
        return self.remaining() > 0 and (self.broken_since is None or now - self.broken_since < VISIBLE_S)

    def tell(self, step: int, rollouts: Path) -> None:
        """Say for how long batch `step` has been waited for, where it is time to."""
        waited = self.limit_s - self.remaining()
        if waited >= self.told_s:
            self.told_s = 2 * waited
            said = f"no batch {step} from the orchestrator in {rollouts} for {waited:.0f} s"
            logger.info(f"{said}: waiting, for {self.limit_s:g} s at most (trainer.batch_timeout_s)")


def run_rl(trainer: Trainer) -> None:
    """Train until `max_steps`, or until the supervisor publishes "stop"; returns when all saves are whole. Collective.

    Raises:
        ArtifactTimeout: no batch within `trainer.batch_timeout_s`.
        ArtifactError: the batch is not what its manifest says.
        NonFiniteError: NaN in a step (see `train_step.py`).
    """
    experiment = trainer.experiment
    start, progress = trainer.resume()
    num_samples = progress.get("num_samples", 0)
    objective = loss_of(experiment)
    trainer.status.ready(step=start, world_size=trainer.world_size)
    fake = fake_source(trainer)
    for step in range(start + 1, trainer.last_step + 1):
        started = time.perf_counter()
        with trainer.train_step.timer("wait"):
            signal = _next_signal(trainer, step, num_samples, is_fake=fake is not None)
        if signal is not Signal.GO:
            _stop(trainer, step - 1, signal, num_samples)
            return
        batch = fake(step) if fake is not None else _read_batch(trainer, step)
        metrics = trainer.train(step, batch, objective)
        num_samples += int(metrics["num_sequences"])
        if fake is None:
            _give_memory_back(trainer)
            trainer.publish_beside(step)
            trainer.bus.publish("consumed", step=step)
            if trainer.save_is_due(step):
                _save(trainer, step, num_samples)
            trainer.prune_rollouts(step)
        trainer.report(step, metrics, started)
    trainer.finish_saves()
    if experiment.trainer.bench:
        finish_bench(trainer)
    elif fake is None:
        trainer.require_version(trainer.last_step)


def _give_memory_back(trainer: Trainer) -> None:
    """Return what the step has freed to the GPU, where engines sleep: the next version wakes them on it."""
    if trainer.experiment.engines_sleep and trainer.device.type == "cuda":
        torch.cuda.empty_cache()


def _read_batch(trainer: Trainer, step: int) -> RankBatch:
    with trainer.slow_ranks.reading():
        return read_local_batch(trainer.paths.rollouts_step(step), *trainer.part, trainer.handover)


def _next_signal(trainer: Trainer, step: int, num_samples: int, *, is_fake: bool) -> Signal:
    """At the boundary before `step`: stop, or go on with batch `step`; saves in between where asked to. Collective.

    A stop comes first, even where the batch is there. The others wait in short broadcasts, so that the wait may be
    longer than the collectives' own deadline.

    Raises:
        ArtifactTimeout: on rank 0 after `trainer.batch_timeout_s`.
        ArtifactError: on rank 0, the batch is broken and stays so.
    """
    patience = _Patience(trainer.experiment.trainer.batch_timeout_s)
    while True:
        awaited = f"batch {step} from the orchestrator" if trainer.rank == 0 else "rank 0"
        activity.doing("wait", awaits=awaited, step=step)
        signal = _look(trainer, step, patience, is_fake=is_fake) if trainer.rank == 0 else Signal.WAIT
        signal = trainer.agree(signal)
        if signal is Signal.SAVE:
            _save(trainer, step - 1, num_samples)
        elif signal is not Signal.WAIT:
            return signal


def _look(trainer: Trainer, step: int, patience: _Patience, *, is_fake: bool) -> Signal:
    """Rank 0: what was asked for, else wait a little for batch `step`."""
    asked = trainer.requested()
    if asked is not None:
        return asked
    if is_fake:
        return Signal.GO
    try:
        wait_for_artifact(
            trainer.paths.rollouts_step(step),
            deadline_s=max(0.0, min(LOOK_S, patience.remaining())),
            bus=trainer.bus,
            topic="batch",
            key={"step": step},
            names=(),  # each rank checks its own file
            handover=trainer.handover,
            min_incarnation=trainer.context.incarnation,
            cancelled=lambda: trainer.has_news,
            pace=patience.pace,
        )
    except WaitCancelled:
        return trainer.requested() or Signal.WAIT
    except ArtifactTimeout as error:
        if patience.bears(is_broken=False):
            patience.tell(step, trainer.paths.rollouts)
            return Signal.WAIT
        raise ArtifactTimeout(
            f"no batch {step} from the orchestrator within trainer.batch_timeout_s = {patience.limit_s:g} s: {error}"
        ) from error
    except ArtifactError:
        if patience.bears(is_broken=True):
            return Signal.WAIT
        raise
    return Signal.GO


def _save(trainer: Trainer, step: int, num_samples: int, *, is_last: bool = False) -> None:
    """Checkpoint `step` together with the orchestrator's state of batch `step`."""
    if trainer.experiment.trainer.data.fake is None and not trainer.experiment.trainer.bench:
        batch_dir, progress = trainer.paths.rollouts_step(step), {"num_samples": num_samples}
        trainer.save(step, progress=progress, batch_dir=batch_dir, is_last=is_last)


def _stop(trainer: Trainer, step: int, signal: Signal, num_samples: int) -> None:
    """End the loop after `step` because the supervisor asked for it."""
    if signal is Signal.STOP_AND_SAVE and step > 0:
        _save(trainer, step, num_samples, is_last=True)
    trainer.finish_saves()
    if trainer.rank == 0:
        message = trainer.bus.latest("stop") or {}
        logger.info(f"stopping after step {step}: {message.get('reason', 'asked to')}")
