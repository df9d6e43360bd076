"""How the rewards of one group become advantages: one file an algorithm, found by `orchestrator.advantage.type`.

`Scorer` runs the whole way: penalties and overlong handling, then the algorithm, then which rollouts train, for every
group of a batch.

An episode of several agents has several traces, each with a reward of its own: the algorithms here compare every trace
with those of its role (`base.score_by_role`). An algorithm of your own sees the mean over an episode's traces in
`group.rewards`, and may ask `base.traces_of`.

To add an algorithm, write a file here with one function `(RewardGroup, AdvantageConfig) -> float64[G]`, or a class made
with the config, and its row in `config.named_code.ALGORITHMS`. A function that sees lengths, rewards and their named
parts alone serves episodes of several agents too (`base.score_by_role`). Or keep it in your own package and state
`orchestrator.advantage.type = module:function`; it is called as `function(group, **args)` with
`orchestrator.advantage.args`. A class instead of a function is made once with those arguments and has
`score_group(group)`; `score_tokens(group, advantages)` where the tokens of one rollout differ; and, where it remembers
anything, `state_dict()` and `load_state_dict(state)` in plain JSON. Its attribute `greedy = True` asks for one greedy
rollout of each prompt, which it finds in `group.greedy`; written as this constant, lint, plan and simulate count it.
"""

from prime_hpc.orchestrator.algorithms.base import Algorithm, RewardGroup, centered, get_algorithm
from prime_hpc.orchestrator.algorithms.scorer import Scorer, Scores

__all__ = [
    "Algorithm",
    "RewardGroup",
    "Scorer",
    "Scores",
    "centered",
    "get_algorithm",
]
