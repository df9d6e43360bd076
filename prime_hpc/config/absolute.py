"""Models that are directories, named from the root: a role may start elsewhere, in a container for instance."""

from pathlib import Path

from prime_hpc.config.experiment import Experiment


def local_directory(name: str) -> Path | None:
    """Return the directory that a model's name means here; None: it is a name of the hub."""
    path = Path(name).expanduser()
    if path.is_absolute():
        return path
    return path.absolute() if name.startswith(".") or path.is_dir() else None


def from_the_root(experiment: Experiment) -> Experiment:
    """Return the same experiment, models in local directories named by their absolute paths."""
    model = experiment.model.model_copy(update=_absolute(experiment.model.name, "name"))
    loss = experiment.trainer.loss
    if loss.kl is not None:
        loss = loss.model_copy(update={"kl": loss.kl.model_copy(update=_absolute(loss.kl.model, "model"))})
    critic = experiment.trainer.critic
    if critic is not None:
        critic = critic.model_copy(update=_absolute(critic.name, "name"))
    teacher = experiment.orchestrator.teacher
    if teacher is not None:
        teacher = teacher.model_copy(update=_absolute(teacher.model, "model"))
    judge = experiment.judge_inference
    if judge is not None:
        judge = judge.model_copy(update=_absolute(judge.model, "model"))
    return experiment.model_copy(
        update={
            "model": model,
            "judge_inference": judge,
            "trainer": experiment.trainer.model_copy(update={"loss": loss, "critic": critic}),
            "orchestrator": experiment.orchestrator.model_copy(update={"teacher": teacher}),
        }
    )


def _absolute(name: str | None, field: str) -> dict[str, str]:
    path = local_directory(name) if name else None
    return {} if path is None else {field: str(path)}
