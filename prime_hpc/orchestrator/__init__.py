"""The orchestrator role: collects rollouts, scores them, packs batches, keeps the engines on the newest policy.

Pure state machines (`rollouts.prompts`, `rollouts.groups`, `rollouts.servers`, `algorithms`, `metrics`) know nothing of
asyncio, HTTP or files; `rollouts.dispatcher`, `weight_sync`, `evaluation` and `loop` drive them. Started as `python -m
prime_hpc.orchestrator.main RUN_DIR`.
"""
