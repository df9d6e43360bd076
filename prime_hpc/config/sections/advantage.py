"""The section `orchestrator.advantage`: how rewards become advantages, and the penalties that change rewards before."""

from typing import Literal

from pydantic import Field, model_validator

from prime_hpc.config.named_code import ALGORITHMS, AlgorithmEntry, says_so
from prime_hpc.config.secret import Arguments
from prime_hpc.config.sections.base import Section
from prime_hpc.config.sections.names import AdvantageName
from prime_hpc.config.sections.teacher import EchoConfig


class LengthPenaltyConfig(Section):
    """Takes off a rollout's reward in proportion to its length, relative to the group's longest."""

    output: float = Field(0.1, ge=0)
    """Weight of the sampled tokens."""
    input: float = Field(0.0, ge=0)
    """Weight of the other tokens: prompts, tool results."""
    turns: float = Field(0.0, ge=0)
    """Weight of the model calls."""
    by_success: bool = True
    """Scale by the group's mean reward, so that only what already works is made short."""


class RepetitionPenaltyConfig(Section):
    """Takes off a rollout's reward in proportion to its repeated n-grams."""

    ngram: int = Field(8, ge=1)
    """Tokens of an n-gram."""
    coef: float = Field(0.5, ge=0)
    """The reward that a rollout loses which repeats nothing but itself."""


class SoftOverlongConfig(Section):
    """DAPO's soft overlong punishment: reward falls evenly over the last `buffer` tokens before the limit."""

    per: Literal["turn", "episode"] = "turn"
    """Of which tokens `max_tokens` is the limit: those of one turn (the longest one of an episode counts), or those of
    all its turns and agents together."""
    max_tokens: int | None = Field(None, ge=1)
    """Sampled tokens from which the whole `coef` is taken off; default, of a turn, `orchestrator.sampling.max_tokens`;
    to be stated for an episode."""
    buffer: int | None = Field(None, ge=1)
    """Tokens before the limit over which it rises; default a fifth of the limit."""
    coef: float = Field(1.0, ge=0)
    """Taken off at the limit and beyond."""

    @model_validator(mode="after")
    def _limits_an_episode(self) -> "SoftOverlongConfig":
        if self.per == "episode" and self.max_tokens is None:
            raise ValueError("per = episode needs max_tokens: sampling.max_tokens is the limit of one turn")
        return self


