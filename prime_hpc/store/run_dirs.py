"""Runs on disk: found, named and listed.

A RUN is a directory, a name under the outputs folder ($PRIMEHPC_OUTPUTS, else ./outputs), or a Slurm job id.
"""

import errno
import json
import os
import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, TypedDict, cast

from prime_hpc.config.errors import ConfigError
from prime_hpc.config.run_files import ATTEMPTS_JSONL, RUN_YAML, SUBMIT_JOB_JSON, SUBMIT_JSON
from prime_hpc.store.errors import PROOFS

OUTPUTS_VARIABLE = "PRIMEHPC_OUTPUTS"
MARKS = (RUN_YAML, SUBMIT_JSON, ATTEMPTS_JSONL)
"""A directory that holds one of these is a run."""
POINTS = "points.jsonl"
"""Marks a sweep's directory; its points are runs below it."""
STAMPS = "_at"
"""In `submit.json`: when its fields were changed, since the record was opened."""
_MAX_DEPTH = 3
"""Folders of folders: outputs/<sweep>/<point>."""
_STALE_TRIES = 3
_ROLES = ("trainer", "orchestrator", "inference")
_JOB_ID = re.compile(r"\d+([_+]\d+)?")


IN_PLACE = "in_place"
"""`AttemptRow.next`: the run goes on in the same job."""


class AttemptRow(TypedDict, total=False):
    """A line of `attempts.jsonl`, as `store.attempts.Attempt` writes it; versions before knew fewer fields."""

    attempt: int
    incarnation: int
    began: float
    why: str
    host: str
    pid: int
    process: str | None
    job_id: str | None
    resume_step: int | None
    ended: float | None
    outcome: str | None
    cause: str | None
    exit_code: int | None
    seconds: dict[str, float]
    nodes: dict[str, list[str]]
    restarts: int | None
    saved_before: int | None
    saved_step: int | None
    lost_nodes: list[str]
    allocated: dict[str, float]
    kept: list[str]
    next: str | None
    """`requeue`, `successor`, `slurm`, `IN_PLACE`; None: it does not come back."""
    submitted: float | None
    permanent: bool


_OF_EVERY_ATTEMPT = AttemptRow(incarnation=0, host="", pid=0, ended=None, outcome=None, cause=None)

SubmissionState = Literal["sending", "sent", "failed", "local"]
"""`sending`: sbatch was asked, and its answer was not written down (yet); then `sent`, it gave a job id, or `failed`,
it refused. `local`: submitit's, on one machine. How a job that was sent goes on, Slurm and the attempts say."""


class SubmissionRecord(TypedDict, total=False):
    """The record of a run's newest submission, see `slurm.submission_record.open_record`."""

    token: str
    state: SubmissionState
    job_id: str | None
    time: float
    """Epoch seconds."""
    command: list[str]
    """As it was typed, without secrets."""
    layout: str
    """`packed`, `het` or `local`."""
    shape: str
    """Name of the shape in force (`slurm.shape`), where there is one."""
    cluster: str | None
    """Slurm's name for the cluster, where it is known."""
    other_cluster: str | None
    """Cluster of the site to which it was sent with -M."""
    successor: str | None
    """Job that waits behind it."""
    no_successor: str | None
    """Why none waits where one should, in Slurm's words."""
    successor_token: str | None
    """Token in that job's comment, where it has another."""
    error: str
    """Reason of `failed`."""
    cancelled: float
    """Epoch seconds."""
    host: str
    """Of the client."""
    pid: int
    """Of the client."""
    array: str
    """The sweep's directory, for a task of an array."""


def outputs_folder(environ: Mapping[str, str] = os.environ) -> Path:
    """Return the folder in which runs are looked for by name."""
    return Path(environ.get(OUTPUTS_VARIABLE) or "outputs")


