"""Stand-ins for inference servers and the bus, for what brings servers to a version: in one event loop, no sockets."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

from prime_hpc.client.inference import InferenceError


class Server:
    """An inference server that can be held up while it loads a version, and then has it or refuses it."""

    def __init__(self) -> None:
        self.version, self.folder = 0, Path()
        self.held: asyncio.Event | None = None
        self.began = asyncio.Event()
        self.refuses: set[int] = set()
        self.base_url = ""
        self.is_up = True
        self.is_asleep = False

    def move(self, base_url: str) -> None:
        self.base_url = base_url

    async def wait_ready(self, deadline_s: float) -> None:
        if not self.is_up:
            raise InferenceError(f"{self.base_url} was not ready after {deadline_s:g} s")

    async def health(self) -> bool:
        return self.is_up

    async def policy_version(self, name: str = "") -> int:
        return self.version

    async def served(self, name: str = "") -> tuple[int, str]:
        return self.version, str(self.folder)

    async def update_weights(self, folder: Path, version: int, name: str = "") -> dict[str, Any]:
        if not self.is_up:
            raise InferenceError("nobody is there")
        held, self.held = self.held, None
        if held is not None:
            self.began.set()
            await held.wait()
        if version in self.refuses:
            raise InferenceError(f"{folder} is not there", status=400)
        self.version, self.folder, self.is_asleep = version, folder, False
        return {}

    async def sleep(self) -> dict[str, Any]:
        if not self.is_up:
            raise InferenceError("nobody is there")
        self.is_asleep = True
        return {}

    async def reload_weights(self) -> dict[str, Any]:
        self.version, self.is_asleep = 0, False
        return {}


class Bus:
    """What the trainer has `said`, and the supervisor says."""

    def __init__(self) -> None:
        self.said: dict[str, dict[str, Any]] = {}
        self.heard_by: dict[str, Callable[[dict[str, Any]], None]] = {}

    def subscribe(self, topic: str, function: Callable[[dict[str, Any]], None]) -> None:
        self.heard_by[topic] = function

    def say(self, topic: str, **fields: Any) -> None:
        """A message to who has subscribed."""
        self.heard_by[topic](fields)

    def latest(self, topic: str) -> dict[str, Any] | None:
        return self.said.get(topic)

    def publish(self, topic: str, **fields: Any) -> None:
        """Nobody hears it."""
