"""`prime-hpc plan`: show where each role of an experiment would run, before anything does."""
