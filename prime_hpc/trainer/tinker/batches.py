"""The client's training data as the trainer's rank batches, and its losses by name through the trainer's objectives.

A datum has an input x of T tokens and a target for each: mostly the token after it, but any token may be asked for (0
over a prompt, say), and of `cross_entropy` K of them at once, which is how a teacher's likeliest tokens are learned. A
sequence of T + 1 tokens goes through the model, whose last one is there for its place alone. Losses are sums over
targets, as the client's users expect, and no means: w are the weights of `cross_entropy`, A the advantages and
r = pi / mu the ratio of the other losses.

    cross_entropy         - sum w log pi
    importance_sampling   - sum r A
    ppo                   - sum min(r A, clip(r, low, high) A)
    cispo                 - sum sg(clip(r, low, high)) A log pi
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from prime_hpc.config.named_code import Bounds
from prime_hpc.config.sections.trainer import LossConfig
from prime_hpc.store.batch.packing import pack
from prime_hpc.store.batch.rank_batch import RankBatch
from prime_hpc.trainer.batching.micro_batches import MicroBatch, build_rank_batch
from prime_hpc.trainer.objectives import LossStats, MicroBatchLoss, Targets, get_objective
from prime_hpc.trainer.tinker.wire import Datum

MOST_TARGETS = 64
"""Targets of one token: each has a row of the model's hidden state in memory."""
LOW, HIGH = "clip_low_threshold", "clip_high_threshold"
_THRESHOLDS = {LOW: 0.8, HIGH: 1.2}


class BadRequestError(ValueError):
    """The client asks for what cannot be done; the message is for its user."""


@dataclass(frozen=True)
class _Loss:
    """A loss of the client."""

    objective: str
    """The trainer's (`trainer.loss.type`)."""
    values: str
    """Input that multiplies the tokens' terms."""
    uses_ratio: bool
    """True if it needs the sampler's `logprobs`."""
    config: Mapping[str, float]
    """Options of `loss_fn_config`, with their defaults."""


LOSSES = {
    "cross_entropy": _Loss("reinforce", "weights", False, {}),
    "importance_sampling": _Loss("ppo_clip", "advantages", True, {}),
    "ppo": _Loss("ppo_clip", "advantages", True, _THRESHOLDS),
    "cispo": _Loss("cispo", "advantages", True, _THRESHOLDS),
}


@dataclass(frozen=True)
class Example:
    """One datum, checked."""

    tokens: NDArray[np.int32]
    """[T + 1] the input, and the last target."""
    targets: NDArray[np.int64]
    """[T] or [T, K] what each token of the input is to predict."""
    values: NDArray[np.float32]
    """Like `targets`: weight or advantage of each."""
    logprobs: NDArray[np.float32]
    """Likewise, log mu; 0 where the loss has no ratio."""


def check_loss(name: str, config: Mapping[str, float | str]) -> Bounds:
    """Return the bounds of a loss' ratio; none that binds where it has none.
    Raises BadRequestError: a loss or an option that is not served."""
    if name not in LOSSES:
        raise BadRequestError(f"loss_fn {name!r} is not served here; there are {', '.join(LOSSES)}")
    known = LOSSES[name].config
    unknown = sorted(config.keys() - known.keys())
    if unknown:
        may = f"it takes {', '.join(known)}" if known else "it takes none"
        raise BadRequestError(f"loss_fn_config of {name}: {', '.join(unknown)} is not known; {may}")
    if not known:
        return Bounds(1.0, math.inf)
    stated = {**known, **config}
    for key, value in stated.items():
        if not isinstance(value, float) or not math.isfinite(value):
            raise BadRequestError(f"loss_fn_config.{key} = {value}: must be a finite number")
    low, high = float(stated[LOW]), float(stated[HIGH])
    if not 0 <= low <= 1 <= high:
        raise BadRequestError(f"loss_fn_config: {LOW} = {low:g} and {HIGH} = {high:g}: must be 0 <= low <= 1 <= high")
    return Bounds(1 - low, high - 1)


def check_data(data: Sequence[Datum], loss: str, vocab_size: int, most_tokens: int) -> list[Example]:
    """Return the data as examples.
    `most_tokens`: of one datum's input and its last target.
    Raises BadRequestError: data that the model cannot be trained on; says which datum, and why."""
    if not data:
        raise BadRequestError("no data")
    return [_example(datum, f"datum {i}", LOSSES[loss], vocab_size, most_tokens) for i, datum in enumerate(data)]


def _example(datum: Datum, where: str, loss: _Loss, vocab_size: int, most_tokens: int) -> Example:
    num = len(datum.tokens)
    expected = {"target_tokens", loss.values} | ({"logprobs"} if loss.uses_ratio else set())
    required = expected - {"weights"}  # all ones where they are left out
    if missing := sorted(required - datum.inputs.keys()):
        raise BadRequestError(f"{where}: loss_fn_inputs lacks {', '.join(missing)}")
    if extra := sorted(datum.inputs.keys() - expected):
        raise BadRequestError(f"{where}: loss_fn_inputs.{extra[0]}: this loss takes {', '.join(sorted(expected))}")
    if num == 0:
        raise BadRequestError(f"{where}: model_input is empty")
    if num + 1 > most_tokens:
        raise BadRequestError(
            f"{where}: {num} tokens and the target of the last one are more than the {most_tokens} that this service "
            "was started for (seq_len)"
        )
    targets = datum.inputs["target_tokens"].astype(np.int64)
    if targets.shape != (num,):
        _check_several(targets.shape, num, where, loss)
    for name, array in datum.inputs.items():
        if array.shape != targets.shape:
            raise BadRequestError(
                f"{where}: {name} has shape {list(array.shape)}, target_tokens has {list(targets.shape)}"
            )
        if array.dtype.kind == "f" and not np.isfinite(array).all():
            raise BadRequestError(f"{where}: {name} holds a value that is not finite")
    for token in (datum.tokens.min(), datum.tokens.max(), targets.min(), targets.max()):
        if not 0 <= token < vocab_size:
            raise BadRequestError(f"{where}: token {token}: the model has tokens 0 to {vocab_size - 1}")
    ones, zeros = np.ones(targets.shape, np.float32), np.zeros(targets.shape, np.float32)
    values, logprobs = datum.inputs.get(loss.values, ones), datum.inputs.get("logprobs", zeros)
    tokens = np.append(datum.tokens, targets[-1].flat[0]).astype(np.int32)
    return Example(tokens, targets, values.astype(np.float32), logprobs.astype(np.float32))


