"""Keep the batch and the weights of a step that was refused (NaN, mismatch), for `replay.kept_step`.

Written before the run ends; a restart of the run rewinds its own batches and weights, but never
touches `failed/`.
"""

import shlex
from functools import partial

from loguru import logger

from prime_hpc.config import Experiment, write_snapshot
from prime_hpc.store.batch.rank_batch import RankBatch
from prime_hpc.store.batch.rank_files import write_batch
from prime_hpc.store.io import files
from prime_hpc.store.run_paths import RunPaths
from prime_hpc.trainer.critic import CriticStep
from prime_hpc.trainer.model.load_policy import compute_dtype
from prime_hpc.trainer.rank_group import RankGroup
from prime_hpc.trainer.train_step import StepRefused
from prime_hpc.trainer.trainer import Trainer
from prime_hpc.trainer.weights.publish import build_publisher

CRITIC = "critic"
"""Below the kept step: the critic's weights."""
UPDATES = "updates"
"""Of the kept batch's state: updates by the batch that the kept weights have; beside it `TrainStep.state`."""


def dump_for_replay(trainer: Trainer, error: StepRefused) -> None:
    """Write batch, weights and config of the refused step into `<run>/failed/step_<n>`. Collective.
    Raises StoreError: the disk is full, or a newer attempt of the run has begun; on every rank."""
    experiment, step = trainer.experiment, error.step
    kept = RunPaths(trainer.paths.failed_step(step))
    ranks = RankGroup()
    ranks.from_first(lambda: files.discard(kept.root) if kept.root.exists() else None)  # of an attempt before
    parts = ranks.gather(error.batch)
    models = [(trainer.train_step, trainer.source, kept)]
    if isinstance(critic := trainer.train_step.critic, CriticStep):
        models.append((critic, critic.source, RunPaths(kept.root / CRITIC)))
    for own, source, where in models:
        build = partial(
            build_publisher,
            own.policy,
            source,
            where,
            dtype=compute_dtype(experiment.model),
            incarnation=0,
            model_name=experiment.model.name,
            slot=own.slot,
        )
        ranks.on_all(build).publish(step - 1)
    ranks.from_first(lambda: _write_beside(trainer, kept, error, parts or []))


def _write_beside(trainer: Trainer, kept: RunPaths, error: StepRefused, parts: list[RankBatch]) -> None:
    """On rank 0: write the batch and the config, beside the version."""
    experiment, step = trainer.experiment, error.step
    own = parts[:: trainer.parallel.dims.ranks_per_part]  # ranks that share a part of the batch hold it alike
    state = {name: tensor.tolist() for name, tensor in trainer.train_step.state.items()}
    write_batch(kept, step, own, state=state | {UPDATES: error.updates})
    if trainer.train_step.policy.adapters is None:  # else the kept version is an adapter, see `replay.kept_step`
        experiment = _with_model(experiment, str(kept.weights_step(step - 1).resolve()))
    if experiment.trainer.critic is not None:
        name = str(RunPaths(kept.root / CRITIC).weights_step(step - 1).resolve())
        critic = experiment.trainer.critic.model_copy(update={"name": name})
        experiment = experiment.model_copy(update={"trainer": experiment.trainer.model_copy(update={"critic": critic})})
    write_snapshot(experiment, kept.root, ["replay"])
    moved = f" with {error.updates} of the batch's updates" * bool(error.updates)
    logger.error(
        f"batch {step} and weights version {step - 1}{moved} are kept in {kept.root}; compute the step again with: "
        f"prime-hpc replay {shlex.quote(str(kept.root))}"
    )


def _with_model(experiment: Experiment, name: str) -> Experiment:
    """Return the experiment as it is from a kept version on; the reference of its KL penalty stays what it was."""
    trainer, kl = experiment.trainer, experiment.trainer.loss.kl
    if kl is not None:
        kl = kl.model_copy(update={"model": kl.model or experiment.model.name})
        trainer = trainer.model_copy(update={"loss": trainer.loss.model_copy(update={"kl": kl})})
    model = experiment.model.model_copy(update={"name": name})
    return experiment.model_copy(update={"model": model, "trainer": trainer})
