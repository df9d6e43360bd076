"""`python -m tests.support.forking_parent FOLDER`: a fork, of a parent that holds what is not the fork's.

The parent has something to do at its end, and an open file that nothing refers to any more but that is not collected
yet. The fork opens a file of its own, collects, writes into it, and has something to do at its end too.
"""

import atexit
import gc
import os
import sys
import weakref
from pathlib import Path

from tests.faults import fork


class _Kept:
    """Something of the parent's."""


def _leave_an_open_file(path: Path) -> int:
    """The descriptor of a file in a cycle that only the collector finds."""
    cycle: list[object] = [file := path.open("w")]
    cycle.append(cycle)
    return file.fileno()


def main(folder: Path) -> int:
    """Fork; return the fork's exit code, 1 where it met an error."""
    kept = _Kept()
    finalizer = weakref.finalize(kept, (folder / "at-the-parents-end").touch)
    gc.disable()
    number = _leave_an_open_file(folder / "parents")
    if (pid := os.fork()) == 0:
        code = 1
        try:
            fork.begin_anew()
            fork.replace_descriptors((-1, -1, -1))
            atexit.register((folder / "at-its-end").touch)
            with (folder / "own").open("w") as own:
                gc.collect()
                assert own.fileno() == number, f"another descriptor than the parent's {number}: this proves nothing"
                own.write("whole")
            code = 7
        finally:
            fork.leave(code)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert finalizer.detach(), "done before the parent's end"
    return code


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
