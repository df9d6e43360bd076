"""An event loop with nothing to do, for `envs.py`: the longest time for which it did not run what was due.

Ends with its standard input; prints that time.
"""

import asyncio
import sys
import time

TICK_S = 0.005


async def watch(pauses: list[float]) -> None:
    """For ever: note by how much a callback comes too late, seconds."""
    while True:
        due = time.monotonic() + TICK_S
        await asyncio.sleep(TICK_S)
        pauses.append(time.monotonic() - due)


async def _until_told() -> float:
    pauses = [0.0]
    told = asyncio.Event()
    asyncio.get_running_loop().add_reader(sys.stdin, told.set)
    watching = asyncio.create_task(watch(pauses))
    await told.wait()
    watching.cancel()
    return max(pauses)


if __name__ == "__main__":
    print(asyncio.run(_until_told()))
