"""Real sandboxes for tests, what is in them, and whether this machine can make any."""

import asyncio
import contextlib
import functools
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from prime_hpc.config.sections.orchestrator import SandboxConfig
from prime_hpc.envs.errors import EnvError
from prime_hpc.envs.sandbox.bubblewrap import Stage, command, explain_refusal, find_bwrap
from prime_hpc.envs.sandbox.sandbox_process import Ended, Sandbox
from prime_hpc.envs.sandbox.warm_pool import WarmPool


@functools.cache
def refusal() -> str:
    """Return why there are none here; empty: there are."""
    try:
        stage = Stage([])
        try:
            argv = command(find_bwrap(), SandboxConfig(), stage)
            tried = subprocess.run([*argv, "/bin/true"], capture_output=True, text=True, timeout=60, check=False)
        finally:
            stage.close()
    except (EnvError, subprocess.TimeoutExpired) as error:
        return str(error)
    return explain_refusal(tried.stderr.strip()) if tried.returncode else ""


def needs_sandboxes() -> pytest.MarkDecorator:
    """Skip where this machine makes none."""
    return pytest.mark.skipif(bool(refusal()), reason=refusal() or "sandboxes can be made")


@contextlib.asynccontextmanager
async def sandbox(**limits: Any) -> AsyncIterator[Sandbox]:
    """One sandbox with small limits."""
    small: dict[str, Any] = {"memory_mib": 128, "disk_mib": 8, "processes": 24, "files": 2000, "warm": 0}
    pool = WarmPool(SandboxConfig(**(small | limits)))
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


def namespace_of(box: Sandbox) -> str:
    """Return the name of the process namespace of a sandbox."""
    (child,) = Path(f"/proc/{box.pid}/task/{box.pid}/children").read_text(encoding="ascii").split()
    return str(Path(f"/proc/{child}/ns/pid").readlink())


def members(namespace: str) -> list[int]:
    """Return the processes of this machine that are in a process namespace."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if str((folder / "ns" / "pid").readlink()) == namespace:
                found.append(int(folder.name))
    return found
