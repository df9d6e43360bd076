"""Environments: verifiers tasksets by name, episodes run in-process, token-exact training samples.

The orchestrator and the evals use `prime_hpc.envs.pool.EnvPool`; nothing is imported here, because verifiers is slow
to import and a login node has none.
"""
