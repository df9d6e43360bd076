"""Environments: verifiers tasksets by name, episodes run in-process, token-exact training samples.

The orchestrator and the evals use `prime_hpc.envs.pool.EnvPool`; nothing is imported here but what makes verifiers
quicker to import: it is slow, and a login node has none.
"""

from prime_hpc.envs.patches import late_imports

late_imports.install()
