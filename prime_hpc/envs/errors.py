"""The environments' user-facing errors. Raised while an `EnvPool` starts, never by a running episode."""

from prime_hpc.config.secret import without_known
from prime_hpc.runtime.failures import NodeError

NO_SIGNAL = "signal only works in main thread"
"""Python's words to who sets a handler on another one."""


class EnvError(ValueError):
    """An environment cannot be set up as configured: the message says what is wrong and what to do.

    Logs have it, and packages put their arguments into what they raise: no secret of the config stays in it.
    """

    def __init__(self, message: str) -> None:
        super().__init__(without_known(message))


class EnvNodeError(EnvError, NodeError):
    """This node cannot play an environment that is configured well: another one, or later, may."""
