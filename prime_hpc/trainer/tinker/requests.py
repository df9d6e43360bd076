"""The client's JSON requests, checked. Fields that are not known are passed over: a newer client may send more."""

import math
import sys
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from prime_hpc.trainer.tinker.adapter import AdamStep
from prime_hpc.trainer.tinker.batches import BadRequestError
from prime_hpc.trainer.tinker.paths import expiry


class _Request(BaseModel):
    model_config = ConfigDict(extra="ignore", protected_namespaces=())


class CreateSession(_Request):
    """A client begins."""

    sdk_version: str = "unknown"
    user_metadata: dict[str, Any] | None = None


class LoraShape(_Request):
    """An adapter's shape."""

    rank: int = Field(32, ge=1)
    seed: int | None = Field(None, ge=-(2**63), lt=2**64)  # what torch's generators take
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True


class CreateModel(_Request):
    """A new adapter."""

    session_id: str
    model_seq_id: int = Field(ge=0, lt=10**9)
    base_model: str
    lora_config: LoraShape | None = None
    user_metadata: dict[str, Any] | None = None
    optimizer_config: dict[str, Any] | None = None


class LoadWeights(_Request):
    """A save taken up: by a new adapter (`session_id`), or by one that is there (`model_id`)."""

    path: str
    optimizer: bool
    session_id: str | None = None
    model_seq_id: int | None = Field(None, ge=0, lt=10**9)
    model_id: str | None = None
    seq_id: int | None = Field(None, ge=0)
    base_model: str | None = None
    user_metadata: dict[str, Any] | None = None
    optimizer_config: dict[str, Any] | None = None


class OfModel(_Request):
    """A request that is about an adapter."""

    model_id: str


class OptimStep(OfModel):
    """An optimizer step."""

    seq_id: int = Field(ge=0)
    adam_params: dict[str, Any] | None = None
    optimizer_params: dict[str, Any] | None = None


class SaveWeights(OfModel):
    """A save with the optimizer."""

    seq_id: int = Field(ge=0)
    path: str | None = None
    overwrite: bool = False
    ttl_seconds: int | None = None
    user_metadata: dict[str, str] | None = None


class SaveForSampler(OfModel):
    """A save for the engines; without a name, one for a sampler of this session."""

    seq_id: int = Field(ge=0)
    path: str | None = None
    sampling_session_seq_id: int | None = Field(None, ge=0)
    kind: Literal["snapshot", "inflight"] = "snapshot"
    ttl_seconds: int | None = None
    user_metadata: dict[str, str] | None = None


class SaveExternal(OfModel):
    """A save to be downloaded."""

    seq_id: int = Field(ge=0)


class Expiry(_Request):
    """So long a save is to be kept; None: for good."""

    ttl_seconds: int | None = None


class Page(_Request):
    """Part of a list."""

    limit: int = Field(100, ge=1)
    offset: int = Field(0, ge=0)


class CreateSampler(_Request):
    """A sampler of the base model or of a save."""

    session_id: str
    sampling_session_seq_id: int = Field(ge=0)
    base_model: str | None = None
    model_path: str | None = None


class SamplingParams(_Request):
    """How to sample."""

    max_tokens: int | None = Field(None, ge=1)
    seed: int | None = None
    stop: str | list[str] | list[int] | None = None
    temperature: float = Field(1.0, ge=0, allow_inf_nan=False)
    top_k: int = -1
    top_p: float = Field(1.0, gt=0, le=1)


class Chunk(_Request):
    """A part of a prompt."""

    type: str = "encoded_text"
    tokens: list[int] = []


class Prompt(_Request):
    """A prompt in parts."""

    chunks: list[Chunk]


class Sample(_Request):
    """A request for samples."""

    sampling_session_id: str | None = None
    base_model: str | None = None
    model_path: str | None = None
    seq_id: int | None = None
    num_samples: int = Field(1, ge=1, le=1024)
    prompt: Prompt
    sampling_params: SamplingParams = SamplingParams()
    prompt_logprobs: bool | None = None
    topk_prompt_logprobs: int = Field(0, ge=0)
    topk_sample_logprobs: int = Field(0, ge=0)
    prompt_logprobs_last_n: int | None = Field(None, ge=1)
    target_prompt_logprobs: Any = None
    prompt_alt_tokens_k: int = 0
    record_stability_info: bool | None = None


class Retrieve(_Request):
    """A question for a result."""

    request_id: str


def explain(error: ValidationError) -> str:
    """Return what is wrong with a body, field by field."""
    return "; ".join(f"{'.'.join(map(str, row['loc'])) or 'body'}: {row['msg']}" for row in error.errors()[:5])


_ADAM: Mapping[str, tuple[float, float, float]] = {
    "learning_rate": (1e-4, 0.0, math.inf),
    "beta1": (0.9, 0.0, 1.0),
    "beta2": (0.95, 0.0, 1.0),
    "eps": (1e-12, 0.0, math.inf),
    "weight_decay": (0.0, 0.0, math.inf),
    "grad_clip_norm": (0.0, -math.inf, math.inf),
}
"""Parameter -> its default in the client, its least value, and the one that it must be below."""


def kept(request: SaveWeights | SaveForSampler) -> dict[str, Any]:
    """Return what is noted beside a save. Raises BadRequestError: it is to be kept for no time at all."""
    expiry(request.ttl_seconds)  # refused before anything is written
    return {"user_metadata": request.user_metadata, "ttl_seconds": request.ttl_seconds}


def adam_step(request: OptimStep) -> AdamStep:
    """Return the parameters of a step.
    Raises BadRequestError: one is no number, not finite or out of its range; or another optimizer's."""
    stated = request.adam_params
    if stated is None:
        kind = (request.optimizer_params or {}).get("type", "none")
        raise BadRequestError(f"optimizer parameters of {kind!r}: here adapters are trained by Adam, state AdamParams")
    unknown = sorted(stated.keys() - _ADAM.keys() - {"type"})
    if unknown:
        raise BadRequestError(f"adam_params.{unknown[0]} is not known; there are {', '.join(_ADAM)}")
    found = {}
    for name, (default, least, below) in _ADAM.items():
        value = stated.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= sys.float_info.max:
            raise BadRequestError(f"adam_params.{name} = {value}: must be a finite number; no step was taken")
        if not least <= value < below:
            raise BadRequestError(f"adam_params.{name} = {value:g}: must lie in [{least:g}, {below:g})")
        found[name] = float(value)
    return AdamStep(
        found["learning_rate"],
        (found["beta1"], found["beta2"]),
        found["eps"],
        found["weight_decay"],
        max(found["grad_clip_norm"], 0.0),
    )
