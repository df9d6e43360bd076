"""A process's own word on what it does now, for whoever looks at it from outside while something hangs.

    introduce("trainer", 3, run_dir)         once, at the process's start
    doing("wait", awaits="batch 12")         at each change of phase: one small write into memory
    enter("step"), leave()                   around calls that come hundreds of times a second: 1 us each
    explain("episodes", table.oldest)        details that are computed only when somebody asks

Three anonymous files (memfd) hold the word, an answer, and stacks. Others of the same user read them by
`/proc/PID/fd`, so that neither this process nor any file system has to answer:

    word      what it does, since when, and the call in which it is; readable also while the process is stopped
    answer    threads by name, tasks of event loops, details: a thread writes it when a byte comes through a pipe
    stacks    of all threads, which `faulthandler` writes upon `DUMP_SIGNAL`, also while a call in C holds the
              interpreter's lock

`prime_hpc.runtime.look` is the other side. Where there is no memfd (other systems than Linux) all of it does nothing.
"""

import asyncio
import contextlib
import faulthandler
import fcntl
import json
import mmap
import os
import signal
import struct
import sys
import threading
import time
import traceback
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from types import CodeType
from typing import Any

from prime_hpc.runtime.event_loops import living_loops
from prime_hpc.runtime.role_context import this_node

DUMP_SIGNAL = signal.SIGRTMIN + 5
"""Real-time, which no library takes for its own. Sent only to processes that catch it."""
WORD, ANSWER, STACKS = "prime-hpc-word", "prime-hpc-answer", "prime-hpc-stacks"
WORD_BYTES = 4096
CALL = struct.Struct("<Qd40s")
"""Behind the word: number of the call, when it began (epoch seconds; 0: it is over), its name."""
MOST_LETTERS = 100
"""Of a text in a word that would be too long."""
MAX_FRAMES = 40
"""Innermost frames of a thread or task that are told."""
MAX_TASKS = 64
TOKEN_BYTES = 8
CLIENTS, RUNS = "clients", "runs"
"""A trainer may await these for ever: a service's next request, a trainer of many's next run."""
Frame = tuple[str, int, str]
"""File, line, function."""
Explanation = Callable[[], Any]


class _Page:
    """The three files of this process."""

    def __init__(self, row: dict[str, Any]) -> None:
        self.row = row
        self.reasons: dict[str, str] = {}
        self.lock = threading.Lock()
        self.word = os.memfd_create(WORD)
        os.ftruncate(self.word, WORD_BYTES + CALL.size)
        self.call = mmap.mmap(self.word, WORD_BYTES + CALL.size)
        mapped = next(n for n in _open_files() if n != self.word and _identity(n) == _identity(self.word))
        self.calls = 0
        self.answer = os.memfd_create(ANSWER)
        self.stacks = os.memfd_create(STACKS)
        fcntl.fcntl(self.stacks, fcntl.F_SETFL, fcntl.fcntl(self.stacks, fcntl.F_GETFL) | os.O_APPEND)
        self.asks, self.door = os.pipe()
        row["door"] = self.door
        own = (self.word, mapped, self.answer, self.stacks, self.asks, self.door)
        self._files = {number: _identity(number) for number in own}

    def close_in_child(self) -> None:
        """Give up a parent's files, of which whoever looks at the child must not read.

        Only what is still the parent's: whoever forked may have closed them, and their numbers be other files'. For the
        same reason the map lives on: at its end it closes its number, whosever that is.
        """
        for number, file in self._files.items():
            if _identity(number) == file:
                os.close(number)
        _parents_maps.append(self.call)

    def write_blocked(self, what: str, why: str) -> None:
        with self.lock:
            self.reasons.pop(what, None)
            self.reasons |= {what: why} if why else {}
            reasons = list(self.reasons.values())
        self.write(blocked="; ".join(reasons))

    def write(self, **changes: Any) -> None:
        with self.lock:
            self.row.update(changes)
            line = json.dumps(self.row, default=str).encode()
            if len(line) > WORD_BYTES:  # its end would be cut off, and nothing of it be understood
                short = {
                    k: v[:MOST_LETTERS] if isinstance(v, str) and k != "run_dir" else v for k, v in self.row.items()
                }
                line = json.dumps(short, default=str).encode()
            os.pwrite(self.word, line[:WORD_BYTES].ljust(WORD_BYTES), 0)


def _open_files() -> list[int]:
    return [int(path.name) for path in Path("/proc/self/fd").iterdir()]


def _identity(number: int) -> tuple[int, int] | None:
    """Device and inode; None of one that is closed."""
    try:
        found = os.fstat(number)
    except OSError:
        return None
    return found.st_dev, found.st_ino


_parents_maps: list[mmap.mmap] = []

_page: _Page | None = None
_explanations: dict[str, Explanation] = {}


