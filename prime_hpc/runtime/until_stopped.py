"""A role's work until it is done or somebody says stop: the bus, SIGTERM, SIGINT. Its end may not take long."""

import asyncio
import os
import signal
import threading
from collections.abc import Callable, Coroutine
from typing import Any

from loguru import logger

from prime_hpc.runtime import slurm_warning
from prime_hpc.runtime.event_loops import in_loop

STOP_GRACE_S = 4.0
"""From being told to stop to the end of the process, at most; the supervisor kills after its own grace."""


async def until_stopped(
    work: Coroutine[Any, Any, None],
    subscribe: Callable[[str, Callable[[dict[str, Any]], None]], object],
    done: Callable[[], None],
    name: str,
    advice: str = "",
) -> None:
    """Run `work` until it is done or told to stop; then it is cancelled, and has `STOP_GRACE_S` to let go.

    Args:
        subscribe: of the bus; the topic is `stop`, which may spare roles by name.
        done: reports that the role has ended well; called here only where the process has to be ended.
        advice: follows the reason in the log.

    Raises:
        Exception: whatever `work` raises.
    """
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    reason: list[str] = []

    def request_stop(why: str) -> None:
        reason.append(why)
        stop.set()

    def on_bus(message: dict[str, Any]) -> None:
        if name not in message.get("spared", ()):
            request_stop(str(message.get("reason", "stop on the bus")))

    numbers = [signal.SIGINT]
    if slurm_warning.is_led():
        slurm_warning.outlive()
    else:
        numbers.append(signal.SIGTERM)
    for number in numbers:
        loop.add_signal_handler(number, request_stop, signal.Signals(number).name)
    subscribe("stop", in_loop(loop, on_bus))
    task = asyncio.create_task(work, name=name)
    stopped = asyncio.create_task(stop.wait(), name="stop")
    await asyncio.wait([task, stopped], return_when=asyncio.FIRST_COMPLETED)
    stopped.cancel()
    if task.done():
        task.result()
        return
    logger.info(f"stopping: {reason[0]}{advice}")
    _end_in_time(done)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def _end_in_time(done: Callable[[], None]) -> None:
    """End although a thread that cannot be interrupted (tasks being loaded, a batch being written) holds it up."""

    def end() -> None:
        logger.warning(f"not everything let go within {STOP_GRACE_S:g} s; ending all the same")
        done()
        os._exit(0)

    timer = threading.Timer(STOP_GRACE_S, end)
    timer.daemon = True
    timer.start()
