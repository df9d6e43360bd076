"""Losses of pairs: what `sft.preference` computes of the two sides' log-probabilities.

With s the sum of log pi over a side's trained tokens, r = s - s_ref its log-ratio to the reference (divided by the
number of tokens where `length_normalized`), and d = r(chosen) - r(rejected), a pair's loss is a function of d; the
step's is the mean over its pairs. `r` times beta is the side's reward (Rafailov et al. 2023, arXiv 2305.18290, section
4).

Sums are float64: they are of hundreds of nats, and their difference is what is learned. Objectives over sequences put
their gradient on tokens (see `objectives.base.Targets.sequence_sum`): a pair's loss is differentiated by its two sums,
and every token of a side bears that slope.
"""

from collections.abc import Callable

import torch
from torch.nn.functional import logsigmoid

from prime_hpc.config.sections.sft import PreferenceConfig
from prime_hpc.trainer.batching.micro_batches import MicroBatch
from prime_hpc.trainer.objectives.base import LossStats


def _dpo(d: torch.Tensor, config: PreferenceConfig) -> torch.Tensor:
    """Arxiv 2305.18290, equation 7; with label smoothing the mean over both ways to label the pair."""
    z, flipped = config.scale * d - config.margin, config.label_smoothing
    return -(1 - flipped) * logsigmoid(z) - flipped * logsigmoid(-z)


def _ipo(d: torch.Tensor, config: PreferenceConfig) -> torch.Tensor:
    """Arxiv 2310.12036, equation 17, whose tau is beta."""
    return (d - 1 / (2 * config.beta)).square()


def _hinge(d: torch.Tensor, config: PreferenceConfig) -> torch.Tensor:
    """Arxiv 2305.10425, equation 11, of log-ratios."""
    return (1 - config.beta * d).clamp(min=0)


LOSSES: dict[str, Callable[[torch.Tensor, PreferenceConfig], torch.Tensor]] = {
    "dpo": _dpo,
    "ipo": _ipo,
    "hinge": _hinge,
    "bradley_terry": _dpo,
}
"""`sft.preference.type` -> the loss of pairs, float64[P], of their d."""


def side_sums(micro: MicroBatch, values: torch.Tensor) -> torch.Tensor:
    """float64[P, 2], the sums of constant `values` [N] over the two sides of a micro-batch's pairs."""
    sums = torch.segment_reduce(values.detach().double(), "sum", lengths=micro.targets_of_sequence, unsafe=True)
    return _of_pairs(sums)


def _of_pairs(values: torch.Tensor) -> torch.Tensor:
    """[P, 2] of [S]; an empty micro-batch has one sequence that stands for nothing."""
    return values[: len(values) // 2 * 2].view(-1, 2)


def preference_loss(
    config: PreferenceConfig, micro: MicroBatch, logprobs: torch.Tensor, weights: torch.Tensor
) -> tuple[torch.Tensor, LossStats]:
    """Loss (0-dim) and statistics of one micro-batch of pairs. No pair: loss 0, still connected to the graph.

    Args:
        micro: sequences 2i and 2i + 1 are the chosen and the rejected side of pair i.
        logprobs: float32 `[N]`, log pi, differentiable.
        weights: float32 `[N]`, by `sequence`: those of both sides add up to the pair's share of the step.

    Returns:
        the loss; means over the step's pairs: `rewards/chosen`, `rewards/rejected`, `rewards/margins`,
        `rewards/accuracies` (pairs whose chosen side has the larger reward), `logps/chosen`, `logps/rejected` (sums
        over tokens, whatever `length_normalized` says), with `nll_weight` `nll`.
    """
    num_pairs = (1 / side_sums(micro, weights).sum(1)).round()  # of the step: a whole number, unlike float32's sums
    share, lengths = 1 / num_pairs, _of_pairs(micro.targets_of_sequence)
    with torch.enable_grad():
        sums = side_sums(micro, logprobs).requires_grad_()
        means = sums / lengths.clamp(min=1)
        ratios = sums
        if config.compares:
            assert micro.reference_sums is not None, "a batch of pairs has the reference's sums"
            ratios = sums - _of_pairs(micro.reference_sums)
        if config.length_normalized:
            ratios = ratios / lengths.clamp(min=1)
        chosen, rejected = ratios.unbind(1)
        d = chosen - rejected
        if config.scores and micro.reference_sums is not None:  # the rows' own margins
            d = d - _of_pairs(micro.reference_sums)[:, 0]
        loss = (share * LOSSES[config.type](d, config)).sum()
        if config.centering_weight:
            loss = loss + config.centering_weight * (share * (chosen + rejected).square()).sum()
        if config.nll_weight:
            loss = loss - config.nll_weight * (share * means[:, 0]).sum()
        (slopes,) = torch.autograd.grad(loss, sums)
    of_tokens = slopes.view(-1).to(logprobs.dtype)[micro.sequence]
    stats = LossStats({}, {})
    shown = {
        "rewards/chosen": config.scale * chosen,
        "rewards/rejected": config.scale * rejected,
        "rewards/margins": config.scale * (chosen - rejected),
        "rewards/accuracies": (chosen > rejected).double(),
    }
    if not config.scores:
        shown |= {"logps/chosen": sums[:, 0], "logps/rejected": sums[:, 1]}
    if config.nll_weight:
        shown["nll"] = -means[:, 0]
    stats.totals |= {name: (share * values.detach()).sum() for name, values in shown.items()}
    return loss.detach().float() + (of_tokens * (logprobs - logprobs.detach())).sum(), stats
