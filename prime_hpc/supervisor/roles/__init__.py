"""The processes that a supervisor starts: their commands, environments and ports, here or as Slurm steps."""
