"""`prime-hpc fetch`: brings what a run's nodes will look for onto shared storage, from a machine with a network."""
