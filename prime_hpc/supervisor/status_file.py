"""`status.json`: how the run is right now, for `prime-hpc status`. Rewritten by the supervisor every few seconds.

Beside it `metrics/roles.jsonl`, for the timeline of `prime-hpc report`: a line for every change of a role's state.
"""

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
        """Replace the file, unless it is fresh and `now` is false. A full disk is no reason to end a run."""
        self._note_changes(values.get("roles") or {})
        if not now and time.monotonic() < self._next:
            return
        self._next = time.monotonic() + INTERVAL_S
        row = {"time": time.time(), **self._constant, **{name: jsonable(value) for name, value in values.items()}}
        try:
            files.write_atomic(self._path, json.dumps(row).encode(), sync=False)
        except (OSError, StoreError) as error:
            if not self._warned:
                logger.warning(f"{self._path} could not be written: {error}")
            self._warned = True

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
