"""Evaluation as a job of its own: plays episodes, keeps every one on disk, makes scores of them.

Nothing is imported here: `settings`, `statistics` and `compare` are for login nodes, `main` is the role in the job.
"""
