"""The process of a server, before anything heavy is imported: its scratch folder, its parent's death, its own end."""

import multiprocessing
import os
import signal
import tempfile
import threading
from pathlib import Path

from prime_hpc.runtime import process_tree
from prime_hpc.store.io import scratch

SCRATCH_PREFIX = "phpc-"
MAX_SCRATCH_LEN = 64
"""A unix socket's path ends at 107 bytes, and vLLM appends a 36-character name."""

SPAWNER = "PRIMEHPC_SPAWNER"
"""Process id of the server, or of the engine, that spawns what reads it."""

HARD_END_S = 4.5
"""After a signal the process is gone by then, whatever still hangs: the supervisor waits 5 s."""


def make_scratch() -> Path:
    """Return a new short-named folder for this server's sockets and temporary files (see `scratch`): its own and its
    engines'."""
    parent = Path(tempfile.gettempdir())
    if len(str(parent)) > MAX_SCRATCH_LEN - 20:
        parent = Path("/tmp")
    if " " in str(parent):  # torch hands such a path to g++ as two, so what is compiled may not lie there either
        parent = Path("/tmp")
        tempfile.tempdir = str(parent)
    return scratch.make_scratch(parent, SCRATCH_PREFIX)


def require_semaphores() -> None:
    """Refuse a machine whose processes cannot lock each other out: the C library keeps such locks in /dev/shm.
    Raises ValueError: /dev/shm is missing, or cannot be written."""
    try:
        multiprocessing.get_context("fork").Lock()
    except OSError as error:
        raise ValueError(
            f"no lock between processes can be made ({error.strerror}): /dev/shm is missing, full or cannot be "
            "written; mount a tmpfs there that all may write (in a container: --shm-size 16g (docker), --ipc host)"
        ) from error


def die_with_parent() -> None:
    """Have every process forked from here killed when this one dies, however it dies.

    A server that gets SIGKILL would otherwise leave engines behind that hold memory, GPUs and ports. What it spawns
    (vLLM's engines on CUDA) runs none of this: it calls `die_with_spawner`.
    """
    os.environ[SPAWNER] = str(os.getpid())
    parent = os.getpid()

    def before() -> None:  # runs in whoever forks: an engine's own children watch the engine
        nonlocal parent
        parent = os.getpid()

    def in_child() -> None:
        # This process's signal handling is none of the child's business. Above all the event loop's wake-up socket:
        # through it a signal that the child gets would be taken for one of ours.
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)
        process_tree.die_with_parent()
        if os.getppid() != parent:  # it died before the request was made
            os._exit(1)

    os.register_at_fork(before=before, after_in_child=in_child)


def die_with_spawner() -> None:
    """In a spawned process, before anything else: be killed when the process that spawned it dies, however it dies."""
    spawner = os.environ.get(SPAWNER)
    process_tree.die_with_parent()
    if spawner is not None and os.getppid() != int(spawner):  # it died before the request was made
        os._exit(1)
    die_with_parent()  # an engine has processes of its own: tensor-parallel workers


def end_hard_soon() -> None:
    """Exit after `HARD_END_S` from a SIGTERM on, should the orderly end not have come through by then."""
    timer = threading.Timer(HARD_END_S, os._exit, (0,))
    timer.daemon = True
    timer.start()
