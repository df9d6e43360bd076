"""Curriculum: the choice of the next task, and of the completed groups that join a batch.

`Curriculum` holds one sampler and any number of admission gates; `loop` hands its sampler to the `PromptStream` and its
gates to the `GroupBook`.

Your own ones are named in the config by where they are:

- a sampler is a class `module:Class`, made with `sampler.args`. `choose(draw)` returns the task of a new position
  (`prompts.Draw`); `observe(group)` hears of every group that ended in a batch or at a gate, once.
- a gate is a function `module:function`, called as `function(group, **args)`, or a class made with `args` that has
  `admits(group)`; it returns whether the group joins the batch.

Either may have `state_dict()` and `load_state_dict(state)` in plain JSON, stored with every batch; a sampler may have
`metrics() -> dict[str, float]`.
"""

from prime_hpc.orchestrator.curriculum.base import CompletedGroup, Gate, TaskSampler
from prime_hpc.orchestrator.curriculum.curriculum import Curriculum
from prime_hpc.orchestrator.curriculum.gates import make_gate
from prime_hpc.orchestrator.curriculum.samplers import DifficultyPool, make_sampler

__all__ = ["CompletedGroup", "Curriculum", "DifficultyPool", "Gate", "TaskSampler", "make_gate", "make_sampler"]
