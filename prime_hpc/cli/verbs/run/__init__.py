"""Verbs of a run directory: look at it, steer it, take something out of it."""
