"""Environments' processes without the processes: what they are told, who plays what, and workers that misbehave."""

import asyncio
import datetime
import selectors
import socket
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from prime_hpc.config.secret import Secret
from prime_hpc.config.sections.orchestrator import EnvConfig, EnvServersConfig
from prime_hpc.envs import pool as pool_module
from prime_hpc.envs.errors import EnvError
from prime_hpc.envs.pool import EnvPool
from prime_hpc.envs.pool_settings import ChatOptions
from prime_hpc.envs.samples import EpisodeState
from prime_hpc.envs.workers import fleet as fleet_module
from prime_hpc.envs.workers import host as host_module
from prime_hpc.envs.workers import host_link
from prime_hpc.envs.workers.assignments import MAX_SUSPECTED, Assignments
from prime_hpc.envs.workers.fleet import Fleet
from prime_hpc.envs.workers.frames import Unpacker, pack
from prime_hpc.envs.workers.host import Host
from prime_hpc.envs.workers.settings import refuse_unsendable, settings_from_plain, settings_to_plain
from tests.support.scripted_workers import CODE, CutOff, Peer, Scripted, fails_once, settings_of, with_fleet


def test_a_worker_is_told_secrets_and_nothing_that_was_not_stated() -> None:
    env = EnvConfig(id="x", args={"api_key": Secret("@the-secret"), "n": 3})  # of a file whose text begins so
    settings = settings_of(env, beside=[EnvConfig(id="y")], chat=ChatOptions(600, 2), api_key="the-key", vision=True)
    assert "the-key" not in repr(settings)
    (message,) = Unpacker().feed(pack("open", options=settings_to_plain(settings)))
    again = settings_from_plain(message["options"])
    (made,), (beside,) = again.envs, again.beside
    assert beside.id == "y" and replace(again, envs=settings.envs, beside=settings.beside) == settings
    assert made.args["api_key"].reveal() == "@the-secret" and made.args["n"] == 3 and made.workers == 0
    assert made.model_fields_set == {"id", "args", "workers"}


# ------------------------------------------------------------------------------------------------- assignments


def test_an_answer_counts_once_and_of_the_attempt_that_is_out() -> None:
    book = Assignments()
    episode = book.open(7, 0)
    book.assign(episode, "a")
    assert book.answered("b", episode.ident, 1) is None  # another worker's
    assert book.lost("a", None).again == [episode] and book.waiting() == [episode]
    book.assign(episode, "b")
    assert book.answered("b", episode.ident, 1) is None  # of the attempt before
    assert book.answered("a", episode.ident, 2) is None
    assert book.answered("b", episode.ident, 2) is episode
    assert book.answered("b", episode.ident, 2) is None  # twice
    assert book.num_dropped == 4 and not len(book)


def test_the_culprit_has_failed_and_its_neighbours_are_innocent() -> None:
    book = Assignments()
    one, other = book.open(0, 0), book.open(1, 0)
    for _ in range(2 * MAX_SUSPECTED):
        for episode in (one, other):
            if episode in book.waiting():
                book.assign(episode, "a")
        losses = book.lost("a", 999)  # known, and none of these
        assert losses.again == [one, other]
    for episode in (one, other):
        book.assign(episode, "a")
    losses = book.lost("a", one.ident)
    assert (losses.guilty, losses.again, losses.unlucky) == ([one], [other], [])


def test_those_that_wait_do_so_in_the_order_of_their_start() -> None:
    book = Assignments()
    episodes = [book.open(task, 0) for task in range(6)]
    for episode in episodes[:4]:
        book.assign(episode, "a" if episode.task % 2 else "b")
    assert book.waiting() == episodes[4:]
    book.lost("a", None)
    assert book.waiting() == [episodes[1], *episodes[3:]]
    book.forget(episodes[3])
    book.assign(episodes[1], "b")
    assert book.waiting() == episodes[4:] and len(book) == 5


def test_who_was_there_too_often_is_not_tried_again() -> None:
    book = Assignments()
    episode = book.open(0, 0)
    for _ in range(MAX_SUSPECTED - 1):
        book.assign(episode, "a")
        assert book.lost("a", 0).again == [episode]
    book.assign(episode, "a")
    assert book.lost("a", 0).unlucky == [episode] and not len(book)


