"""The loguru logger of a process. Each entrypoint calls `setup_logger` once at start-up.

Roles write to stdout; the supervisor redirects that into `logs/attempt_k/<role>/`. The supervisor
itself writes to the terminal and to its own file.
"""

import contextlib
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from loguru import logger

if TYPE_CHECKING:
    from loguru import Logger


class _FileSink:
    """A log file that drops lines on a full disk: the terminal has them, and the run's own error says why it ends."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)

    def write(self, message: str) -> None:
        """Append one line, unbuffered: what was logged before a kill is on disk."""
        with contextlib.suppress(OSError):
            os.write(self._descriptor, message.encode())

    def stop(self) -> None:
        """Close the file; loguru calls it when the sink is removed."""
        os.close(self._descriptor)


def setup_logger(
    role: str,
    *,
    level: str = "INFO",
    file: Path | None = None,
    file_level: str | None = None,
    json_lines: bool = False,
    console: bool = True,
) -> "Logger":
    """Configure the process's one logger and return it.

    Args:
        role: name shown in every line, e.g. `trainer[0]`.
        level: least severe level; the environment's PRIME_LOG_LEVEL overrides it.
        file: also append to this file.
        file_level: least severe level of the file; default `level`.
        json_lines: one JSON object a line instead of text.
        console: write to stdout.
    """
    level = os.environ.get("PRIME_LOG_LEVEL", level).upper()
    pattern = "<dim>{time:HH:mm:ss}</dim> <level>{level: <7}</level> <cyan>{extra[role]}</cyan> {message}"
    logger.remove()
    logger.configure(extra={"role": role})
    if console:
        logger.add(sys.stdout, level=level, format=pattern, serialize=json_lines, enqueue=False)
    if file is not None:
        file_level = os.environ.get("PRIME_LOG_LEVEL", file_level or level).upper()
        logger.add(_FileSink(file), level=file_level, format=pattern, serialize=json_lines, colorize=False)
    return logger
