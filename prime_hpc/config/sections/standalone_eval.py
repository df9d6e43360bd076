"""The section of `eval`: what is evaluated, on what, how often, and how the scores are made; and what it shares with
`synthesize`: environments, servers and sampling."""

from pathlib import Path
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from prime_hpc.config.sections.base import Section, from_here
from prime_hpc.config.sections.orchestrator import ClientConfig, EnvConfig, EnvServersConfig, check_labels
from prime_hpc.config.sections.sampling import SamplingConfig, SamplingOverride, SamplingSection
from prime_hpc.observe.pass_at_k import powers_of_two


class StandaloneClientConfig(ClientConfig):
    """A server that runs already: prime-hpc's own, or any API that answers OpenAI's chat completions."""

    timeout_s: float = Field(600, gt=0)
    """Deadline of one HTTP request."""
    api: Literal["auto", "tokens", "chat"] = "auto"
    """`tokens`: prime-hpc's own server, asked token by token as in training; `chat`: OpenAI's chat completions; `auto`:
    `tokens` where the server is prime-hpc's."""
    model: str | None = None
    """Name under which the API serves the model; default `model.name`."""
    max_retries: int = Field(6, ge=0)
    """How often a request is sent again that got 408, 409, 429, 5xx, a broken answer or none, with growing pauses or
    those that the API asks for; within half of the environments' shortest `timeout_s`."""


class StandaloneSamplingConfig(SamplingSection):
    """How the replies are sampled: greedily, where nothing else is stated."""

    temperature: float = Field(0.0, ge=0, le=2)
    """Softmax temperature; 0: greedy."""
    max_tokens: int | None = Field(None, ge=1)
    """Longest completion of one turn; default: what the model's context has room for, or what the API allows."""

    def parameters(self) -> dict[str, Any]:
        """By vLLM's names; those that are off are left out."""
        stated = self.model_dump()
        filled = SamplingConfig(**stated | {"max_tokens": stated["max_tokens"] or 1}).parameters()
        if self.max_tokens is None:
            del filled["max_tokens"]
        return filled


class StandaloneEnvConfig(EnvConfig):
    """One environment of an evaluation or of synthetic data."""

    num_examples: int | None = Field(None, ge=1)
    """Tasks of this environment; default: the section's `num_examples`."""
    rollouts_per_example: int | None = Field(None, ge=1)
    """Completions of each of its tasks; default: the section's `rollouts_per_example`."""
    sampling: SamplingOverride = SamplingOverride()
    """Its sampling; what is not stated is the section's `sampling`."""


class EpisodesConfig(Section):
    """Episodes to play outside of training: on what, how often, against which servers."""

    environment_ids: list[str] = []
    """Environments by name, with their own defaults (`math500,aime2025`)."""
    env: list[StandaloneEnvConfig] = []
    """Further environments, with arguments."""
    env_servers: EnvServersConfig = EnvServersConfig()
    """Processes that play the episodes."""
    num_examples: int | None = Field(None, ge=1)
    """Tasks of each environment, the first ones; default: all, of an endless environment 128."""
    rollouts_per_example: int = Field(1, ge=1)
    """Completions of each task: the k of avg@k, and of n best of k."""
    sampling: StandaloneSamplingConfig = StandaloneSamplingConfig()
    """Sampling of the replies."""
    client: StandaloneClientConfig | None = None
    """Attach to servers that run; absent: the job starts its own (`inference`)."""
    max_concurrent: int = Field(128, ge=1)
    """Episodes in flight at most."""
    retry_failed: bool = False
    """When started again: play the episodes once more that had failed."""
    max_failed_share: float = Field(0.1, ge=0, le=1)
    """End with exit code 1 when more than this share of an environment's episodes failed: the rest says little."""

    @model_validator(mode="after")
    def _names_differ(self) -> "EpisodesConfig":
        check_labels(self.environments)
        return self

    @property
    def environments(self) -> list[StandaloneEnvConfig]:
        """All environments, those by name alone first."""
        return [*(StandaloneEnvConfig(id=name) for name in self.environment_ids), *self.env]

    def num_rollouts(self, env: StandaloneEnvConfig) -> int:
        """Completions of each task of an environment."""
        return env.rollouts_per_example or self.rollouts_per_example

    def sampling_of(self, env: StandaloneEnvConfig) -> StandaloneSamplingConfig:
        """How an environment's replies are sampled."""
        stated = {name: value for name, value in env.sampling.model_dump().items() if value is not None}
        return StandaloneSamplingConfig(**(self.sampling.model_dump() | stated))


class StandaloneEvalConfig(EpisodesConfig):
    """Evaluation of a model, a run's weight versions or an API, as a job of its own (`kind: eval`)."""

    weights_dir: Path | None = None
    """A run's `weights` directory (or the run's): its versions are evaluated one after another, after the base model
    (`model.name`)."""
    steps: list[int] | Literal["all"] = "all"
    """Versions of `weights_dir` to evaluate."""
    eval_base: bool = True
    """With `weights_dir`: evaluate the base model too."""
    pass_k: list[int] = []
    """k of pass@k; default: powers of two up to `rollouts_per_example`."""
    pass_threshold: float = 1.0
    """A completion counts as passed from this reward on."""
    confidence: float = Field(0.95, gt=0, lt=1)
    """Of the bootstrap intervals."""
    num_resamples: int = Field(10_000, ge=100)
    """Bootstrap resamples of the tasks."""

    _from_here = field_validator("weights_dir")(from_here)

    @field_validator("steps")
    @classmethod
    def _are_steps(cls, value: list[int] | str) -> list[int] | str:
        if isinstance(value, list) and any(step < 1 for step in value):
            raise ValueError(f"must be steps from 1 on (the base model is eval_base), got {value}")
        return sorted(set(value)) if isinstance(value, list) else value

    @model_validator(mode="after")
    def _fits_together(self) -> "StandaloneEvalConfig":
        fewest = min(self.num_rollouts(env) for env in self.environments) if self.environments else 1
        for k in self.pass_k:
            if self.environments and not 1 <= k <= fewest:
                raise ValueError(
                    f"eval.pass_k: pass@{k} needs at least {k} completions of each task; eval.rollouts_per_example is "
                    f"{fewest}"
                )
        if self.weights_dir is None and self.steps != "all":
            raise ValueError("eval.steps names versions of eval.weights_dir, which is not stated")
        if self.weights_dir is None and not self.eval_base:
            raise ValueError("eval.eval_base is off and eval.weights_dir is not stated: nothing is left to evaluate")
        if self.client is not None and self.client.api == "chat" and self.weights_dir is not None:
            raise ValueError(
                "eval.weights_dir needs prime-hpc's own servers, which can load a version; eval.client.api is chat"
            )
        return self

    def ks(self, num_rollouts: int) -> list[int]:
        """k of pass@k for an environment with so many completions of each task."""
        if self.pass_k:
            return sorted(set(self.pass_k))
        return powers_of_two(num_rollouts)
