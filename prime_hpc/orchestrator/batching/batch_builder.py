"""From complete groups to the trainer's packed arrays: advantages, packing, one `RankBatch` per data-parallel rank.

Tokens stay exactly those that the engines saw and sampled: samples are only concatenated, never cut or re-tokenised.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from prime_hpc.config import Experiment
from prime_hpc.config.sections.orchestrator import MOST_ROLLOUTS
from prime_hpc.config.sections.sampling import SamplingConfig
from prime_hpc.envs.samples import Sample
from prime_hpc.orchestrator.algorithms import Scorer
from prime_hpc.orchestrator.algorithms.echo import Echo
from prime_hpc.orchestrator.algorithms.scorer import References, Tokens, any_signal
from prime_hpc.orchestrator.errors import OrchestratorError
from prime_hpc.orchestrator.rollouts.episodes import Episode, mask_all, mask_older
from prime_hpc.orchestrator.rollouts.groups import Group
from prime_hpc.store.batch.images import ImageTable, image_keys
from prime_hpc.store.batch.packing import pack, pack_rows
from prime_hpc.store.batch.rank_batch import SPECS, FieldSpec, RankBatch, drop_idle
from prime_hpc.store.batch.shared_prefixes import find_sharing, token_keys

EPISODE_BITS = (MOST_ROLLOUTS - 1).bit_length()
"""A sample's id is position << 12 | episode: unique over the whole run and traceable to its prompt."""


@dataclass(frozen=True)
class TrainSample:
    """One sequence with what the trainer needs beside its tokens."""

    sample: Sample
    advantages: NDArray[np.float32]
    """float32[L], 0 where nothing trains."""
    reward: float
    sample_id: int
    group_id: int
    env_id: int
    ce_weights: NDArray[np.float32] | None = None
    """float32[L], see `echo`; None without."""
    rollout_tokens: int = 0
    """Tokens of the whole rollout, all the samples of its trace, that train or would if they were not too old: else the
    few young tokens of a long reply would weigh as much as another whole one."""
    mini_batch: int = 0
    """Number of the optimizer step of its step's."""


@dataclass(frozen=True)
class ScoredGroup:
    """A group's G usable episodes with their advantages."""

    group: Group
    episodes: list[Episode]
    rewards: NDArray[np.float64]
    """float64[G], penalties taken off."""
    advantages: NDArray[np.float64]
    """float64[G]"""
    kept: NDArray[np.bool_]
    """bool[G], episodes that train if the group does."""
    trains: bool
    """False: its advantages are all zero and the config drops such groups, or none of its episodes may train."""
    problem: str = ""
    """Why it could not be scored."""
    tokens: Tokens | None = None
    """Advantages of single tokens, in place of `advantages`: see `Scores`."""
    references: References = ()
    """The teacher's log-probabilities: see `RewardGroup`."""

    @property
    def has_signal(self) -> bool:
        """True if any of its tokens has an advantage, or a teacher's distribution to be compared with."""
        taught = any(sample.teacher_ids is not None for e in self.episodes for sample in e.result.samples)
        return taught or any_signal(self.advantages, self.tokens)


def sample_id(position: int, episode: int) -> int:
    """int64 id of episode `episode` of the prompt at `position`; all its branches share it."""
    assert 0 <= episode < 1 << EPISODE_BITS, f"a group holds up to {1 << EPISODE_BITS} episodes"
    return position << EPISODE_BITS | episode


def score_groups(
    groups: Sequence[Group],
    scorer: Scorer | Sequence[Scorer],
    *,
    zero: str,
    scale: str = "none",
    env_names: Sequence[str] = (),
    references: Sequence[References] | None = None,
    floor: int = 0,
) -> list[ScoredGroup]:
    """Advantages of every group, in order, and which groups train; `references` are the groups', in order. No token
    trains that a version before `floor` sampled. `zero` and `scale`: see `AdvantageConfig`.

    With `zero = drop`, groups without any signal do not reach the trainer. A batch is never empty, so that step n
    still makes version n: where nothing at all would train, the smallest group (in tokens) without a signal stays with
    advantages of 0; where all rollouts were left out on purpose, the smallest one stays without a token that trains.
    Rewards, advantages and lengths are those of whole replies, also where their older tokens do not train.
    Raises OrchestratorError: no group at all could be scored, or the algorithm failed.
    """
    scored = [
        _score(group, scorer if isinstance(scorer, Scorer) else scorer[group.prompt.source], zero, env_names, given)
        for group, given in zip(groups, references or [()] * len(groups), strict=True)
    ]
    problems = [s.problem for s in scored if s.problem]
    if len(problems) == len(scored):
        raise OrchestratorError(f"none of the batch's {len(scored)} groups could be scored; e.g. {problems[0]}")
    scored = _scaled(scored) if scale == "batch" else scored
    scored = [replace(entry, episodes=[mask_older(episode, floor) for episode in entry.episodes]) for entry in scored]
    with_tokens = [i for i, entry in enumerate(scored) if any(map(_has_targets, _kept(entry)))]
    if any(scored[i].trains for i in with_tokens):
        return scored
    smallest = min(with_tokens or range(len(scored)), key=lambda i: _num_tokens(scored[i].episodes))
    scored[smallest] = (_without_signal if with_tokens else _without_targets)(scored[smallest])
    return scored


