"""From the store's rank batches (numpy, flat) to the packed micro-batches that the model takes (torch).

RL and SFT both train on `store.batch.rank_batch.RankBatch`: `rl.py` reads it from disk, `data/` and `fake_batch` build
it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from prime_hpc.config.sections.trainer import DistillationConfig, FakeDataConfig
from prime_hpc.store.batch.images import ImageTable
from prime_hpc.store.batch.rank_batch import NOT_SAMPLED, OF_TEACHER, SPECS, TRUNCATION, RankBatch, select_micro_batches
from prime_hpc.store.batch.rank_files import read_rank_batches
from prime_hpc.store.batch.shared_prefixes import token_keys
from prime_hpc.store.io import files
from prime_hpc.store.messaging.file_transfer import Handover
from prime_hpc.trainer.batching.image_inputs import ImageError, ImageInputs, MicroBatchImages
from prime_hpc.trainer.batching.rows import Rows, lay_out
from prime_hpc.trainer.ops.attention import Packing, plan_packing
from prime_hpc.trainer.ops.transfer import to_device
from prime_hpc.trainer.parallel import Parallel


@dataclass
class MicroBatch:
    """One packed row of T tokens in S sequences with N targets (trained tokens).

    A target is predicted from the token before it, in the same sequence; a sequence's first token is never a target.
    Under context parallelism a rank holds some of the tokens, and computes the targets that these predict; whatever
    else is said of targets and sequences is of the whole row.
    """

    input_ids: torch.Tensor
    """int64[1, T], or this rank's T / cp tokens; fewer than T where samples share their first tokens; int64[S, L] with
    each sequence in a row of its own, padded at its end."""
    position_ids: torch.Tensor
    """As `input_ids`, counts from 0 in every sequence; int64[4, ...] with images: these, and the three dimensions in
    which tokens are placed then."""
    packing: Packing
    """Of all T tokens, before any are shared; of S * L tokens with a row each."""
    target_index: torch.Tensor
    """int64[N], the position (in the flat `input_ids`) whose hidden state predicts the target, of the `own` ones."""
    targets: torch.Tensor
    """int64[N], the trained token ids."""
    sequence: torch.Tensor
    """int64[N], the sequence (0..S-1) of each target."""
    targets_of_sequence: torch.Tensor
    """int64[S]"""
    temperatures: torch.Tensor
    """float32[N]"""
    behaviour_logprobs: torch.Tensor
    """float32[N], the sampling engine's log-probabilities."""
    advantages: torch.Tensor
    """float32[N]"""
    num_tokens: int
    """Real tokens: 0 for an empty micro-batch, which computes on one dummy token."""
    num_shared: int = 0
    """Of these, the tokens that are computed with another sample's."""
    reference_logprobs: torch.Tensor | None = None
    """float32[N], the reference model's log-probabilities, where the objective needs them."""
    old_logprobs: torch.Tensor | None = None
    """float32[N], the policy's own before the first update by the batch, where the objective needs them and there are
    several, or they are looked at beforehand; None: they are what this forward pass computes."""
    correction_mean: torch.Tensor | None = None
    """float32[N], the same for all: the mean of the correction's weights over the batch, where they are divided by
    it; None: they are not."""
    reference_sums: torch.Tensor | None = None
    """float64[S], see `RankBatch.reference_sums`."""
    high_entropy: torch.Tensor | None = None
    """bool[N], the targets that the objective trains, with `trainer.loss.top_entropy_quantile`; None: all."""
    high_covariance: torch.Tensor | None = None
    """bool[N], the targets that `trainer.loss.covariance` chose; None: it is off."""
    far: torch.Tensor | None = None
    """bool[N], the targets that `trainer.loss.second_moment` leaves out; None: it is off."""
    returns: torch.Tensor | None = None
    """float32[N], what a critic's values of the targets are to be (`trainer.critic`); None: it is not a critic's."""
    old_values: torch.Tensor | None = None
    """float32[N], what they were before the first update by the batch."""
    targets_of_rollout: torch.Tensor | None = None
    """int64[S], number of targets of the whole rollout that each sequence is a piece of, over all micro-batches and
    ranks; None where sequences are whole rollouts."""
    own: slice = field(default_factory=lambda: slice(None))
    """The targets that this rank computes; all of them where it has the whole row."""
    ce_weights: torch.Tensor | None = None
    """float32[N], weights in the cross-entropy beside the objective; None where the batch has none."""
    top_p: torch.Tensor | None = None
    """float32[N], with `top_k` (int64[N]) and `min_p` (float32[N]): the tokens that were sampled from, see
    `truncation.Truncation`; None where all were."""
    top_k: torch.Tensor | None = None
    min_p: torch.Tensor | None = None
    most_top_k: int = 0
    all_have_top_k: bool = False
    """True if all targets with a `top_p` have one."""
    trained: torch.Tensor | None = None
    """int64, with `ce_weights` the targets that the objective trains (`objective_part`); the others have but that."""
    trained_of_sequence: torch.Tensor | None = None
    """int64[S], with `trained`: how many of those each sequence has."""
    routed: torch.Tensor | None = None
    """int16[tokens of `input_ids`, layers, k], the experts to which each is sent in each layer of the model, -1 where
    its own choice counts; None: everywhere."""
    images: MicroBatchImages | None = None
    """Of the computed tokens; None: there are none."""
    teacher_ids: torch.Tensor | None = None
    """int32[N, k], the teacher's likeliest tokens at each target; None: it named none."""
    teacher_logprobs: torch.Tensor | None = None
    """float32[N, k], their log-probabilities under the teacher."""
    listed_logprobs: torch.Tensor | None = None
    """float32[N, k], the same under the policy, differentiable, once the train step has computed them."""

    @property
    def num_targets(self) -> int:
        """N."""
        return self.targets.shape[0]


