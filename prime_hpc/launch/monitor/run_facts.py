"""Facts of a run, read before its state is decided: files of its directory, Slurm's answer, the verdict's form."""

import math
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prime_hpc.config.run_files import ATTEMPTS_JSONL, STATUS_JSON
from prime_hpc.observe.metrics import number_of
from prime_hpc.store.attempts import read_attempts, with_last_word
from prime_hpc.store.run_dirs import AttemptRow, SubmissionRecord, known_record, read_json

if TYPE_CHECKING:
    from prime_hpc.slurm.jobs import JobInfo

UNDER_WAY = ("submitting", "pending", "starting", "running", "saving", "ending", "requeued")
"""States of a run that was started and has not ended."""
FINAL = ("completed", "failed", "stopped", "lost")
"""States in which nothing more happens by itself. Besides these there are `not started`,
`by hand` (roles without a supervisor, of which nobody can tell more), and `unreadable` (its attempts, or whether it was
submitted again)."""


@dataclass
class Evidence:
    """Content of a run directory, read once."""

    path: Path
    record: SubmissionRecord | None = None
    attempts: list[AttemptRow] = field(default_factory=list)
    unreadable: str | None = None
    """Why the attempts, or the submission, are not known."""
    word: dict[str, Any] | None = None
    """`status.json`: the supervisor's last word."""
    heard: float = 0.0
    """When that came, epoch seconds, by its own clock or the file's: the later, since a node's may be behind."""

    @property
    def last(self) -> AttemptRow | None:
        """The newest attempt."""
        return self.attempts[-1] if self.attempts else None

    @property
    def since(self) -> float:
        """When it was last submitted or last began, epoch seconds."""
        record, last = self.record or SubmissionRecord(), self.last or AttemptRow()
        return max(number(record.get("time")) or 0.0, number(last.get("began")) or 0.0)


@dataclass
class Queue:
    """Slurm's answer about the jobs of interest."""

    jobs: Mapping[str, "JobInfo"] = field(default_factory=dict)
    trouble: str | None = None
    """Why Slurm could not be asked; None: it answered, or there was nothing to ask."""
    asked: float = field(default_factory=time.time)
    """When, epoch seconds: what a run wrote later is newer than the answer."""

    def by_token(self, token: str | None) -> "JobInfo | None":
        """Return the job that carries a submission's token."""
        return next((job for job in self.jobs.values() if token and job.token == token), None)


@dataclass
class RunStatus:
    """One run. Times are epoch seconds; what is not known is None."""

    name: str
    path: str
    state: str
    note: str = ""
    """Why it is in that state: the queue's reason, the end's cause, what is missing."""
    step: int | None = None
    max_steps: int | None = None
    figure: str | None = None
    """`reward` or `loss`."""
    value: float | None = None
    trend: list[float] = field(default_factory=list)
    """Its last values, oldest first."""
    attempt: int | None = None
    """The newest that has begun."""
    is_between: bool = False
    """That attempt is over, and the next one is on its way."""
    why: str | None = None
    """Why the newest attempt began."""
    cause: str | None = None
    """Why the last attempt that ended did."""
    outcome: str | None = None
    """How it ended: completed, failed, interrupted, node_lost, preempted, requeued or stopped."""
    job_id: str | None = None
    since: float | None = None
    ended: float | None = None
    word: float | None = None
    """When the supervisor last wrote."""
    starts: float | None = None
    """Slurm's estimate of the start of a waiting job."""
    time_left_s: float | None = None
    eta_s: float | None = None
    """Seconds until the last step at the present pace."""
    nodes: dict[str, list[str]] = field(default_factory=dict)
    """Hosts by role label."""
    roles: dict[str, str] = field(default_factory=dict)
    """States by role label."""
    runs: dict[str, str] = field(default_factory=dict)
    """Of a trainer that trains many: what its runs do, by name."""
    service: str | None = None
    """The address of its tinker service."""
    stall: str | None = None
    """Why the present step stands still, and the file that says more."""
    no_successor: str | None = None
    """Why no job waits to take over, where one should."""
    alarms: list[str] = field(default_factory=list)
    """Those that fired last in the newest attempt."""
    idle_share: float | None = None
    """Share of its last steps in which the trainer waited for a batch."""
    servers: dict[str, dict[str, Any]] = field(default_factory=dict)
    """By role label, how busy each server is: `running` and `waiting` requests, `kv_use` (0 to 1), `sampled_per_s`; or
    `error`."""
    gpus: dict[str, dict[str, Any]] = field(default_factory=dict)
    """By node, its GPUs together: `num_gpus`, `utilization` (0 to 1), `memory_used` and `memory_total` (bytes),
    `power_w`; or `error`."""
    doing: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    """By role, what its processes do and for whom they wait: rows of `phase`, `awaits`, `blocked`, `since`,
    `count`."""
    slurm: str | None = None
    """Slurm's state of the job, with its reason."""
    host: str | None = None
    """Of the newest attempt's supervisor."""
    pid: int | None = None
    """Of the newest attempt's supervisor, on its host."""
    checkpoint: int | None = None
    checkpoint_time: float | None = None
    purge: str | None = None
    """When the site deletes files of it, where that is soon."""
    logs: dict[str, str] = field(default_factory=dict)

    @property
    def is_final(self) -> bool:
        """True if nothing more will happen by itself."""
        return self.state in FINAL

    @property
    def is_under_way(self) -> bool:
        """True if something was started that has not ended."""
        return self.state in UNDER_WAY

    @property
    def attempt_text(self) -> str:
        """Return the newest attempt, for people."""
        why = f" ({self.why})" if self.why and not self.is_between else ""
        return f"{'after ' if self.is_between else ''}attempt {self.attempt}{why}"

    @property
    def progress(self) -> str:
        """Its step and its last one, for people: the trainer of many runs has no last one, epochs before they are
        counted neither."""
        if self.max_steps is not None:
            return f"{self.step or 0}/{self.max_steps}"
        return "-" if self.step is None else str(self.step)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self) | {"final": self.is_final}


def read_evidence(path: Path) -> Evidence:
    """Return the three files of a run."""
    attempts, record, unreadable = [], None, None
    try:
        record = known_record(path)
    except OSError as error:
        unreadable = f"{error.filename} cannot be read: {error.strerror}"
    file = path / ATTEMPTS_JSONL
    try:
        attempts = read_attempts(file)
    except OSError as error:
        unreadable = f"{file} cannot be read: {error.strerror}"
    word = read_json(path / STATUS_JSON)
    if attempts and attempts[-1].get("job_id") is None:  # a job that has ended may come back: Slurm says
        attempts[-1] = with_last_word(attempts[-1], word)
    heard = number((word or {}).get("time")) or 0.0
    if word is not None:
        with suppress(OSError):
            heard = max(heard, (path / STATUS_JSON).stat().st_mtime)
    return Evidence(path, record, attempts, unreadable, word, heard)


def number(value: Any) -> float | None:
    """Return a finite number of a file as a float; None where it is something else."""
    found = None if isinstance(value, str) else number_of(value)
    return found if found is not None and math.isfinite(found) else None


def integer(value: Any) -> int | None:
    """Return an integer of a file; None where it is something else."""
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def span(seconds: float) -> str:
    """Return a length of time in one unit: `42 s`, `7 min`, `3.5 h`, `2.1 d`."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    if seconds < 7200:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h" if seconds < 172_800 else f"{seconds / 86_400:.1f} d"
