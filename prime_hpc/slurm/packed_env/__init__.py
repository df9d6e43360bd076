"""A Python environment as one file: its facts, and how a process on a node starts from it."""
