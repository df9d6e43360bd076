"""A finished episode as the orchestrator sees it: may it train, how old are its tokens, was the server at fault. Pure.

Made by `dispatcher` from the environments' `EpisodeResult`; kept in `groups.Group` until the batch is written.
"""

from dataclasses import dataclass, replace

import numpy as np

from prime_hpc.envs.samples import EpisodeResult, EpisodeState
from prime_hpc.store.batch.rank_batch import NOT_SAMPLED

SERVER_ERRORS = frozenset({"ProviderError", "VersionSpanError", "MalformedGenerateResponseError"})
"""`EpisodeResult.error_type` of failures that lie with the inference server: nothing is sent to it until it was looked
at, and the episode is worth one more try. A server that refuses a request (`RequestRefusedError`) works."""
COLLATERAL_ERRORS = frozenset(
    {"BlockedLoop", "WorkerLost", "AbortedGeneration", "UnusableAnswerError", "MalformedResponse"}
)
"""Failures in which episode and server are innocent: an environment blocked the loop of all, or ended the process that
played it with others and nobody knows which one it was; the engine aborted the requests of an adapter that is too old,
or has no log-probability of one token. Worth one more try."""


@dataclass(frozen=True)
class Episode:
    """One ended episode. Counts are over all its samples."""

    result: EpisodeResult
    usable: bool
    reason: str
    """One line: why it is not usable; of a usable one, that a deadline cut it off: it has a reward, no samples."""
    min_version: int | None
    """Oldest version that sampled a trained token; None without any."""
    max_version: int | None
    num_prompt_tokens: int
    """Tokens that were not trained: prompts, tool results, other turns."""
    num_sampled_tokens: int
    version_sum: int
    """Sum over the trained tokens of the version that sampled each, for the mean lag."""
    num_stale_tokens: int = 0
    """Those of the sampled tokens that do not train after all: they are too old for the batch."""


def mask_older(episode: Episode, floor: int) -> Episode:
    """Return the episode with only those tokens to train that version `floor` or a newer one sampled.

    It keeps its samples, also those of which nothing trains any more, its reward and its lengths.
    """
    if episode.min_version is None or episode.min_version >= floor:
        return episode
    samples, trained = [], []
    for sample in episode.result.samples:
        mask = sample.loss_mask & (sample.versions >= floor)
        logprobs = np.where(mask, sample.logprobs, np.float32(0))
        versions = np.where(mask, sample.versions, np.int32(NOT_SAMPLED))
        samples.append(replace(sample, loss_mask=mask, logprobs=logprobs, versions=versions))
        trained.append(versions[mask])
    young = np.concatenate(trained)
    return replace(
        episode,
        result=replace(episode.result, samples=samples),
        min_version=int(young.min()) if len(young) else None,
        max_version=int(young.max()) if len(young) else None,
        version_sum=int(young.sum()),
        num_stale_tokens=episode.num_sampled_tokens - len(young),
    )


def mask_all(episode: Episode) -> Episode:
    """Return the episode without a token that trains, in whatever loss; its samples, reward and figures stay."""
    samples = [
        replace(
            sample,
            loss_mask=np.zeros_like(sample.loss_mask),
            logprobs=np.zeros_like(sample.logprobs),
            versions=np.full_like(sample.versions, NOT_SAMPLED),
            roles=None,
        )
        for sample in episode.result.samples
    ]
    return replace(episode, result=replace(episode.result, samples=samples))


def is_retryable(result: EpisodeResult) -> bool:
    """Return whether the episode itself may be innocent. What an environment does wrong, it would do wrong again."""
    return is_server_error(result) or (result.state is EpisodeState.FAILED and result.error_type in COLLATERAL_ERRORS)


def is_server_error(result: EpisodeResult) -> bool:
    """Return whether the inference server, not the environment, made the episode fail."""
    return result.state is EpisodeState.FAILED and result.error_type in SERVER_ERRORS


def to_episode(
    result: EpisodeResult, seq_len: int, *, is_policy: bool = True, timeout_reward: float | None = None
) -> Episode:
    """Judge a result: usable needs samples that the trainer can take (at most `seq_len` tokens).

    Where another model sampled (not `is_policy`), tokens are of no policy version and never grow stale. With a
    `timeout_reward`, a rollout that its deadline cut off is usable without samples: it has this reward.
    """
    if result.state is EpisodeState.TIMEOUT and timeout_reward is not None:
        counted = replace(result, reward=timeout_reward, samples=[])
        return Episode(counted, True, result.reason or result.state.value, None, None, 0, 0, 0)
    reason = "" if result.usable else (result.reason or result.state.value)
    if not reason and not result.samples:
        reason = "no sampled tokens"
    longest = max((sample.num_tokens for sample in result.samples), default=0)
    if not reason and longest > seq_len:
        reason = f"a sample of {longest} tokens is longer than seq_len ({seq_len})"
    if reason:
        return Episode(result, False, reason, None, None, 0, 0, 0)
    if not is_policy:
        nobody = [replace(s, versions=np.full_like(s.versions, NOT_SAMPLED)) for s in result.samples]
        num_trained = sum(s.num_loss_tokens for s in nobody)
        num_prompt = sum(s.num_tokens for s in nobody) - num_trained
        return Episode(replace(result, samples=nobody), True, "", None, None, num_prompt, num_trained, 0)
    versions = [sample.versions[sample.loss_mask] for sample in result.samples]
    num_sampled = sum(len(v) for v in versions)
    return Episode(
        result=result,
        usable=True,
        reason="",
        min_version=min(int(v.min()) for v in versions),
        max_version=max(int(v.max()) for v in versions),
        num_prompt_tokens=sum(s.num_tokens for s in result.samples) - num_sampled,
        num_sampled_tokens=num_sampled,
        version_sum=sum(int(v.sum()) for v in versions),
    )
