"""`tools/bench sandbox`: how long a sandbox takes to start, and checks of programs a core, against plain subprocesses.

`cold_*`: from nothing to a sandbox that takes commands, one after the other. `warm_*`: from asking the pool, whose
sandboxes are there, to the end of a program that does nothing. `checks_per_s`: programs with assertions to their
verdict on one core (all processes are pinned to it), four asked for at once: each in a sandbox of its own (`sandbox`),
in a plain Python process (`subprocess`), in the process with limits that runs them without a sandbox (`limited`). The
sides take turns; each figure is the median of the rounds. `cpu_s`: of a check, all its processes together.
"""

import asyncio
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from typing import Any

STARTS = 100
CHECKS = 60
AT_ONCE = 4
ROUNDS = 3
PROGRAM = (
    "def is_prime(n):\n    return n > 1 and all(n % d for d in range(2, int(n ** 0.5) + 1))\n"
    "assert sum(map(is_prime, range(2000))) == 303\n"
)


def run() -> dict[str, Any]:
    """Starts, then the three sides in turn."""
    return asyncio.run(_run())


async def _run() -> dict[str, Any]:
    from prime_hpc.config.sections.orchestrator import SandboxConfig
    from prime_hpc.envs.benchmarks.execute import Limits, run_program
    from prime_hpc.envs.sandbox.warm_pool import WarmPool

    figures: dict[str, Any] = {"cores": len(os.sched_getaffinity(0)), "user": "root" if os.geteuid() == 0 else "other"}
    cold = WarmPool(SandboxConfig(warm=0))
    await cold.open()
    for _ in range(3):
        cold.give_back(await cold.take())
    took = []
    for _ in range(STARTS):
        begin = time.perf_counter()
        box = await cold.take()
        took.append(time.perf_counter() - begin)
        await box.stop()
    figures |= _spread("cold", took)
    await cold.close()

    warm = WarmPool(SandboxConfig(warm=4))
    await warm.open()
    took = []
    for _ in range(STARTS):
        async with asyncio.timeout(60):
            while len(warm._warm) < warm.config.warm:
                await asyncio.sleep(0.005)
        begin = time.perf_counter()
        box = await warm.take()
        ended = await box.run(program="pass")
        took.append(time.perf_counter() - begin)
        assert ended.verdict == "passed", ended
        await box.stop()
    figures |= _spread("warm", took)
    await warm.close()

    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    pool = WarmPool(SandboxConfig(warm=AT_ONCE, parallel=AT_ONCE))
    await pool.open()

    async def in_sandbox() -> bool:
        box = await pool.take()
        ended = await box.run(program=PROGRAM)
        pool.give_back(box)
        return ended.verdict == "passed"

    async def in_subprocess() -> bool:
        argv = [sys.executable, "-I", "-S", "-c", PROGRAM]
        return (await asyncio.to_thread(subprocess.run, argv, check=False)).returncode == 0

    async def limited() -> bool:
        return (await run_program(PROGRAM, Limits())).passed

    sides = {"sandbox": in_sandbox, "subprocess": in_subprocess, "limited": limited}
    found: dict[str, list[dict[str, float]]] = {name: [] for name in sides}
    for _ in range(ROUNDS):
        for name, check in sides.items():
            found[name].append(await _measure(check))
    await pool.close()
    return figures | {
        side: {key: statistics.median(row[key] for row in rows) for key in rows[0]} for side, rows in found.items()
    }


def _spread(name: str, took: list[float]) -> dict[str, float]:
    took.sort()
    return {f"{name}_median_s": statistics.median(took), f"{name}_p99_s": took[int(len(took) * 0.99) - 1]}


async def _measure(check: Callable[[], Awaitable[bool]]) -> dict[str, float]:
    room = asyncio.Semaphore(AT_ONCE)

    async def one() -> None:
        async with room:
            assert await check()

    used, begin = _cpu_s(), time.perf_counter()
    await asyncio.gather(*(one() for _ in range(CHECKS)))
    wall_s = time.perf_counter() - begin
    await asyncio.sleep(0.3)  # those that are given back end
    return {"checks_per_s": CHECKS / wall_s, "cpu_s": (_cpu_s() - used) / CHECKS}


def _cpu_s() -> float:
    """CPU seconds of this process and of those of its descendants that have ended."""
    both = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in both)


def render(figures: dict[str, Any]) -> str:
    """As a table."""
    lines = [
        f"start, {STARTS} times, as {figures['user']}: cold {figures['cold_median_s'] * 1e3:.1f} ms "
        f"(p99 {figures['cold_p99_s'] * 1e3:.1f}), warm {figures['warm_median_s'] * 1e3:.1f} ms "
        f"(p99 {figures['warm_p99_s'] * 1e3:.1f})"
    ]
    for side in ("sandbox", "subprocess", "limited"):
        row = figures[side]
        lines.append(f"{side:<12} {row['checks_per_s']:6.1f} checks/s on one core, {row['cpu_s'] * 1e3:.1f} ms of CPU")
    return "\n".join(lines)
