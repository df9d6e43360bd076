"""The environments' one user-facing error. Raised while an `EnvPool` starts, never by a running episode."""


class EnvError(ValueError):
    """An environment cannot be set up as configured: the message says what is wrong and what to do."""