def is_run(path: Path | str) -> bool:
    """Return whether a directory is a run's (and not a sweep's, which may have been submitted too)."""
    base = os.fspath(path)
    if os.path.lexists(f"{base}/{MARKS[0]}"):  # no Path methods: called for thousands
        return True
    if os.path.lexists(f"{base}/{POINTS}"):
        return False
    return any(os.path.lexists(f"{base}/{mark}") for mark in MARKS[1:]) or bool(by_hand(path))


def by_hand(path: Path | str) -> list[str]:
    """Roles that were started by hand in this run directory, each with a config of its own there."""
    return [role for role in _ROLES if os.path.lexists(f"{os.fspath(path)}/roles/{role}/{RUN_YAML}")]


def list_runs(folder: Path, closed: list[Path] | None = None) -> list[Path]:
    """Return runs under a folder in no order, those in folders of it too; [] where it does not exist.

    A run's own directory is not searched, hidden ones neither. `closed`: is given the directories that cannot be read,
    each of them a run or not.
    """
    found: list[Path] = []
    _collect(str(folder), _MAX_DEPTH, found, [] if closed is None else closed)
    return found


def _collect(folder: str, depth: int, found: list[Path], closed: list[Path]) -> None:
    try:
        with os.scandir(folder) as entries:
            names = [entry.path for entry in entries if not entry.name.startswith(".") and _is_dir(entry)]
    except OSError as error:
        if error.errno not in PROOFS:  # absent, or gone meanwhile
            closed.append(Path(folder))
        return
    for path in names:
        if is_run(path):
            found.append(Path(path))
        elif depth > 1:
            _collect(path, depth - 1, found, closed)


def _is_dir(entry: os.DirEntry[str]) -> bool:
    """Return whether an entry is a directory; a link that leads in a circle is none."""
    try:
        return entry.is_dir()
    except OSError:
        return False


def run_name(path: Path, folder: Path) -> str:
    """Return a run's name in a list of those under `folder`."""
    try:
        return str(path.relative_to(folder))
    except ValueError:
        return str(path)


def read_json(path: Path | str) -> dict[str, Any] | None:
    """Return a small JSON object; None where it is absent, torn or not an object, or cannot be read now."""
    try:
        return known_json(path)
    except OSError:
        return None


def known_json(path: Path | str) -> dict[str, Any] | None:
    """Return the same, for who decides or writes by it. Raises OSError: whether it is there is not known now."""
    for left in reversed(range(_STALE_TRIES)):
        try:
            with open(path, "rb") as file:  # noqa: PTH123 - thousands of them: no Path methods
                value = json.loads(file.read())
        except ValueError:
            return None
        except OSError as error:
            if error.errno in PROOFS:
                return None
            if error.errno != errno.ESTALE or not left:  # another node replaced it as it was read
                raise OSError(error.errno, error.strerror, str(path)) from error
        else:
            return value if isinstance(value, dict) else None
    return None


def read_rows(path: Path | str) -> list[AttemptRow]:
    """Return the attempts of a run, the last word about each, in order; torn lines are left out."""
    try:
        with open(path, "rb") as file:  # noqa: PTH123 - as above
            content = file.read()
    except OSError:
        return []
    return parse_attempts(content)


def parse_attempts(content: bytes) -> list[AttemptRow]:
    """Read the lines of `attempts.jsonl`: the last of each attempt, in order; torn and foreign ones are left out, and
    fields that every attempt has are filled in where a line was made by hand."""
    rows: dict[int, AttemptRow] = {}
    for line in content.splitlines():
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if isinstance(row, dict) and isinstance(row.get("attempt"), int):
            rows[row["attempt"]] = cast(AttemptRow, _OF_EVERY_ATTEMPT | row)
    return [rows[number] for number in sorted(rows)]


def read_record(path: Path | str) -> SubmissionRecord | None:
    """Return the record of a run's newest submission: the client's words and the job's, the later one of each field;
    None where there is none, or it cannot be read now."""
    try:
        return known_record(path)
    except OSError:
        return None