def _scaled(scored: Sequence[ScoredGroup]) -> list[ScoredGroup]:
    """Divide all advantages by their root mean square over the rollouts that may train, also those of groups without
    signal: their standard deviation, where an algorithm takes the group's mean off (REINFORCE++-baseline, arXiv
    2501.03262; ScaleRL, arXiv 2510.13786, section 3.2). Advantages that are all zero stay so."""
    every = np.concatenate([_to_scale(entry) for entry in scored])
    scale = float(np.sqrt(np.mean(every**2))) if every.any() else 1.0
    return [
        replace(
            entry,
            advantages=entry.advantages / scale,
            tokens=entry.tokens and [[row / np.float32(scale) for row in rows] for rows in entry.tokens],
        )
        for entry in scored
    ]


def _to_scale(entry: ScoredGroup) -> NDArray[np.float64]:
    """Return the advantages of a group's rollouts that may train; where the tokens of one differ, of each of its
    samples: the seats of a game may add up to nothing."""
    if entry.tokens is None:
        return entry.advantages[entry.kept]
    samples = [
        row[sample.loss_mask]
        for episode, rows, kept in zip(entry.episodes, entry.tokens, entry.kept.tolist(), strict=True)
        for sample, row in zip(episode.result.samples, rows, strict=True)
        if kept and sample.loss_mask.any()
    ]
    return np.array([np.sqrt(np.mean(row**2)) for row in samples])


def _kept(entry: ScoredGroup) -> list[Episode]:
    return [episode for episode, kept in zip(entry.episodes, entry.kept.tolist(), strict=True) if kept]


def _has_targets(episode: Episode) -> bool:
    return any(_tokens_by_trace(episode).values())


def _without_signal(entry: ScoredGroup) -> ScoredGroup:
    """Have a group train with advantages of 0: those of its episodes that may."""
    return replace(entry, trains=True, advantages=np.zeros_like(entry.advantages), tokens=None)


def _without_targets(entry: ScoredGroup) -> ScoredGroup:
    """Have a group stand in a batch of which nothing trains, whatever the objective: the weights stay as they are."""
    everyone = np.ones_like(entry.kept)
    return replace(_without_signal(entry), kept=everyone, episodes=[mask_all(episode) for episode in entry.episodes])


def _score(group: Group, scorer: Scorer, zero: str, env_names: Sequence[str], references: References) -> ScoredGroup:
    episodes, source = group.usable, group.prompt.source
    env = env_names[source] if source < len(env_names) else f"environment {source}"
    scores = scorer.score(episodes, env=env, position=group.prompt.position, references=references, greedy=group.greedy)
    trains = bool(scores.kept.any()) and (zero == "keep" or scores.has_signal)
    return ScoredGroup(
        group,
        episodes,
        scores.rewards,
        scores.advantages,
        scores.kept,
        trains,
        scores.problem,
        scores.tokens,
        references,
    )


def zero_groups(experiment: Experiment) -> str:
    """`keep` or `drop`: the configured `advantage.zero`, or with `auto` `keep` where a loss looks at tokens without an
    advantage, so that leaving them out would change it."""
    stated = experiment.orchestrator.advantage.zero
    if stated != "auto":
        return stated
    trainer = experiment.trainer  # a critic learns from rewards of 0 too
    return "keep" if trainer.loss.is_of_all_tokens or trainer.critic is not None else "drop"


