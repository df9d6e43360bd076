"""A sweep's directory: its points and what was sent.

<output_dir>/<name>/
sweep.yaml      the sweep as it was last submitted, files and flags merged
points.jsonl    a line a point; its place is the point's index for ever, later submits only append. Replaced in
one rename
submits.jsonl   what was sent: a line before sbatch (`sending`) and one after it; the last of a token counts.
Only appended to
<point>/        the point's run directory
logs/           of the arrays' tasks
.arrays/N/      stands for the points from index N on, where Slurm's MaxArraySize does not reach them
"""

import json
import os
import socket
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prime_hpc.config.errors import ConfigError
from prime_hpc.config.site import cluster_name
from prime_hpc.runtime.atomic_write import write_atomic
from prime_hpc.slurm.allocation import job_argument
from prime_hpc.slurm.submission_record import SUBMISSION_VARIABLE, new_token, open_record
from prime_hpc.store.run_dirs import SubmissionRecord, known_record

if TYPE_CHECKING:
    from prime_hpc.launch.sweep.resolve import Point

SWEEP_YAML = "sweep.yaml"
POINTS = "points.jsonl"
SUBMITS = "submits.jsonl"
ARRAYS = ".arrays"
BLOCK = "block.json"
_ID_DIGITS = 8
INVALID = "invalid"
"""Ends the name of a point that is not valid, where another experiment has its own."""


@dataclass(frozen=True)
class PointRow:
    """One line of `points.jsonl`."""

    index: int
    id: str
    """The first digits of its hash; of a point without one its name."""
    name: str
    run_dir: str
    """Relative to the sweep's directory."""
    values: dict[str, Any]
    hash: str | None
    reason: str | None = None
    """Why it cannot run as it is."""
    current: bool = True
    """True if the sweep file as last submitted has it."""


@dataclass(frozen=True)
class SubmitRow:
    """One entry of `submits.jsonl`: a job, an array, or a cancel."""

    token: str
    kind: str
    """array, job, local or cancel."""
    state: str
    """sending, sent or failed; of a cancel `sent`."""
    time: float
    points: list[int]
    job_id: str | None = None
    first: int = 0
    """Array: the index of the point that task 0 would run."""
    lane: int | None = None
    error: str | None = None
    pid: int = 0
    """Of the command that sends it."""
    host: str = ""


@dataclass
class Sweep:
    """The directory, as an object. Reading never writes."""

    dir: Path
    rows: list[PointRow] = field(default_factory=list)
    submits: list[SubmitRow] = field(default_factory=list)

    @property
    def current(self) -> list[PointRow]:
        """Points that the sweep file has, by index."""
        return [row for row in self.rows if row.current]

    def run_dir(self, row: PointRow) -> Path:
        """Return a point's run directory."""
        return self.dir / row.run_dir

    def last_submits(self) -> dict[int, SubmitRow]:
        """Point index -> the last job that it was sent as."""
        return {index: s for s in self.submits if s.kind != "cancel" for index in s.points}

    def write_points(self) -> None:
        """Replace `points.jsonl`. Raises ConfigError where the disk is full or not writable."""
        write_text(self.dir / POINTS, "".join(json.dumps(asdict(row), default=str) + "\n" for row in self.rows))

    def record(self, row: SubmitRow) -> None:
        """Add a submit, or replace the one with its token, on disk before this returns."""
        self.submits = _folded([*self.submits, row])
        _append_line(self.dir / SUBMITS, asdict(row))

    def update(self, row: SubmitRow, **changes: Any) -> SubmitRow:
        """Record a submit with changes."""
        changed = replace(row, **changes)
        self.record(changed)
        return changed

    def array_of(self, first: int) -> Path:
        """Return the directory that stands for the points from `first` on in a batch script; made if absent."""
        if first == 0:
            return self.dir
        folder = self.dir / ARRAYS / str(first)
        folder.mkdir(parents=True, exist_ok=True)
        write_text(folder / BLOCK, json.dumps({"first": first}))
        return folder


