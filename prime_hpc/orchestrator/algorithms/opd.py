"""On-policy distillation: the policy's own tokens, scored by a teacher, or by the policy that has seen more.

`opd`: the teacher is a frozen model (arXiv 2306.08543, 2306.13649).

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

`opsd`: the teacher is the policy itself, having been shown the task's solution (arXiv 2601.18734).

    A_t = w (r_i - mean(r)) + clip(log p(t | demonstration, x, y_<t) - log p(t | x, y_<t), -g, g)

with x the prompt, y the rollout, p the policy. The run's own servers score `demonstration + prompt + rollout`, where
the demonstration is the field `orchestrator.advantage.demonstration` (default `answer`) of the task's data, written
into a system message by `demonstration_text` and put before the sample's own tokens, which stay as they were sampled.
What the policy could only have known from the solution is so taught to it without the solution.

Edge cases: those of `opd`. A task without that field ends the run with its fields named. The teacher moves with the
policy: a sample is scored by the version that is served when its episode ends, which may be newer than the one that
sampled it. A field that says little (a bare number) shifts little but the end of the rollout.

`sdpo`: the teacher is the policy itself, having been shown another rollout of the same prompt that succeeded
(self-distillation policy optimization, arXiv 2601.20802).

    A_t = w (r_i - mean(r)) + clip(log p(t | y_j, x, y_<t) - log p(t | x, y_<t), -g, g)

with j the first other rollout of the group whose reward is `success_reward` or more; its text stands where `opsd` has
the demonstration: what followed the prompt, the environment's turns too, a reply's reasoning (`reasoning_content`) not.
So no answer is needed, and every token of a failed rollout is told apart from what a success would have said there. The
paper shows feedback of the environment, too, and its teacher may be a moving average of the policy; here it is the
policy that is served once the group is complete.

Edge cases: those of `opd`. A rollout without such a peer, or for which prompt, peer and rollout together are too long,
has no teacher: its tokens have the rewards' part alone. With `trainer.loss.distillation` such a one is compared with
the policy that sampled it, shown nothing. Peers are those of the whole episode, by its reward from the environment,
before penalties; of several agents the first one's text is shown.
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
