"""Forward passes over a batch besides those that train."""

from prime_hpc.config import Experiment


def looked_at_for(experiment: Experiment) -> list[str]:
    """Return the keys for which the trainer looks at each batch before its first update, in one pass for all of them
    (`trainer.train_step.TrainStep`); empty: it does not."""
    trainer, correction = experiment.trainer, experiment.trainer.loss.correction
    if experiment.kind != "rl":
        return []
    keys = ["trainer.loss.top_entropy_quantile"] if trainer.loss.top_entropy_quantile is not None else []
    if correction is not None and correction.batch_normalize:
        keys.append("trainer.loss.correction.batch_normalize")
    elif correction is not None and trainer.num_mini_batches * trainer.epochs_per_batch > 1:
        keys.append("trainer.loss.correction")
    if trainer.loss.second_moment is not None:
        keys.append("trainer.loss.second_moment")
    return keys
