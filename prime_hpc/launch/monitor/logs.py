"""A run's logs: find the file, read its last lines, follow it.

    logs/supervisor.log                       the supervisor's, of all attempts
    logs/slurm-<job>.out                      the batch script's output: what came before the supervisor
    logs/attempt_<k>/trainer/trainer.log      all ranks; rank_<n>.log where a rank has a file of its own
    logs/attempt_<k>/orchestrator/orchestrator.log
    logs/attempt_<k>/inference/inference.log  server 0; inference_<n>.log of the others; so too teacher/, judge/

Following looks the file up by name every time: on a network file system only an open asks the server how long a file
is now, and a file may be replaced.
"""

import os
import re
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

from prime_hpc.config.errors import ConfigError
from prime_hpc.config.run_files import ATTEMPTS_JSONL, ENGINE_ROLES
from prime_hpc.launch.monitor.run_progress import newest_file
from prime_hpc.store.io.files import list_dir
from prime_hpc.store.run_dirs import read_rows

ROLES = ("supervisor", "trainer", "orchestrator", "eval", "synthesize", *ENGINE_ROLES, "slurm")
_ATTEMPT = re.compile(r"attempt_(\d+)")
_LABEL = re.compile(rf"(trainer|{'|'.join(ENGINE_ROLES)})(?:\[(\d+)\]|_(\d+))")
_BEGINS = re.compile(rb": attempt (\d+), incarnation ")
"""The supervisor's first line of an attempt."""
_BLOCK = 1 << 16
_LONGEST_LINE = 1 << 20


@dataclass(frozen=True)
class Source:
    """One log to show."""

    path: Path
    role: str
    attempt: int | None = None
    rank: int | None = None
    """Show only this rank's lines of a file that all ranks share."""
    part: tuple[int, int | None] = (0, None)
    """First byte and end (None: as far as the file goes) of what is shown of the file."""

    def takes(self, line: str) -> bool:
        """Return whether a line of the file belongs to what was asked for."""
        if self.rank is None:
            return True
        return any(mark in line for mark in (f"trainer[{self.rank}]", f"[rank{self.rank}]:", f'"rank": {self.rank},'))


def parse_role(text: str, rank: int | None) -> tuple[str, int | None]:
    """Role and rank of `--role` and `--rank`; `inference[1]` and `inference_1` name both.
    Raises ConfigError: no such role."""
    if match := _LABEL.fullmatch(text):
        return match[1], int(match[2] or match[3])
    if text not in ROLES:
        raise ConfigError(f"no role {text!r}; there are {', '.join(ROLES)}")
    if rank is not None and text not in ("trainer", *ENGINE_ROLES):
        raise ConfigError(f"--rank goes with --role trainer, inference, teacher or judge, not with {text}")
    return text, rank


def attempts_with_logs(run_dir: Path) -> list[int]:
    """Numbers of the attempts that have a log folder, ascending. Raises OSError: `logs` cannot be listed."""
    return sorted(int(match[1]) for name in list_dir(run_dir / "logs") if (match := _ATTEMPT.fullmatch(name)))


def find_source(run_dir: Path, role: str, rank: int | None = None, attempt: int | None = None) -> Source | None:
    """Return the file that holds a log; None where there is none (yet).

    Args:
        role: one of `ROLES`.
        rank: of the trainer, or the server's number.
        attempt: None: the newest that has such a log.

    Raises:
        OSError: the run's logs cannot be looked at.
    """
    if role == "supervisor":
        return _supervisor(run_dir, attempt)
    if role == "slurm":
        return _job_output(run_dir, attempt)
    for number in [attempt] if attempt is not None else reversed(attempts_with_logs(run_dir)):
        folder = run_dir / "logs" / f"attempt_{number}" / role
        if role == "trainer" and rank is not None and (folder / f"rank_{rank}.log").exists():
            return Source(folder / f"rank_{rank}.log", role, number)
        name = f"{role}_{rank}.log" if role in ENGINE_ROLES and rank else f"{role}.log"
        if (folder / name).exists():
            return Source(folder / name, role, number, rank if role == "trainer" else None)
        if role == "trainer" and rank is not None and any(fnmatch(name, "rank_*.log") for name in list_dir(folder)):
            return None  # this attempt has no such rank: an older one's would be taken for it
    return None


