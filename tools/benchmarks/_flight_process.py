"""The orchestrator's own process for `flight.py`, watched from within: `python -m _flight_process RUN_DIR`.

Nothing of it is replaced; beside its loop runs what notes by how much a callback came too late, and at each batch what
its threads and its environments' processes have used so far. Written to `FLIGHT_LOG` at its end.
"""

import asyncio
import gc
import json
import os
import resource
import threading
import time
from pathlib import Path
from typing import Any

import psutil

from prime_hpc.orchestrator import loop, main
from prime_hpc.store.role_process import leave

TICK_S = 0.005
MEMORY_S = 5.0
WORTH_S = 0.02
"""Pauses from here on are kept one by one."""
TICKS = os.sysconf("SC_CLK_TCK")


def thread_seconds() -> dict[str, float]:
    """CPU seconds of this process so far: of the orchestrator's loop, the environments' thread, all others."""
    found = {"loop": 0.0, "environments": 0.0, "others": 0.0}
    names = {thread.native_id: thread.name for thread in threading.enumerate()}
    for task in Path("/proc/self/task").iterdir():
        fields = (task / "stat").read_text().rpartition(")")[2].split()
        name = names.get(int(task.name), "")
        kind = "loop" if name == "MainThread" else "environments" if name.startswith("prime-hpc-envs") else "others"
        found[kind] += (int(fields[11]) + int(fields[12])) / TICKS
    own = resource.getrusage(resource.RUSAGE_SELF)
    found["others"] += max(0.0, own.ru_utime + own.ru_stime - sum(found.values()))  # of threads that have ended
    return found


def mark() -> dict[str, Any]:
    """Measure what has been used up to now."""
    children = psutil.Process().children(recursive=True)
    times = [child.cpu_times() for child in children]
    return {
        "time": time.monotonic(),
        "cpu": thread_seconds() | {"workers": sum(t.user + t.system for t in times)},
        "rss": psutil.Process().memory_info().rss,
        "rss_workers": sum(child.memory_info().rss for child in children),
    }


class Watch:
    """Notes of a run, taken while it goes on."""

    def __init__(self) -> None:
        self.pauses: list[tuple[float, float, float, float]] = []
        self.marks: list[dict[str, Any]] = []
        self.memory: list[tuple[float, int, int, int]] = []
        self.collections: list[tuple[float, float]] = []
        self._began = 0.0

    def collecting(self, phase: str, info: dict[str, int]) -> None:
        """Note a collection of garbage that was not short."""
        if phase == "start":
            self._began = time.thread_time()
        elif (took := time.thread_time() - self._began) > WORTH_S / 4:
            self.collections.append((time.monotonic(), took))

    async def pauses_of_loop(self) -> None:
        """For ever: by how much a callback comes too late, and for how long this thread, and all together, have
        computed meanwhile."""
        while True:
            due, used, used_by_all = time.monotonic() + TICK_S, time.thread_time(), time.process_time()
            await asyncio.sleep(TICK_S)
            late, used = time.monotonic() - due, time.thread_time() - used
            if late > WORTH_S:
                self.pauses.append((due, late, used, time.process_time() - used_by_all))

    async def memory_now_and_then(self, orchestrator: loop.Orchestrator) -> None:
        """For ever: resident bytes, here and of the workers, and how many ended episodes wait here for their group, for
        their batch, or for the version that comes of it."""
        while True:
            now = mark()
            book, batches = orchestrator.book, orchestrator.carrier.batches
            groups = [*book.in_flight.values(), *book.complete, *(g for _, of_batch in batches for g in of_batch)]
            held = sum(group.num_ended for group in groups)
            self.memory.append((now["time"], now["rss"], now["rss_workers"], held))
            await asyncio.sleep(MEMORY_S)

    def install(self) -> None:
        """Run beside the orchestrator's loop."""
        gc.callbacks.append(self.collecting)
        run, report = loop.Orchestrator.run, loop.Orchestrator._report

        async def watched(orchestrator: loop.Orchestrator) -> None:
            beside = [
                asyncio.create_task(self.pauses_of_loop()),
                asyncio.create_task(self.memory_now_and_then(orchestrator)),
            ]
            try:
                await run(orchestrator)
            finally:
                for task in beside:
                    task.cancel()
                names = ("pauses", "marks", "memory", "collections")
                Path(os.environ["FLIGHT_LOG"]).write_text(json.dumps({name: getattr(self, name) for name in names}))

        def reported(orchestrator: loop.Orchestrator, *args: Any) -> None:
            report(orchestrator, *args)
            self.marks.append(mark())

        loop.Orchestrator.run = watched  # type: ignore[method-assign,assignment]
        loop.Orchestrator._report = reported  # type: ignore[method-assign,assignment]


if __name__ == "__main__":
    Watch().install()
    leave(main.main())
