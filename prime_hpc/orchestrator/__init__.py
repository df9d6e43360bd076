"""The orchestrator role: collects rollouts, scores them, packs batches, keeps the engines on the newest policy.

Pure state machines (`prompts`, `groups`, `servers`, `advantages`, `metrics`) know nothing of asyncio, HTTP or files;
`dispatch`, `weights`, `evaluate` and `loop` drive them. Started as `python -m prime_hpc.orchestrator.main RUN_DIR`.
"""
