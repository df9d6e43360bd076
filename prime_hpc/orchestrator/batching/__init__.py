"""Finished groups to the trainer's batches."""
