"""From a checked experiment to a running one: plan, prepare, run here or submit.

Nothing in this room imports torch, transformers, vllm or verifiers: a login node has none of them to spare. The package
itself imports nothing: a job imports it too.
"""
