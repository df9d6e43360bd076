"""Checks of the nodes inside the allocation, before the roles start. `run.run_preflight` is the way in."""
