"""An inference server as `weight_sync` needs it."""

from pathlib import Path
from typing import Any, Protocol


class Client(Protocol):
    """The part of `client.InferenceClient` that is needed here."""

    def move(self, base_url: str) -> None:
        """Ask there from now on."""

    async def wait_ready(self, deadline_s: float) -> None:
        """Until the server answers."""

    async def health(self) -> bool:
        """Return whether it answers."""

    async def policy_version(self, name: str) -> int:
        """Return the version that it serves."""

    async def load(self) -> dict[str, float]:
        """Return its figures of the moment."""
        ...

    async def update_weights(self, path: Path, version: int, name: str) -> dict[str, Any]:
        """Load a version."""

    async def reload_weights(self) -> dict[str, Any]:
        """Back to the base model."""

    async def sleep(self) -> dict[str, Any]:
        """Give up the engines' memory until the next version is loaded."""

    async def serve_base(self, name: str) -> dict[str, Any]:
        """Let a name stand for the base model."""
