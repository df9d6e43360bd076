"""On-policy distillation: the policy's own tokens, scored by a frozen teacher (arXiv 2306.08543, 2306.13649).

    A_t = w (r_i - mean(r)) + clip(log p_teacher(t) - log p_policy(t), -g, g)

For tokens sampled by the policy, -(log p_policy - log p_teacher) is a one-sample estimate of -KL(policy || teacher) at
that place; as an advantage it is the reverse KL's policy gradient with a horizon of one token (every token answers for
itself; what it makes likely later is left out, which costs little and takes out most of the variance). log p_policy is
the sampling engine's, of the version that sampled the token; the trainer's ratio to it is the objective's business.
w = `orchestrator.advantage.reward_weight`, g = `max_gap`.

The teacher scores the very token ids, and must share the policy's tokenizer (checked before the run where both are on
disk). With `orchestrator.teacher.tokenizer = own` it reads the same text in its own tokens, and t is the shortest piece
of text that ends a token of both: each of the policy's tokens in it carries the whole gap, see
`cross_tokenizer/segments.py` for why, and 0 where the teacher has no word. Its log-probabilities are those of
temperature 1, so the policy must sample at 1 (refused otherwise).

With `trainer.loss.distillation` the loss compares the whole distributions, without the sample's variance, in the place
of this one token's ratio: A_t = w (r_i - mean(r)) then.

Edge cases: a token that the teacher thinks impossible (engines say -9999) weighs -g. Equal rewards leave the teacher's
word alone; a group of one has no reward part. Rewards of episodes of several agents are compared role by role. A
rollout that a limit cut short has tokens as good as any other's: `overlong` applies to it all the same. Algorithms of
your own get the scores too: a class with `teacher = "model"` and `score_tokens`.
"""

import numpy as np
from numpy.typing import NDArray

from prime_hpc.config.sections.advantage import AdvantageConfig
from prime_hpc.envs.samples import Sample
from prime_hpc.orchestrator.algorithms.base import (
    FloatArray,
    RewardGroup,
    centered,
    episode_means,
    score_by_role,
    token_advantages,
)


class Distillation:
    """See the module."""

    def __init__(self, config: AdvantageConfig) -> None:
        self._weight, self._max_gap = config.reward_weight, config.max_gap
        self._per_trace: dict[tuple[int, int], float] = {}

    def score_group(self, group: RewardGroup) -> FloatArray:
        """Return the rewards' part, the same for all tokens of a trace."""
        self._per_trace = score_by_role(group, lambda same: self._weight * centered(same.rewards))
        return episode_means(group, self._per_trace)

    def score_tokens(self, group: RewardGroup, advantages: FloatArray) -> list[list[FloatArray]]:
        """Return the teacher's part on top, token by token; nothing on top where the loss has the teacher's word."""
        if not group.references:
            return token_advantages(group, self._per_trace)
        return [
            [
                self._per_trace[i, sample.trace] + np.clip(_gaps(sample, scores), -self._max_gap, self._max_gap)
                for sample, scores in zip(episode.result.samples, teacher, strict=True)
            ]
            for i, (episode, teacher) in enumerate(zip(group.episodes, group.references, strict=True))
        ]


def _gaps(sample: Sample, scores: NDArray[np.float32]) -> FloatArray:
    """Return log p_teacher - log p_policy at every token, float64[L]."""
    if sample.teacher_gaps is not None:
        return np.nan_to_num(sample.teacher_gaps.astype(np.float64), nan=0.0)
    return scores.astype(np.float64) - sample.logprobs
