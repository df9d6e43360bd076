"""The settings of a pool: what it plays and whom it asks, stated once by its caller; a worker is told the same."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from prime_hpc.config.sections.orchestrator import EnvConfig
from prime_hpc.envs.errors import EnvError
from prime_hpc.envs.task_sources import Split

MAX_PATIENCE_S = 60.0
"""How long a turn waits for a server of ours that cannot be reached (it is being restarted), at most."""


@dataclass(frozen=True)
class ChatOptions:
    """Of servers that answer OpenAI's chat completions: any API. Without token ids nothing of it can train."""

    timeout_s: float
    """Deadline of one request."""
    max_retries: int
    """Of a request that failed for a passing reason."""


@dataclass(frozen=True, kw_only=True)
class PoolSettings:
    """Environments, and the servers that answer for the policy."""

    envs: Sequence[EnvConfig]
    """`source_index` counts them."""
    samplings: Sequence[dict[str, Any]]
    """Of each environment's replies, by vLLM's names."""
    split: Split
    """Of the tasks; see `EnvSource`."""
    seed: int
    """For tasksets that take one."""
    beside: Sequence[EnvConfig] = ()
    """Environments of the other split: no task is in both, see `EnvSource`."""

    urls: Sequence[str]
    """`http://host:port/v1` of each server; `url_index` counts them."""
    model_name: str
    """Under which the servers serve the policy."""
    is_policy: bool = True
    """The servers' model is the one that trains; else it imitates theirs, and no ratio asks how they draw tokens."""
    api_key: str | None = field(default=None, repr=False)
    api_key_var: str = "VLLM_API_KEY"
    """Environment variable with the key, where `api_key` is not known: a worker's machine may have it."""
    max_model_len: int
    """Prompt and completion tokens of one sequence, at most."""
    chat: ChatOptions | None = None
    """The servers are no own ones, but an API: replies have no tokens, and no tokenizer is needed."""

    tokenizer_path: str
    """Local directory or hub name."""
    renderer: str = "auto"
    """How messages become tokens: a name of the `renderers` package, or `auto`."""
    enable_thinking: bool = False
    """The chat template opens a think section."""
    trust_remote_code: bool = False
    """Run the tokenizer's own code, where it ships with one."""
    chat_template: str | None = None
    """In place of the tokenizer's own."""
    vision: bool = False
    """Prompts may hold images, which the servers' model sees."""

    environ: dict[str, str] = field(default_factory=dict, repr=False)
    """Variables that rewards read, for workers on other machines too."""
    keep_messages: bool = False
    """Results bring their conversations."""
    teacher_reads: bool = False
    """Samples bring their messages, for a teacher that writes them by its own chat template."""
    keep_samples: bool = True
    """Results bring their tokens, to train on; else the versions of these alone."""

    def __post_init__(self) -> None:
        """Raise EnvError where there is nothing to play, or nobody to ask."""
        if not self.envs:
            raise EnvError("no environment is configured: set orchestrator.env to a list with at least one `id`")
        if not self.urls:
            raise EnvError("no inference server is known: set orchestrator.client.base_url, or let the run start one")
        assert len(self.samplings) == len(self.envs)

    def of_one(self, index: int) -> "PoolSettings":
        """Return the settings of one of the environments."""
        return replace(self, envs=[self.envs[index]], samplings=[self.samplings[index]])

    @property
    def patience_s(self) -> float:
        """How long a turn waits for a server that cannot be reached."""
        most_s = MAX_PATIENCE_S if self.chat is None else math.inf  # an API's limits may ask for minutes
        return min(most_s, *(env.timeout_s / 2 for env in self.envs))
