"""One module a verb of the command line, each with `run(argv, program) -> exit code`: of an experiment file, of a run
directory, of the cluster.

A module is imported only when its verb is called, and imports what is heavy inside its functions.
"""
