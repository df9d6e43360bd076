"""The weights that a server samples with, and their change: the backend protocol's part behind the admin routes."""

from typing import Any, Protocol

BASE_VERSION = 0
"""The base model's version."""


class PolicyFailedError(RuntimeError):
    """The engines' weights are undefined after a failed load; the server is ending."""


class UnavailableError(RuntimeError):
    """A version cannot be had now, by no fault of its own; the server goes on, and may be asked again."""


class Policy(Protocol):
    """The weights behind `routes`. Updates are serialised; the same update again is a no-op.

    Answers of `update`, `reload` and `serve_base` are JSON objects: `version`, `path`, `changed`, and of a load
    `seconds` with `check`, `read`, `open` and `paused`.
    """

    version: int
    """That samples now."""

    def served(self, name: str) -> tuple[int, str]:
        """Version and folder that sample under a model name. Raises BadVersionError: nothing is served under it."""

    def adapter_versions(self) -> dict[str, int]:
        """Model name -> version of every adapter that is served."""

    async def update(self, path: str, version: int, name: str) -> dict[str, Any]:
        """Load a version while requests are in flight: tokens that were sampled before it carry the old version,
        tokens after it the new one.

        Raises:
            BadVersionError: refused; the engines go on as they were.
            UnavailableError: not to be had now; the engines go on with a whole version.
            PolicyFailedError: the load failed half-way; the server ends.
        """

    async def reload(self, name: str) -> dict[str, Any]:
        """Go back to the base model, version 0; an adapter of another name is unloaded.
        Raises BadVersionError, PolicyFailedError: as `update`."""

    async def serve_base(self, name: str) -> dict[str, Any]:
        """Let a further model name stand for the base model until an adapter is loaded under it.
        Raises BadVersionError: the server serves no adapters."""

    async def sleep(self) -> dict[str, Any]:
        """Give up the engines' memory; requests wait until an update or `wake_up`. The answer says `asleep`.

        Raises:
            BadVersionError: the backend cannot.
            PolicyFailedError: an engine could not; the server ends.
        """

    async def wake_up(self) -> dict[str, Any]:
        """Take the memory back and go on with the version as it was.
        Raises BadVersionError, PolicyFailedError: as `sleep`."""
