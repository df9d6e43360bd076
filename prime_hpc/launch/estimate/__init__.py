"""Estimates from a model's config and from earlier runs: memory, time per step, adapter shapes."""
