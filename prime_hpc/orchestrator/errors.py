"""The orchestrator's one user-facing error. `main` reports it in one line and exits 1."""


class OrchestratorError(RuntimeError):
    """The run cannot go on; the message says why and what to look at."""
