"""How completions are sampled: of training rollouts, and of evaluations.

The trainer computes the log-probabilities of the distribution that the engines draw from, at its temperature and within
its top-p, top-k and min-p. Parameters that change the distribution otherwise are for evaluations alone.
"""

from collections.abc import Mapping
from typing import Any

from pydantic import Field, field_validator

from prime_hpc.config.sections.base import Section

LEAST_TEMPERATURE = 0.01
"""vLLM samples at this one where a request asks for less, but for 0."""

SET_ELSEWHERE = {
    "temperature": "state it as `temperature`, beside `extra`",
    "max_tokens": "state it as `max_tokens`, beside `extra`",
    "max_completion_tokens": "state it as `max_tokens`, beside `extra`",
    "top_p": "state it as `top_p`, beside `extra`",
    "top_k": "state it as `top_k`, beside `extra`",
    "min_p": "state it as `min_p`, beside `extra`",
    "n": "the number of completions is rollouts_per_example",
    "stop_token_ids": "the renderer of the model's messages decides what ends a reply; `stop` takes strings",
    "logprobs": "prime-hpc asks for those of the sampled tokens",
    "prompt_logprobs": "prime-hpc asks for those of the sampled tokens",
    "logprob_token_ids": "prime-hpc asks for those of the sampled tokens",
    "flat_logprobs": "prime-hpc reads one form of answer",
    "output_kind": "prime-hpc reads one form of answer",
    "skip_special_tokens": "prime-hpc reads tokens, not text",
    "extra_body": "state its entries themselves",
    "trace_decode_token_ids": "nothing would be sampled",
}
"""Sampling parameters that `extra` must not hold, and what to do instead."""

CHANGES: dict[str, tuple[Any, ...]] = {
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "logit_bias": (None, {}),
    "allowed_token_ids": (None, []),
    "bad_words": (None, []),
    "min_tokens": (0,),
    "structured_outputs": (None,),
    "thinking_token_budget": (None, -1),
    "watermarking": (None, False),
    "extra_args": (None, {}),
    "seed": (None, -1),
}
"""Parameters that change the distribution (`seed` makes one of all rollouts), and values that do not."""

HARMLESS = frozenset(
    {
        "stop",
        "ignore_eos",
        "include_stop_str_in_output",
        "repetition_detection",
        "detokenize",
        "spaces_between_special_tokens",
        "skip_reading_prefix_cache",
        "stream_interval",
    }
)
"""Parameters that end a completion or shape the answer, and leave each token's distribution as it is."""


def of_distribution(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Return those of vLLM's parameters that decide what tokens are drawn from, where they are not off."""
    off = CHANGES | {"top_p": (1,), "top_k": (0, -1), "min_p": (0,)}
    return {
        name: value
        for name, value in parameters.items()
        if value is not None and name != "max_tokens" and name not in HARMLESS and value not in off.get(name, ())
    }


def _is_sampled_at(value: float | None) -> float | None:
    if value is not None and 0 < value < LEAST_TEMPERATURE:
        raise ValueError(f"vLLM samples at no temperature between 0 (greedy) and {LEAST_TEMPERATURE:g}")
    return value


def _is_not_set_elsewhere(extra: dict[str, Any] | None) -> dict[str, Any] | None:
    for name in extra or {}:
        if name in SET_ELSEWHERE:
            raise ValueError(f"must not hold {name}: {SET_ELSEWHERE[name]}")
    return extra


class SamplingSection(Section):
    """Settings that training and evaluation sampling share."""

    top_p: float = Field(1.0, gt=0, le=1)
    """Sample from the most likely tokens that together have this probability; 1: from all."""
    top_k: int | None = Field(None, ge=1)
    """Sample from so many most likely tokens; default: from all."""
    min_p: float = Field(0.0, ge=0, le=1)
    """Sample from tokens at least this likely, relative to the likeliest; 0: from all."""
    extra: dict[str, Any] = {}
    """Further sampling parameters, by vLLM's names. For training only those that leave the distribution as it is, such
    as `stop`."""

    _sampled_at = field_validator("temperature", check_fields=False)(_is_sampled_at)
    _set_here = field_validator("extra")(_is_not_set_elsewhere)

    @property
    def truncates(self) -> bool:
        """True if some tokens are never sampled, however unlikely they are."""
        return self.top_p < 1 or self.top_k is not None or self.min_p > 0

    def untrainable(self) -> dict[str, str]:
        """Entries of `extra` of whose distribution the trainer does not have the log-probabilities, and why."""
        found = {}
        for name, value in self.extra.items():
            if name == "seed" and value not in CHANGES[name]:
                found[name] = "with one seed all rollouts of a prompt are the same"
            elif name in CHANGES and value not in CHANGES[name]:
                found[name] = "the trainer cannot compute the log-probabilities of what it makes of the distribution"
            elif name not in CHANGES and name not in HARMLESS:
                found[name] = f"it is not known to leave the distribution as it is ({', '.join(sorted(HARMLESS))} do)"
        return found


class SamplingConfig(SamplingSection):
    """How training rollouts are sampled. The trainer's log-probabilities are those of the same distribution."""

    temperature: float = Field(1.0, ge=0, le=2)
    """Softmax temperature."""
    max_tokens: int = Field(512, ge=1)
    """Longest completion of one turn."""

    def parameters(self) -> dict[str, Any]:
        """By vLLM's names; those that are off are left out."""
        stated = {"temperature": self.temperature, "max_tokens": self.max_tokens}
        if self.top_p < 1:
            stated["top_p"] = self.top_p
        if self.top_k is not None:
            stated["top_k"] = self.top_k
        if self.min_p > 0:
            stated["min_p"] = self.min_p
        return stated | self.extra


class SamplingOverride(Section):
    """Sampling of one environment where it differs from the others; what is not stated is theirs."""

    temperature: float | None = Field(None, ge=0, le=2)
    """Softmax temperature."""
    max_tokens: int | None = Field(None, ge=1)
    """Longest completion of one turn."""
    top_p: float | None = Field(None, gt=0, le=1)
    """Sample from the most likely tokens that together have this probability."""
    top_k: int | None = Field(None, ge=1)
    """Sample from so many most likely tokens."""
    min_p: float | None = Field(None, ge=0, le=1)
    """Sample from tokens at least this likely, relative to the likeliest."""
    extra: dict[str, Any] | None = None
    """Further sampling parameters, in place of the others'."""

    _sampled_at = field_validator("temperature")(_is_sampled_at)
    _set_here = field_validator("extra")(_is_not_set_elsewhere)

    def over(self, common: SamplingConfig) -> SamplingConfig:
        """Return the common sampling with what is stated here."""
        stated = {name: value for name, value in self.model_dump().items() if value is not None}
        return SamplingConfig(**(common.model_dump() | stated))


class EvalSamplingConfig(SamplingSection):
    """How evaluations are sampled: greedily and as long as in training, where nothing else is stated."""

    temperature: float = Field(0.0, ge=0, le=2)
    """Softmax temperature; 0: greedy."""
    max_tokens: int | None = Field(None, ge=1)
    """Longest completion of one turn; default `orchestrator.sampling.max_tokens`."""
