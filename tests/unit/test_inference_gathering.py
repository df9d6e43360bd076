"""Requests that wait for each other before they reach the engine."""

import asyncio

from prime_hpc.inference.vllm.gathering import Gathering


def test_requests_that_follow_each_other_go_on_together_and_a_later_one_by_itself() -> None:
    async def run() -> list[str]:
        gathering, events = Gathering(gap_s=0.05, limit_s=60), list[str]()

        async def ask(name: str) -> None:
            events.append(f"{name} comes")
            await gathering.join()
            events.append(f"{name} goes")

        async with asyncio.timeout(200):
            await asyncio.gather(ask("a"), ask("b"), ask("c"))
            await ask("d")
        return events

    assert asyncio.run(run()) == [
        *(f"{name} comes" for name in "abc"),
        *(f"{name} goes" for name in "abc"),
        *("d comes", "d goes"),
    ]


def test_nobody_waits_longer_than_the_limit_and_one_who_gives_up_holds_nobody_back() -> None:
    async def run() -> None:
        gathering = Gathering(gap_s=60, limit_s=0.02)
        async with asyncio.timeout(200):
            first = asyncio.create_task(gathering.join())
            second = asyncio.create_task(gathering.join())
            await asyncio.sleep(0)
            first.cancel()
            await second
        assert first.cancelled()

    asyncio.run(run())
