"""Process families: everything that a role started, found and ended without names or patterns.

Roles start processes of their own (vLLM's engines, torchrun's ranks), partly in sessions of their own.
"""

import contextlib
import ctypes
import os
import signal
import time
from collections.abc import Iterable

import psutil

from prime_hpc.runtime.tied_process import PR_SET_PDEATHSIG

PR_SET_CHILD_SUBREAPER = 36
KILL_S = 10.0
"""A killed process of many gigabytes takes a moment to go; one that waits for a device may never."""
_LIBC = ctypes.CDLL(None, use_errno=True)
"""Loaded before any fork: a child may not take the loader's lock."""


def become_subreaper() -> bool:
    """Make orphaned descendants children of this process, so that they can be found and ended.

    Returns whether the kernel agreed (Linux does; elsewhere orphans are found by the snapshots alone).
    """
    try:
        return _LIBC.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0
    except (OSError, AttributeError):
        return False


def die_with_parent() -> None:
    """From now on, SIGKILL when the parent's thread ends. Linux; elsewhere it does nothing."""
    with contextlib.suppress(OSError, AttributeError):
        _LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def family(pid: int) -> list[psutil.Process]:
    """Return the process and all its descendants, itself first; empty where it is gone."""
    try:
        process = psutil.Process(pid)
        return [process, *process.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def runs_since(pid: int, since: float) -> bool:
    """Return whether a process that began at `since` (epoch seconds) or before still runs; one that has ended, and
    whose parent has not asked how (a container without an init never does), does not."""
    try:
        process = psutil.Process(pid)
        return process.create_time() <= since + 1 and process.status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    except psutil.NoSuchProcess:
        return False


def send(processes: Iterable[psutil.Process], signum: int) -> None:
    """Send a signal to those that still live (psutil guards against re-used ids)."""
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            process.send_signal(signum)


def alive(processes: Iterable[psutil.Process]) -> list[psutil.Process]:
    """Those that run and are no zombies."""
    living = []
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                living.append(process)
    return living


def end_families(leaders: Iterable[int], grace_s: float, polite: int = signal.SIGTERM) -> list[int]:
    """End the leaders by the signal `polite` and, after `grace_s`, whatever is left of their families.

    Returns the ids of the processes that had to be killed.
    """
    leaders = list(leaders)
    members = {p for pid in leaders for p in family(pid)}
    send((p for p in members if p.pid in leaders), polite)
    deadline = time.monotonic() + grace_s
    while time.monotonic() < deadline and alive(members):
        # children born meanwhile belong to the family too
        members |= {p for pid in leaders for p in family(pid)}
        time.sleep(0.05)
    return _kill(members)


def _kill(members: Iterable[psutil.Process]) -> list[int]:
    """Kill those that still live, and wait: who starts others in their place wants their memory and ports."""
    left = alive(members)
    send(left, signal.SIGKILL)
    deadline = time.monotonic() + KILL_S
    while time.monotonic() < deadline and alive(left):
        time.sleep(0.01)
    return [p.pid for p in left]


def marked(pid: int, variable: str, value: str, session: int | None = None) -> list[psutil.Process]:
    """Descendants of `pid` that were started with this value of an environment variable: a role's, whoever is their
    parent by now. Of a process that was itself forked also those in its `session`: copies of it that have started no
    program have the environment of whoever started its own."""
    found = []
    with contextlib.suppress(psutil.NoSuchProcess):
        for process in psutil.Process(pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied, ProcessLookupError):
                if process.environ().get(variable) == value or os.getsid(process.pid) == session:
                    found.append(process)
    return found


def end_strays(pid: int, known: Iterable[int], grace_s: float) -> list[int]:
    """End descendants of `pid` other than `known` ones and theirs: orphans that the subreaper inherited."""
    spared = {process.pid for one in known for process in family(one)}
    try:
        strays = [p for p in psutil.Process(pid).children(recursive=True) if p.pid not in spared]
    except psutil.NoSuchProcess:
        return []
    strays = alive(strays)
    send(strays, signal.SIGTERM)
    deadline = time.monotonic() + grace_s
    while time.monotonic() < deadline and alive(strays):
        time.sleep(0.05)
    return _kill(strays)
