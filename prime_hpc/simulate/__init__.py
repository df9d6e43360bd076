"""`prime-hpc simulate`: step time, waits and cost of an experiment in this shape and in others, from measured runs."""
