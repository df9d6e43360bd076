"""Everything that knows Slurm: its client, options, placement on nodes, batch scripts, submission and job endings.

`launch` (login node) and `supervisor` (inside the job) build on it; the roles never import it.
"""
