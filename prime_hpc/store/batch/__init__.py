"""Training batches in memory: a rank's arrays with their fields, and how samples are packed into them.

RL's orchestrator and SFT's data both build batches here; `rank_files` writes and reads RL's, `store.batches` keeps
book of them.
"""
