"""The loguru logger of a process. Each entrypoint calls `setup_logger` once at start-up.

Roles write to stdout; the supervisor redirects that into `logs/attempt_k/<role>/`. The supervisor
itself writes to the terminal and to its own file.
"""

import contextlib
import os
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from loguru import logger

if TYPE_CHECKING:
    from loguru import Logger

PATIENCE_S = 0.5
MAX_WAITING = 10_000
LEVELS = ("TRACE", "DEBUG", "INFO", "SUCCESS", "WARNING", "ERROR", "CRITICAL")


class _PatientSink:
    """A sink that loses lines rather than hold its caller up.

    A line is written by a thread, and `write` waits for it: what was logged before a kill is on disk. Where the file
    system hangs it waits `PATIENCE_S` once; from then on lines queue up until the thread is back, and those beyond
    `MAX_WAITING` are dropped. So a thread that must never stand still, as the bus's, may log.

    Args:
        write: writes one message; may block, may raise OSError (a full disk: the line is dropped).
        close: called at the end.
    """

    def __init__(self, write: Callable[[str], object], close: Callable[[], None] = lambda: None) -> None:
        self._write, self._close = write, close
        self._state = threading.Condition()
        self._waiting: deque[str] = deque()
        self._num_given = self._num_done = self._num_lost = 0
        self._is_stuck = self._is_closed = False
        self._pid = os.getpid()
        threading.Thread(target=self._run, name="log", daemon=True).start()

    def write(self, message: str) -> None:
        """Hand on one line."""
        if os.getpid() != self._pid:  # a forked child has no such thread
            self._write(message)
            return
        with self._state:
            if len(self._waiting) >= MAX_WAITING:
                self._num_lost += 1
                return
            self._waiting.append(message)
            self._num_given += 1
            self._state.notify_all()
            self._wait()

    def stop(self) -> None:
        """Write what waits, as long as the file takes it; loguru calls it when the sink is removed."""
        with self._state:
            self._wait()
            self._is_closed = True
            self._state.notify_all()
            if self._is_stuck:
                return
        self._close()

    def _wait(self) -> None:
        mine = self._num_given
        if not self._is_stuck and not self._state.wait_for(lambda: self._num_done >= mine, PATIENCE_S):
            self._is_stuck = True

    def _run(self) -> None:
        while True:
            with self._state:
                self._state.wait_for(lambda: bool(self._waiting) or self._is_closed)
                if not self._waiting:
                    return
                message = self._waiting.popleft()
                lost, self._num_lost = self._num_lost, 0
            with contextlib.suppress(OSError, ValueError):  # a full disk; a stream that was closed
                self._write(
                    f"({lost} lines were lost while this could not be written)\n" + message if lost else message
                )
            with self._state:
                self._num_done += 1
                self._is_stuck = False
                self._state.notify_all()


def _file_sink(path: Path) -> _PatientSink:
    """Append to a file, unbuffered. On a full disk the terminal has the lines, and the run's own error says why."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
    write = lambda message: os.write(descriptor, message.encode(errors="replace"))  # noqa: E731
    return _PatientSink(write, lambda: os.close(descriptor))


def _write_out(message: str) -> None:
    """Write to standard output as it is now: where rich draws a bar it is rich's own, which writes above the bar."""
    sys.stdout.write(message)
    sys.stdout.flush()


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
    """
    asked = os.environ.get("PRIME_LOG_LEVEL", "").upper()
    is_level = asked in LEVELS
    level = asked if is_level else level
    pattern = "<dim>{time:HH:mm:ss}</dim> <level>{level: <7}</level> <cyan>{extra[role]}</cyan> {message}"
    logger.remove()
    logger.configure(extra={"role": role})
    # `diagnose` would write values into a traceback: keys, samples, and tensors whose memory is gone (a crash)
    if console:
        # a process with a log file of its own is the supervisor: its output is a file in a job, and it must not wait
        on_terminal = sys.stdout.isatty()
        out: Any = _write_out if on_terminal else sys.stdout if file is None else _PatientSink(_write_out)
        is_plain = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
        has_colors = on_terminal and not is_plain
        looks: dict[str, Any] = {
            "level": level,
            "format": pattern,
            "serialize": json_lines,
            "colorize": has_colors,
            "diagnose": False,
        }
        _CONSOLE[:] = [(out, looks, role, logger.add(out, **looks))]
    if file is not None:
        file_level = asked if is_level else file_level or level
        logger.add(
            _file_sink(file), level=file_level, format=pattern, serialize=json_lines, colorize=False, diagnose=False
        )
    if asked and not is_level:
        logger.warning(f"PRIME_LOG_LEVEL={asked} is no level: state one of {', '.join(LEVELS)}; {level} it is")
    return logger


_CONSOLE: list[tuple[Any, dict[str, Any], str, int]] = []
"""The console's sink as `setup_logger` last set it up, its form, the role, and loguru's number of it."""


@contextlib.contextmanager
def kept_logger() -> Iterator[None]:
    """Have the console's lines go on as they are set up after the body, which may run other people's code: `remove()`
    and a sink of its own, as loguru's first page shows it, is what a package does to the one logger of its process."""
    first = _next_number()
    try:
        yield
    finally:
        for out, looks, role, number in _CONSOLE[:]:
            try:
                logger.remove(number)
            except ValueError:  # it is gone; what was put in its place would say each line once more
                for other in range(first, _next_number()):
                    with contextlib.suppress(ValueError):
                        logger.remove(other)
                logger.configure(extra={"role": role})
            _CONSOLE[:] = [(out, looks, role, logger.add(out, **looks))]


def _next_number() -> int:
    """Return the number above all that loguru has given to sinks."""
    number = logger.add(lambda message: None)
    logger.remove(number)
    return number + 1


def separate_native_stderr(path: Path) -> None:
    """Send what libraries write to this process's standard error (NCCL, CUDA, glibc's last words) into a file of its
    own; Python's own messages, tracebacks among them, go where they went.

    Of many ranks that share a log, a line of NCCL says no rank, and lines of several are torn into each other. A file
    that cannot be made is no reason to end: then all stays as it was.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        own = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
    except OSError as error:
        logger.warning(f"{path} cannot be written ({error.strerror}): libraries' messages stay in the role's log")
        return
    sys.stderr.flush()
    sys.stderr = os.fdopen(os.dup(2), "w", buffering=1, errors="backslashreplace")
    os.dup2(own, 2)
    os.close(own)
