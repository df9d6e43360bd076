"""Hosts of environments' workers without the processes: away for a while, for good, or without room."""

import asyncio
import errno
import os
import socket
from typing import Any

import pytest

from prime_hpc.envs.samples import EpisodeState
from prime_hpc.envs.workers import fleet as fleet_module
from prime_hpc.envs.workers import host_link
from prime_hpc.envs.workers.fleet import Fleet
from prime_hpc.envs.workers.frames import Unpacker, pack
from prime_hpc.envs.workers.host import Session
from prime_hpc.envs.workers.host_link import Connection, HostLink
from tests.support.scripted_workers import Peer, Scripted, fails_once, with_fleet


class AtOnce(HostLink):
    """A host whose workers die before anybody here gets round to reading."""

    fails = False

    async def _reach(self) -> socket.socket:
        ours, self.theirs = socket.socketpair()
        ours.setblocking(False)
        return ours

    async def _start(self, control: socket.socket, order: dict[str, Any]) -> socket.socket:
        if self.fails:
            raise ConnectionError("no")
        self.theirs.sendall(pack("gone", worker=order["worker"], code=-9, episode=0, why=""))
        while order["worker"] in self._endings:
            await asyncio.sleep(0)
        ours, theirs = socket.socketpair()
        theirs.close()
        return ours


def test_how_a_worker_ended_is_known_though_it_did_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_link, "TOLD_WITHIN_S", 0.5)

    async def main() -> None:
        host = AtOnce()
        async with asyncio.timeout(200):
            made = await host.connect("x", 0, {})
            assert await made.receive() == []
            assert (await made.ending()).code == -9
            host.fails = True
            with pytest.raises(ConnectionError):
                await host.connect("x", 0, {})
        assert not host._endings
        await host.close()
        host.theirs.close()

    asyncio.run(main())


def test_a_host_without_room_for_a_worker_says_so_and_keeps_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> int:
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    monkeypatch.setattr(os, "fork", refuse)  # as where a limit of processes is met
    orchestrator, control = socket.socketpair()
    ours, theirs = socket.socketpair()
    with orchestrator, control, ours, theirs:
        order = pack("start", worker=3, label="x", log="", memory=0, loads={"tokenizer": ""})
        socket.send_fds(orchestrator, [order], [theirs.fileno()])
        Session(control).obey([])
        (told,) = Unpacker().feed(orchestrator.recv(1 << 16))
        theirs.close()
        assert (told["op"], told["worker"]) == ("gone", 3) and "no process can be had: [Errno 11]" in told["why"]
        assert ours.recv(1) == b""  # nobody holds the worker's end


class Away(Scripted):
    """A host that is not there for a while, once its first worker has ended."""

    refusals = 20

    async def connect(self, label: str, memory_bytes: int, loads: dict[str, Any]) -> Connection:
        if self.peers and self.refusals:
            self.refusals -= 1
            raise ConnectionRefusedError("nobody listens")
        return await super().connect(label, memory_bytes, loads)


def test_a_host_that_was_there_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host that is started again takes longer than a worker's few starts in a row."""
    monkeypatch.setattr(fleet_module, "FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(fleet_module, "LONGEST_PAUSE_S", 0.01)

    async def fail(peer: Peer) -> None:
        peer.end(-9)

    async def use(fleet: Fleet) -> None:
        assert (await fleet.run(0, 0)).reward == 5.0

    fleet = asyncio.run(with_fleet(fails_once(fail), use, host=Away, max_restarts=1))
    assert fleet.metrics()["restarts"] == 21


def test_a_host_that_does_not_come_back_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet_module, "FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(fleet_module, "AWAY_S", 0.1)
    monkeypatch.setattr(Away, "refusals", 10**9)

    async def fail(peer: Peer) -> None:
        peer.end(-9)

    async def use(fleet: Fleet) -> None:
        result = await fleet.run(0, 0)
        assert result.state is EpisodeState.FAILED and "nobody listens" in result.reason

    asyncio.run(with_fleet(fails_once(fail), use, host=Away, max_restarts=1))
