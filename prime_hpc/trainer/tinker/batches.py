"""The client's training data as the trainer's rank batches, and its losses by name through the trainer's objectives.

A datum has an input x of T tokens and a target for each, the token after it: together one sequence of T + 1 tokens
with T targets. Losses are sums over tokens, as the client's users expect, and no means: w are the weights of
`cross_entropy`, A the advantages and r = pi / mu the ratio of the other losses.

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
    values: NDArray[np.float32]
    """[T] weight or advantage of each target."""
    logprobs: NDArray[np.float32]
    """[T] log mu of each target; 0 where the loss has no ratio."""


def check_loss(name: str, config: Mapping[str, float | str]) -> Bounds:
    """Return the bounds of a loss' ratio; none that binds where it has none.

    Raises:
        BadRequestError: a loss or an option that is not served.
    """
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

    Args:
        data: of one request.
        loss: of `LOSSES`.
        vocab_size: of the model.
        most_tokens: of one datum's input and its last target.

    Raises:
        BadRequestError: data that the model cannot be trained on; says which datum, and why.
    """
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
    for name, array in datum.inputs.items():
        if array.shape != (num,):
            more = "; several targets a token are not served here" if array.ndim > 1 else ""
            raise BadRequestError(f"{where}: {name} has shape {list(array.shape)}, model_input has {num} tokens{more}")
        if array.dtype.kind == "f" and not np.isfinite(array).all():
            raise BadRequestError(f"{where}: {name} holds a value that is not finite")
    targets = datum.inputs["target_tokens"].astype(np.int64)
    tokens = np.append(datum.tokens, targets[-1])
    if tokens.min() < 0 or tokens.max() >= vocab_size or targets.min() < 0 or targets.max() >= vocab_size:
        worst = next(int(i) for i in (*tokens, *targets) if not 0 <= i < vocab_size)
        raise BadRequestError(f"{where}: token {worst}: the model has tokens 0 to {vocab_size - 1}")
    if not np.array_equal(targets, tokens[1:]):
        at = int(np.flatnonzero(targets != tokens[1:])[0])
        raise BadRequestError(
            f"{where}: target_tokens[{at}] = {targets[at]}, but the next token of model_input is {tokens[at + 1]}: "
            "here the target of a token is the one after it"
        )
    ones, zeros = np.ones(num, np.float32), np.zeros(num, np.float32)
    values, logprobs = datum.inputs.get(loss.values, ones), datum.inputs.get("logprobs", zeros)
    return Example(tokens.astype(np.int32), values.astype(np.float32), logprobs.astype(np.float32))


def part_of(examples: Sequence[Example], part: int, num_parts: int, budget: int) -> RankBatch:
    """Return one rank's part of a request's data; every rank computes the same split.

    Args:
        examples: all of it.
        part, num_parts: this rank's place among the parts.
        budget: tokens of one micro-batch.
    """
    micro_batches = [m.tolist() for m in pack([len(e.tokens) for e in examples], num_parts, budget)[part]]
    order = [i for micro in micro_batches for i in micro]
    masks = [np.ones(len(e.tokens), bool) for e in examples]
    batch = build_rank_batch(micro_batches, [e.tokens for e in examples], masks)
    values, logprobs = ([_shifted(getattr(examples[i], name)) for i in order] for name in ("values", "logprobs"))
    nothing = [np.zeros(0, np.float32)]
    return replace(batch, advantages=np.concatenate(nothing + values), logprobs=np.concatenate(nothing + logprobs))


def _shifted(values: NDArray[np.float32]) -> NDArray[np.float32]:
    """Values of the targets, as values of the tokens that they are."""
    return np.concatenate([np.zeros(1, np.float32), values])


@dataclass
class Collected:
    """Results of a pass, in the order of a batch's targets."""

    logprobs: list[torch.Tensor]
    losses: list[torch.Tensor]


def summed_loss(name: str, bounds: Bounds, collected: Collected) -> MicroBatchLoss:
    """Return the loss of micro-batches: a sum over their targets, which notes every target's log pi and loss.

    Args:
        name: of `LOSSES`.
        bounds: of `check_loss`.
        collected: takes the notes.
    """
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


def per_example(batch: RankBatch, collected: Collected) -> dict[int, tuple[NDArray[np.float32], NDArray[np.float32]]]:
    """Return index of the example -> log pi and loss of its targets, [T] each.

    Args:
        batch: whose targets the notes are of.
        collected: by `summed_loss`.
    """
    lengths = np.diff(batch.seq_offsets) - 1
    ends = np.cumsum(lengths)[:-1]
    logprobs, losses = (
        np.split(torch.cat(found).float().cpu().numpy(), ends) if len(lengths) else []
        for found in (collected.logprobs, collected.losses)
    )
    return {int(i): rows for i, rows in zip(batch.sample_ids, zip(logprobs, losses, strict=True), strict=True)}