# ------------------------------------------------------------------------------- workers that misbehave, scripted


def test_a_second_answer_and_one_for_an_episode_given_up_are_dropped() -> None:
    given_up = asyncio.Event()

    async def behave(peer: Peer) -> None:
        await peer.open()
        first = await peer.hear("play")
        peer.answer(first, 1.0)
        peer.answer(first, 2.0)
        second = await peer.hear("play")
        given_up.set()
        cancelled = await peer.hear("cancel")
        assert (cancelled["id"], cancelled["attempt"]) == (second["id"], second["attempt"])
        peer.answer(second, 3.0)
        peer.answer(await peer.hear("play"), 4.0)

    async def use(fleet: Fleet) -> None:
        assert (await fleet.run(0, 0)).reward == 1.0
        playing = asyncio.create_task(fleet.run(1, 0))
        await given_up.wait()
        playing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await playing
        assert (await fleet.run(2, 0)).reward == 4.0

    fleet = asyncio.run(with_fleet(behave, use))
    assert fleet.metrics()["dropped_answers"] == 2 and fleet.metrics()["episodes"] == 2


def test_an_answer_of_a_dead_workers_time_is_dropped_by_its_successor() -> None:
    orders: list[dict[str, Any]] = []

    async def behave(peer: Peer) -> None:
        await peer.open()
        orders.append(await peer.hear("play"))
        if len(orders) == 1:
            peer.end(-11, episode=orders[0]["id"] + 1)
            return
        peer.answer(orders[0], 1.0)  # as if it had survived
        peer.answer(orders[1], 2.0)

    async def use(fleet: Fleet) -> None:
        assert (await fleet.run(0, 0)).reward == 2.0

    fleet = asyncio.run(with_fleet(behave, use))
    assert fleet.metrics()["dropped_answers"] == 1 and fleet.metrics()["replayed"] == 1


def test_other_code_is_refused_by_name() -> None:
    async def behave(peer: Peer) -> None:
        await peer.open({"the environment's code": "xyz"})
        await peer.hear("never")

    async def use(fleet: Fleet) -> None:
        raise AssertionError("it must not start")

    with pytest.raises(EnvError, match="the environment's code \\(abc here, xyz there\\) differs"):
        asyncio.run(with_fleet(behave, use))


def test_a_worker_that_comes_back_with_other_code_plays_nothing() -> None:
    lives = 0

    async def behave(peer: Peer) -> None:
        nonlocal lives
        lives += 1
        await peer.open(CODE if lives == 1 else {"the environment's code": "xyz"})
        await peer.hear("play")
        peer.end(1)

    async def use(fleet: Fleet) -> None:
        result = await fleet.run(0, 0)
        assert result.state is EpisodeState.FAILED and "xyz there" in result.reason

    asyncio.run(with_fleet(behave, use))


def test_a_worker_that_is_too_large_before_its_first_episode_is_refused() -> None:
    """Its successors would be, too: the fleet replaced one after the other and waited for ever."""

    async def behave(peer: Peer) -> None:
        await peer.hear("open")
        peer.writer.write(pack("opened", fingerprint=CODE) + pack("beat", busy=0.0, memory=3 << 30))
        await peer.hear("stop")

    async def use(fleet: Fleet) -> None:
        raise AssertionError("it started")

    with pytest.raises(EnvError, match=r"holds 3\.00 GiB before its first episode: .*memory_gib = 2,"):
        asyncio.run(with_fleet(behave, use, memory_gib=2))


def test_a_worker_may_take_longer_to_load_what_took_long_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet_module, "OPEN_TIMEOUT_S", 0.05)

    async def behave(peer: Peer) -> None:
        await peer.hear("open")
        await asyncio.sleep(0.5)
        peer.say("opened", fingerprint=CODE)
        peer.answer(await peer.hear("play"), 1.0)

    async def use(fleet: Fleet) -> None:
        assert (await fleet.run(0, 0)).reward == 1.0

    fleet = asyncio.run(with_fleet(behave, use, load_s=60.0, max_restarts=0))
    assert not fleet.metrics()["restarts"]