def count_rollouts(scored: Sequence[ScoredGroup]) -> NDArray[np.int64]:
    """int64[2], the trained tokens and the rollouts (an episode's traces) that have any, of all groups that could be
    scored, also of those that do not train for want of a signal: `RankBatch.totals`."""
    counts = [
        count
        for entry in scored
        for episode, kept in zip(entry.episodes, entry.kept.tolist(), strict=True)
        if kept
        for count in _tokens_by_trace(episode).values()
    ]
    return np.array([sum(counts), np.count_nonzero(counts)], dtype=np.int64)


def _tokens_by_trace(episode: Episode) -> dict[int, int]:
    """Trace -> tokens of all its samples that train; nothing predicts a sample's first one."""
    found: dict[int, int] = {}
    for sample in episode.result.samples:
        found[sample.trace] = found.get(sample.trace, 0) + int(np.count_nonzero(sample.loss_mask[1:]))
    return found


def _num_tokens(episodes: Sequence[Episode]) -> int:
    return sum(e.num_sampled_tokens + e.num_prompt_tokens for e in episodes)


def train_samples(scored: Sequence[ScoredGroup], echo: Echo | None = None) -> list[TrainSample]:
    """All sequences that train; a sampled token gets its own advantage where it has one, else its episode's.

    Those of which all tokens are too old are left out, unless that were all there is.
    """
    samples: list[TrainSample] = []
    too_old: list[TrainSample] = []
    for entry in scored:
        if not entry.trains:
            continue
        prompt, originals = entry.group.prompt, entry.group.usable
        numbers = [i for i, slot in enumerate(entry.group.slots) if slot is not None and slot.usable]
        for i, episode in enumerate(entry.episodes):
            if not entry.kept[i]:
                continue
            ident = sample_id(prompt.position, numbers[i])
            whole_rollout = _tokens_by_trace(originals[i])
            for j, sample in enumerate(episode.result.samples):
                ce_weights = echo.weights(sample) if echo is not None else None
                is_idle = not sample.loss_mask.any() and (ce_weights is None or not ce_weights.any())
                whole = np.where(sample.loss_mask, np.float32(entry.advantages[i]), np.float32(0.0))
                advantages = whole if entry.tokens is None else entry.tokens[i][j]
                if episode.num_stale_tokens:
                    advantages = np.where(sample.loss_mask, advantages, np.float32(0.0))
                reward = episode.result.reward
                ids, of_rollout = (ident, prompt.position, prompt.source), whole_rollout[sample.trace]
                found = too_old if episode.num_stale_tokens and is_idle else samples
                found.append(TrainSample(sample, advantages, reward, *ids, ce_weights, of_rollout))
    return samples or too_old


def build_ranks(
    samples: Sequence[TrainSample],
    *,
    num_ranks: int,
    micro_batch_tokens: int,
    sampling: SamplingConfig | Sequence[SamplingConfig],
    share_prefixes: bool = True,
    single_rows: bool = False,
    totals: NDArray[np.int64] | None = None,
    num_mini_batches: int = 1,
    seed: Sequence[int] = (0,),
) -> list[RankBatch]:
    """Deal sequences into micro-batches of at most `micro_batch_tokens` and lay out each rank's arrays.

    Args:
        sampling: how they were sampled, of all or of each environment.
        share_prefixes: the trainer computes what a group's samples begin with once in a micro-batch.
        single_rows: each sequence takes a row of its own, padded to the longest of its micro-batch.
        totals: `count_rollouts` of the step.
        num_mini_batches, seed: see `deal_mini_batches`; each is packed by itself.

    Raises ValueError: there are no samples (a batch's groups have at least one each), or one is too long.
    """
    if not samples:
        raise ValueError("there is nothing to deal: a batch has at least one sample")
    lengths = np.array([s.sample.num_tokens for s in samples], dtype=np.int64)
    dealt = deal_mini_batches(samples, num_mini_batches, seed)
    if num_mini_batches > 1:
        samples = [replace(s, mini_batch=int(k)) for s, k in zip(samples, dealt, strict=True)]
    assignment: list[list[NDArray[np.int64]]] = [[] for _ in range(num_ranks)]
    for k in np.unique(dealt):
        own, sharing = np.flatnonzero(dealt == k), None
        if share_prefixes and not single_rows:
            sharing = find_sharing([_keys(samples[i].sample) for i in own], [samples[i].group_id for i in own])
        deal = pack_rows if single_rows else partial(pack, sharing=sharing)
        for rank, micro_batches in zip(assignment, deal(lengths[own], num_ranks, micro_batch_tokens), strict=True):
            rank += [own[chosen] for chosen in micro_batches]
    if isinstance(sampling, SamplingConfig):
        sampling = [sampling] * (1 + max((s.env_id for s in samples), default=0))
    likes = {
        name: next((found for s in samples if (found := _value(s, name)) is not None), None)
        for name, spec in SPECS.items()
        if spec.per == "token"
    }  # of all ranks alike, and looked for once: with hundreds of ranks there are millions of pairs
    return drop_idle([_rank_batch(samples, parts, sampling, totals, likes) for parts in assignment])


