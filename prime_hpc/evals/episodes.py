"""Every episode of a run without a trainer on disk: one JSON object a line, only ever appended, each whole or cut off.

    {"step": 10, "env": "calculator", "task": 3, "rollout": 0, "state": "completed", "reward": 1.0, ...}

(step, env, task, rollout) is the key; step 0 is the base model. Killed at any moment, the run goes on with the
keys that are missing. One process writes: the one that plays, of one attempt of the run.
"""

import json
import math
import os
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

from loguru import logger

from prime_hpc.envs.samples import UNANSWERED, UNSCORED
from prime_hpc.observe.metrics import READ_BYTES, parse_row
from prime_hpc.store.io.disk import disk_errors
from prime_hpc.store.run_paths import RunPaths, check_incarnation

RESULTS = "results"
FILE = "episodes.jsonl"
ADVICE = "; started again, it goes on with the episodes that are missing"
"""Said by a process that is told to stop before all are played."""
SYNC_S = 1.0
"""Lines are on the disk after so long at most: what a node loses with its memory is played again."""

_TEXTS = ("prompt", "completion")

COMPLETED, FAILED, TIMEOUT = "completed", "failed", "timeout"


class Key(NamedTuple):
    """Identity of an episode."""

    step: int
    env: str
    task: int
    rollout: int


@dataclass(frozen=True, slots=True)
class Record:
    """One episode that has ended."""

    step: int
    env: str
    task: int
    rollout: int
    state: str
    """`completed`; `timeout` (its deadline cut it off; counts as reward 0); `failed` (server, API or environment; has
    no score)."""
    reward: float | None
    """None where it failed."""
    truncated: bool = False
    """A limit of tokens or turns cut it short; scored as it is."""
    task_id: str = ""
    """Sum over the task's data: the same task in two evaluations has the same one."""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    seconds: float = 0.0
    reason: str = ""
    """One line: why it failed or timed out."""
    error: str = ""
    """Class of the failure."""
    metrics: dict[str, float] = field(default_factory=dict)
    prompt: str = ""
    completion: str = ""

    @property
    def key(self) -> Key:
        """Of the four fields."""
        return Key(self.step, self.env, self.task, self.rollout)

    @property
    def is_scored(self) -> bool:
        """True if it has a score."""
        return self.state != FAILED

    @property
    def has_failed(self) -> bool:
        """True if nobody knows what the model would have scored: also of a timeout before an API's first reply or while
        the reward was computed: scored as any timeout, but it counts in `max_failed_share`, and is played again."""
        return not self.is_scored or self.error in (UNANSWERED, UNSCORED)


def results_file(run_dir: Path) -> Path:
    """Of a run directory."""
    return run_dir / RESULTS / FILE


def num_episodes(run_dir: Path) -> int:
    """Whole lines of the file: an attempt that leaves more of them than it found has got somewhere."""
    path = results_file(run_dir)
    if not path.exists():
        return 0
    with path.open("rb") as file:
        return sum(part.count(b"\n") for part in iter(lambda: file.read(1 << 20), b""))


def read_records(path: Path) -> tuple[dict[Key, Record], int]:
    """All episodes of a file, one a key: one that is as it should be wins over a failed one, else the first.
    Returns the episodes without their texts, and the bytes of whole lines: what is beyond them was cut off."""
    records: dict[Key, Record] = {}
    end = 0
    for record, start, length in read_lines(path, Record, texts=False):
        end = start + length
        if record is not None and replaces(record, records.get(key := record.key)):
            records[key] = record
    return records, end


def _without_texts(record: Record) -> Record:
    """Return what is counted of an episode: the texts of a million are more than a node's memory."""
    return replace(record, prompt="", completion="") if record.prompt or record.completion else record


def replaces(record: Record, earlier: Record | None) -> bool:
    """Return whether an episode counts beside an earlier one of its key."""
    return earlier is None or _rank(record) > _rank(earlier)


def _rank(record: Record) -> int:
    return record.is_scored + (not record.has_failed)


