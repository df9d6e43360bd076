"""`attempts.jsonl`: one line per attempt of a run: when, where, why it began, why it ended.

Written by the supervisor; read by `status`, the report and the resume logic.
"""

import json
import os
import shlex
import socket
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, cast

from loguru import logger

from prime_hpc.config.run_files import STATUS_JSON
from prime_hpc.store.errors import NoRoom, StoreError
from prime_hpc.store.io import files
from prime_hpc.store.io.disk import in_words, is_full
from prime_hpc.store.io.file_age import file_age_s
from prime_hpc.store.io.updated_file import update_file
from prime_hpc.store.run_dirs import AttemptRow, SubmissionRecord, parse_attempts, read_record
from prime_hpc.store.run_paths import RunPaths

ALIVE_S = 120.0
"""An attempt on another host that was silent for longer is over: twice what an NFS client may show of an older
state."""

NOT_BEGUN = "ended before it began"
"""Why, of an attempt that went back to no step: nothing of the run was touched."""
_ENDED = ("Z", "X", "x")
"""States of a process that has ended (proc(5))."""


@dataclass
class Attempt:
    """One attempt of a run."""

    attempt: int
    incarnation: int
    began: float
    why: str
    host: str = field(default_factory=socket.gethostname)
    pid: int = field(default_factory=os.getpid)
    process: str | None = field(default_factory=lambda: process_token(os.getpid()))
    job_id: str | None = None
    resume_step: int | None = None
    ended: float | None = None
    outcome: str | None = None
    cause: str | None = None
    exit_code: int | None = None
    seconds: dict[str, float] = field(default_factory=dict)
    nodes: dict[str, list[str]] = field(default_factory=dict)
    """Hosts by role label."""
    restarts: int | None = None
    """SLURM_RESTART_COUNT."""
    saved_before: int | None = None
    """Newest whole checkpoint when the attempt began."""
    saved_step: int | None = None
    """Newest whole checkpoint when the attempt ended."""
    lost_nodes: list[str] = field(default_factory=list)
    """Nodes that fell silent."""
    allocated: dict[str, float] = field(default_factory=dict)
    """Of a Slurm job: its `nodes`, `cpus` and, where they are known, `gpus`, and `since` when it has them (epoch
    seconds). Without Slurm the `gpus` of its roles, where they have some."""
    kept: list[str] = field(default_factory=list)
    """Labels of the roles that went on from the attempt before, in the same job."""
    next: str | None = None
    """How the run comes back, see `AttemptRow.next`."""
    submitted: float | None = None
    """When its job was, epoch seconds: the submit record is that of the newest."""
    permanent: bool = False
    """Set where the role that failed says that another attempt would end for the same cause."""


class Ended(Exception):
    """The attempt is over; carries the exit code, the cause and the outcome."""

    def __init__(self, code: int, cause: str, outcome: str | None = None, permanent: bool = False) -> None:
        super().__init__(cause)
        self.code, self.cause, self.permanent = code, cause, permanent
        self.outcome = outcome or ("completed" if code == 0 else "failed")

    @classmethod
    def by_itself(cls, error: OSError | StoreError) -> "Ended":
        """Of what the supervisor itself met: a full disk under the logs, a process table that is full."""
        code = NoRoom.attempt_exit_code if is_full(error) or isinstance(error, NoRoom) else 1
        return cls(code, f"the supervisor could not go on: {in_words(error)}")


