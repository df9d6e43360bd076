"""Training checkpoints: when to save, stage, write, verify and load."""
