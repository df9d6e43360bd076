"""Records of the service: its clients, their samplers, the line of an adapter's requests, and results on their way."""

import asyncio
from dataclasses import dataclass, field

from prime_hpc.trainer.tinker.board import Operation
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
