"""Waiting for one future, however it ends, and for a group of tasks, whose first error is told."""

import asyncio
import re
from pathlib import Path

import pytest

from prime_hpc.runtime.event_loops import ended, task_group


def test_a_future_is_waited_for_however_it_ends() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        for end in ("result", "error", "cancelled"):
            for timeout in (None, 200.0):
                future = loop.create_future()
                waiting = asyncio.create_task(ended(future, timeout))
                await asyncio.sleep(0)
                assert not waiting.done()
                if end == "result":
                    future.set_result(1)
                elif end == "error":
                    future.set_exception(ValueError("seen"))
                else:
                    future.cancel()
                assert await waiting and await ended(future)
                assert end != "error" or isinstance(future.exception(), ValueError)

    asyncio.run(main())


def test_one_that_is_not_done_in_time_goes_on_and_so_does_one_whose_waiter_is_cancelled() -> None:
    async def main() -> None:
        future = asyncio.get_running_loop().create_future()
        assert not await ended(future, 0.0)
        waiting = asyncio.create_task(ended(future))
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert not future.done() and not future._callbacks

    asyncio.run(main())


def test_the_first_error_of_a_group_of_tasks_is_told_as_itself() -> None:
    async def fail() -> None:
        raise ZeroDivisionError("a bug")

    async def nested() -> None:
        async with task_group() as tasks:
            tasks.create_task(fail())

    async def all_of_them() -> None:
        async with task_group() as tasks:
            tasks.create_task(nested())
            tasks.create_task(asyncio.sleep(200))

    with pytest.raises(ZeroDivisionError, match="a bug"):
        asyncio.run(all_of_them())


def test_nothing_is_raised_within_except_star() -> None:
    """It would come as a group before Python 3.11.4, which these tests may not be run with."""
    files = (Path(__file__).resolve().parents[2] / "prime_hpc").rglob("*.py")
    assert not [path for path in files if re.search(r"^\s*except\s*\*", path.read_text(), re.MULTILINE)]
