"""`prime-hpc logs RUN`: the last lines of a run's logs, and with -f what comes after them.

Exit codes: 0 shown, also where a run that has not started has nothing to show (it says why); 2 there is no such run,
attempt, role or rank, or its log cannot be read. Ctrl-C while following is its ordinary end: 0.
"""

import json
import os
import re
import sys
import time
from pathlib import Path

from prime_hpc.cli.common import parse, say
from prime_hpc.config.errors import ConfigError
from prime_hpc.config.run_files import ATTEMPTS_JSONL, RUN_YAML
from prime_hpc.launch.monitor.logs import (
    Follower,
    Source,
    Watch,
    find_source,
    follow,
    last_lines,
    parse_role,
    what_there_is,
)
from prime_hpc.launch.monitor.run_facts import RunStatus
from prime_hpc.launch.monitor.run_progress import line_of
from prime_hpc.launch.monitor.status import PatientAsk, status_of
from prime_hpc.runtime.failures import file_error_text
from prime_hpc.store.attempts import NOT_BEGUN
from prime_hpc.store.run_dirs import find_run, read_rows

ASK_EVERY_S = 10.0
_ANSI = re.compile(r"\x1b\[[0-9;]*m")
LOOK_S = 1.0
"""How often it is asked whether the run is over."""
SETTLED_S = 2.0
"""A run that ended just now counts as over after so long."""
LATER_S = 5.0
"""A job's own output that is newer than the supervisor's log by this is pointed at."""


def run(argv: list[str], program: str) -> int:
    """Print a log; see the module."""
    given = parse("logs", argv)
    [word] = given.arguments(1, least=1)
    role, rank = parse_role(given.get("--role") or "supervisor", given.whole("--rank"))
    attempt, count = given.whole("--attempt"), given.whole("--lines")
    path = find_run(word)
    view = _View(path, program, role, rank, attempt, as_json="--json" in given)
    count = 50 if count is None else count
    if "--follow" in given:
        try:
            return view.follow(count)
        except KeyboardInterrupt:
            return 0
    return view.show(count)


