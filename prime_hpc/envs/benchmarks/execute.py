"""Run a program that a model wrote: a process of its own with limits, none of our environment, no network if possible.

The limits bound accidents and the usual mischief of generated code. They are no prison: the process runs as this user
and can read what the user can read, which is why tasks that come here ask for `allow_code_execution`. The child's part
is `sandboxed_child.py`, which shuts itself in before it looks at the program.
"""

import asyncio
import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prime_hpc.runtime.slurm_warning import WARNED_WITHIN_S, WARNINGS, is_led, was_warned_since

CHILD = Path(__file__).with_name("sandboxed_child.py")
GRACE_S = 1.0
"""Of wall-clock time beyond the limit, for the interpreter to start and end."""
MOST_OUTPUT = 1 << 20
"""Bytes of a program's output that are read, unless the caller wants more."""
MOST_FILE_BYTES = 16 << 20
"""Of one file that a program writes; its output is one."""

_SLOTS = threading.BoundedSemaphore(max(1, os.cpu_count() or 1))
"""As many programs at once as there are cores: their time limits are meant for a core each."""


@dataclass(frozen=True)
class Limits:
    """Of one program."""

    seconds: float = 5.0
    memory_mib: int = 1024


@dataclass(frozen=True)
class ProgramOutcome:
    """How a program ended."""

    passed: bool
    """It ran to its end: not by an exception, an exit of its own, a signal or a limit."""
    reason: str
    """`passed`, `timed out`, or `failed: ...`."""
    output: str
    """The beginning of its output, up to the limit."""
    without_network: bool
    output_is_whole: bool = True
    """False where there was more."""


async def run_program(
    program: str, limits: Limits, *, stdin: str = "", may_exit: bool = False, output_bytes: int = 0
) -> ProgramOutcome:
    """`run_program_here` on a thread that waits for it."""
    how: dict[str, Any] = {"stdin": stdin, "may_exit": may_exit, "output_bytes": output_bytes}
    return await asyncio.to_thread(run_program_here, program, limits, **how)


def run_program_here(
    program: str, limits: Limits, *, stdin: str = "", may_exit: bool = False, output_bytes: int = 0
) -> ProgramOutcome:
    """Run a Python program to its end or its limit.

    It has passed only if the child says so with a word that it alone was told: a program that ends the process by
    itself, before its checks, has not.

    Raises:
        RuntimeError: Slurm's warning came while it ran, and it did not pass, for which that may be the reason.

    Args:
        may_exit: whether `sys.exit(0)` is an end like any other.
        output_bytes: read of its output, where that is more than `MOST_OUTPUT`.
    """
    most_output = max(MOST_OUTPUT, output_bytes)
    word = secrets.token_hex(16)
    with _SLOTS, _folder() as folder:
        verdict_read, verdict_write = os.pipe()
        os.set_blocking(verdict_read, False)  # what the program has started may hold the other end open
        order = {"program": program, "word": word, "may_exit": may_exit}
        order |= {"seconds": limits.seconds, "memory_mib": limits.memory_mib}
        order["file_bytes"] = max(MOST_FILE_BYTES, most_output + 1)
        order_path = Path(folder, "order.json")
        order_path.write_text(json.dumps(order | {"verdict": verdict_write}), encoding="utf-8")
        out_path, in_path = Path(folder, "out"), Path(folder, "in")
        in_path.write_text(stdin, encoding="utf-8", errors="surrogatepass")
        began = time.monotonic()
        try:
            with in_path.open("rb") as source, out_path.open("wb") as sink:
                child = subprocess.Popen(
                    [sys.executable, "-I", "-S", str(CHILD), str(order_path)],
                    stdin=source,
                    stdout=sink,
                    stderr=subprocess.DEVNULL,
                    cwd=folder,
                    env={"PATH": "/usr/bin:/bin", "HOME": folder, "LANG": "C.UTF-8"},
                    pass_fds=(verdict_write,),
                    start_new_session=True,
                )
                os.close(verdict_write)
                timed_out = _wait(child, limits.seconds + GRACE_S)
            said = "" if timed_out else _read(verdict_read)
            # where soft and hard limit of CPU time are the same, the kernel may end it with SIGKILL
            was_killed = child.returncode in (-signal.SIGKILL, 128 + signal.SIGKILL)
            timed_out |= was_killed and time.monotonic() - began >= limits.seconds
        finally:
            os.close(verdict_read)
        with out_path.open("rb") as file:
            output = file.read(most_output).decode(errors="replace")
            is_whole = not file.read(1)
    if timed_out or child.returncode in (-signal.SIGXCPU, 128 + signal.SIGXCPU):
        return ProgramOutcome(False, "timed out", output, False)
    if is_led() and any(child.returncode in (-number, 128 + number) for number in WARNINGS):
        time.sleep(WARNED_WITHIN_S)
    if is_led() and not said.endswith(" passed") and was_warned_since(began):
        raise RuntimeError("Slurm's warning (a signal to the whole job) came while a program ran")
    if said.startswith(word):
        flag, _, reason = said.removeprefix(word).partition(" ")
        return ProgramOutcome(reason == "passed", reason, output, flag == "0", is_whole)
    return ProgramOutcome(False, f"failed: it ended by itself (exit code {child.returncode})", output, False)


@contextmanager
def _folder() -> Iterator[str]:
    """Make a folder, and remove it with whatever a program has made in it: nothing of that fails the episode."""
    made = tempfile.TemporaryDirectory(prefix="prime-hpc-code-", ignore_cleanup_errors=True)
    try:
        yield made.name
    finally:
        with suppress(RecursionError):
            made.cleanup()
        if os.path.lexists(made.name):  # thousands of folders, each in the one before: too many for open files as well
            subprocess.run(["rm", "-rf", made.name], check=False)


def _read(pipe: int) -> str:
    try:
        return os.read(pipe, 4096).decode(errors="replace")
    except BlockingIOError:
        return ""


def _wait(child: "subprocess.Popen[bytes]", seconds: float) -> bool:
    """Wait for the end and kill what the program has left behind; whether the limit ended it."""
    try:
        child.wait(timeout=seconds)
        return False
    except subprocess.TimeoutExpired:
        return True
    finally:
        try:
            os.killpg(child.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass  # the whole group is gone already
        child.wait()