def _supervisor(run_dir: Path, attempt: int | None) -> Source | None:
    path = run_dir / "logs" / "supervisor.log"
    if not path.exists():  # it never got so far: what the job itself printed
        return _job_output(run_dir, attempt)
    if attempt is None:
        return Source(path, "supervisor")
    part = _part_of(path, attempt)
    return None if part is None else Source(path, "supervisor", attempt, part=part)


def _part_of(path: Path, attempt: int) -> tuple[int, int | None] | None:
    """Find where an attempt's lines are in the supervisor's log: from its first line to the next attempt's."""
    begins: dict[int, int] = {}
    offset = 0
    with path.open("rb") as file:
        for line in file:
            if match := _BEGINS.search(line):
                begins.setdefault(int(match[1]), offset)
            offset += len(line)
    if attempt not in begins:
        return None
    return begins[attempt], min((o for n, o in begins.items() if n > attempt), default=None)


def _job_output(run_dir: Path, attempt: int | None) -> Source | None:
    """Return what the batch script printed (a local job: what submitit kept of it)."""
    logs = run_dir / "logs"
    if attempt is not None:
        job = next(
            (row.get("job_id") for row in read_rows(run_dir / ATTEMPTS_JSONL) if row["attempt"] == attempt), None
        )
        path = logs / f"slurm-{job}.out"
        return Source(path, "slurm", attempt) if job and path.exists() else None
    found = [logs / name for name in list_dir(logs) if fnmatch(name, "slurm-*.out")]
    found += [logs / "submitit" / name for name in list_dir(logs / "submitit") if name.endswith("_log.out")]
    newest = newest_file(found)
    return None if newest is None else Source(newest, "slurm")


def what_there_is(run_dir: Path) -> str:
    """Return the logs of a run for an error message: `attempt 2: orchestrator, trainer; supervisor`. Raises OSError."""
    numbers = attempts_with_logs(run_dir)
    parts = []
    for number in numbers[-3:]:
        folder = run_dir / "logs" / f"attempt_{number}"
        names = (name for room in list_dir(folder) for name in list_dir(folder / room))
        files = sorted(name.removesuffix(".log") for name in names if name.endswith(".log"))
        parts.append(f"attempt {number}: {', '.join(files) or 'nothing'}")
    parts += [role for role in ("supervisor", "slurm") if find_source(run_dir, role)]
    return "; ".join(parts) or "nothing"


def last_lines(source: Source, count: int, *, whole: bool = False) -> tuple[list[str], int]:
    """Return the last lines of a log and the offset behind them, from which `Follower` goes on.

    Args:
        count: how many; 0: all.
        whole: leave a last line that no newline ends yet to the follower, which shows it when it is whole.

    Raises:
        OSError: the file cannot be read.
    """
    begin, end = source.part
    with source.path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        end = size if end is None else min(end, size)
        if whole and end > begin and os.pread(file.fileno(), 1, end - 1) != b"\n":
            end = _start_of_last(file.fileno(), begin, end, 1)
        # a rank's lines may be far apart: the whole file is looked through
        start = begin if not count or source.rank is not None else _start_of_last(file.fileno(), begin, end, count)
        file.seek(start)
        kept: deque[str] = deque(maxlen=count or None)
        left = end - start
        while left > 0 and (raw := file.readline(min(left, _LONGEST_LINE))):
            left -= len(raw)
            line = raw.decode("utf-8", errors="replace").rstrip("\r\n")
            if source.takes(line):
                kept.append(line)
    return list(kept), end