_SEEN_BY_OBJECTIVES = (
    "targets",
    "sequence",
    "temperatures",
    "behaviour_logprobs",
    "advantages",
    "reference_logprobs",
    "old_logprobs",
    "correction_mean",
    "high_entropy",
    "high_covariance",
    "far",
    "teacher_ids",
    "teacher_logprobs",
    "listed_logprobs",
)
"""Fields of `MicroBatch` with a value a target that objectives look at."""


def objective_part(micro: MicroBatch) -> MicroBatch:
    """Return what the objective sees of a micro-batch with `ce_weights`: the targets of its own, everything said of
    those.

    For objectives alone: it does not go through a model.
    """
    chosen = micro.trained
    assert chosen is not None and micro.trained_of_sequence is not None
    changes: dict[str, Any] = {"ce_weights": None, "trained": None, "trained_of_sequence": None}
    for name in _SEEN_BY_OBJECTIVES:
        values = getattr(micro, name)
        changes[name] = None if values is None else values[chosen]
    return replace(micro, targets_of_sequence=micro.trained_of_sequence, **changes)


def make_micro_batch(
    batch: RankBatch,
    index: int,
    device: torch.device | str = "cpu",
    parallel: Parallel | None = None,
    *,
    share_prefixes: bool = True,
    single_rows: bool = False,
    pads: bool = True,
    stream: Any = None,
    image_inputs: ImageInputs | None = None,
    scores: bool = False,
) -> MicroBatch:
    """Return the `index`-th micro-batch of a rank batch as tensors.

    An empty one (no tokens) becomes one dummy token without a target: it goes through every layer, and so takes part
    in FSDP's collectives, with a loss of exactly 0 and zero gradients. Where ranks split the tokens, a last sequence
    without targets fills the row up, so that they split evenly.

    Args:
        parallel: the layout; None: the whole row.
        share_prefixes: compute what samples of a group begin with once (`prefix_attention.py`); not where ranks
            split rows.
        single_rows: give each sequence a row of its own, padded to the longest: what comes after a sequence does not
            change it in a causal model, whatever its layers are. Not with context parallelism.
        pads: plan how sequences are padded into buckets, for the kernel that needs it.
        stream: CUDA stream of the copy to the device; None: the current one.
        image_inputs: how the model takes images (ImageError: it cannot be shown one); None: it takes none.
        scores: read the model at the targets themselves, which a reward model scores, not at the tokens before them.
    """
    part, tokens = batch.micro_batch(index), batch.tokens_of(index)
    lengths, ids, mask, ce = np.diff(part.seq_offsets), part.token_ids.astype(np.int64), part.loss_mask, part.ce_weights
    sequence_of = np.repeat(np.arange(len(lengths)), lengths)
    positions = np.arange(len(ids)) - part.seq_offsets[sequence_of]
    at = np.flatnonzero(part.computed_mask())
    sequence = sequence_of[at]
    targets, num_sequences = ids[at], len(lengths)
    truncation = _truncation(part, sequence, mask[at])
    rows = lay_out(
        *(ids, positions, at if scores else at - 1, lengths, part.group_ids, parallel),
        share_prefixes=share_prefixes,
        single_rows=single_rows,
        keys=token_keys(ids, part.routed, part.images),
    )
    places, images = _with_images(part, positions, rows, image_inputs)

    def tensor(array: NDArray) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(array))

    given = truncation | {name: of[at] for name in OF_TEACHER if (of := getattr(part, name)) is not None}
    more: dict[str, Any] = {k: tensor(v) if isinstance(v, np.ndarray) else v for k, v in given.items()}
    micro = MicroBatch(
        input_ids=tensor(rows.ids).view(rows.num_rows, -1),
        position_ids=tensor(places).view(*places.shape[:-1], rows.num_rows, -1),
        packing=plan_packing(rows.lengths, device, rows.shared, rows.num_rows, pads=pads),
        target_index=tensor(rows.predicting),
        targets=tensor(targets),
        sequence=tensor(sequence),
        targets_of_sequence=tensor(np.bincount(sequence, minlength=num_sequences)),
        temperatures=tensor(np.where(mask[at], part.temperatures[sequence], np.float32(1))),
        behaviour_logprobs=tensor(part.logprobs[at]),
        advantages=tensor(part.advantages[at]),
        num_tokens=tokens.stop - tokens.start,
        num_shared=0 if rows.shared is None else len(rows.shared) - len(rows.ids),
        targets_of_rollout=None if part.rollout_tokens is None else tensor(part.rollout_tokens.astype(np.int64)),
        reference_sums=None if part.reference_sums is None else tensor(part.reference_sums),
        own=rows.own,
        ce_weights=None if ce is None else tensor(ce[at]),
        trained=None if ce is None else tensor(np.flatnonzero(mask[at])),
        trained_of_sequence=None if ce is None else tensor(np.bincount(sequence[mask[at]], minlength=num_sequences)),
        routed=None if part.routed is None else tensor(_choices(part.routed, rows.source)),
        images=images,
        **more,
    )
    return to_device(micro, torch.device(device), stream)


