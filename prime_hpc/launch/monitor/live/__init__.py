"""`prime-hpc status --watch`: a run, or many of them, as a view of the terminal that refreshes by itself."""
