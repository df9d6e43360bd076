"""`prime-hpc status`, `logs` and `diff`: read a run's state from its directory and from Slurm."""