def read_attempts(path: Path) -> list[AttemptRow]:
    """Return the attempts so far, the last word about each; torn and foreign lines are left out.
    Raises OSError: it is there and cannot be read (`run_dirs.read_rows` takes that for none)."""
    try:
        return parse_attempts(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        return []


def saved_claims(rows: Iterable[AttemptRow]) -> list[tuple[int, int]]:
    """Return (incarnation, step that was saved when it ended) of attempts that saved, for `newest.expected_step`."""
    return [(row["incarnation"], saved) for row in rows if (saved := row.get("saved_step"))]


def rows_with(path: Path, own: Attempt) -> list[AttemptRow]:
    """Return the attempts so far, in order, of one of them what this process knows: its end may not have been written.
    Raises OSError: as for `read_attempts`."""
    rows = {row["attempt"]: row for row in read_attempts(path)}
    rows[own.attempt] = cast(AttemptRow, asdict(own))
    return [rows[number] for number in sorted(rows)]


def write_attempt(path: Path, attempt: Attempt) -> None:
    """Rewrite the file with this attempt's line added or replaced. Raises StoreError: disk full, not writable."""
    rewrite_row(path, cast(AttemptRow, asdict(attempt)))


def close_attempt(
    attempt: Attempt, ended: Ended, saved_step: int | None, seconds: Mapping[str, float], now: float
) -> None:
    """Note how an attempt ended. `saved_step`: its newest whole checkpoint."""
    attempt.ended, attempt.exit_code, attempt.cause, attempt.outcome = now, ended.code, ended.cause, ended.outcome
    attempt.saved_step, attempt.permanent = saved_step, ended.permanent
    attempt.seconds = {name: round(value, 1) for name, value in seconds.items()}


def rewrite_row(path: Path, row: AttemptRow) -> None:
    """Add or replace the line of `row["attempt"]`; lines of attempts that a newer one has overtaken are closed."""

    def add(content: bytes) -> bytes:
        rows = {known["attempt"]: known for known in parse_attempts(content)}
        rows[row["attempt"]] = row
        _close_overtaken(list(rows.values()))
        return "".join(json.dumps(rows[key]) + "\n" for key in sorted(rows)).encode()

    update_file(path, add)


def with_last_word(row: AttemptRow, word: Mapping[str, Any] | None) -> AttemptRow:
    """Return the line of an attempt with the end that its supervisor's last word (`status.json`) states, where it could
    not write it down here, on a full disk say; any other line as it is."""
    if (
        word is None
        or word.get("attempt") != row["attempt"]
        or word.get("state") != "ended"
        or row["ended"] is not None
    ):
        return row
    return {**row, "ended": word["time"], "outcome": word.get("outcome") or "failed", "cause": word.get("cause")}


def _close_overtaken(rows: list[AttemptRow]) -> None:
    """Of two attempts that begin at once the older one may write nothing more, not even its end, and the newer one had
    not seen it when it began: whoever writes next closes it."""
    newest = max(rows, key=lambda row: row.get("incarnation", 0))
    for row in rows:
        if row.get("ended") is None and row.get("incarnation", 0) < newest.get("incarnation", 0):
            row["ended"] = max(row.get("began") or 0.0, newest.get("began") or 0.0)
            row["outcome"], row["cause"] = "failed", f"attempt {newest['attempt']} began meanwhile"


def begin(
    path: Path,
    *,
    incarnation: int,
    why: str,
    resume_step: int | None,
    job_id: str | None,
    saved_before: int | None = None,
    restarts: int | None = None,
) -> Attempt:
    """Open the next attempt and write its line.

    Its number is that of a log directory which did not exist: two attempts that begin at once never share one.
    Raises StoreError: disk full, not writable.
    """
    number = max((row["attempt"] for row in read_attempts(path)), default=0) + 1
    while not _take(path.parent / "logs" / f"attempt_{number}"):
        number += 1
    attempt = Attempt(
        number,
        incarnation,
        time.time(),
        why,
        job_id=job_id,
        resume_step=resume_step,
        saved_before=saved_before,
        restarts=restarts,
        submitted=(read_record(path.parent) or SubmissionRecord()).get("time"),
    )
    write_attempt(path, attempt)
    return attempt


def _take(log_dir: Path) -> bool:
    try:
        files.make_dir(log_dir, exist_ok=False)
    except FileExistsError:
        return False
    return True


def show_latest_logs(paths: RunPaths, attempt: Attempt) -> None:
    """Let `logs/latest` lead to an attempt's logs, where links are. Raises StoreError: disk full, not writable."""
    latest = paths.root / "logs" / "latest"
    files.make_dir(latest.parent)
    if not files.replace_link(latest, name := f"attempt_{attempt.attempt}"):
        logger.warning(f"{latest} cannot be made on this file system: this attempt's logs are in logs/{name}")


def is_same_process(row: AttemptRow, attempt: Attempt) -> bool:
    """Return whether the process that has an attempt opened this line, too."""
    return (row["host"], row["pid"], row.get("process")) == (attempt.host, attempt.pid, attempt.process)


def is_held(row: AttemptRow) -> bool:
    """Return whether an attempt that wrote no end still runs on this host."""
    from prime_hpc.runtime.process_tree import runs_since

    if row["ended"] is not None or row["host"] != socket.gethostname():
        return False
    if row.get("process"):
        return process_token(row["pid"]) == row["process"]
    return runs_since(row["pid"], row.get("began") or 0.0)


def runs_elsewhere(run_dir: Path, row: AttemptRow) -> str | None:
    """Signs that an attempt that wrote no end still runs on another host, outside of Slurm; None: there are none.

    Its supervisor replaces `status.json` every two seconds. The file's age is told by the file system's own clock.
    """
    if row["ended"] is not None or row.get("job_id") or row["host"] == socket.gethostname():
        return None
    try:
        age_s = file_age_s(run_dir / STATUS_JSON)
    except OSError:
        return None
    if abs(age_s) > ALIVE_S:  # one of the future was not replaced since that clock was set back
        return None
    return (
        f"attempt {row['attempt']} runs on {row['host']} (process {row['pid']}), whose last sign of life is "
        f"{max(age_s, 0):.0f} s old: end it there (prime-hpc cancel {shlex.quote(str(run_dir))}), or, if that process "
        f"is gone, wait until it has been silent for {ALIVE_S:.0f} s"
    )


def process_token(pid: int) -> str | None:
    """Tells a process from a later one with the same number, also where the clock was set; None: it is gone, or has
    ended and its parent has not asked how (a container without an init never does).

    The boot's id and the start in ticks since then (proc(5), field 22 of stat; field 3 is the state).
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except OSError:
        return None
    return f"{boot}:{fields[19]}" if fields[0] not in _ENDED else None