class AdvantageConfig(Section):
    """How rewards of a group become advantages."""

    type: AdvantageName = "grpo"
    """`grpo`: (r - mean) / std over the group; `gdpo`: the same of each reward function by
    itself, added up with their weights; `dr_grpo` (`grpo_no_std`): r - mean; `rloo`: r - mean of the others; `remax`: r
    - that of one more rollout of the prompt, sampled greedily, which does not train;
    `opo`: r - mean weighted by length, `optimal_token_baseline`: by the gradient up to each token; `max_rl`: (r - mean)
    / mean; `pass_at_k`: `grpo` of the best of every `pass_k` rollouts, `pkpo`: what a rollout adds to that best; `rae`:
    r - a moving average of each role's rewards in the environment; `reinforce` (`none`): r itself;
    `gae`: by `trainer.critic`, of r at the last token, without any group; `hierarchical_grpo`: each agent against its
    own kind; `grpo_shuffled`: a control, `grpo` of rewards dealt out at random within their group; `opd`, `opsd`,
    `sdpo`: token by token log p_teacher - log p_policy, the teacher being `orchestrator.teacher` or the policy that was
    shown the task's answer, or a rollout of the group that succeeded; `sft`: the teacher samples, the policy imitates;
    or your own as `module:function`. Where an episode has several agents, all compare the traces of one role."""
    args: Arguments = {}
    """Arguments of your own algorithm, by its names."""
    eps: float = Field(1e-6, gt=0)
    """`grpo`, `gdpo`, `pass_at_k`: added to the standard deviation."""
    scale: Literal["none", "batch"] = "none"
    """`batch`: divide the advantages of a step by their root mean square, all groups together; with `dr_grpo` (`grpo`
    has divided within each group) they are those of REINFORCE++-baseline and ScaleRL, with `gdpo` its paper's."""
    pass_k: int = Field(4, ge=2)
    """`pass_at_k`, `pkpo`: rollouts whose best one counts, the k of the pass@k that is trained; a prompt must have
    more, with `pkpo` as many."""
    decay: float = Field(0.95, ge=0, lt=1)
    """`rae`: what the moving average keeps of itself at each trace."""
    reward_weight: float = Field(0.0, ge=0)
    """`opd`, `opsd`, `sdpo`: weight of r - mean beside the teacher's word; 0 is distillation alone."""
    max_gap: float = Field(20.0, gt=0)
    """`opd`, `opsd`, `sdpo`: bound of a token's log p_teacher - log p_policy on both sides, in nats."""
    demonstration: str = "answer"
    """`opsd`: field of the task's data that the teacher is shown."""
    demonstration_text: str = "A correct solution of the task that follows: {demonstration}"
    """`opsd`, `sdpo`: system message that shows it, before everything else."""
    success_reward: float = 1.0
    """`sdpo`: rollouts from this reward on are shown to the teacher of their group's others."""
    within: list[str] = []
    """`hierarchical_grpo`: agents compared within one episode; default: those that act more than once in one."""
    echo: EchoConfig | None = None
    """Cross-entropy on the environment's tokens, beside any algorithm; off when absent."""
    zero: Literal["auto", "keep", "drop"] = "auto"
    """Groups whose advantages are all zero reach the trainer or not. `auto`: they do where they change the loss (a KL
    penalty, an entropy bonus, `trainer.loss.type = nll`); elsewhere they would only cost time, and the loss's
    denominators count them all the same (`trainer.loss.denominators`)."""
    overlong: Literal["keep", "mask", "drop", "penalize"] = "keep"
    """Rollouts that a limit (tokens, turns) cut short: `mask` scores them but does not train on them; `drop` treats
    them as failed; `penalize` takes `overlong_penalty` off their reward."""
    overlong_penalty: float = Field(1.0, ge=0)
    """`overlong = penalize`: taken off the reward."""
    timeout: Literal["drop", "penalize"] = "drop"
    """Rollouts that their environment's `timeout_s` cut off; either way `episodes/timeout` counts them. `drop`: as if
    they had not been sampled, so what is left of a group is the quick ones; `penalize`: each is compared with the group
    as a rollout of reward `timeout_reward`. It has no whole reply, so its own tokens do not train."""
    timeout_reward: float = 0.0
    """`timeout = penalize`: the reward of a rollout that was cut off."""
    soft_overlong: SoftOverlongConfig | None = None
    """Penalty near the token limit; off when absent."""
    length: LengthPenaltyConfig | None = None
    """Length penalty; off when absent."""
    repetition: RepetitionPenaltyConfig | None = None
    """Repetition penalty; off when absent."""

    @property
    def algorithm(self) -> AlgorithmEntry:
        """Facts of the algorithm; your own may be one that scores a single rollout."""
        return ALGORITHMS.get(self.type) or AlgorithmEntry(self.type, min_group=1)

    @property
    def compares_rollouts(self) -> bool:
        """True if one rollout alone has no advantage (unknown, so False, of your own algorithm)."""
        return self.algorithm.min_group > 1

    @property
    def has_greedy(self) -> bool:
        """True if each prompt has a greedy rollout, too; of your own algorithm as its code says."""
        return self.algorithm.greedy or (":" in self.type and says_so(self.type, "greedy"))

    @property
    def least_group(self) -> int:
        """Fewest rollouts of a prompt that a run may be set to."""
        return {"pass_at_k": self.pass_k + 1, "pkpo": self.pass_k}.get(self.type, self.algorithm.min_group)

    @property
    def distils(self) -> bool:
        """True if a teacher scores the policy's tokens."""
        return self.algorithm.teacher != ""

    @property
    def imitates(self) -> bool:
        """True if the teacher samples in the policy's place."""
        return self.algorithm.imitates

    @property
    def asks_teacher(self) -> bool:
        """True if it needs `orchestrator.teacher` (unknown, so False, of your own algorithm)."""
        return self.algorithm.teacher == "model" or self.imitates

    @model_validator(mode="after")
    def _args_are_used(self) -> "AdvantageConfig":
        if self.args and ":" not in self.type:
            raise ValueError(f"args are for your own algorithm; {self.type} has keys of its own here")
        if "{demonstration}" not in self.demonstration_text:
            raise ValueError("demonstration_text must hold {demonstration}, where the task's field is put")
        return self