def new_submit(kind: str, points: Sequence[int], **facts: Any) -> SubmitRow:
    """Return a submit that is about to be sent, with a fresh token."""
    return SubmitRow(
        token=new_token(),
        kind=kind,
        state="sending",
        time=time.time(),
        points=list(points),
        pid=os.getpid(),
        host=socket.gethostname(),
        **facts,
    )


def read_sweep(sweep_dir: Path) -> Sweep:
    """Return the state of a sweep; an empty one where nothing was submitted yet.
    Raises ConfigError: a file is damaged."""
    rows = [PointRow(**row) for row in _read_lines(sweep_dir / POINTS)]
    for index, row in enumerate(rows):
        if row.index != index:
            raise ConfigError(
                f"{sweep_dir / POINTS}:{index + 1}: holds point {row.index}; the file was changed by hand"
            )
    submits = _read_lines(sweep_dir / SUBMITS, may_be_torn=True)
    return Sweep(sweep_dir, rows, _folded(SubmitRow(**row) for row in submits))


def point_run_dir(sweep_dir: Path, array_index: int, environ: Mapping[str, str] = os.environ) -> Path:
    """Return the run directory of an array's task, prepared by `sweep submit`; the task's log is linked into it.

    Called in the job.

    Args:
        sweep_dir: as the batch script says: the sweep's directory, or one below its `.arrays`.
        array_index: SLURM_ARRAY_TASK_ID.
        environ: the job's; tells of which submission it is, and the name of its log.

    Raises:
        ConfigError: there is no such point, or it was submitted again since.
    """
    sweep_dir = Path(sweep_dir)
    first = 0
    if (sweep_dir / BLOCK).exists():
        first = int(json.loads((sweep_dir / BLOCK).read_text(encoding="utf-8"))["first"])
        sweep_dir = sweep_dir.parent.parent
    try:
        lines = (sweep_dir / POINTS).read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ConfigError(f"{sweep_dir / POINTS}: cannot be read: {error.strerror}; is it a sweep?") from error
    index = first + array_index
    if array_index < 0 or index >= len(lines):
        raise ConfigError(f"{sweep_dir}: there is no point {index}: the sweep has {len(lines)}")
    token = environ.get(SUBMISSION_VARIABLE, "").partition(" ")[0]
    newest = read_sweep(sweep_dir).last_submits().get(index) if token else None
    if newest is not None and newest.token != token:
        raise ConfigError(
            f"point {index} was submitted again, as job {newest.job_id or 'yet unknown'}: this job's submission had "
            "been given up when sbatch answered too late; it ends here"
        )
    run_dir = sweep_dir / str(json.loads(lines[index])["run_dir"])
    _link_log(run_dir, environ)
    if newest is not None:
        with suppress(OSError):  # a full disk: no run fails for want of it
            _open_point_record(run_dir, sweep_dir, newest, environ)
    return run_dir


def _open_point_record(run_dir: Path, sweep_dir: Path, submit: SubmitRow, environ: Mapping[str, str]) -> None:
    """Open a task's record where the client, which writes those of thousands once sbatch has answered, has not come to
    it yet: what the job itself adds would go into an earlier submission's, and be lost with that."""
    record = known_record(run_dir) or SubmissionRecord()
    # that of this submit has its time, whichever job goes on with it; of two arrays the file's order has told already,
    # as hosts' clocks differ
    if (time_of := record.get("time", 0.0)) != submit.time and ("array" in record or time_of < submit.time):
        job_id, cluster = job_argument(environ), cluster_name(environ)
        open_point_record(run_dir, sweep_dir, submit, job_id=job_id, command=[], cluster=cluster)


