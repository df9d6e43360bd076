"""Event loops whose deadlines forgive a stall: of the process, or of the file system under it (see `clock`)."""

import asyncio
import os
import time
import weakref
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

from prime_hpc.runtime.clock import AwakeClock

LOOP_GAP_S = 5.0
LOOP_READ_S = 1.0

_LOOPS: "weakref.WeakSet[asyncio.AbstractEventLoop]" = weakref.WeakSet()


def new_event_loop(raw: Callable[[], float] = time.monotonic) -> asyncio.AbstractEventLoop:
    """Make an event loop whose timers stand still while it does: stopped with its process, or in a file that hangs.

    Else all requests that were in flight would be late at once when it goes on, with answers that nobody has read yet.
    """
    loop = asyncio.new_event_loop()
    _LOOPS.add(loop)
    clock = AwakeClock(raw, LOOP_GAP_S)
    loop.time = clock.now  # type: ignore[method-assign]

    def wake() -> None:  # whatever else it waits for
        loop.call_later(LOOP_READ_S, wake)

    wake()
    return loop


def _let_go() -> None:
    """In a fork: have its copies of the loops run nothing more, and take no wake-ups. The sockets, and the object that
    polls them, are the parent's too."""
    for loop in living_loops():
        own: Any = loop
        own._ready.clear()
        own._scheduled.clear()
        own._selector.close()


os.register_at_fork(after_in_child=_let_go)


@contextmanager
def idle_loop() -> Iterator[None]:
    """Give this thread a loop, as a program's first one has: what packages ask for as they are imported
    (`asyncio.get_event_loop()`), to run something at once."""
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    try:
        yield
    finally:
        asyncio.set_event_loop(None)
        loop.close()


def living_loops() -> list[asyncio.AbstractEventLoop]:
    """Return the loops of this process that were made here and are not closed."""
    return [loop for loop in list(_LOOPS) if not loop.is_closed()]


def loop_time() -> float:
    """Of the running event loop; outside of one, of a monotonic clock."""
    try:
        return asyncio.get_running_loop().time()
    except RuntimeError:
        return time.monotonic()


@asynccontextmanager
async def task_group() -> AsyncIterator[asyncio.TaskGroup]:
    """Make an `asyncio.TaskGroup` that ends with the first error itself, and not with a group of it.

    Without `except*`: what is raised there is a group again before Python 3.11.4 (Debian 12 has 3.11.2).
    """
    try:
        async with asyncio.TaskGroup() as tasks:
            yield tasks
    except ExceptionGroup as group:
        found: Exception = group
        while isinstance(found, ExceptionGroup):
            found = found.exceptions[0]
        raise found from None


async def ended(future: "asyncio.Future[Any]", timeout: float | None = None) -> bool:
    """Wait until a future is done, however it is, for so many seconds at most; return whether it is.

    `asyncio.wait` of one, for a third of its cost: short episodes wait a few times.
    """
    if future.done():
        return True
    loop = asyncio.get_running_loop()
    waiter = loop.create_future()

    def wake(*_: object) -> None:
        if not waiter.done():
            waiter.set_result(None)

    future.add_done_callback(wake)
    timer = None if timeout is None else loop.call_later(timeout, wake)
    try:
        await waiter
    finally:
        future.remove_done_callback(wake)
        if timer is not None:
            timer.cancel()
    return future.done()


def in_loop(loop: asyncio.AbstractEventLoop, call: Callable[[Any], object]) -> Callable[[Any], None]:
    """Return what has the event loop make a call of one argument, from any thread; not once the loop is closed."""

    def from_thread(argument: Any) -> None:
        if not loop.is_closed():
            loop.call_soon_threadsafe(call, argument)

    return from_thread
