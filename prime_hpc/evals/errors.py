"""The evals' one user-facing error."""


class EvalError(RuntimeError):
    """An evaluation cannot go on; the message says what is wrong and what to do. Episodes played so far are kept."""