def test_one_that_dies_again_and_again_is_given_up() -> None:
    async def behave(peer: Peer) -> None:
        await peer.hear("open")
        peer.end(7)

    async def use(fleet: Fleet) -> None:
        raise AssertionError("it must not start")

    with pytest.raises(EnvError, match="exit code 7"):
        asyncio.run(with_fleet(behave, use, max_restarts=0))


@pytest.mark.parametrize(
    ("said", "silence_s"), [(b"\x00\x00\x00\x01\x05", 60.0), (b"", 0.1)], ids=["nonsense", "nothing"]
)
def test_a_worker_that_says_nonsense_or_nothing_is_ended_and_its_episode_played_again(
    said: bytes, silence_s: float
) -> None:
    async def fail(peer: Peer) -> None:
        peer.writer.write(said)
        await peer.hear("never")

    async def use(fleet: Fleet) -> None:
        assert (await fleet.run(0, 0)).reward == 5.0

    assert asyncio.run(with_fleet(fails_once(fail), use, silence_s=silence_s)).metrics()["restarts"] >= 1


def test_episodes_of_a_machine_that_is_cut_off_are_played_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its workers counted as open until TCP gave them up, and got episodes that all met their deadlines."""
    monkeypatch.setattr(host_link, "TOLD_WITHIN_S", 0.05)

    async def fail(peer: Peer) -> None:
        await asyncio.Event().wait()

    async def use(fleet: Fleet) -> None:
        played = asyncio.create_task(fleet.run(0, 0))
        await asyncio.sleep(0)
        fleet.move_server(0, "x" * (64 << 20))  # more than is taken of what nobody reads: it waits to be sent
        async with asyncio.timeout(200):
            assert (await played).reward == 5.0

    assert asyncio.run(with_fleet(fails_once(fail), use, host=CutOff, silence_s=0.1)).metrics()["restarts"] >= 1


def test_a_server_that_moves_while_a_worker_opens_is_asked_where_it_is() -> None:
    opening, moved, told = asyncio.Event(), asyncio.Event(), list[Any]()

    async def behave(peer: Peer) -> None:
        await peer.hear("open")
        if opening.is_set():
            peer.say("opened", fingerprint=CODE)
            await peer.hear("play")
            opening.clear()
            peer.end(-9)
            return
        opening.set()
        await moved.wait()
        peer.say("opened", fingerprint=CODE)
        order = await peer.hear("play")
        told.extend(message["url"] for message in peer.inbox if message["op"] == "move")
        peer.answer(order, 1.0)

    async def use(fleet: Fleet) -> None:
        playing = asyncio.create_task(fleet.run(0, 0))
        while opening.is_set():
            await asyncio.sleep(0.01)
        await opening.wait()
        fleet.move_server(0, "http://there/v1")
        moved.set()
        assert (await playing).reward == 1.0

    opening.set()  # of the first life nothing is asked
    asyncio.run(with_fleet(behave, use))
    assert told == ["http://there/v1"]


def test_an_orchestrator_that_comes_again_takes_the_place_of_its_broken_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else nobody would read the old one, which is always readable once it has ended, nor collect its workers."""
    monkeypatch.setattr(host_module, "_reap", dict)  # the children of this process are not its own
    host = Host(None)
    with selectors.DefaultSelector() as selector:
        peers: list[socket.socket] = []
        for _ in range(2):
            for peer in peers:
                peer.close()  # seen in the same turn
            peer, sock = socket.socketpair()
            sock.settimeout(1.0)
            host._new[sock] = Unpacker()
            selector.register(sock, selectors.EVENT_READ)
            peer.sendall(pack("control", session="s"))
            host._turn(selector)
            peers.append(peer)
        (session,) = host._sessions.values()
        assert [key.fileobj for key in selector.get_map().values()] == [session.control] == [sock]
        for end in (peers[1], sock, host._wakeup, host._alarm):
            end.close()


