"""Base of every objective, and how one is found by its config name."""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from prime_hpc.config.errors import ConfigError
from prime_hpc.config.named_code import OBJECTIVES, Bounds, import_object
from prime_hpc.config.sections.names import is_import_path
from prime_hpc.config.sections.trainer import LossConfig

_KEY = "trainer.loss.type"
MAX_LOG_RATIO = 20.0
"""Ratios saturate at e^20 = 5e8, with gradient 0 beyond: an exponential that overflows would turn a gradient of 0
into NaN. A token that far off carries no usable signal, and the mismatch metrics show it."""


@dataclass
class LossStats:
    """Statistics of an objective by how the log shows them, each a 0-dim tensor: `train_step.py` reduces them over
    micro-batches and ranks."""

    sums: dict[str, torch.Tensor]
    """Sums over targets, shown as means over them."""
    maxima: dict[str, torch.Tensor]
    totals: dict[str, torch.Tensor] = field(default_factory=dict)
    """Sums that are shown as they are."""

    def add(self, other: "LossStats") -> None:
        """Take in another micro-batch's, on the device."""
        for mine, others in ((self.sums, other.sums), (self.totals, other.totals)):
            for name, value in others.items():
                mine[name] = mine[name] + value if name in mine else value
        for name, value in other.maxima.items():
            self.maxima[name] = torch.maximum(self.maxima[name], value) if name in self.maxima else value


@dataclass(frozen=True)
class Targets:
    """The N trained tokens of one micro-batch, sequence after sequence."""

    logprobs: torch.Tensor
    """float32[N], log pi, differentiable."""
    anchor: torch.Tensor
    """float32[N], the ratio's denominator: log mu as the engine reported it; with an importance correction the
    trainer's own log pi before this update (a constant)."""
    advantages: torch.Tensor
    """float32[N]"""
    sequence: torch.Tensor
    """int64[N], the sequence (0..S-1) of each target, never falling."""
    targets_of_sequence: torch.Tensor
    """int64[S]"""

    def log_ratio(self) -> torch.Tensor:
        """float32[N], log(pi / anchor), differentiable, saturated at +-`MAX_LOG_RATIO`."""
        return (self.logprobs - self.anchor).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)

    def sequence_sum(self, values: torch.Tensor) -> torch.Tensor:
        """[S], the sum of constant `values` [N] over each sequence; sequences without targets get 0.

        Not differentiable on purpose: the gradient of a gather back to tokens would be added up in no fixed order
        on a GPU. Objectives over sequences put their gradient on tokens instead (see `gspo.py`).
        """
        return torch.segment_reduce(values.detach(), "sum", lengths=self.targets_of_sequence, unsafe=True)

    def sequence_max(self, values: torch.Tensor) -> torch.Tensor:
        """[S], the greatest of constant `values` [N], none below 0, of each sequence; those without targets get 0."""
        lengths = self.targets_of_sequence
        return torch.segment_reduce(values.detach(), "max", lengths=lengths, unsafe=True, initial=0)

    def sequence_mean(self, values: torch.Tensor) -> torch.Tensor:
        """[S], the mean of constant `values` [N] over each sequence; sequences without targets get 0."""
        return self.sequence_sum(values) / self.targets_of_sequence.clamp(min=1)


@dataclass(frozen=True)
class Terms:
    """An objective's terms for its targets."""

    loss: torch.Tensor
    """[N], each target's loss before its weight in the batch, differentiable in `Targets.logprobs`."""
    clipped: torch.Tensor
    """bool[N], targets whose gradient a clip or mask cut off or bounded."""
    log_ratio: torch.Tensor | None = None
    """[N], a constant: the logarithm of the ratio that was held against the bounds, where that is not the token's own:
    the log tells its two sides apart."""


Objective = Callable[[Targets, LossConfig, Bounds], Terms]


def get_objective(name: str) -> Objective:
    """Return the objective called `name`, or the user's own at `module:function`.
    Raises ConfigError: unknown, or the import fails; says why."""
    if name not in OBJECTIVES and not is_import_path(name):
        raise ConfigError(f"{name!r} is unknown; known: {', '.join(sorted(OBJECTIVES))}", _KEY)
    return import_object(OBJECTIVES[name].place if name in OBJECTIVES else name, _KEY)
