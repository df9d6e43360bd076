"""From a checked experiment to a running one: plan, prepare, run here or submit. Called by `prime_hpc.cli` alone.

Nothing in this room imports torch, transformers, vllm or verifiers: a login node has none of them to spare.
"""

from prime_hpc.launch.local import run, run_role, submit
from prime_hpc.launch.plan import plan_text

__all__ = ["plan_text", "run", "run_role", "submit"]
