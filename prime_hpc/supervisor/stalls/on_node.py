"""Look at a run's processes on this node, and say it as short lines of text.

    python -m prime_hpc.supervisor.stalls.on_node RUN_DIR [PID ...]

A process of its own, so that whoever asks can give up on it: `prime-hpc why` starts it here, and through srun on the
nodes of a job. The run directory is a name here: only the probe, in a thread, asks its file system.
"""

import os
import sys
from pathlib import Path

from prime_hpc.supervisor.stalls.collect import look_here, to_lines


def main() -> None:
    """Print what is seen, and leave at once, though a thread may hang with the file system."""
    run_dir, *pids = sys.argv[1:]
    seen = look_here(Path(run_dir), pids=[int(pid) for pid in pids], by_name=True)
    sys.stdout.write("".join(f"{line}\n" for line in to_lines(seen)))
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
