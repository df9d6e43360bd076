"""Whom a pool's episodes ask for replies, and how; the same for all environments of the pool."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class ChatOptions:
    """Of servers that answer OpenAI's chat completions: any API. Without token ids nothing of it can train."""

    timeout_s: float
    """Deadline of one request."""
    max_retries: int
    """Of a request that failed for a passing reason."""


@dataclass(frozen=True)
class PolicyTarget:
    """The servers and how to ask them."""

    model_name: str
    urls: tuple[str, ...]
    api_key_var: str
    api_key: str | None
    sampling: Any
    """verifiers `SamplingConfig`."""
    max_model_len: int
    patience_s: float
    chat: ChatOptions | None = None
    """Not prime-hpc's own servers, but any API."""
    keep_messages: bool = False
    """Results bring their conversations."""
    keep_samples: bool = True
    """Results bring their tokens, to train on; else the versions of these alone."""