LEFT = """
import mmap, os, time
import psutil
from prime_hpc.envs.workers.host import _Worker
from prime_hpc.runtime.process_tree import become_subreaper

become_subreaper()
worker = os.fork()
if worker == 0:
    os.setsid()
    if os.fork() == 0:
        time.sleep(40)
    os._exit(3)
os.waitpid(worker, 0)
(left,) = psutil.Process().children()
_Worker(worker, "its mark", mmap.mmap(-1, mmap.PAGESIZE), 0).kill_leftovers()
assert left.wait(20) == -9
"""


def test_copies_of_a_worker_end_with_it() -> None:
    """What `multiprocessing` forks has no mark in its environment; it held the worker's connection open, too."""
    done = subprocess.run([sys.executable, "-c", LEFT], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_workers_of_several_environments_are_dealt_out_over_the_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[list[str]] = []

    class Noted:
        def __init__(self, name: str, number: Any, servers: Any, hosts: list[str], **options: Any) -> None:
            found.append([hosts[slot % len(hosts)] for slot in range(1 if number == "auto" else number)])

        async def start(self) -> None:
            """Nothing."""

    monkeypatch.setattr(pool_module, "Fleet", Noted)
    monkeypatch.setattr(pool_module, "fingerprint", lambda source: {})
    monkeypatch.setattr(pool_module, "remote_hosts", lambda servers, urls: ["a", "b", "c"])
    envs = [EnvConfig(id=f"e{n}", workers=number) for n, number in enumerate((1, "auto", 2, 0, 1))]
    pool = EnvPool(replace(settings_of(envs[0]), envs=envs, samplings=[{}] * len(envs)))
    pool.sources = cast(Any, [SimpleNamespace(name=env.id, config=env, load_s=0.0) for env in envs])
    asyncio.run(pool._start_fleets())
    assert found == [["a"], ["b"], ["c", "a"], ["b"]]


def test_episodes_in_flight_end_with_the_fleet() -> None:
    async def behave(peer: Peer) -> None:
        await peer.open()
        await peer.hear("never")

    async def use(fleet: Fleet) -> None:
        playing = asyncio.create_task(fleet.run(0, 0))
        await asyncio.sleep(0)
        await fleet.close()
        assert (await playing).state is EpisodeState.CANCELLED

    asyncio.run(with_fleet(behave, use))


def test_a_task_that_takes_long_to_make_costs_an_episode_none_of_its_time() -> None:
    async def behave(peer: Peer) -> None:
        await peer.open()
        order = await peer.hear("play")
        peer.say("making", id=order["id"], attempt=order["attempt"])
        asked.set()
        await made.wait()
        peer.say("begun", id=order["id"], attempt=order["attempt"])
        peer.answer(order, 7.0)

    async def use(fleet: Fleet) -> None:
        playing = asyncio.create_task(fleet.run(0, 0))
        await asked.wait()
        while fleet._timers:  # its deadline is lifted
            await asyncio.sleep(0.01)
        made.set()
        assert (await playing).reward == 7.0

    asked, made = asyncio.Event(), asyncio.Event()
    asyncio.run(with_fleet(behave, use))


@pytest.mark.parametrize("value", [datetime.date(2024, 8, 1), 2**70])
def test_arguments_that_cannot_be_sent_are_named_and_hang_nothing(value: Any) -> None:
    env = EnvConfig(id="toy", args={"fine": [1, "a"], "day": value})
    options = settings_to_plain(settings_of(env))
    with pytest.raises(EnvError, match=r"'toy': args\.day cannot be told to a worker"):
        refuse_unsendable("toy", options)
    refuse_unsendable("toy", settings_to_plain(settings_of(EnvConfig(id="toy", args={"fine": 1}))))

    async def main() -> None:
        hosts = [Scripted(Peer.open)]
        told: dict[str, Any] = {"moved": list, "expected": CODE, "timeout_s": 60.0}
        fleet = Fleet("toy", 1, EnvServersConfig(), hosts, options=options, **told)
        with pytest.raises(EnvError, match=r"worker toy\[0\]: "):
            await asyncio.wait_for(fleet.start(), 200)
        await fleet.close()

    asyncio.run(main())
