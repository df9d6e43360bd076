"""Finished episodes with known tokens, for tests of the orchestrator's pure parts."""

import numpy as np

from prime_hpc.envs.samples import EpisodeResult, EpisodeState, Sample
from prime_hpc.orchestrator.rollouts.episodes import Episode, to_episode


def make_sample(versions: list[int], *, num_prompt: int = 3, first_token: int = 100, reward: float = 0.0) -> Sample:
    """A prompt of `num_prompt` tokens, then one sampled token per entry of `versions`."""
    sampled = len(versions)
    total = num_prompt + sampled
    return Sample(
        token_ids=np.arange(first_token, first_token + total, dtype=np.int32),
        loss_mask=np.arange(total) >= num_prompt,
        logprobs=np.where(np.arange(total) >= num_prompt, -0.5 - np.arange(total) / 100, 0).astype(np.float32),
        versions=np.array([-1] * num_prompt + versions, dtype=np.int32),
        num_turns=1,
        reward=reward,
    )


def make_result(
    versions: list[int] | None = None, *, reward: float = 0.0, samples: list[Sample] | None = None
) -> EpisodeResult:
    """A completed, usable result."""
    return EpisodeResult(
        state=EpisodeState.COMPLETED,
        usable=True,
        samples=samples if samples is not None else [make_sample(versions or [0], reward=reward)],
        reward=reward,
    )


def failed_result(reason: str = "TaskError: boom", error_type: str = "TaskError") -> EpisodeResult:
    """A result that may not train."""
    return EpisodeResult(state=EpisodeState.FAILED, usable=False, reason=reason, error_type=error_type)


def make_episode(versions: list[int] | None = None, *, reward: float = 0.0) -> Episode:
    """A usable episode."""
    return to_episode(make_result(versions, reward=reward), seq_len=1000)


def failed_episode() -> Episode:
    """An unusable episode."""
    return to_episode(failed_result(), seq_len=1000)
