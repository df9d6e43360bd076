"""`status.json`: how the run is right now, for `prime-hpc status`. Rewritten by the supervisor every few seconds."""

import json
import os
import socket
import time
from pathlib import Path
from typing import Any

from loguru import logger

from prime_hpc.config.run_files import STATUS_JSON
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

    def write(self, *, now: bool = False, **values: Any) -> None:
        """Replace the file, unless it is fresh and `now` is false. A full disk is no reason to end a run."""
        if not now and time.monotonic() < self._next:
            return
        self._next = time.monotonic() + INTERVAL_S
        row = {"time": time.time(), **self._constant, **values}
        try:
            files.write_atomic(self._path, json.dumps(row).encode(), sync=False)
        except (OSError, StoreError) as error:
            if not self._warned:
                logger.warning(f"{self._path} could not be written: {error}")
            self._warned = True
