"""Real sandboxes for tests, what is in them, and whether this machine can make any.

They are bubblewrap's, or, with the path of an image in `$PRIME_HPC_TEST_SANDBOX_IMAGE`, apptainer's.
"""

import asyncio
import contextlib
import functools
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from prime_hpc.config.sections.orchestrator import SandboxConfig
from prime_hpc.envs.errors import EnvError
from prime_hpc.envs.sandbox.sandbox_process import Ended, Sandbox, first_inside
from prime_hpc.envs.sandbox.warm_pool import WarmPool

IMAGE = os.environ.get("PRIME_HPC_TEST_SANDBOX_IMAGE")
RUNTIME: dict[str, Any] = {"runtime": "apptainer", "image": IMAGE} if IMAGE else {}


@functools.cache
def refusal() -> str:
    """Return why there are none here; empty: there are."""

    async def make_one() -> None:
        pool = WarmPool(SandboxConfig(warm=0, **RUNTIME))
        await pool.open()
        await pool.close()

    try:
        asyncio.run(make_one())
    except EnvError as error:
        return str(error)
    return ""


def needs_sandboxes() -> pytest.MarkDecorator:
    """Skip where this machine makes none."""
    return pytest.mark.skipif(bool(refusal()), reason=refusal() or "sandboxes can be made")


@contextlib.asynccontextmanager
async def sandbox(**limits: Any) -> AsyncIterator[Sandbox]:
    """One sandbox with small limits, but for the time of a command: the machine may be busy."""
    small: dict[str, Any] = {"memory_mib": 128, "disk_mib": 8, "processes": 24, "files": 2000, "warm": 0}
    small["command_s"] = 200
    pool = WarmPool(SandboxConfig(**(small | RUNTIME | limits)))
    await pool.open()
    try:
        yield await pool.take()
    finally:
        await pool.close()


def play(*programs: str, **limits: Any) -> list[Ended]:
    """Run Python programs one after the other in one sandbox."""

    async def run() -> list[Ended]:
        async with sandbox(**limits) as box:
            return [await box.run(program=program) for program in programs]

    return asyncio.run(run())


_HELD: list[int] = []
"""Open namespaces, until this process ends."""


def namespace_of(box: Sandbox) -> str:
    """Return the name of the process namespace of a sandbox."""
    first = first_inside(box.pid)
    assert first is not None
    hold(first)
    return str(Path(f"/proc/{first}/ns/pid").readlink())


def hold(pid: int) -> None:
    """Keep the name of a process's namespace from being the next one's: the kernel gives the lowest free number."""
    _HELD.append(os.open(f"/proc/{pid}/ns/pid", os.O_RDONLY | os.O_CLOEXEC))


def members(namespace: str, *, living: bool = False) -> list[int]:
    """Return the processes of this machine that are in a process namespace.

    `living`: not those that have ended and of whose end nobody has asked yet; orphans are this process's, where a test
    before had it look after them.
    """
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if str((folder / "ns" / "pid").readlink()) == namespace and not (living and _has_ended(folder)):
                found.append(int(folder.name))
    return found


def _has_ended(folder: Path) -> bool:
    return (folder / "stat").read_text().rpartition(")")[2].split()[0] in "ZX"
