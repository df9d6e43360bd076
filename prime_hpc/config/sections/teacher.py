"""Sections of algorithms that take more than rewards: the teacher of distillation, and echo's token weights."""

from typing import Any, Literal

from pydantic import Field, field_validator

from prime_hpc.config.sections.base import Section
from prime_hpc.config.sections.names import is_import_path


class TeacherConfig(Section):
    """A frozen model on servers of its own: scores the policy's tokens, or samples in its stead (`sft`)."""

    model: str | None = None
    """Directory or hub name: what `teacher_inference` serves; of a teacher at `base_url`, to compare its tokenizer with
    the policy's before anything starts, or to read with it (`tokenizer = own`)."""
    tokenizer: Literal["same", "own"] = "same"
    """`same`: it scores the policy's very tokens. `own`: it has another tokenizer, read from `model`, and scores the
    same text in its own tokens, after the conversation by its own chat template (`opd`)."""
    served_name: str = "policy"
    """Model name on its servers; prime-hpc's own `inference` says `policy`."""
    base_url: list[str] | str = []
    """`http://host:port/v1` of each of its servers, where they run already; none with `teacher_inference`."""
    api_key_var: str = "VLLM_API_KEY"
    """Environment variable that holds its servers' key."""
    timeout_s: float = Field(120, gt=0)
    """Deadline of one request."""
    deadline_s: float = Field(600, gt=0)
    """How long the scores of one sequence are asked for again while its servers fail or are away."""
    max_concurrent: int = Field(32, ge=1)
    """Sequences that are scored at once."""

    @property
    def urls(self) -> list[str]:
        """Every server's."""
        return [self.base_url] if isinstance(self.base_url, str) else list(self.base_url)


class EchoConfig(Section):
    """Cross-entropy on what the environment said (tool results, users' turns), beside RL on what the policy said."""

    weight: float = Field(0.1, gt=0)
    """Weight of the mean negative log-likelihood of those tokens, against the RL loss."""
    roles: list[Literal["tool", "user"]] = ["tool", "user"]
    """Messages after the first reply whose tokens are learned."""
    filter: str | None = None
    """Your own choice among them as `module:function`: called with a sample, returns float[tokens], factors of
    `weight` (0: not learned)."""

    @field_validator("roles")
    @classmethod
    def _some_role(cls, roles: list[str]) -> list[str]:
        if not roles:
            raise ValueError("names no role, so that nothing is learned: tool, user or both; or leave echo out")
        return roles

    @field_validator("filter")
    @classmethod
    def _is_path(cls, name: str | None) -> str | None:
        if name is not None and not is_import_path(name):
            raise ValueError(f"{name!r} is not written as module:function")
        return name


def check_teacher(experiment: Any) -> None:
    """Refuse a teacher without servers, with those of two kinds, for which the run has no use, or whose word does not
    fit the rest of an `Experiment`. Raises ValueError: says which."""
    _is_started(experiment)
    if experiment.kind == "rl":
        _can_distil(experiment)
    elif experiment.trainer.loss.distillation is not None:
        raise ValueError(
            f"trainer.loss.distillation is for RL with a teacher, this is {experiment.kind}: leave it out, or have the "
            "teacher sample the rows (orchestrator.advantage.type = sft)"
        )


def asks_teacher(experiment: Any) -> bool:
    """Return whether the run needs `orchestrator.teacher` (unknown, so False, of an algorithm of your own)."""
    advantage = experiment.orchestrator.advantage
    compares = experiment.trainer.loss.distillation is not None and advantage.algorithm.teacher not in ("self", "peer")
    return advantage.asks_teacher or (compares and ":" not in advantage.type)


