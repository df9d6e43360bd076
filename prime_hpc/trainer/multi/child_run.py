"""One of several runs, on every rank: a trainer of its own around the shared model. All functions are collective.

Built and stepped by `loop.py`. A child trains through its adapter slot alone; its gradients, optimizer, schedule,
checkpoints and versions touch no other slot's tensors, so the order in which runs take turns changes no bit of any.
"""

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch.distributed as dist
from loguru import logger

from prime_hpc.runtime.role_context import RoleContext
from prime_hpc.store.batch.rank_batch import RankBatch
from prime_hpc.store.errors import StoreError
from prime_hpc.store.messaging.bus import BusClient
from prime_hpc.store.messaging.run_bus import RunBusClient
from prime_hpc.store.run_paths import current_incarnation
from prime_hpc.store.waiting import ArtifactWatch
from prime_hpc.trainer.batching.micro_batches import read_local_batch, refuse_untrainable
from prime_hpc.trainer.multi.admission import Admission
from prime_hpc.trainer.objectives import MicroBatchLoss, loss_of
from prime_hpc.trainer.optim.schedule import check_schedule
from prime_hpc.trainer.rank_group import OF_A_RUN
from prime_hpc.trainer.replay.dump_failed_step import dump_for_replay
from prime_hpc.trainer.train_step import StepRefused
from prime_hpc.trainer.trainer import Base, Trainer, open_trainer

T = TypeVar("T")
READ_S = 3.0
"""How long a batch or a checkpoint that is not what its manifest says, or cannot be read, may hold the others up."""


class _Silent:
    """The trainer speaks for all its runs; a run's own word is its `state.json`."""

    def ready(self, **info: Any) -> None:
        """Nothing to say."""

    def beat(self, step: int | None = None, **info: Any) -> None:
        """Nothing to say."""

    def note(self, step: int) -> None:
        """Nothing to say."""


@dataclass
class Child:
    """A run that holds a slot."""

    name: str
    trainer: Trainer
    objective: MicroBatchLoss
    budget: int
    """Tokens of one micro-batch that the trainer has memory for."""
    step: int
    """Steps done."""
    num_samples: int
    num_tokens: int
    trained: tuple[dict[str, float], float] | None = None
    """Metrics of a step, and when it began, whose version or checkpoint is not written yet."""
    published: int = 0
    """Step whose version it was that this attempt published last."""

    @property
    def is_done(self) -> bool:
        """True if its last step is done."""
        return self.step >= self.trainer.experiment.max_steps

    @property
    def progress(self) -> dict[str, int]:
        """Progress that its checkpoints hold besides tensors."""
        return {"num_samples": self.num_samples, "num_tokens": self.num_tokens}

    @property
    def last_tokens(self) -> float:
        """Tokens of the step that is to be settled, in all passes over its batch."""
        assert self.trained is not None
        return self.trained[0]["num_tokens"] * self.trainer.experiment.trainer.epochs_per_batch

    def _on_all(self, action: Callable[[], T]) -> T:
        return self.trainer.control.on_all(action, OF_A_RUN)

    def next_batch(self) -> ArtifactWatch:
        """Rank 0: where batch `step` + 1 will appear. Not collective."""
        step, trainer = self.step + 1, self.trainer
        incarnation = trainer.context.incarnation
        return ArtifactWatch(
            trainer.paths.rollouts_step(step),
            bus=trainer.bus,
            topic="batch",
            key={"step": step},
            names=(),  # each rank checks its own file
            handover=trainer.handover,
            min_incarnation=incarnation
            if incarnation > 1
            else 0,  # a first attempt also takes another run's that were put there before it began
        )

    def advance(self) -> None:
        """Train on the next batch; `settle` comes next.
        Raises StepRefused, StoreError: on all ranks alike; this run cannot go on."""
        trainer, step, started = self.trainer, self.step + 1, time.perf_counter()
        batch = self._on_all(lambda: self._read(step))
        counts = trainer.control.gather_all(batch.num_micro_batches)
        if len(set(counts)) > 1:
            raise StoreError(f"batch {step} is of {counts} micro-batches on the ranks; it must be as many on each")
        metrics = trainer.train(step, batch, self.objective)
        self.step = step
        self.num_samples += int(metrics["num_sequences"])
        self.num_tokens += int(metrics["num_tokens"])
        self.trained = metrics, started

    def settle(self) -> dict[str, float]:
        """Publish what the last step has made, save where it is due; returns the step's metrics, with its times.

        Raises:
            NoRoom, Unreadable: it cannot be written now; to be called again.
            StoreError: as of `advance`.
        """
        assert self.trained is not None
        trainer, step, (metrics, started) = self.trainer, self.step, self.trained
        self._on_all(self._still_there)
        if self.published != step:
            self._on_all(lambda: trainer.publish(step))
            self.published = step
            trainer.bus.publish("consumed", step=step)
        if trainer.save_is_due(step):
            self.save()
        self.trained = None
        self._on_all(lambda: trainer.prune_rollouts(step))
        return self._on_all(lambda: trainer.report(step, metrics, started))

    def _read(self, step: int) -> RankBatch:
        trainer = self.trainer
        self._still_there()
        directory = trainer.paths.rollouts_step(step)
        with trainer.slow_ranks.reading():
            batch = read_local_batch(directory, *trainer.part, trainer.handover, deadline_s=READ_S)
        refuse_untrainable(batch, trainer.vocab_size, self.budget)
        return batch

    def _still_there(self) -> None:
        """On rank 0: nothing may be written into a directory that was deleted, or is another run's by now."""
        trainer = self.trainer
        if trainer.rank == 0 and current_incarnation(trainer.paths) != trainer.context.incarnation:
            raise StoreError(f"{trainer.paths.root} was deleted or replaced while it trained")

    def save(self, *, is_last: bool = False) -> None:
        """Checkpoint the step that is done. Raises what `advance` does. `is_last`: see `Saver.save`."""
        if self.step:
            self._on_all(self._still_there)
            batch_dir = self.trainer.paths.rollouts_step(self.step)
            self.trainer.save(self.step, progress=self.progress, batch_dir=batch_dir, is_last=is_last)

    def close(self, error: BaseException | None = None) -> str | None:
        """End it in good order: finish its saves, keep a refused batch; returns what went wrong with that.
        `error`: why it ends, where it failed."""
        trainer, trouble = self.trainer, None
        try:
            if isinstance(error, StepRefused):
                self._on_all(lambda: dump_for_replay(trainer, error))
            trainer.finish_saves()
        except StoreError as failure:
            trouble = str(failure)
        try:
            self._on_all(trainer.close)
        except StoreError as failure:
            trouble = "; ".join(filter(None, [trouble, str(failure)]))
        trainer.saver.checkpointer.close()
        adapters = trainer.train_step.policy.adapters
        assert adapters is not None
        for parameter in adapters.parameters(trainer.train_step.slot):
            parameter.grad = None
        return trouble


