"""Sampling parameters of a request, by vLLM's names. What is not built is refused, never ignored."""

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from prime_hpc.config.sections.sampling import CHANGES, HARMLESS

TOP_CANDIDATES = 20
"""Most log-probabilities of further tokens that a request may ask for."""
TOP_OF_PROMPT = 4096
"""The same at each token of a prompt: `trainer.loss.distillation.top_k` may be as many."""
IGNORED = HARMLESS - {"stop", "ignore_eos", "include_stop_str_in_output", "repetition_detection"} | {
    "skip_special_tokens",
    "output_kind",
    "max_completion_tokens",
    "best_of",
}
"""Parameters that change nothing of what this server answers."""
NEUTRAL: dict[str, tuple[Any, ...]] = {name: values for name, values in CHANGES.items() if name != "seed"} | {
    "repetition_detection": (None,),
    "best_of": (None, 1),
}
"""Parameters that are taken only with these values, which are off."""


class BadRequestError(ValueError):
    """A request that cannot be answered as it was meant; the message says why."""


class SamplingParams(BaseModel):
    """How one request is sampled."""

    model_config = ConfigDict(extra="forbid")

    n: int = Field(1, ge=1, le=256)
    """Completions."""
    max_tokens: int | None = Field(None, ge=1)
    """Longest completion; None: as long as the context allows."""
    temperature: float = Field(1.0, ge=0, le=100)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=-1)
    """0 and -1: off."""
    min_p: float = Field(0.0, ge=0, le=1)
    seed: int | None = None
    stop: list[str] = []
    stop_token_ids: list[int] = []
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    logprobs: int | None = Field(None, ge=0, le=TOP_CANDIDATES)
    prompt_logprobs: int | None = Field(None, ge=0, le=TOP_OF_PROMPT)

    @field_validator("stop", "stop_token_ids", mode="before")
    @classmethod
    def _listed(cls, value: Any) -> Any:
        return [] if value is None else [value] if isinstance(value, str) else value

    @field_validator("stop")
    @classmethod
    def _says_something(cls, value: list[str]) -> list[str]:
        if "" in value:
            raise ValueError("an empty string would stop everything")
        return value

    @field_validator("seed")
    @classmethod
    def _off(cls, value: int | None) -> int | None:
        return None if value == -1 else value

    @property
    def is_greedy(self) -> bool:
        """True if the likeliest token is taken."""
        return self.temperature == 0


def parse_params(stated: Mapping[str, Any]) -> SamplingParams:
    """Read the parameters of a request.
    Raises BadRequestError: one is unknown, out of its range, or asks for something that this server cannot do."""
    known = {}
    for name, value in stated.items():
        if name in SamplingParams.model_fields:
            if value is not None:
                known[name] = value
        elif name in NEUTRAL:
            if value is not None and value not in NEUTRAL[name]:
                raise BadRequestError(f"{name}: the transformers backend cannot do this; leave it out")
        elif name not in IGNORED:
            raise BadRequestError(f"{name}: the transformers backend does not know this sampling parameter")
    try:
        return SamplingParams(**known)
    except ValidationError as error:
        first = error.errors()[0]
        raise BadRequestError(f"{'.'.join(map(str, first['loc']))}: {first['msg']}, not {first['input']!r}") from error
