"""Checkpoints as the run directory holds them: which are whole, which is the newest, which are deleted."""