def known_record(path: Path | str) -> SubmissionRecord | None:
    """Return the same, for who decides by it: taken for none, a second job would be sent. Raises OSError: it is not
    known now."""
    record = known_json(f"{path}/{SUBMIT_JSON}")
    if record is None:
        return None
    stamps = record.pop(STAMPS, {})
    job = known_json(f"{path}/{SUBMIT_JOB_JSON}")
    if job is None or job.get("of") != record.get("token"):  # there is none, or it speaks of an earlier submission
        return cast(SubmissionRecord, record)
    said: dict[str, tuple[float, Any]] = job["fields"]
    later = {name: value for name, (at, value) in said.items() if at >= stamps.get(name, 0.0)}
    return cast(SubmissionRecord, record | later)


def job_ids(path: Path) -> set[str]:
    """Every Slurm job that a run ever was."""
    record = read_record(path) or SubmissionRecord()
    ids = {record.get("job_id"), record.get("successor")} if record.get("state") != "local" else set()
    ids |= {row.get("job_id") for row in read_rows(path / ATTEMPTS_JSONL)}
    return {str(number) for number in ids if number}


def find_run(word: str, environ: Mapping[str, str] = os.environ) -> Path:
    """Return the run directory that a RUN argument means.
    Raises ConfigError: there is none, or the word fits several; it names what is near."""
    folder = outputs_folder(environ)
    direct = Path(word).expanduser()
    for candidate in (direct, folder / word):
        if candidate.is_dir() and is_run(candidate):
            return candidate
    for candidate in (direct, folder / word):
        refuse_closed(candidate)
    runs = list_runs(folder)
    same = [path for path in runs if path.name == word]
    if not same and _JOB_ID.fullmatch(word):
        same = _by_job(word, runs)
    if len(same) == 1:
        return same[0]
    if same:
        names = ", ".join(sorted(run_name(path, folder) for path in same))
        raise ConfigError(f"{word!r} is the name of several runs: {names}; give one of these")
    if direct.is_dir():
        raise ConfigError(f"{word} is a directory, but no run: it holds none of {', '.join(MARKS)}")
    raise ConfigError(_not_found(word, [run_name(path, folder) for path in runs], folder))


def refuse_closed(path: Path) -> None:
    """Raise a ConfigError for a directory whose files are not this user's to see: none of them would be found."""
    if path.is_dir() and not os.access(path, os.R_OK | os.X_OK):
        raise ConfigError(f"{path} cannot be read: Permission denied; its owner can open it (chmod, setfacl)")


def _by_job(word: str, runs: list[Path]) -> list[Path]:
    """Return the run of a job id (a het component's id counts as its leader's); Slurm may re-use ids: the newest is
    meant."""
    wanted = {word, word.partition("+")[0]}
    found = [path for path in runs if wanted & job_ids(path)]
    return [max(found, key=lambda path: path.stat().st_mtime)] if found else []


def _not_found(word: str, names: list[str], folder: Path) -> str:
    from difflib import get_close_matches

    lasts = {name.rpartition("/")[2]: name for name in names}
    near = get_close_matches(word, names, n=3, cutoff=0.5)
    near += [lasts[last] for last in get_close_matches(word.rstrip("/").rpartition("/")[2], lasts, n=3, cutoff=0.5)]
    near += sorted(name for name in names if word in name)[:3]
    if near:
        hint = f"did you mean {', '.join(list(dict.fromkeys(near))[:5])}?"
    elif names:
        others = "1 other" if len(names) == 1 else f"{len(names)} others"
        hint = f"{folder} holds {others} (`prime-hpc status {shlex.quote(str(folder))}` lists them)"
    else:
        hint = f"there is no run under {folder}; give a directory, or name another folder with {OUTPUTS_VARIABLE}"
    if _JOB_ID.fullmatch(word):
        asking = f"`scontrol show job {word}` names the directory of another (StdOut)"
        return f"no run or job {word!r}: ids are those of the runs under {folder}; {asking}"
    return f"no run {word!r}; {hint}"