def _is_started(experiment: Any) -> None:
    o, started = experiment.orchestrator, experiment.teacher_inference
    urls = o.teacher.urls if o.teacher is not None else []
    if started is None:
        if o.teacher is not None and not urls:
            raise ValueError(
                "orchestrator.teacher.base_url names no server: give the url of one that runs, or have the run "
                "start one with teacher_inference"
            )
        return
    if urls:
        raise ValueError(
            "orchestrator.teacher.base_url attaches to a teacher that runs, teacher_inference starts one: leave "
            "one of them out"
        )
    if experiment.kind != "rl":
        raise ValueError(f"teacher_inference is for RL with a teacher, this is {experiment.kind}: leave it out")
    if not (asks_teacher(experiment) or ":" in o.advantage.type):
        raise ValueError(
            f"teacher_inference is not used by orchestrator.advantage.type = {o.advantage.type}: leave it out, or "
            "set opd, sft or trainer.loss.distillation"
        )
    if o.teacher is None or o.teacher.model is None:
        raise ValueError("teacher_inference serves orchestrator.teacher.model, which is not stated")
    if experiment.trainer.max_concurrent_runs > 1:
        raise ValueError(
            "teacher_inference cannot be shared by the runs of trainer.max_concurrent_runs > 1: start `inference` "
            "with the teacher's model, and state its url in each run's orchestrator.teacher.base_url"
        )
    scores = not o.advantage.imitates or experiment.trainer.loss.distillation is not None
    need = experiment.seq_len + scores  # a score samples one token that is not used
    if o.teacher.tokenizer == "own":
        return  # how many tokens a text is to it, nobody knows before
    if started.max_model_len is not None and started.max_model_len < need:
        raise ValueError(
            f"teacher_inference.max_model_len ({started.max_model_len}) is too short for samples of seq_len "
            f"({experiment.seq_len}): at least {need}, or leave it out"
        )


def _can_read(experiment: Any) -> None:
    """Refuse a tokenizer of the teacher's own where its word is of tokens. Raises ValueError: says which."""
    o, key = experiment.orchestrator, "orchestrator.teacher.tokenizer = own"
    if o.teacher.model is None:
        raise ValueError(f"{key} is read from orchestrator.teacher.model, which is not stated")
    if experiment.trainer.loss.distillation is not None:
        raise ValueError(
            f"{key} and trainer.loss.distillation do not fit: the distributions of two vocabularies are of other "
            "events at the same place. Leave distillation out: orchestrator.advantage.type = opd compares sampled text"
        )
    if o.advantage.imitates:
        raise ValueError(
            f"{key} does not fit orchestrator.advantage.type = {o.advantage.type}, whose teacher samples the policy's "
            "tokens: set opd, or have the teacher write rows (`synthesize`) for `sft`"
        )


def _can_distil(experiment: Any) -> None:
    o, trainer = experiment.orchestrator, experiment.trainer
    key, imitates = f"orchestrator.advantage.type = {o.advantage.type}", o.advantage.imitates
    compares = trainer.loss.distillation is not None
    by = "trainer.loss.distillation" if compares else key
    if asks_teacher(experiment) and o.teacher is None and (o.env or o.advantage.asks_teacher):
        raise ValueError(
            f"{by} needs a teacher: set orchestrator.teacher.base_url to a server of its model, or "
            "orchestrator.teacher.model and teacher_inference to start one"
        )
    if o.teacher is not None and not (asks_teacher(experiment) or ":" in o.advantage.type):
        raise ValueError(
            f"orchestrator.teacher is not used by {key}: leave it out, or set opd, sft or trainer.loss.distillation"
        )
    if o.teacher is not None and o.teacher.tokenizer == "own":
        _can_read(experiment)
    if compares and experiment.model.vision is not None:
        raise ValueError(f"{by} asks the teacher with tokens alone, without images: leave model.vision out")
    distils = o.advantage.distils or compares
    if distils and not imitates and o.sampling.temperature != 1:
        raise ValueError(
            f"{by} compares log-probabilities at temperature 1 (so the teacher's are): orchestrator.sampling."
            f"temperature must be 1, not {o.sampling.temperature:g}"
        )
    if o.advantage.scale == "batch" and (o.advantage.distils or imitates):
        raise ValueError(f"{key} takes a teacher's word as it is: leave orchestrator.advantage.scale out")
    if distils and not imitates and o.sampling.truncates:
        raise ValueError(
            f"{by} compares log-probabilities over the whole vocabulary (so the teacher's are): leave "
            "orchestrator.sampling.top_p, top_k and min_p out"
        )
    if imitates and not trainer.loss.objective.imitates:
        raise ValueError(
            f"{key} and trainer.loss.type = {trainer.loss.type} do not fit: no policy sampled the tokens, so "
            "there is no importance ratio; set trainer.loss.type = nll"
        )
    if imitates and (experiment.inference is not None or o.eval is not None):
        section = "inference" if experiment.inference is not None else "orchestrator.eval"
        raise ValueError(
            f"{key} samples from the teacher's servers alone, the policy is served nowhere: leave {section} out"
        )
