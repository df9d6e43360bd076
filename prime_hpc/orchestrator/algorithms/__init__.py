"""How the rewards of one group become advantages: one file an algorithm, found by `orchestrator.advantage.type`.

`Scorer` runs the whole way: penalties and overlong handling, then the algorithm, then which rollouts train. `assemble`
calls it for every group of a batch.

An episode of several agents has several traces, each with a reward of its own: the algorithms here compare every trace
with those of its role (`base.score_by_role`). An algorithm of your own sees the mean over an episode's traces in
`group.rewards`, and may ask `base.traces_of`.

To add an algorithm, write a file here with one function `(RewardGroup, AdvantageConfig) -> float64[G]` under
`@register("name")`, import it below and add the name to `config.sections.orchestrator.AdvantageName`. Or keep it in
your own package and state `orchestrator.advantage.type = module:function`; it is called as `function(group, **args)`
with `orchestrator.advantage.args`. A class instead of a function is made once with those arguments and has
`score_group(group)`; `score_tokens(group, advantages)` where the tokens of one rollout differ; and, where it remembers
anything, `state_dict()` and `load_state_dict(state)` in plain JSON.
"""

from prime_hpc.orchestrator.algorithms import (
    grpo,
    hierarchical_grpo,
    max_rl,
    opd,
    opo,
    opsd,
    rae,
    reinforce,
    rloo,
    sft_distill,
)
from prime_hpc.orchestrator.algorithms.base import Algorithm, RewardGroup, centered, get_algorithm, register
from prime_hpc.orchestrator.algorithms.scorer import Scorer, Scores

__all__ = [
    "Algorithm",
    "RewardGroup",
    "Scorer",
    "Scores",
    "centered",
    "get_algorithm",
    "grpo",
    "hierarchical_grpo",
    "max_rl",
    "opd",
    "opo",
    "opsd",
    "rae",
    "register",
    "reinforce",
    "rloo",
    "sft_distill",
]