class _View:
    """One question about a run's logs."""

    def __init__(
        self, path: Path, program: str, role: str, rank: int | None, attempt: int | None, *, as_json: bool
    ) -> None:
        self._path, self._program, self._as_json = path, program, as_json
        self._role, self._rank, self._attempt = role, rank, attempt
        self._ask = PatientAsk(ASK_EVERY_S)
        self._colors = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
        self._told = ""
        self._next_look = 0.0
        self._final_since: float | None = None

    def show(self, count: int) -> int:
        source = self._first_source()
        if source is None:
            self._say_why_nothing()
            return 0
        num_lines, _ = self._print_last(source, count)
        if not num_lines and source.rank is not None:
            if not self._has_rank():
                raise ConfigError(f"{source.path} has no line of trainer rank {self._rank}")
            self._say(f"trainer rank {self._rank} has written nothing to {source.path}")
        return 0

    def follow(self, count: int) -> int:
        """Return the last lines and all that come until the run is over."""
        source = self._first_source()
        first = None
        if source is None:
            self._say_why_nothing()
        else:
            num_lines, offset = self._print_last(source, count, whole=True)
            if not num_lines and source.rank is not None and self._has_rank() is False:
                raise ConfigError(f"{source.path} has no line of trainer rank {self._rank}: there is no such rank")
            first = Follower(source, offset)
            if source.part[1] is not None:  # an attempt that is over, in a file that goes on with the next
                return 0
        for origin, line in follow(first, Watch(self._source, self._is_over), self._say):
            self._print(origin, line)
            sys.stdout.flush()
        return 0

    def _first_source(self) -> Source | None:
        """Return the log to show. Raises ConfigError where it cannot be looked for."""
        try:
            return find_source(self._path, self._role, self._rank, self._attempt)
        except OSError as error:
            raise ConfigError(f"the logs of {self._path.name} cannot be read: {file_error_text(error)}") from error

    def _source(self) -> Source | None:
        """Return the log to follow now; None, too, where a file system does not tell: the next look does."""
        try:
            return find_source(self._path, self._role, self._rank, self._attempt)
        except OSError:
            return None

    def _has_rank(self) -> bool | None:
        """Return whether the run's config has a trainer of so many ranks; None: it does not say."""
        stated = line_of(self._path / RUN_YAML, "  num_ranks: ", after="trainer:")
        return (self._rank or 0) < int(stated) if stated is not None and stated.isdigit() else None

    def _is_over(self) -> str | None:
        now = time.monotonic()
        if now < self._next_look:
            return None
        self._next_look = now + LOOK_S
        status = self._status()
        if status.is_final:
            # a supervisor writes down its attempt's end first, and then has the job come back
            self._final_since = self._final_since or now
            is_settled = status.ended is None or time.time() - status.ended > 5 * SETTLED_S
            return f"the run is {_sentence(status)}" if is_settled or now - self._final_since >= SETTLED_S else None
        self._final_since = None
        if self._attempt is not None and status.attempt is not None and status.attempt > self._attempt:
            return f"attempt {self._attempt} is over"
        if not status.is_under_way or status.state in ("pending", "requeued", "submitting"):
            told = _sentence(status)
            if told != self._told:
                self._told = told
                self._say(told)
        return None

    def _status(self) -> RunStatus:
        return status_of(self._path, ask=self._ask, details=False)

    def _say_why_nothing(self) -> None:
        """Why there is no such log. Raises ConfigError where there never will be one."""
        status = self._status()
        asked = self._role if self._rank is None else f"{self._role} {self._rank}"
        began = status.attempt is not None and (self._attempt is None or self._attempt <= status.attempt)
        if began and (status.is_final or self._attempt is not None):
            where = "" if self._attempt is None else f" in attempt {self._attempt}{self._why_not_begun()}"
            raise ConfigError(f"{self._path.name} has no log of {asked}{where}; there is {what_there_is(self._path)}")
        if self._attempt is not None and not began and status.attempt is not None:
            raise ConfigError(f"{self._path.name} has no attempt {self._attempt}; the newest is {status.attempt}")
        self._told = _sentence(status)
        self._say(f"no log of {asked} yet: the run is {self._told}")

    def _why_not_begun(self) -> str:
        """Say why the attempt that was asked for has no logs of its own, where it ended before it had any."""
        rows = (row for row in read_rows(self._path / ATTEMPTS_JSONL) if row["attempt"] == self._attempt)
        row = next(rows, None)
        return f", which {NOT_BEGUN}: {row.get('cause')}" if row is not None and row.get("why") == NOT_BEGUN else ""

    def _print_last(self, source: Source, count: int, *, whole: bool = False) -> tuple[int, int]:
        """Print the last lines; returns how many there are, and the offset behind them."""
        try:
            lines, offset = last_lines(source, count, whole=whole)
        except OSError as error:
            raise ConfigError(f"{source.path} cannot be read: {error.strerror}") from error
        for line in lines:
            self._print(source, line)
        sys.stdout.flush()
        if self._role == "supervisor" and self._attempt is None:
            output = _job_output(self._path)
            if output and output.path != source.path and _is_later(output.path, source.path):
                self._say(f"the job's own output is newer: {output.path} (--role slurm)")
        return len(lines), offset

    def _print(self, source: Source, line: str) -> None:
        if self._as_json:
            line = _ANSI.sub("", line)
            row = {"role": source.role, "attempt": source.attempt, "rank": self._rank, "file": str(source.path)}
            print(json.dumps(row | {"line": line}, ensure_ascii=False))
        else:
            print(line if self._colors else _ANSI.sub("", line))

    def _say(self, text: str) -> None:
        say(f"{self._program}: {text}")


def _sentence(status: RunStatus) -> str:
    return f"{status.state}: {status.note}" if status.note else status.state


def _job_output(path: Path) -> Source | None:
    try:
        return find_source(path, "slurm")
    except OSError:  # removed meanwhile
        return None


def _is_later(one: Path, other: Path) -> bool:
    try:
        return one.stat().st_mtime > other.stat().st_mtime + LATER_S
    except OSError:  # removed meanwhile
        return False