def read_lines(
    path: Path, record_type: type[Record], *, texts: bool = True
) -> Iterator[tuple[Record | None, int, int]]:
    """Read a file line by line: it may be larger than the memory.

    Args:
        path: may be missing.
        texts: with what was said for people; without, only what is counted is built.

    Yields:
        the episode (None: the line holds none), and the line's first byte and length; half a last line is left out.
    """
    if not path.exists():
        return
    start = 0
    with path.open("rb", buffering=READ_BYTES) as file:
        for line in file:
            if not line.endswith(b"\n"):
                return
            record = parse_record(line, record_type, texts=texts)
            if record is None:
                logger.warning(f"{path}: a line is no episode and is passed over: {line[:80]!r}")
            yield record, start, len(line)
            start += len(line)


def parse_record(line: bytes, record_type: type[Record], *, texts: bool = True) -> Record | None:
    """Return the episode that a line holds, None where it holds none. `texts`: as for `read_lines`."""
    row = parse_row(line) or {}
    known = record_type.__dataclass_fields__
    try:
        record = record_type(**{name: row[name] for name in row if name in known and (texts or name not in _TEXTS)})
        good = isinstance(record.reward, int | float) and math.isfinite(record.reward)
    except (TypeError, OverflowError):
        return None
    return record if good or record.state == FAILED else None


class EpisodeLog:
    """The file of one run, opened for appending. `records` holds what was there and what was added, without texts."""

    record_type: type[Record] = Record

    def __init__(self, paths: RunPaths, incarnation: int) -> None:
        """Read what is there, and cut off half a last line.
        Raises OSError, StoreError: it cannot be read or written."""
        self.path = results_file(paths.root)
        self._paths, self._incarnation = paths, incarnation
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.records: dict[Key, Record] = {}
        whole = 0
        for record, start, length in read_lines(self.path, self.record_type, texts=False):
            whole = start + length
            if record is not None and replaces(record, self.records.get(record.key)):
                self._index(record, start)
        size = self.path.stat().st_size if self.path.exists() else 0
        self._descriptor = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
        if size > whole:
            logger.warning(f"{self.path} ends in the middle of a line (an earlier attempt was killed): cut off")
            os.ftruncate(self._descriptor, whole)
        self._size = whole  # no one else writes
        self._next_sync = time.monotonic() + SYNC_S

    def add(self, record: Record) -> None:
        """Append one episode. Raises StoreError: the disk is full (half a line is cut off again)."""
        if not replaces(record, self.records.get(record.key)):
            return
        text = json.dumps(
            {name: getattr(record, name) for name in self.record_type.__dataclass_fields__},
            ensure_ascii=False,
            allow_nan=False,
        )
        line = text.encode(errors="replace") + b"\n"  # an environment's words may hold half a surrogate pair
        with disk_errors(self.path):
            try:
                written = os.write(self._descriptor, line)
                while written < len(line):
                    written += os.write(self._descriptor, line[written:])
            except OSError:
                os.ftruncate(self._descriptor, self._size)
                raise
        self._index(record, self._size)
        self._size += len(line)

    def _index(self, record: Record, start: int) -> None:
        """Keep what is needed of an episode whose line begins at byte `start`."""
        self.records[record.key] = _without_texts(record)

    @property
    def is_sync_due(self) -> bool:
        """True if lines may have waited for the disk for `SYNC_S`, and nobody syncs already."""
        return time.monotonic() >= self._next_sync

    def sync(self) -> None:
        """Have everything on the disk, which may take long: for a thread, beside others' `add`.
        Raises as `add`, and FencedError: a newer attempt has begun."""
        self._next_sync = math.inf
        check_incarnation(self._paths, self._incarnation)
        with disk_errors(self.path):
            os.fsync(self._descriptor)
        self._next_sync = time.monotonic() + SYNC_S

    def close(self) -> None:
        """Sync and close."""
        try:
            self.sync()
        finally:
            os.close(self._descriptor)

    def missing(self, wanted: Iterable[Key], *, retry_failed: bool) -> list[Key]:
        """Those of the wanted episodes that are still to be played, in their order."""

        def is_there(key: Key) -> bool:
            record = self.records.get(key)
            return record is not None and not (record.has_failed and retry_failed)

        return [key for key in wanted if not is_there(key)]
