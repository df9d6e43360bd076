"""The process that runs a model's program; started by `execute.py` as a plain script, without site-packages.

It reads its order, gives up the network and enters namespaces of its own (where the kernel lets a user have them),
limits itself, and runs the program. The first process of its namespace does nothing but wait, in the group that
`execute.py` kills: with it everything ends, whatever group or session the program has gone to. What the program's
process reports goes through a pipe, after a word that the program was not told.
"""

import builtins
import contextlib
import ctypes
import json
import os
import resource
import sys

CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000
MOST_FILES = 64
MOST_PROCESSES = 64


def enter_sandbox(seconds: float, memory_mib: int, file_bytes: int) -> bool:
    """Enter the namespaces, set the limits; whether the network is gone."""
    libc = ctypes.CDLL(None, use_errno=True)
    without_network = libc.unshare(CLONE_NEWUSER | CLONE_NEWNET | CLONE_NEWPID) == 0
    if without_network:
        for _ in ("first process of the namespace", "process of the program"):
            child = os.fork()
            if child:
                wait_and_end(child)
    memory, cpu = memory_mib << 20, max(1, int(seconds + 0.999))
    for limit, value in (
        (resource.RLIMIT_AS, memory),
        (resource.RLIMIT_CPU, cpu),
        (resource.RLIMIT_FSIZE, file_bytes),
        (resource.RLIMIT_NOFILE, MOST_FILES),
        (resource.RLIMIT_NPROC, MOST_PROCESSES),
        (resource.RLIMIT_CORE, 0),
    ):
        hard = resource.getrlimit(limit)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(limit, (value, value))
    return without_network


def wait_and_end(child: int) -> None:
    """Wait for a child, and for orphans that come to this process; end as the child has, by a code in place of a
    signal."""
    while True:
        pid, status = os.waitpid(-1, 0)
        if pid == child:
            code = os.waitstatus_to_exitcode(status)
            os._exit(code if code >= 0 else 128 - code)


def run(program: str, may_exit: bool) -> str:
    """Return `passed`, or how it failed."""
    vars(builtins).update(exit=sys.exit, quit=sys.exit)  # `site`, which is not imported, has them
    try:
        exec(compile(program, "program.py", "exec"), {"__name__": "__main__"})
    except SystemExit as error:
        return "passed" if may_exit and error.code in (None, 0) else f"failed: exit code {error.code}"
    except BaseException as error:  # noqa: BLE001 - whatever a model's program raises is its verdict
        return f"failed: {type(error).__name__}: {error}"[:300]
    return "passed"


def main() -> None:
    """Carry out the order of which the first argument names the file."""
    with open(sys.argv[1], encoding="utf-8") as file:  # noqa: PTH123 - pathlib costs as much as the rest of the start
        order = json.load(file)
    os.unlink(sys.argv[1])  # noqa: PTH108
    del sys.argv[1:]
    without_network = enter_sandbox(order["seconds"], order["memory_mib"], order["file_bytes"])
    reason = run(order.pop("program"), order["may_exit"])
    sys.stdout.flush()
    said = f"{order['word']}{0 if without_network else 1} {reason}"
    os.write(order["verdict"], said.encode(errors="replace"))
    os._exit(0)


main()
