"""Verbs of an experiment file: what would run, and start it."""
