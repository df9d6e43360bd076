"""Start a program that is killed when this process ends, however it ends.

    subprocess.Popen(tied(["sbatch", "--parsable", script]))

The program's own first step asks the kernel for it: this file, run by an interpreter without site packages (10 ms),
becomes the program by exec. A function between fork and exec (`preexec_fn`) would do the same from within a copy of
this process, where every library's fork handlers run first: with threads about, such a copy may wait for ever for a
lock whose holder was not copied.
"""

import ctypes
import os
import shutil
import signal
import sys
from collections.abc import Mapping, Sequence

PR_SET_PDEATHSIG = 1
_FLAGS = ("-I", "-S")
EXIT_GONE = 1
"""Its starter ended before it could ask."""


def tied(
    command: Sequence[str], environ: Mapping[str, str] = os.environ, *, deaf_to: Sequence[signal.Signals] = ()
) -> list[str]:
    """Return the command line that runs `command` tied to this process: to the thread that starts it, for the kernel.

    Args:
        environ: the environment that it is going to have: PATH says where the program is.
        deaf_to: signals that it ignores until it has handlers of its own. Block them while it is started, and the time
            before its first step is covered too.

    Raises:
        FileNotFoundError: there is no such program.
        PermissionError: it may not be run.
    """
    path = environ.get("PATH", os.defpath)
    if shutil.which(command[0], path=path) is None:
        is_there = shutil.which(command[0], os.F_OK, path) is not None
        raise PermissionError(command[0]) if is_there else FileNotFoundError(command[0])
    numbers = ",".join(str(int(number)) for number in deaf_to)
    return [sys.executable, *_FLAGS, __file__, str(os.getpid()), numbers, *command]


def split(words: Sequence[str]) -> tuple[list[int], list[str]] | None:
    """Return the ignored signals and the command of a command line of `tied`; None: it is none."""
    start = 1 + len(_FLAGS)
    if [*words[1 : start + 1]] != [*_FLAGS, __file__]:
        return None
    return _numbers(words[start + 2]), list(words[start + 3 :])


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",") if number]


def _become(starter: int, deaf_to: list[int], command: list[str]) -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != starter:  # it died before the request was made
        os._exit(EXIT_GONE)
    for ours in (signal.SIGPIPE, signal.SIGXFSZ):  # this interpreter ignores them, and a program would go on doing so
        signal.signal(ours, signal.SIG_DFL)
    for number in deaf_to:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, deaf_to)
    os.execvp(command[0], command)


if __name__ == "__main__":
    _become(int(sys.argv[1]), _numbers(sys.argv[2]), sys.argv[3:])
