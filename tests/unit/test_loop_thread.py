"""Jobs on a thread's loop: their ends, cancellation, and interrupts."""

import asyncio
import itertools
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import pytest
from loguru import logger

from prime_hpc.envs.loop_thread import AT_ONCE, Job, LoopThread

T = 20.0


async def _on(thread: LoopThread, act: Callable[[LoopThread], Any]) -> Any:
    try:
        return await act(thread)
    finally:
        assert await thread.stop(T)


def test_thousands_that_begin_together_leave_the_loop_its_turns() -> None:
    turns: list[int] = []
    begun = [0]

    async def work() -> None:
        begun[0] += 1
        await asyncio.sleep(0)

    async def watch() -> None:
        while begun[0] < 20 * AT_ONCE:
            turns.append(begun[0])
            await asyncio.sleep(0)

    async def act(thread: LoopThread) -> None:
        blocked = threading.Event()
        thread.loop.call_soon_threadsafe(blocked.wait, T)
        watching = thread.start(watch(), "watch")
        jobs = [thread.start(work(), "job") for _ in range(20 * AT_ONCE)]
        blocked.set()
        async with asyncio.timeout(T):
            for job in (watching, *jobs):
                await job.ended
        assert max(b - a for a, b in itertools.pairwise(turns)) <= 2 * AT_ONCE

    asyncio.run(_on(LoopThread("test"), act))


def test_every_job_ends_with_its_own_result_however_many_begin_together() -> None:
    async def work(number: int) -> int:
        await asyncio.sleep(0.001 * (number % 3))
        if number % 5 == 0:
            raise ValueError(number)
        if number % 7 == 0:
            raise asyncio.CancelledError
        return number

    async def act(thread: LoopThread) -> None:
        for round_ in range(20):
            jobs = [thread.start(work(number), f"job {number}") for number in range(1, 50)]
            async with asyncio.timeout(T):
                tasks = [await job.ended for job in jobs]
            for number, task in enumerate(tasks, 1):
                assert task.get_name() == f"job {number}", round_
                if number % 5 == 0:
                    assert isinstance(task.exception(), ValueError)
                elif number % 7 == 0:
                    assert task.cancelled()
                else:
                    assert task.result() == number

    asyncio.run(_on(LoopThread("test"), act))


def test_a_cancelled_job_is_not_waited_for_and_one_that_goes_on_is_named() -> None:
    said: list[str] = []
    seen: list[str] = []

    async def stubborn(end: asyncio.Event) -> None:
        try:
            await asyncio.sleep(T)
        except asyncio.CancelledError:
            seen.append("cancelled")
            await end.wait()

    async def act(thread: LoopThread) -> None:
        end = asyncio.Event()
        job = thread.start(stubborn(end), "stubborn one")
        while job.task is None:
            await asyncio.sleep(0.001)
        job.ended.cancel()
        thread.cancel(job, 0.05)
        deadline = time.monotonic() + T
        while not said and time.monotonic() < deadline:
            await asyncio.sleep(0.01)
        thread.loop.call_soon_threadsafe(end.set)

    sink = logger.add(lambda message: said.append(str(message)), level="WARNING")
    try:
        asyncio.run(_on(LoopThread("test"), act))
    finally:
        logger.remove(sink)
    assert seen == ["cancelled"]
    assert len(said) == 1 and "stubborn one ignores its cancellation" in said[0]


def test_a_job_that_is_cancelled_before_it_begins_never_runs() -> None:
    ran: list[str] = []

    async def work() -> None:
        ran.append("ran")

    async def act(thread: LoopThread) -> Job:
        thread.loop.call_soon_threadsafe(time.sleep, 0.2)
        job = thread.start(work(), "late")
        job.ended.cancel()
        thread.cancel(job, 1.0)
        other = thread.start(asyncio.sleep(0), "other")
        async with asyncio.timeout(T):
            await other.ended
        return job

    job = asyncio.run(_on(LoopThread("test"), act))
    assert ran == [] and job.task is None


