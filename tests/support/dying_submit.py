"""`python -m tests.support.dying_submit CONFIG POINT`: a `submit` that is killed as it syncs its nth file."""

import os
import signal
import sys
from pathlib import Path
from typing import Any

from prime_hpc.launch.submission import submit
from tests.support.submissions import load


def main() -> int:
    """Submit; the exit code, where it was done before."""
    config, point, calls, real = Path(sys.argv[1]), int(sys.argv[2]), 0, os.fsync
    os.chdir(config.parent)

    def fsync(fd: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == point:
            os.kill(os.getpid(), signal.SIGKILL)
        real(fd)

    os.fsync = fsync
    return submit(load(config), as_json=True)


if __name__ == "__main__":
    sys.exit(main())
