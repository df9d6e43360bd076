"""`prime-hpc lint`: find mistakes of an experiment without a cluster. One module of rules a subject."""
