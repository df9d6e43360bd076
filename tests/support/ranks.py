"""Ranks of a test in processes of their own, as `torch.multiprocessing.spawn` starts them, but forked (`forked`).

`python -m tests.support.ranks FILE RANK` is one of them.
"""

import importlib
import os
import pickle
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tests.support.forked import ForkedProcess

LIMIT_S = 280.0


def spawn(work: Callable[..., None], args: Sequence[Any], nprocs: int, limit_s: float = LIMIT_S) -> None:
    """`work(rank, *args)` on every rank. Raises AssertionError with what the first rank that failed said."""
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        file = Path(folder) / "work"
        file.write_bytes(pickle.dumps((work.__module__, work.__qualname__, tuple(args))))
        processes = []
        for rank in range(nprocs):
            with (Path(folder) / f"log{rank}").open("wb") as log:
                command = ["tests.support.ranks", str(file), str(rank)]
                processes.append(ForkedProcess(command, env=os.environ, stdout=log, stderr=log))
        try:
            deadline = time.monotonic() + limit_s
            while None in (codes := [process.poll() for process in processes]) and not any(codes):
                assert time.monotonic() < deadline, f"ranks still run after {limit_s:g} s"
                time.sleep(0.02)
            for rank, code in enumerate(codes):
                assert not code, f"rank {rank}: {code}\n{(Path(folder) / f'log{rank}').read_text()[-6000:]}"
        finally:
            for process in processes:
                process.kill()
                process.wait(30)


def main(file: str, rank: str) -> None:
    """One rank."""
    module, name, args = pickle.loads(Path(file).read_bytes())
    getattr(importlib.import_module(module), name)(int(rank), *args)


if __name__ == "__main__":
    main(*sys.argv[1:])