def _with_images(
    part: RankBatch, positions: NDArray[np.int64], rows: Rows, image_inputs: ImageInputs | None
) -> tuple[NDArray[np.int64], MicroBatchImages | None]:
    """Return the places of the computed tokens, int64[..., rows * L], and the images among them."""
    if part.images is None or not part.images.any():
        return rows.positions, None
    if image_inputs is None:
        raise ImageError("the batch holds images, and the model takes text alone: set model.vision")
    return image_inputs.lay_out(part.images, part.encoded_image, positions, rows.source, rows.positions)


def _truncation(part: RankBatch, sequence: NDArray[np.int64], sampled: NDArray[np.bool_]) -> dict[str, Any]:
    """Fields of `MicroBatch` that say of each target which tokens it was sampled from; none where that was all.

    Args:
        sequence: int64[N], of each target.
        sampled: bool[N], whether the policy sampled the target: else it is of the whole distribution.
    """
    if part.top_ps is None:
        return {}
    whole: dict[str, Any] = {name: SPECS[name].absent for name in TRUNCATION}
    values = {name: np.where(sampled, getattr(part, name)[sequence], whole[name]) for name in TRUNCATION}
    if all((values[name] == whole[name]).all() for name in TRUNCATION):
        return {}
    top_p, top_k = values["top_ps"].astype(np.float32), values["top_ks"].astype(np.int64)
    bounded = bool(((top_p == 1) | (top_k > 0)).all())
    found = {"top_p": top_p, "top_k": top_k, "min_p": values["min_ps"].astype(np.float32)}
    return found | {"most_top_k": int(top_k.max()), "all_have_top_k": bounded}


