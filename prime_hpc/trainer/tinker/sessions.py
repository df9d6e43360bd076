"""Records of the service: its clients, their samplers, the line of an adapter's requests, and results on their way."""

import asyncio
import time
from dataclasses import dataclass, field
from typing import Any

from pydantic_core import to_json

from prime_hpc.trainer.tinker.board import Failure, Operation
from prime_hpc.trainer.tinker.paths import Saved


class GoneError(LookupError):
    """Nothing of that name is here (any more); the message says why."""


@dataclass
class Future:
    """A result on its way."""

    model_id: str
    done: asyncio.Event = field(default_factory=asyncio.Event)
    body: bytes = b""
    is_protobuf: bool = False
    ended: float = 0.0

    def settle(self, result: Any) -> None:
        """Give it its result: bytes as they are, a failure in the client's form, else what JSON can hold."""
        self.is_protobuf = isinstance(result, bytes)
        if isinstance(result, Failure):
            result = {"error": result.message, "category": "user" if result.is_user else "server"}
        self.body = result if isinstance(result, bytes) else to_json(result)
        self.ended = time.monotonic()
        self.done.set()


@dataclass
class Sampler:
    """A sampler of a client: of a save, of the base model, or of whatever its adapter published last."""

    saved: Saved | None
    follows: str = ""
    """The adapter, of an `inflight` sampler."""


@dataclass
class Session:
    """One client."""

    seen: float
    models: list[str] = field(default_factory=list)
    samplers: list[str] = field(default_factory=list)
    user_metadata: dict[str, str] = field(default_factory=dict)


@dataclass
class Line:
    """The numbers of an adapter's requests."""

    next: int = 1
    held: dict[int, Operation] = field(default_factory=dict)