def open_point_record(run_dir: Path, sweep_dir: Path, submit: SubmitRow, **fields: Any) -> None:
    """Tell a point which task of an array it is (`job_id`), where `status`, `logs` and `cancel` look for it."""
    of_sweep = {"time": submit.time, "array": str(sweep_dir), **fields}
    open_record(run_dir, token=submit.token, state="sent", layout="packed", **of_sweep)


def log_name(array: str, task: str) -> str:
    """Name of a task's log in the sweep's `logs`, of ids or of Slurm's symbols for them."""
    return f"slurm-{array}_{task}.out"


def _link_log(run_dir: Path, environ: Mapping[str, str]) -> None:
    """Let `prime-hpc logs POINT` find the job's log where those of single runs are."""
    if "SLURM_ARRAY_JOB_ID" not in environ:
        return
    name = log_name(environ["SLURM_ARRAY_JOB_ID"], environ["SLURM_ARRAY_TASK_ID"])
    with suppress(OSError):  # it is there from an earlier attempt; and no run fails for want of a link
        (run_dir / "logs").mkdir(exist_ok=True)
        (run_dir / "logs" / name).symlink_to(Path("..", "..", "logs", name))


def merge_points(sweep: Sweep, points: Sequence["Point"]) -> list[tuple[PointRow, "Point"]]:
    """Bring the sweep's rows up to what its file says now; nothing is written.

    A point that is known by its hash keeps index, name and directory. One that is new takes the place of an invalid or
    never sent one of its name, else it is appended; where its name belongs to another experiment it gets another.
    Returns the current points in the order of the file.
    """
    sent = {index for row in sweep.submits for index in row.points}
    known = {row.hash: row for row in sweep.rows if row.hash is not None}
    free = {row.name if row.hash else row.id: row.index for row in sweep.rows if row.index not in sent}
    owners = {row.name: row.index for row in sweep.rows if row.hash is not None}
    wanted = {point.hash for point in points}
    rows = [replace(row, current=False) for row in sweep.rows]
    result = []
    for point in points:
        row = known.get(point.hash) if point.hash is not None else None
        if row is None:
            index = free.get(point.name, len(rows))
            if index < len(rows) and rows[index].hash in wanted - {None}:
                index = len(rows)  # that is another point of the file as it is now
            name = point.name
            if owners.get(name, index) != index:
                name = f"{name}-{(point.hash or INVALID)[:_ID_DIGITS]}"
            elif point.hash is not None:
                owners[name] = index
            row = PointRow(index, "", name, name, {}, None)
        row = replace(
            row,
            id=point.hash[:_ID_DIGITS] if point.hash else point.name,
            values=point.values,
            hash=point.hash,
            reason=point.reason,
            current=True,
        )
        rows[row.index : row.index + 1] = [row]
        result.append((row, point))
    sweep.rows = rows
    return result


def write_text(path: Path, text: str) -> None:
    """Replace a small file in one rename. Raises ConfigError: the disk is full or not writable."""
    try:
        write_atomic(path, text)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written: {error.strerror}") from error


def _append_line(path: Path, row: dict[str, Any]) -> None:
    """Add a line, on disk when this returns; a half line that a killed writer left stays one."""
    try:
        with path.open("a+b") as file:
            if size := file.seek(0, os.SEEK_END):
                file.seek(size - 1)
                if file.read(1) != b"\n":
                    file.write(b"\n")
            file.write(json.dumps(row, default=str).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written: {error.strerror}") from error


def _folded(rows: Iterable[SubmitRow]) -> list[SubmitRow]:
    """Return the last word about each submit, in the order in which they were begun: clocks of hosts differ."""
    return list({row.token: row for row in rows}.values())


def _read_lines(path: Path, may_be_torn: bool = False) -> list[dict[str, Any]]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return []
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    rows = []
    for number, line in enumerate(lines, 1):
        try:
            rows.append(json.loads(line))
        except ValueError as error:
            if not may_be_torn:
                raise ConfigError(f"{path}:{number}: damaged: {error}") from error
    return rows