def _choices(routed: NDArray[Any], source: NDArray[np.int64] | None) -> NDArray[np.int16]:
    """Return the recorded experts of the computed tokens, int16[tokens, layers, k], -1 where none are known.

    Args:
        routed: [T, layers, k] of the micro-batch's tokens, see `RankBatch.routed`.
        source: int64[tokens], see `Rows.source`.
    """
    known = (routed != np.iinfo(routed.dtype).max).any(-1, keepdims=True)  # no token goes to one expert twice
    choices = np.where(known, routed.astype(np.int16), np.int16(-1))
    if source is None:
        return choices
    taken = choices[source]
    taken[source < 0] = -1
    return taken


@dataclass(frozen=True)
class BatchFacts:
    """Facts of a rank batch for metrics; sums and maxima over this rank."""

    num_tokens: int
    num_sequences: int
    num_targets: int
    num_trained_sequences: int
    """Sequences that hold at least one target."""
    lengths: NDArray[np.int64]
    """Of the sequences."""
    reward_sum: float
    lag_sum: float
    """Sum over sampled targets of (step - 1 - version)."""
    num_sampled: int
    lag_max: int
    num_echo: int
    """Tokens with a weight in the cross-entropy beside the objective."""


def batch_facts(batch: RankBatch, step: int) -> BatchFacts:
    """Count what `BatchFacts` says; step n trains version n - 1."""
    mask = batch.target_mask()
    lengths = np.diff(batch.seq_offsets)
    per_sequence = np.add.reduceat(np.append(mask, False), batch.seq_offsets[:-1]) if len(lengths) else np.zeros(0)
    versions = batch.versions[mask]
    lags = (step - 1) - versions[versions != NOT_SAMPLED].astype(np.int64)
    return BatchFacts(
        num_tokens=batch.num_tokens,
        num_sequences=batch.num_sequences,
        num_targets=int(mask.sum()),
        num_trained_sequences=int(np.count_nonzero((per_sequence > 0) & (lengths > 0))),
        lengths=lengths,
        reward_sum=float(batch.rewards.sum()),
        lag_sum=float(lags.sum()),
        num_sampled=len(lags),
        lag_max=int(lags.max(initial=0)),
        num_echo=0 if batch.ce_weights is None else int(((batch.ce_weights > 0) & ~batch.first_tokens()).sum()),
    )


def rows_fit(batch: RankBatch, budget: int) -> bool:
    """Return whether every micro-batch fits the budget with a row for each sequence, padded to the longest; a row that
    is longer must be alone."""
    lengths = np.diff(batch.seq_offsets)
    parts = [lengths[batch.sequences_of(i)] for i in range(batch.num_micro_batches)]
    return bool((lengths > 0).all()) and all(len(n) * n.max() <= max(budget, n.max()) for n in parts if len(n))


def with_single_rows(batch: RankBatch, groups: list[NDArray[np.int64]], num_micro_batches: int) -> RankBatch:
    """Return the rank batch whose micro-batches hold the sequences of `groups` (`rows.group_rows`), and empty ones
    after."""
    single = replace(batch, micro_offsets=np.arange(batch.num_sequences + 1))
    chosen = [(single, int(i)) for group in groups for i in group]
    counts = [len(group) for group in groups] + [0] * (num_micro_batches - len(groups))
    offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
    return replace(select_micro_batches(chosen, len(chosen)), micro_offsets=offsets)