@pytest.mark.parametrize("lost", ["begin", "deliver"])
def test_jobs_whose_wake_up_an_interrupt_has_swallowed_go_on_at_the_next_look(
    lost: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work(number: int) -> int:
        return number

    async def act(thread: LoopThread) -> None:
        swallowed = {"begin": "_begin", "deliver": "_deliver"}[lost]
        with monkeypatch.context() as patch:
            patch.setattr(thread, swallowed, lambda: None)
            jobs = [thread.start(work(number), str(number)) for number in range(3)]
            await asyncio.wait([job.ended for job in jobs], timeout=0.1)
        assert not any(job.ended.done() for job in jobs)
        thread.look_again()
        async with asyncio.timeout(T):
            assert [(await job.ended).result() for job in jobs] == [0, 1, 2]

    asyncio.run(_on(LoopThread("test"), act))


def test_jobs_that_begin_together_have_each_its_callers_context() -> None:
    number: ContextVar[int] = ContextVar("number", default=0)

    async def work() -> int:
        return number.get()

    async def act(thread: LoopThread) -> None:
        async def call(own: int) -> int:
            number.set(own)
            return (await thread.start(work(), "job").ended).result()

        async with asyncio.timeout(T):
            assert await asyncio.gather(*(call(own) for own in range(1, 50))) == list(range(1, 50))

    asyncio.run(_on(LoopThread("test"), act))


def test_how_late_the_thread_is_shows_while_it_is_blocked_and_afterwards() -> None:
    async def act(thread: LoopThread) -> None:
        blocked = threading.Event()

        async def block() -> None:
            blocked.wait(T)

        async with asyncio.timeout(T):
            job = thread.start(block(), "job")
            while thread.load().late_s < 0.5:
                await asyncio.sleep(0.01)
            blocked.set()
            await job.ended
            while len(thread._ticks) < 3:
                await asyncio.sleep(0.01)
        assert thread.load().late_s >= 0.5

    asyncio.run(_on(LoopThread("test"), act))


def test_how_busy_the_thread_is() -> None:
    async def act(thread: LoopThread) -> None:
        async def compute() -> None:
            while True:
                sum(range(1000))
                await asyncio.sleep(0)

        async with asyncio.timeout(T):
            thread.start(compute(), "job")
            while len(thread._ticks) < 3:
                await asyncio.sleep(0.01)
        assert 0.0 < thread.load().busy < 1.1

    asyncio.run(_on(LoopThread("test"), act))


FORKS = """
import asyncio, os, signal, sys, time
from prime_hpc.envs.loop_thread import LoopThread

async def forks(how):
    if (child := os.fork()) == 0:
        try:
            if how == "exits":
                sys.exit(0)
        finally:
            await asyncio.sleep(0.01)
            open(sys.argv[1], "w").close()
    return child

async def echo(reader, writer):
    while line := await reader.readline():
        writer.write(line)

async def talk(number):
    server = await asyncio.start_server(echo, "127.0.0.1")
    reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
    children = [await forks(how) for how in ("exits", "goes on")]
    for _ in range(number):
        writer.write(b"?\\n")
        assert await reader.readline() == b"?\\n"
    return children

children, end = LoopThread("environments").submit(talk(500)).result(60), time.monotonic() + 60
while children and time.monotonic() < end:
    children = [child for child in children if os.waitpid(child, os.WNOHANG) == (0, 0)]
    time.sleep(0.02)
for child in children:
    os.kill(child, signal.SIGKILL)
print("live on" if children or os.path.exists(sys.argv[1]) else "ended")
"""


def test_a_child_that_an_environment_forks_leaves_its_parents_loop_alone(tmp_path: Path) -> None:
    """It went on as a second loop on the same sockets, and took the first one's wake-ups from it."""
    command = [sys.executable, "-c", FORKS, str(tmp_path / "went-on")]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=280, check=True)
    assert ran.stdout == "ended\n", ran.stderr