def introduce(role: str, index: int, run_dir: str | os.PathLike[str], **facts: Any) -> None:
    """Begin to tell. Once a process; again in a child that was forked, which must not speak for its parent.

    Args:
        index: rank, or number of the server.
        facts: whatever else others may need to know of it.
    """
    global _page
    if not hasattr(os, "memfd_create"):
        return
    if _page is not None and _page.row["pid"] == os.getpid():
        _page.write(role=role, index=index, run_dir=os.fspath(run_dir), **facts)
        return
    _explanations.clear()  # a parent's
    parents = _page
    now = time.time()
    row = {"role": role, "index": index, "pid": os.getpid(), "host": this_node(), "began": now}
    row |= {"run_dir": os.fspath(run_dir), "phase": "starting", "awaits": "", "since": now, "blocked": "", **facts}
    _page = _Page(row)
    _page.write()
    with contextlib.suppress(OSError, RuntimeError, ValueError):
        faulthandler.register(DUMP_SIGNAL, file=_page.stacks, all_threads=True)
    if parents is not None:  # not before: until now the signal's handler writes into its file
        parents.close_in_child()
    threading.Thread(target=_answer_forever, args=(_page,), name="why", daemon=True).start()


def introduced() -> dict[str, Any]:
    """Return `role`, `index` and `run_dir` as this process said them, for those that it starts; {}: it said nothing."""
    page = _page
    return {} if page is None else {key: page.row[key] for key in ("role", "index", "run_dir")}


def doing(phase: str, *, awaits: str = "", **facts: Any) -> None:
    """Say what this process does from now on, and for whom or what it waits; nothing where it was not introduced.

    The time of the change stands only where something changed.
    """
    page = _page
    if page is None:
        return
    row = page.row
    same = row["phase"] == phase and row["awaits"] == awaits
    if same and all(row.get(key) == value for key, value in facts.items()):
        return
    page.write(phase=phase, awaits=awaits, **facts, **({} if same else {"since": time.time()}))


def enter(name: str) -> None:
    """Say that a call begins that may hang, `name` being 40 bytes at most; the process is introduced.

    Of one thread: calls do not nest.
    """
    page = _page
    assert page is not None, "introduce() comes first"
    page.calls += 1
    CALL.pack_into(page.call, WORD_BYTES, page.calls, time.time(), name.encode())


def leave() -> None:
    """Say that the call is over."""
    page = _page
    assert page is not None, "introduce() comes first"
    CALL.pack_into(page.call, WORD_BYTES, page.calls, 0.0, b"")


def blocked(what: str, why: str) -> None:
    """Say why a part of this process, of whatever thread, cannot go on for now, beside its phase; empty: it can."""
    if _page is not None:
        _page.write_blocked(what, why)


def now_doing() -> dict[str, Any]:
    """Return the phase, what it waits for, since when (epoch seconds) and why parts of it cannot go on; {} where it was
    not introduced."""
    page = _page
    return {} if page is None else {key: page.row[key] for key in ("phase", "awaits", "since", "blocked")}


def explain(name: str, explanation: Explanation) -> None:
    """Have `explanation()` be part of every answer from now on: JSON-able, quick, callable from another thread."""
    _explanations[name] = explanation


# ------------------------------------------------------------------------------------------ the thread that answers


def _answer_forever(page: _Page) -> None:
    while token := os.read(page.asks, TOKEN_BYTES):
        details: dict[str, Any] = {}
        for name, explanation in list(_explanations.items()):
            try:
                details[name] = explanation()
            except Exception as error:  # noqa: BLE001 - of any part of the process, which may be half-built or broken
                details[name] = {"error": f"{type(error).__name__}: {error}"}
        told = {"threads": _threads(), "tasks": _tasks(), "details": details}
        answer = {"token": token.decode(errors="replace"), **told}
        data = json.dumps(answer, default=str).encode() + b"\n"
        os.ftruncate(page.answer, 0)
        os.pwrite(page.answer, data, 0)


def _threads() -> dict[str, list[Frame]]:
    """Frames of every thread but this one, innermost first."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    own = threading.get_ident()
    found: dict[str, list[Frame]] = {}
    for ident, frame in sys._current_frames().items():
        if ident != own:
            name = names.get(ident, "thread")
            name = name if name not in found else f"{name} {ident}"
            found[name] = [_frame(f.f_code, line) for f, line in islice(traceback.walk_stack(frame), MAX_FRAMES)]
    return found


def _frame(code: CodeType, line: int | None) -> Frame:
    return code.co_filename, line or 0, code.co_qualname


def _tasks() -> list[dict[str, Any]]:
    """Pending tasks of all event loops with the frames at which they wait, innermost first."""
    rows = []
    for loop in living_loops():
        try:
            tasks = asyncio.all_tasks(loop)
        except RuntimeError:  # it changed again and again while it was read
            continue
        for task in list(tasks)[:MAX_TASKS]:
            frames = _awaiting(task.get_coro())
            rows.append({"name": task.get_name(), "frames": frames[::-1][:MAX_FRAMES]})
    return rows


def _awaiting(coroutine: Any) -> list[Frame]:
    """Frames of a suspended coroutine and of those that it awaits, outermost first."""
    frames: list[Frame] = []
    while coroutine is not None and len(frames) < 10 * MAX_FRAMES:
        for prefix in ("cr", "gi", "ag"):
            frame = getattr(coroutine, f"{prefix}_frame", None)
            if frame is not None:
                frames.append(_frame(frame.f_code, frame.f_lineno))
                coroutine = getattr(coroutine, f"{prefix}_await", None) or getattr(coroutine, "gi_yieldfrom", None)
                break
        else:
            break
    return frames
