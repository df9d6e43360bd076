"""The curriculum's section: which task comes next, which completed groups join a batch. Part of the orchestrator's."""

from typing import Literal, get_args

from pydantic import Field, field_validator, model_validator

from prime_hpc.config.secret import Arguments
from prime_hpc.config.sections.base import Section
from prime_hpc.config.sections.names import known_or_import

SamplerName = Literal["standard", "difficulty_pool"]
GateName = Literal["reward_range", "advantage_range"]
_POOL_KEYS = ("easy_above", "hard_below", "easy_probability", "hard_probability")


class SamplerConfig(Section):
    """The choice of an environment's next task."""

    type: SamplerName | str = "standard"
    """`standard`: every task once an epoch, in an order shuffled by `seed`; `difficulty_pool`: the same walk, but a
    task whose group was easy or hard when it was last seen is passed over with some probability; or your own as
    `module:Class`."""
    easy_above: float = Field(1.0, allow_inf_nan=False)
    """`difficulty_pool`: a task is easy while its latest group's mean reward is at least this."""
    hard_below: float = Field(0.0, allow_inf_nan=False)
    """`difficulty_pool`: a task is hard while its latest group's mean reward is at most this."""
    easy_probability: float = Field(0.1, ge=0, le=1)
    """`difficulty_pool`: probability that an easy task is drawn when its turn comes."""
    hard_probability: float = Field(0.5, ge=0, le=1)
    """`difficulty_pool`: probability that a hard task is drawn when its turn comes."""
    args: Arguments = {}
    """Arguments of your own sampler, by its names."""

    @field_validator("type")
    @classmethod
    def _known(cls, name: str) -> str:
        return known_or_import(name, get_args(SamplerName), "a sampler", "module:Class")

    @model_validator(mode="after")
    def _sensible(self) -> "SamplerConfig":
        if self.args and ":" not in self.type:
            raise ValueError(f"args are for your own sampler; {self.type} has keys of its own here")
        changed = [key for key in _POOL_KEYS if getattr(self, key) != type(self).model_fields[key].default]
        if changed and self.type != "difficulty_pool":
            raise ValueError(f"{', '.join(changed)}: only type = difficulty_pool has pools (type is {self.type})")
        if self.hard_below >= self.easy_above:
            raise ValueError(
                f"hard_below ({self.hard_below:g}) must be less than easy_above ({self.easy_above:g}): between them "
                "lies what is neither hard nor easy"
            )
        return self


class GateConfig(Section):
    """One admission gate: a completed group that it rejects joins no batch, another prompt takes its place."""

    type: GateName | str = "advantage_range"
    """`reward_range`: admits a group whose mean reward lies in [`low`, `high`]; `advantage_range`: one whose largest
    distance of a reward from the group's mean does (default: any distance but 0, so groups of equal rewards are
    rejected: DAPO's dynamic sampling); or your own as `module:function` or `module:Class`."""
    name: str | None = None
    """Label in metrics; default the type."""
    low: float | None = Field(None, allow_inf_nan=False)
    """Least value that is admitted; default: no bound (`advantage_range`: anything above 0)."""
    high: float | None = Field(None, allow_inf_nan=False)
    """Greatest value that is admitted; default: no bound."""
    args: Arguments = {}
    """Arguments of your own gate, by its names."""

    @property
    def label(self) -> str:
        """The gate's name in metrics and messages."""
        return self.name or self.type

    @field_validator("type")
    @classmethod
    def _known(cls, name: str) -> str:
        return known_or_import(name, get_args(GateName), "an admission gate")

    @model_validator(mode="after")
    def _sensible(self) -> "GateConfig":
        bounds = {key: value for key, value in (("low", self.low), ("high", self.high)) if value is not None}
        if ":" in self.type:
            if bounds:
                raise ValueError(f"{', '.join(bounds)}: your own gate takes its arguments from `args`")
            return self
        if self.args:
            raise ValueError(f"args are for your own gate; {self.type} has `low` and `high`")
        if self.type == "reward_range" and not bounds:
            raise ValueError("reward_range admits everything without a bound: set `low`, `high` or both")
        if self.low is not None and self.high is not None and self.low > self.high:
            raise ValueError(f"low ({self.low:g}) is above high ({self.high:g}): no group would be admitted")
        if self.type == "advantage_range":
            for key, value in bounds.items():
                if value <= 0:
                    raise ValueError(
                        f"{key} ({value:g}) must be above 0: it bounds the largest distance of a reward from the mean "
                        "of its group (leave `low` out to reject groups of equal rewards only)"
                    )
        return self


class CurriculumConfig(Section):
    """The choice of tasks that are drawn, and which of the finished groups train."""

    sampler: SamplerConfig = SamplerConfig()
    """Draws tasks."""
    gates: list[GateConfig] = []
    """Every one must admit a group; the first that does not is named in the metrics."""
    max_rejected: float = Field(3.0, gt=0, allow_inf_nan=False)
    """Groups rejected on the way to one batch at most, in multiples of its prompts; what completes after that joins
    the batch as it is, with a warning, so that a batch is always made."""

    @model_validator(mode="after")
    def _names_differ(self) -> "CurriculumConfig":
        labels = [gate.label for gate in self.gates]
        twice = sorted({label for label in labels if labels.count(label) > 1})
        if twice:
            raise ValueError(f"two gates are called {twice[0]!r}: give one of them another `name`")
        return self
