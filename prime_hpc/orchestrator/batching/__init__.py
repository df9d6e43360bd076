"""Finished groups to the trainer's batches: build samples, share prefixes, pack."""
