"""One module a verb of the command line, each with `run(argv, program) -> exit code`.

A module is imported only when its verb is called, and imports what is heavy inside its functions. `common` holds what
they share.
"""
