"""`status.json`: how the run is right now, for `prime-hpc status`. Rewritten by the supervisor every few seconds.

Beside it `metrics/roles.jsonl`, for the timeline of `prime-hpc report`: a line for every change of a role's state.
"""

import contextlib
import json
import os
import socket
import time
from pathlib import Path
from typing import Any

from loguru import logger

from prime_hpc.config.run_files import STATUS_JSON
from prime_hpc.observe.metric_files import metrics_file
from prime_hpc.observe.metrics import jsonable
from prime_hpc.store.errors import StoreError
from prime_hpc.store.io import files
from prime_hpc.store.io.disk import is_full

INTERVAL_S = 2.0


class LiveStatus:
    """Writes the file when something changed, and now and then so that its age tells whether anybody lives."""

    def __init__(self, run_dir: Path, **constant: Any) -> None:
        self._path = run_dir / STATUS_JSON
        self._constant = {**constant, "host": socket.gethostname(), "pid": os.getpid()}
        self._next = 0.0
        self._warned = False
        self._changes = metrics_file(run_dir, "roles")
        self._states: dict[str, str] = {}

    def write(self, *, now: bool = False, **values: Any) -> None:
        """Replace the file, unless it is fresh and `now` is false. A full disk is no reason to end a run, nor to look
        dead: where it has no room for another file, the words go where the last ones stood."""
        self._note_changes(values.get("roles") or {})
        if not now and time.monotonic() < self._next:
            return
        self._next = time.monotonic() + INTERVAL_S
        row = {"time": time.time(), **self._constant, **{name: jsonable(value) for name, value in values.items()}}
        data = json.dumps(row).encode()
        try:
            files.write_atomic(self._path, data, sync=False)
        except (OSError, StoreError) as error:
            if is_full(error) and self._overwrite(data):
                return
            if not self._warned:
                logger.warning(f"{self._path} could not be written: {error}")
            self._warned = True

    def _overwrite(self, data: bytes) -> bool:
        """Write into the room that the file has on its disk; False where that is too little. Who reads it meanwhile may
        find it torn, as of a writer that was killed."""
        with contextlib.suppress(OSError), self._path.open("r+b", buffering=0) as file:
            if len(data) <= os.fstat(file.fileno()).st_blocks * 512 and file.write(data) == len(data):
                file.truncate()
                return True
        return False

    def _note_changes(self, states: dict[str, str]) -> None:
        """Append the roles whose state is another one than the last time."""
        changed = {label: state for label, state in states.items() if self._states.get(label) != state}
        if not changed:
            return
        self._states |= changed
        facts = {"time": round(time.time(), 3), "attempt": self._constant.get("attempt")}
        rows = (json.dumps({**facts, "role": label, "state": state}) + "\n" for label, state in changed.items())
        try:
            self._changes.parent.mkdir(exist_ok=True)  # not the run directory, which may be gone
            with self._changes.open("a", encoding="utf-8") as file:
                file.write("".join(rows))
        except OSError as error:
            if not self._warned:
                logger.warning(f"{self._changes} could not be written: {error}")
            self._warned = True