def begin_child(base: Base, admission: Admission, budget: int, bus: BusClient) -> Child:
    """Give a run its slot, from its checkpoint where it has one.
    Raises StoreError: on all ranks alike; it cannot begin."""
    context = RoleContext(
        "trainer",
        admission.path,
        index=dist.get_rank(),
        attempt=admission.incarnation,
        incarnation=admission.incarnation,
        run=admission.name,
    )
    run_bus, experiment = RunBusClient(bus, context.bus_run), admission.experiment

    built: list[Trainer] = []

    def build() -> Child:
        check_schedule(experiment)
        objective = loss_of(experiment)
        built.append(open_trainer(base, experiment, context, run_bus, _Silent(), admission.slot))
        return Child(admission.name, built[0], objective, budget, 0, 0, 0)

    try:
        return _begun(base.control.on_all(build, OF_A_RUN), admission)
    except BaseException:
        for trainer in built:  # it comes back with each try: what it has opened would stay open
            with contextlib.suppress(StoreError, OSError):
                trainer.close()
        raise


def _begun(child: Child, admission: Admission) -> Child:
    """Return the run as its checkpoint has it. Collective; raises what `begin_child` does."""
    if admission.resume is None:
        return child
    trainer, info = child.trainer, admission.resume
    checkpointer, on_all = trainer.saver.checkpointer, trainer.control.on_all
    progress = on_all(lambda: checkpointer.load(info, READ_S), OF_A_RUN)
    child.step, trainer.saver.saved_step = info.step, info.step
    child.num_samples, child.num_tokens = progress.get("num_samples", 0), progress.get("num_tokens", 0)
    if admission.republish:
        on_all(lambda: trainer.publish(info.step, prune=False), OF_A_RUN)
    if trainer.rank == 0:
        logger.info(f"{admission.name}: resumed from {info.path}: step {info.step}")
    trainer.control.from_first(checkpointer.prune, OF_A_RUN)
    return child
