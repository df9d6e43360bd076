"""A second life line: ends the roles when the supervisor itself is killed.

Started by the supervisor as its own small process. It reads role process ids from standard input,
one a line (`+pid`, `-pid`); when the pipe closes without a farewell (`bye`), the supervisor is gone
and nobody else would end its roles.
"""

import contextlib
import os
import signal
import subprocess
import sys

import psutil

from prime_hpc.runtime.process_tree import end_families
from prime_hpc.runtime.slurm_warning import WARNINGS

FAREWELL = "bye"
END_S = 10.0
"""For which a reaper that was told to end may take its time."""


class Reaper:
    """The supervisor's handle of the reaper process."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "prime_hpc.supervisor.reaper"],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C and a killed process group must not reach it
            text=True,
            bufsize=1,
        )

    @property
    def pid(self) -> int:
        """Process id of the reaper."""
        return self._process.pid

    def watch(self, pid: int) -> None:
        """End this process's family should the supervisor vanish."""
        self._say(f"+{pid}")

    def forget(self, pid: int) -> None:
        """Forget a process that ended in good order."""
        self._say(f"-{pid}")

    def close(self) -> None:
        """End it: the supervisor ends in good order, and there is nothing to reap."""
        self._say(FAREWELL)
        if self._process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):  # it was killed: it had nothing left to do
                self._process.stdin.close()
        for _ in range(2):
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(END_S)
                return
            self._process.kill()  # stopped, or starved by a node without memory: that fails no run that has ended well

    def _say(self, line: str) -> None:
        try:
            assert self._process.stdin is not None
            self._process.stdin.write(line + "\n")
            self._process.stdin.flush()
        except (BrokenPipeError, ValueError):
            return  # without a reaper the supervisor still ends its roles itself


def main() -> None:
    """Read process ids until the pipe closes; then end what is left."""
    for number in (*WARNINGS, signal.SIGINT):  # of every process of a job; the pipe decides
        signal.signal(number, signal.SIG_IGN)
    watched: dict[int, psutil.Process] = {}  # with their start times: a number alone may be another process's by then
    for raw in sys.stdin:
        line = raw.strip()
        if line == FAREWELL:
            return
        if line.startswith("+"):
            with contextlib.suppress(psutil.NoSuchProcess):
                watched[int(line[1:])] = psutil.Process(int(line[1:]))
        elif line.startswith("-"):
            watched.pop(int(line[1:]), None)
    end_families(still_themselves(watched), grace_s=4.0)


def still_themselves(watched: dict[int, psutil.Process]) -> list[int]:
    """Ids that still belong to the processes that were to be watched; this one's is never among them."""
    return [pid for pid, process in watched.items() if pid != os.getpid() and process.is_running()]


if __name__ == "__main__":
    main()
