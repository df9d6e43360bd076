"""On-policy self-distillation: the teacher is the policy itself, having been shown the task's solution.

    A_t = w (r_i - mean(r)) + clip(log p(t | demonstration, x, y_<t) - log p(t | x, y_<t), -g, g)

with x the prompt, y the rollout, p the policy (arXiv 2601.18734).

The same as `opd.py` with another teacher: the run's own servers score `demonstration + prompt + rollout`, where the
demonstration is the field `orchestrator.advantage.demonstration` (default `answer`) of the task's data, written into a
system message by `demonstration_text` and put before the sample's own tokens, which stay as they were sampled. What the
policy could only have known from the solution is so taught to it without the solution.

Edge cases: those of `opd.py`. A task without that field ends the run with its fields named. The teacher moves with the
policy: a sample is scored by the version that is served when its episode ends, which may be newer than the one that
sampled it. A field that says little (a bare number) shifts little but the end of the rollout.
"""

from prime_hpc.orchestrator.algorithms.opd import Distillation


class SelfDistillation(Distillation):
    """See the module."""
