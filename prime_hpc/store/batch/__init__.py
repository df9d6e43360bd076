"""Training batches in memory: a rank's arrays with their fields, and how samples are packed into them.

RL's orchestrator and SFT's data both build batches here; `store.batches` keeps them on disk.
"""