def _check_several(shape: tuple[int, ...], num: int, where: str, loss: _Loss) -> None:
    """Raise a BadRequestError unless so many targets a token can be trained on."""
    if len(shape) != 2 or shape[0] != num:
        raise BadRequestError(f"{where}: target_tokens has shape {list(shape)}, model_input has {num} tokens")
    if loss.uses_ratio:
        raise BadRequestError(f"{where}: target_tokens has shape {list(shape)}: this loss takes one target a token")
    if not 1 <= shape[1] <= MOST_TARGETS:
        raise BadRequestError(f"{where}: {shape[1]} targets a token; there may be 1 to {MOST_TARGETS}")


def part_of(examples: Sequence[Example], part: int, num_parts: int, budget: int) -> RankBatch:
    """Return one rank's part of a request's data; every rank computes the same split.

    Args:
        part, num_parts: this rank's place among the parts.
        budget: tokens of one micro-batch.
    """
    micro_batches = [m.tolist() for m in pack([len(e.tokens) for e in examples], num_parts, budget)[part]]
    masks = [np.ones(len(e.tokens), bool) for e in examples]
    return build_rank_batch(micro_batches, [e.tokens for e in examples], masks)


def retargeted(micro: MicroBatch, examples: Sequence[Example]) -> MicroBatch:
    """Return a micro-batch with its examples' targets in the place of its tokens.

    Args:
        micro: each token but the first of its sequences is a target.
        examples: in the order of its sequences; none where it is empty.
    """
    if not examples:
        return micro
    counts = np.concatenate([np.full(len(e.targets), e.targets[0].size) for e in examples])
    ends = np.concatenate([[0], np.cumsum(counts)])
    first, stop, _ = micro.own.indices(len(counts))
    device = micro.targets.device

    def joined(name: str) -> torch.Tensor:
        return torch.from_numpy(np.concatenate([getattr(e, name).ravel() for e in examples])).to(device)

    def repeated(values: torch.Tensor, times: NDArray[np.int64]) -> torch.Tensor:
        return values.repeat_interleave(torch.from_numpy(times).to(device), output_size=int(times.sum()))

    return replace(
        micro,
        target_index=repeated(micro.target_index, counts[first:stop]),
        targets=joined("targets"),
        sequence=repeated(micro.sequence, counts),
        targets_of_sequence=torch.tensor([e.targets.size for e in examples], device=device),
        temperatures=repeated(micro.temperatures, counts),
        behaviour_logprobs=joined("logprobs"),
        advantages=joined("values"),
        own=slice(int(ends[first]), int(ends[stop])),
    )


@dataclass
class Collected:
    """Results of a pass, in the order of a batch's targets."""

    logprobs: list[torch.Tensor]
    losses: list[torch.Tensor]


def summed_loss(name: str, bounds: Bounds, collected: Collected) -> MicroBatchLoss:
    """Return the loss of micro-batches: a sum over their targets, which notes every target's log pi and loss.
    `collected`: takes the notes."""
    objective: Callable[..., Any] = get_objective(LOSSES[name].objective)
    config = LossConfig()

    def loss(micro: MicroBatch, logprobs: torch.Tensor, _: torch.Tensor) -> tuple[torch.Tensor, LossStats]:
        targets = Targets(
            logprobs=logprobs,
            anchor=micro.behaviour_logprobs,
            advantages=micro.advantages,
            sequence=micro.sequence,
            targets_of_sequence=micro.targets_of_sequence,
        )
        terms = objective(targets, config, bounds).loss
        collected.logprobs.append(logprobs.detach())
        collected.losses.append(terms.detach())
        return terms.sum(), LossStats({}, {})

    return loss


def per_example(
    batch: RankBatch, examples: Sequence[Example], collected: Collected
) -> dict[int, tuple[NDArray[np.float32], NDArray[np.float32]]]:
    """Return index of the example -> log pi and loss of its targets, each in their shape.
    `batch`: whose targets the notes are of."""
    shapes = [examples[i].targets.shape for i in batch.sample_ids]
    ends = np.cumsum([int(np.prod(shape)) for shape in shapes])[:-1]
    logprobs, losses = (
        np.split(torch.cat(found).float().cpu().numpy(), ends) if shapes else []
        for found in (collected.logprobs, collected.losses)
    )
    rows = zip(batch.sample_ids, shapes, logprobs, losses, strict=True)
    return {int(i): (found.reshape(shape), terms.reshape(shape)) for i, shape, found, terms in rows}
