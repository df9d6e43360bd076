"""A trainer rank whose disk fails where the environment says.

usage: FAULT="RANK:OPERATION:PART[:hang]" python -m tests.support.faulty_trainer RUN_DIR
On that rank every OPERATION (create, write, fsync, mkdir, rename) on a path with PART in it answers "disk full", or
(hang) never answers.
"""

import errno
import os
import sys
import time
from pathlib import Path

from prime_hpc.store.io import files
from prime_hpc.trainer.main import main


def run() -> int:
    rank, operation, part, *how = os.environ["FAULT"].split(":")

    def fail(seen: str, path: Path) -> None:
        if seen == operation and part in path.as_posix() and os.environ.get("RANK", "0") == rank:
            if how == ["hang"]:
                time.sleep(600)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    with files.observe_operations(fail):
        return main()


if __name__ == "__main__":
    code = run()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
