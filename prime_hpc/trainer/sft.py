"""The SFT loop: the next samples, one train step, held-out loss, checkpoints, and at the end the weights."""

import time
from functools import partial

from loguru import logger

from prime_hpc.store.leases import min_floor, set_last_version
from prime_hpc.trainer.bench import finish_bench
from prime_hpc.trainer.data.build import FakeData, Progress, RealData, build_data, without_padding
from prime_hpc.trainer.data.epochs import StoppedCountingError
from prime_hpc.trainer.data.eval_loss import HeldOut
from prime_hpc.trainer.data.reference import References, fill
from prime_hpc.trainer.objectives import loss_of
from prime_hpc.trainer.optim.schedule import learning_rate_factor
from prime_hpc.trainer.rank_group import OF_FILES
from prime_hpc.trainer.trainer import Signal, Trainer
from prime_hpc.trainer.weights.publish import Publisher, kept_versions

_RL_ONLY = ("reward", "lag_mean", "lag_max")


def run_sft(trainer: Trainer) -> None:
    """Train until `max_steps` or the end of `sft.data.num_epochs`, or until the supervisor publishes "stop"; returns
    when all saves are whole. Collective. Raises SFTDataError: the data set cannot be trained on; names the row."""
    data, objective = build_data(trainer), loss_of(trainer.experiment)
    held_out = _held_out(trainer)
    if not _has_references(trainer, data, held_out):
        data.close()
        return
    start, progress = trainer.resume()
    progress = data.start(progress)
    counts = trainer.experiment.num_steps is None  # for as long as that takes, no step stands still
    trainer.status.ready(step=start, world_size=trainer.world_size, idle=counts)
    try:
        last = data.last_step(start, is_stopped=lambda: trainer.bus.latest("stop") is not None)
    except StoppedCountingError:
        _goes_on(trainer, start, progress)
        data.close()
        return
    figures = end_with(trainer, last)
    if counts:
        trainer.status.beat(idle=False)
    if held_out is not None and start == 0:
        _report_untrained(trainer, held_out)
    if start and _is_published(trainer, start) and trainer.lacks_version(start):  # it had no room before a stop
        trainer.publish(start, prune=_may_prune(trainer))
    for step in range(start + 1, trainer.last_step + 1):
        started = time.perf_counter()
        if not _goes_on(trainer, step - 1, progress):
            data.close()
            return
        with trainer.train_step.timer("data"):
            batch, progress = data.next()
        metrics = trainer.train(step, batch, objective) | data.figures | figures
        without_padding(metrics)
        if held_out is not None and held_out.is_due(step):
            with trainer.train_step.timer("eval"):
                metrics |= held_out.evaluate()
        if _is_published(trainer, step):
            trainer.publish(step, prune=_may_prune(trainer))
        if not trainer.experiment.trainer.bench and trainer.save_is_due(step):
            trainer.save(step, progress=progress, batch_dir=None)
        trainer.report(step, {k: v for k, v in metrics.items() if k not in _RL_ONLY}, started)
    data.close()
    trainer.finish_saves()
    _finish(trainer)


def _has_references(trainer: Trainer, data: FakeData | RealData, held_out: HeldOut | None) -> bool:
    """Have batches of pairs carry the starting weights' log-probabilities, before a checkpoint takes their place.
    Returns whether that is done: False when told to stop before. Collective."""
    if isinstance(data, FakeData) or not data.compares:
        return True
    read = partial(References, trainer.paths.reference_sums, trainer.source)
    references = trainer.control.from_first(read, OF_FILES)
    held = held_out.references(references) if held_out is not None else []
    step, info = 0, trainer.chosen_checkpoint()
    if info is not None:  # rows are computed from there on
        step, progress = info.step, info.manifest.meta.get("progress") or {}
        data.start(progress)
    if not fill(trainer, references, [data.references(references, step), *held]):
        return False
    if held_out is not None:
        held_out.attach([table for table, _ in held])
    return True


def end_with(trainer: Trainer, last: int | None) -> dict[str, float]:
    """Have the run end with step `last`, which the data say, and tell everybody; None: with `max_steps`.
    Returns what every step's metrics say of it.
    Raises ValueError: the learning-rate schedule does not fit into so many steps."""
    if last is None:
        return {}
    trainer.experiment = trainer.experiment.model_copy(update={"max_steps": last})
    learning_rate_factor(trainer.experiment.trainer.scheduler, last, last)
    trainer.train_step.max_steps = trainer.saver.max_steps = last
    if isinstance(trainer.publisher, Publisher):
        trainer.publisher.is_kept = kept_versions(trainer.experiment)
    if trainer.rank == 0:
        set_last_version(trainer.paths, last)
    return {"run/max_steps": last}


def _is_published(trainer: Trainer, step: int) -> bool:
    """Return whether version `step` is written before the end: on request, or because engines evaluate it."""
    experiment = trainer.experiment
    evaluation = experiment.orchestrator.eval
    intervals = [experiment.sft.save_interval, *(evaluation.intervals if evaluation is not None else ())]
    return not experiment.trainer.bench and any(every and step % every == 0 for every in intervals)


def _may_prune(trainer: Trainer) -> bool:
    """Return whether older versions may go: those that engines wait for to evaluate, once they have said what they
    need."""
    return trainer.experiment.sft.save_interval is None and min_floor(trainer.paths) is not None


def _held_out(trainer: Trainer) -> HeldOut | None:
    wanted = trainer.experiment.sft.eval is not None and not trainer.experiment.trainer.bench
    return HeldOut(trainer) if wanted else None


def _report_untrained(trainer: Trainer, held_out: HeldOut) -> None:
    """Report the held-out loss of version 0."""
    figures = held_out.evaluate()
    if trainer.metrics is not None:
        trainer.metrics.log(0, **figures)
        logger.info(f"held-out loss {figures['eval/loss']:.4f} before the first step")


def _goes_on(trainer: Trainer, step: int, progress: Progress) -> bool:
    """At the boundary after `step`: do what the supervisor asks for; False: the loop ends here. Collective."""
    while True:
        asked = trainer.requested() if trainer.rank == 0 else None
        signal = trainer.agree(asked or Signal.GO)
        if signal is Signal.GO:
            return True
        if signal is not Signal.STOP:
            trainer.save(step, progress=progress, batch_dir=None, is_last=signal is not Signal.SAVE)
        if signal is not Signal.SAVE:
            trainer.finish_saves()
            if trainer.rank == 0:
                message = trainer.bus.latest("stop") or {}
                logger.info(f"stopping after step {step}: {message.get('reason', 'asked to')}")
            return False


def _finish(trainer: Trainer) -> None:
    """Publish the last version unless it is there; a bench run prints its table instead."""
    if trainer.experiment.trainer.bench:
        finish_bench(trainer)
        return
    last = trainer.experiment.max_steps
    if trainer.lacks_version(last):
        trainer.publish(last, prune=False)
        trainer.require_version(last)
