"""Waiting for one future: it ends however it does, in time or not, and whoever waits may be cancelled."""

import asyncio

import pytest

from prime_hpc.runtime.event_loops import ended


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
