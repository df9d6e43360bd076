"""The section of `synthesize`: which episodes a teacher plays, and which of them become rows."""

from typing import Literal

from pydantic import Field, field_validator, model_validator

from prime_hpc.config.sections.base import in_home
from prime_hpc.config.sections.standalone_eval import EpisodesConfig, StandaloneEnvConfig, StandaloneSamplingConfig

PROMPTS = "prompts"
"""Environment of `synthesize.prompts`."""


class TeacherSamplingConfig(StandaloneSamplingConfig):
    """How a teacher's replies are sampled: at temperature 1, where nothing else is stated."""

    temperature: float = Field(1.0, ge=0, le=2)
    """Softmax temperature; 0: greedy, and then all completions of a task are the same."""


class SynthesizeConfig(EpisodesConfig):
    """Rows from a teacher's episodes, as a job of its own (`kind: synthesize`): data for `sft`, replies to prompts."""

    sampling: TeacherSamplingConfig = TeacherSamplingConfig()
    """Sampling of the replies."""
    prompts: list[str] = []
    """JSONL files of prompts (or patterns, or directories), beside or instead of environments: rows with `prompt`,
    `messages`, `question` or `instruction`; their other fields are handed on. Each is an environment's task without a
    score."""
    split: Literal["train", "eval"] = "train"
    """Tasks of the environments; `eval` are those that evaluations play."""
    min_reward: float | None = None
    """Drop a conversation with a smaller reward."""
    min_metrics: dict[str, float] = {}
    """Drop a conversation where a metric of its environment is smaller, or missing: `{exact: 1}`."""
    parsed: bool = True
    """Drop a conversation with a reply that is empty, whose think section has no end, or whose tool calls cannot be
    read or have arguments that are no JSON object."""
    finished: bool = True
    """Drop a conversation that a limit of tokens or turns cut short."""
    min_completion_tokens: int | None = Field(None, ge=1)
    """Drop a conversation with fewer sampled tokens, over all its replies."""
    max_completion_tokens: int | None = Field(None, ge=1)
    """Drop a conversation with more sampled tokens, over all its replies."""
    drop_duplicates: bool = True
    """Of equal conversations keep the first."""
    n_best: int | None = Field(None, ge=1)
    """Keep so many of each task's conversations that are left: the highest rewards, of equal ones the shortest. All,
    where it is not stated."""
    give_up_after: int | None = Field(1000, ge=1)
    """End with exit code 1 when so many episodes have ended and no conversation passes: nothing more is spent."""
    shard_rows: int = Field(50_000, ge=1)
    """Rows of one file."""
    compression: Literal["none", "gzip"] = "none"
    """Of the files."""

    @field_validator("prompts")
    @classmethod
    def _from_here(cls, value: list[str]) -> list[str]:
        return [str(in_home(path).absolute()) for path in value]

    @model_validator(mode="after")
    def _can_be_met(self) -> "SynthesizeConfig":
        for env in self.environments if self.n_best is not None else []:
            if self.n_best is not None and self.num_rollouts(env) < self.n_best:
                raise ValueError(
                    f"synthesize.n_best: the {self.n_best} best of {self.num_rollouts(env)} completions of a task of "
                    f"{env.label}: raise synthesize.rollouts_per_example, or leave n_best out"
                )
        low, high = self.min_completion_tokens, self.max_completion_tokens
        if low is not None and high is not None and low > high:
            raise ValueError(
                f"synthesize.min_completion_tokens ({low}) is above synthesize.max_completion_tokens ({high})"
            )
        return self

    @property
    def environments(self) -> list[StandaloneEnvConfig]:
        """All environments: those by name, those with arguments, the files of prompts."""
        if not self.prompts:
            return super().environments
        return [*super().environments, StandaloneEnvConfig(id=PROMPTS, args={"files": self.prompts})]
