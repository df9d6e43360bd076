"""Sections of algorithms that take more than rewards: the teacher of distillation, and echo's token weights."""

from typing import Literal

from pydantic import Field, field_validator

from prime_hpc.config.sections.base import Section
from prime_hpc.config.sections.names import is_import_path


class TeacherConfig(Section):
    """A frozen model on servers of its own: scores the policy's tokens (`opd`), or samples in its stead (`sft`)."""

    model: str | None = None
    """Directory or hub name: what `teacher_inference` serves; of a teacher at `base_url`, to compare its tokenizer with
    the policy's before anything starts."""
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