def redistribute(batches: list[RankBatch], rank: int, world_size: int) -> RankBatch:
    """Rank `rank`'s part when a batch that was packed for `len(batches)` ranks trains on `world_size`.

    Whole micro-batches move, largest first to the emptiest rank, so packing budgets still hold; all ranks get the same
    number of micro-batches. Every rank computes the same assignment.
    """
    pairs = [(b, i) for b in batches for i in range(b.num_micro_batches) if b.tokens_of(i).stop > b.tokens_of(i).start]
    pairs.sort(key=lambda p: p[0].tokens_of(p[1]).start - p[0].tokens_of(p[1]).stop)
    per_rank = -(-max(len(pairs), 1) // world_size)
    own: list[list[tuple[RankBatch, int]]] = [[] for _ in range(world_size)]
    load = [0] * world_size
    for batch, i in pairs:
        target = min((r for r in range(world_size) if len(own[r]) < per_rank), key=lambda r: load[r])
        tokens = batch.tokens_of(i)
        own[target].append((batch, i))
        load[target] += tokens.stop - tokens.start
    return select_micro_batches(own[rank], per_rank)


def read_local_batch(
    directory: Path,
    rank: int,
    world_size: int,
    handover: Handover | None = None,
    *,
    deadline_s: float = files.VISIBLE_S,
) -> RankBatch:
    """Return this rank's part of the batch in `directory`, also when it was packed for another number of ranks.

    Args:
        handover: the writer's socket, which is asked first.
        deadline_s: keep trying this many seconds while a file is not what the manifest says.

    Raises:
        ArtifactError: a file is not what its manifest says.
    """
    own: list[bool] = []

    def choose(num_ranks: int) -> list[int]:
        own[:] = [num_ranks == world_size]
        return [rank] if own[0] else list(range(num_ranks))

    batches = read_rank_batches(directory, choose, handover=handover, deadline_s=deadline_s)
    return batches[0] if own[0] else redistribute(batches, rank, world_size)


def refuse_untrainable(batch: RankBatch, vocab_size: int, budget: int) -> None:
    """Raise a ValueError for what would end the process, and not only the step, in the forward pass.

    Args:
        batch: well-formed (`RankBatch.check`).
        budget: tokens of one micro-batch that the trainer has memory for.
    """
    if batch.images is not None and batch.images.any():
        raise ValueError("it holds images, and a trainer of many runs takes text alone")
    ids = batch.token_ids
    if ids.size and not (int(ids.min()) >= 0 and int(ids.max()) < vocab_size):
        raise ValueError(f"token ids from {ids.min()} to {ids.max()}: the model has tokens 0 to {vocab_size - 1}")
    if (batch.temperatures < 0).any():
        raise ValueError(f"a temperature of {batch.temperatures.min():g}")
    for i in range(batch.num_micro_batches):
        tokens = batch.tokens_of(i)
        if tokens.stop - tokens.start > budget:
            raise ValueError(f"micro-batch {i} has {tokens.stop - tokens.start} tokens, more than {budget}")


def build_rank_batch(
    micro_batches: list[list[int]],
    token_ids: list[NDArray[np.int32]],
    loss_masks: list[NDArray[np.bool_]],
    advantages: NDArray[np.float32] | None = None,
    images: Sequence[tuple[NDArray[np.int32], Sequence[bytes]]] | None = None,
) -> RankBatch:
    """Return a rank batch of tokenised samples.

    Args:
        micro_batches: for each micro-batch the indices of its samples.
        token_ids, loss_masks: of each sample.
        advantages: float32[num_samples], or None for 0.
        images: of each sample, the number of each token's image (from 1; empty: it has none), and its encoded images.
    """
    order = [i for micro in micro_batches for i in micro]
    lengths = np.array([len(token_ids[i]) for i in order], dtype=np.int64)
    total, num = int(lengths.sum()), len(order)
    per_sample = np.zeros(num, np.float32) if advantages is None else advantages[order].astype(np.float32)
    return RankBatch(
        token_ids=np.concatenate([np.zeros(0, np.int32), *(token_ids[i] for i in order)]).astype(np.int32),
        loss_mask=np.concatenate([np.zeros(0, bool), *(loss_masks[i] for i in order)]).astype(bool),
        logprobs=np.zeros(total, np.float32),
        versions=np.full(total, NOT_SAMPLED, np.int32),
        advantages=np.repeat(per_sample, lengths),
        seq_offsets=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        micro_offsets=np.concatenate([[0], np.cumsum([len(m) for m in micro_batches])]).astype(np.int64),
        temperatures=np.ones(num, np.float32),
        rewards=np.zeros(num, np.float32),
        sample_ids=np.array(order, dtype=np.int64),
        group_ids=np.array(order, dtype=np.int64),
        env_ids=np.zeros(num, np.int32),
        **({} if images is None else _image_arrays([images[i] for i in order], lengths)),
    )


def _image_arrays(
    images: Sequence[tuple[NDArray[np.int32], Sequence[bytes]]], lengths: NDArray[np.int64]
) -> dict[str, Any]:
    """Fields of a batch's images; none where no sample has one."""
    if not any(len(encoded) for _, encoded in images):
        return {}
    table = ImageTable()
    numbers = [
        table.renumber(own, encoded) if len(encoded) else np.zeros(length, np.int32)
        for (own, encoded), length in zip(images, lengths.tolist(), strict=True)
    ]
    content, offsets = table.arrays()
    return {"images": np.concatenate(numbers), "image_bytes": content, "image_offsets": offsets}


def with_fake_teacher(batch: RankBatch, vocab_size: int, distillation: DistillationConfig | None) -> RankBatch:
    """Return the batch with a teacher that finds some tokens, the same everywhere, equally likely; as it is where no
    teacher is compared with."""
    if distillation is None:
        return batch
    top_k = min(distillation.top_k, vocab_size)
    ids = np.tile(np.arange(top_k, dtype=np.int32), (batch.num_tokens, 1))
    return replace(batch, teacher_ids=ids, teacher_logprobs=np.full(ids.shape, -np.log(2 * top_k), np.float32))


def fake_batch(config: FakeDataConfig, vocab_size: int, seed: int, step: int, rank: int, world_size: int) -> RankBatch:
    """Random tokens of the configured shape, the same for the same (seed, step); all tokens are trained.

    `length = variable` draws lengths uniformly between a quarter of `seq_len` and `seq_len`.
    """
    rng = np.random.default_rng([seed, step])
    low = config.seq_len if config.length == "fixed" else max(2, config.seq_len // 4)
    lengths = rng.integers(low, config.seq_len + 1, config.batch_size)
    ids = [rng.integers(0, vocab_size, n, dtype=np.int32) for n in lengths]
    masks = [np.ones(n, bool) for n in lengths]
    advantages = rng.standard_normal(config.batch_size).astype(np.float32)
    groups = [
        list(range(i, min(i + config.micro_batch_size, config.batch_size)))
        for i in range(0, config.batch_size, config.micro_batch_size)
    ]
    per_rank = -(-len(groups) // world_size)
    own = groups[rank::world_size]
    return build_rank_batch(own + [[]] * (per_rank - len(own)), ids, masks, advantages)


def as_pairs(batch: RankBatch, *, scores: bool) -> RankBatch:
    """Return random samples as the two sides of pairs. `scores`: a reward model's, each read at its last token."""
    batch = replace(batch, reference_sums=np.zeros(batch.num_sequences))
    last = np.isin(np.arange(batch.num_tokens), batch.seq_offsets[1:] - 1)
    return replace(batch, loss_mask=last) if scores else batch