def deal_mini_batches(samples: Sequence[TrainSample], number: int, seed: Sequence[int]) -> NDArray[np.integer[Any]]:
    """int[S], the mini-batch of each sequence: prompts at random, as many to each as can be, and whole ones, whose
    rollouts begin alike; rollouts where there are fewer prompts than mini-batches. The same whatever the trainer's
    layout is. `seed`: of the run, and its step."""
    if number == 1:
        return np.zeros(len(samples), np.int64)
    prompts, rollouts = (np.array([getattr(s, name) for s in samples]) for name in ("group_id", "sample_id"))
    known, which = np.unique(prompts if len(np.unique(prompts)) >= number else rollouts, return_inverse=True)
    place = np.random.default_rng(list(seed)).permutation(len(known))
    return place[which] * number // len(known)


def _rank_batch(
    samples: Sequence[TrainSample],
    micro_batches: Sequence[NDArray[np.int64]],
    samplings: Sequence[SamplingConfig],
    totals: NDArray[np.int64] | None,
    likes: Mapping[str, NDArray[Any] | None],
) -> RankBatch:
    """Lay out a rank's sequences: each field of the table from the attribute of its name, of a `TrainSample`, its
    `Sample` or how its environment samples. `likes`: one of the batch's arrays of each field a token."""
    chosen = [samples[i] for micro_batch in micro_batches for i in micro_batch]
    arrays: dict[str, Any] = {
        "seq_offsets": _offsets([s.sample.num_tokens for s in chosen]),
        "micro_offsets": _offsets([len(micro_batch) for micro_batch in micro_batches]),
        "totals": totals,
    }
    for name, spec in SPECS.items():
        like = likes.get(name)
        if like is not None and name == "images":
            arrays |= _images(chosen)
        elif like is not None:
            arrays[name] = _join(spec, like, [(_value(s, name), s.sample.num_tokens) for s in chosen])
        elif spec.per == "sequence":
            values = [_value(s, spec.attribute or spec.column, samplings[s.env_id]) for s in chosen]
            arrays[name] = np.array([spec.absent if value is None else value for value in values], spec.dtype)
    return RankBatch(**arrays)


def _keys(sample: Sample) -> NDArray[np.integer[Any]]:
    """Return what two tokens must have in common to be computed as one: see `token_keys`."""
    shown = None if sample.images is None else image_keys(sample.images, sample.image_data)
    return token_keys(sample.token_ids, sample.routed, shown)


def _images(chosen: Sequence[TrainSample]) -> dict[str, NDArray[Any]]:
    """Lay out a rank's images: its sequences' numbers of them, in one table."""
    table = ImageTable()
    parts = [
        np.zeros(s.num_tokens, np.int32) if s.images is None else table.renumber(s.images, s.image_data)
        for s in (each.sample for each in chosen)
    ]
    content, offsets = table.arrays()
    images = np.concatenate([np.zeros(0, np.int32), *parts])
    return {"images": images, "image_bytes": content, "image_offsets": offsets}


def _join(spec: FieldSpec, like: NDArray[Any], found: Sequence[tuple[NDArray[Any] | None, int]]) -> NDArray[Any]:
    """Join what sequences have of a field, each with its length in tokens; `like` is one of the batch's."""
    absent = spec.absent if isinstance(spec.absent, int | float) else 0
    parts = [spec.stand_in(length, like, absent) if part is None else part for part, length in found]
    joined = np.concatenate([like[:0], *parts])
    return joined if spec.trailing else joined.astype(spec.dtype, copy=False)


def _value(sample: TrainSample, attribute: str, how: SamplingConfig | None = None) -> Any:
    """Return a sequence's own value, else its sample's, else that of how it was sampled."""
    owners = (sample, sample.sample, how)
    return next((getattr(owner, attribute) for owner in owners if hasattr(owner, attribute)), None)


def _offsets(lengths: Sequence[int]) -> NDArray[np.int64]:
    return np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]).astype(np.int64)