def _start_of_last(descriptor: int, begin: int, end: int, count: int) -> int:
    """Offset at which the last `count` lines before `end` begin, read backwards."""
    position, found = end, 0
    while position > begin:
        length = min(_BLOCK, position - begin)
        position -= length
        block = os.pread(descriptor, length, position)
        at = len(block)
        while (at := block.rfind(b"\n", 0, at)) >= 0:
            if position + at == end - 1:
                continue  # the newline that ends the last line
            found += 1
            if found == count:
                return position + at + 1
    return begin


def copy_new(path: Path, offset: int) -> int:
    """Copy what a log, once there is one, holds from `offset` on to the terminal; returns the offset behind it."""
    if not path.exists():
        return offset
    with path.open("rb") as file:
        file.seek(offset)
        data = file.read()
    sys.stdout.buffer.write(data)
    sys.stdout.flush()
    return offset + len(data)


class Follower:
    """New lines of one log since the last look; notices when the file was replaced or cut."""

    def __init__(self, source: Source, offset: int = 0) -> None:
        self.source = source
        self._offset = offset
        self._file: int | None = None
        self._rest = b""

    def lines(self) -> Iterator[str]:
        """Whole lines that are new. A file that is not there (any more) has none."""
        for data in self._chunks():
            whole, newline, rest = (self._rest + data).rpartition(b"\n")
            if len(rest) > _LONGEST_LINE:  # no log line is so long: shown as it is
                whole, rest = whole + newline + rest, b""
            self._rest = rest
            for raw in whole.splitlines():
                line = raw.decode("utf-8", errors="replace")
                if self.source.takes(line):
                    yield line

    def close(self) -> Iterator[str]:
        """Return the last line if no newline ended it; the file is closed."""
        rest, self._rest = self._rest.decode("utf-8", errors="replace"), b""
        if self._file is not None:
            os.close(self._file)
            self._file = None
        if rest and self.source.takes(rest):
            yield rest

    def _chunks(self) -> Iterator[bytes]:
        try:
            fresh = os.open(self.source.path, os.O_RDONLY)
        except OSError:  # gone, or an NFS server that does not answer now: the next look tells
            return
        if self._file is not None and not os.path.samestat(os.fstat(self._file), os.fstat(fresh)):
            yield from self._read(self._file)  # what the old file still holds
            self._offset = 0
        if self._file is not None:
            os.close(self._file)
        self._file = fresh
        if os.fstat(fresh).st_size < self._offset:
            self._offset = 0  # cut: begin anew
        yield from self._read(fresh)

    def _read(self, descriptor: int) -> Iterator[bytes]:
        while True:
            try:
                data = os.pread(descriptor, _BLOCK, self._offset)
            except OSError:  # ESTALE: the file was removed on the server
                return
            if not data:
                return
            self._offset += len(data)
            yield data


@dataclass
class Watch:
    """Outside facts that following a run needs; injected, so that tests need no waiting."""

    newest: Callable[[], Source | None]
    """The log to follow now; another path than before when a new attempt has begun."""
    is_over: Callable[[], str | None]
    """Why nothing more will come; None: something may."""
    pause: Callable[[], None] = lambda: time.sleep(0.5)


def follow(first: Follower | None, watch: Watch, say: Callable[[str], None]) -> Iterator[tuple[Source, str]]:
    """Lines as they come, over restarts of the run, until the run is over.

    Args:
        first: where to begin; None: there is no log yet.
        say: is told when the log goes on in another file, and why it ends.

    Yields:
        the log that a line is from, and the line.
    """
    follower = first
    while True:
        over = watch.is_over()  # asked first: what was written before the end is still read below
        if follower is not None:
            for line in follower.lines():
                yield follower.source, line
        newest = watch.newest()
        if newest is not None and (follower is None or newest.path != follower.source.path):
            if follower is not None:
                for line in (*follower.lines(), *follower.close()):
                    yield follower.source, line
                what = f"attempt {newest.attempt}: " if newest.attempt is not None else ""
                say(f"goes on in {what}{newest.path}")
            follower = Follower(newest)
            continue
        if over is not None:
            if follower is not None:
                for line in follower.close():
                    yield follower.source, line
            say(over)
            return
        watch.pause()
