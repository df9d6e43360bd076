"""Ranks of a test in processes of their own, as `torch.multiprocessing.spawn` starts them, but forked (`forked`).

`python -m tests.support.ranks FILE RANK` is one of them.
"""

import importlib
import os
import pickle
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.support.forked import ForkedProcess

LIMIT_S = 280.0


@contextmanager
def started(work: Callable[..., None], args: Sequence[Any], nprocs: int) -> Iterator[tuple[list[ForkedProcess], Path]]:
    """`work(rank, *args)` on every rank, until the block ends: the processes, and where they say something (`log0`)."""
    with tempfile.TemporaryDirectory(prefix="ranks-") as name:
        folder, processes = Path(name), list[ForkedProcess]()
        (folder / "work").write_bytes(pickle.dumps((work.__module__, work.__qualname__, tuple(args))))
        try:
            for rank in range(nprocs):
                with (folder / f"log{rank}").open("wb") as log:
                    command = ["tests.support.ranks", str(folder / "work"), str(rank)]
                    processes.append(ForkedProcess(command, env=os.environ, stdout=log, stderr=log))
            yield processes, folder
        finally:
            for process in processes:
                process.kill()
                process.wait(30)


def spawn(work: Callable[..., None], args: Sequence[Any], nprocs: int, limit_s: float = LIMIT_S) -> None:
    """`work(rank, *args)` on every rank. Raises AssertionError with what all ranks said: the first that fails may only
    have lost the one that is at fault."""
    with started(work, args, nprocs) as (processes, folder):
        deadline = time.monotonic() + limit_s
        while None in (codes := [process.poll() for process in processes]) and not any(codes):
            assert time.monotonic() < deadline, f"ranks still run after {limit_s:g} s"
            time.sleep(0.02)
        if any(codes):
            time.sleep(1.0)  # the others' last words
        said = [(folder / f"log{rank}").read_text()[-6000:] for rank in range(nprocs)]
        words = "\n".join(
            f"rank {rank}: {code}\n{word}" for rank, (code, word) in enumerate(zip(codes, said, strict=True))
        )
        assert not any(codes), words


def main(file: str, rank: str) -> None:
    """One rank."""
    module, name, args = pickle.loads(Path(file).read_bytes())
    getattr(importlib.import_module(module), name)(int(rank), *args)


if __name__ == "__main__":
    main(*sys.argv[1:])
