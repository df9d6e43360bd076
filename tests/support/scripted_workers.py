"""Workers of environments that do as a test says, over real sockets: their hosts, and fleets of them."""

import asyncio
import socket
from collections.abc import Awaitable, Callable
from typing import Any, cast

from prime_hpc.config.sections.orchestrator import EnvConfig, EnvServersConfig
from prime_hpc.envs.pool_settings import PoolSettings
from prime_hpc.envs.samples import EpisodeResult, EpisodeState
from prime_hpc.envs.workers.fleet import Fleet
from prime_hpc.envs.workers.frames import Unpacker, pack
from prime_hpc.envs.workers.host_link import Connection, Ending
from prime_hpc.envs.workers.records import result_to_plain
from prime_hpc.envs.workers.settings import settings_to_plain

CODE = {"the environment's code": "abc"}


def settings_of(env: EnvConfig, **options: Any) -> PoolSettings:
    asked: dict[str, Any] = {"urls": ["http://host:1/v1"], "model_name": "m", "tokenizer_path": "t"}
    asked |= {"split": "train", "seed": 0, "max_model_len": 64, "samplings": [{"top_k": 5}]}
    return PoolSettings(envs=[env], **(asked | options))


class Scripted:
    """A host whose workers do as a test says: `behave(worker)` for each that is started."""

    def __init__(self, behave: "Callable[[Peer], Awaitable[None]]") -> None:
        self.behave = behave
        self.peers: list[Peer] = []

    async def connect(self, label: str, memory_bytes: int, loads: dict[str, Any]) -> Connection:
        ours, theirs = socket.socketpair()
        ended: asyncio.Future[Ending] = asyncio.get_running_loop().create_future()
        streams, host = await asyncio.open_connection(sock=ours), cast(Any, self)
        made = Connection(host, len(self.peers), ended, *streams)
        peer = Peer(made, *(await asyncio.open_connection(sock=theirs)))
        self.peers.append(peer)
        peer.task = asyncio.create_task(peer.run(self.behave))
        return made

    def kill(self, number: int, why: str) -> None:
        self.peers[number].end(-9, why=why)


class Peer:
    """The worker's end of a connection."""

    task: "asyncio.Task[None]"

    def __init__(self, connection: Connection, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connection, self.reader, self.writer = connection, reader, writer
        self.unpacker = Unpacker()
        self.inbox: list[dict[str, Any]] = []

    async def run(self, behave: "Callable[[Peer], Awaitable[None]]") -> None:
        await behave(self)
        await self.hear("stop")
        self.end(0)

    async def hear(self, op: str) -> dict[str, Any]:
        """The next message of this kind; ends the worker where it is told to stop."""
        while True:
            for message in self.inbox:
                if message["op"] == op:
                    self.inbox.remove(message)
                    return message
            data = await self.reader.read(1 << 16)
            if not data:
                self.end(0)
                await asyncio.Event().wait()
            self.inbox += self.unpacker.feed(data)

    async def open(self, code: dict[str, str] = CODE) -> None:
        await self.hear("open")
        self.say("opened", fingerprint=code)

    def say(self, op: str, **fields: Any) -> None:
        self.writer.write(pack(op, **fields))

    def answer(self, order: dict[str, Any], reward: float) -> None:
        result = result_to_plain(EpisodeResult(EpisodeState.COMPLETED, True, reward=reward))
        self.say("ended", id=order["id"], attempt=order["attempt"], result=result)

    def end(self, code: int, episode: int = 0, why: str = "") -> None:
        if not self.connection.ended.done():
            self.connection.ended.set_result(Ending(code, episode, why))
        self.writer.close()


class CutOff(Scripted):
    """A host that nothing reaches any more."""

    def kill(self, number: int, why: str) -> None:
        """Nothing."""


async def with_fleet(
    behave: Callable[[Peer], Awaitable[None]],
    use: Callable[[Fleet], Awaitable[None]],
    *,
    host: type[Scripted] = Scripted,
    load_s: float = 0.0,
    **limits: Any,
) -> Fleet:
    fleet = Fleet(
        "toy",
        1,
        EnvServersConfig(**limits),
        [host(behave)],
        options=settings_to_plain(settings_of(EnvConfig(id="toy"))),
        moved=list,
        expected=CODE,
        timeout_s=60.0,
        load_s=load_s,
    )
    try:
        async with asyncio.timeout(200):
            await fleet.start()
            await use(fleet)
    finally:
        await fleet.close()
    return fleet


def fails_once(fail: Callable[[Peer], Awaitable[None]]) -> Callable[[Peer], Awaitable[None]]:
    """The first worker does not answer its first episode, but as told; all others give 5.0."""
    lives = 0

    async def behave(peer: Peer) -> None:
        nonlocal lives
        lives += 1
        await peer.open()
        order = await peer.hear("play")
        if lives == 1:
            await fail(peer)
        peer.answer(order, 5.0)

    return behave
