"""Models that score: where the config names one that has to reply, or a language model that has to score; and families
of which there is no reward model to train.
"""

from collections.abc import Iterator

from prime_hpc.config import Experiment, Problem
from prime_hpc.config.engine_groups import MODELS, engine_roles, served_by, trained_names
from prime_hpc.config.families import reward_problem
from prime_hpc.store.model.config import read_config
from prime_hpc.store.model.files import is_classifier


def reward_models(experiment: Experiment, role: str | None = None) -> Iterator[Problem]:
    """Yield models that score where replies are needed, a judge of the other kind than its runner, and families that
    have no reward models.
    `role`: started by hand and alone; `inference` serves both kinds."""
    names, teacher = trained_names(experiment), experiment.orchestrator.teacher
    if experiment.kind == "rl" and teacher is not None and teacher.model is not None:
        names |= {MODELS["teacher"]: teacher.model}
    names.pop("trainer.critic.name", None)  # values are scores
    if experiment.trains_reward_model:
        yield from _unscored(experiment.model.name, "model.name")
    elif role == "inference":
        yield from _served(experiment)
    else:
        for key, name in names.items():
            if is_classifier(read_config(name) or {}):
                yield Problem(
                    f"{name} is a reward model: it scores what it reads, and writes no reply. It serves rewards "
                    "(judge_inference.model, runner: pooling; prime-hpc inference --model.name), and "
                    "sft.preference.type = bradley_terry trains it further",
                    key,
                )
    if experiment.kind == "rl" and (critic := experiment.trainer.critic) is not None:
        yield from _unscored(critic.name or experiment.model.name, "trainer.critic.name")
    yield from _judge(experiment)


def _unscored(name: str, key: str) -> Iterator[Problem]:
    """Yield a model of a family of which transformers has none that score."""
    if problem := reward_problem(read_config(name) or {}):
        yield Problem(f"{name}: {problem}; begin with another model", key)


def _served(experiment: Experiment) -> Iterator[Problem]:
    """Yield a reward model that servers by hand are to serve by another backend than vLLM."""
    name, servers = experiment.model.name, experiment.inference
    if servers is not None and servers.backend != "vllm" and is_classifier(read_config(name) or {}):
        yield Problem(f"{name} is a reward model, which vLLM alone serves: leave it out", "inference.backend")


def _judge(experiment: Experiment) -> Iterator[Problem]:
    """Yield a judge of the other kind than its runner."""
    section = experiment.judge_inference
    if "judge" not in engine_roles(experiment) or section is None:
        return
    if section.vllm.keys() & {"hf_overrides", "convert", "model_class_overrides"}:  # vLLM makes another of it
        return
    judge = served_by(experiment, "judge").model.name
    config, scores = read_config(judge) or {}, section.runner == "pooling"
    kinds = [str(name) for name in config.get("architectures") or ()]
    if scores and any(name.endswith(("ForCausalLM", "ForConditionalGeneration")) for name in kinds):
        wrong = "a language model, which has no score: leave runner out, state judge_inference.vllm.convert"
    elif not scores and is_classifier(config):
        wrong = "a reward model, which writes no reply: set runner = pooling"
    else:
        return
    yield Problem(f"{judge} is {wrong}, or name another judge", "judge_inference.runner")
