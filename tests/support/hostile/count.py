"""Counts the calls that a metadata server would see: opens, creates, stats, listings, renames, removals.

    with counted(run_dir) as calls:
        ... one role's share of a step ...
    calls.total, calls.kinds            # and calls.paths for a test that wants to know why

Reading and writing of bytes are not among them, nor closes; an fsync is (it is what makes a name or a size durable).
"""

import contextlib
import io
import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

_BY_PATH = {
    "open": "open",
    "stat": "stat",
    "lstat": "stat",
    "listdir": "list",
    "scandir": "list",
    "mkdir": "mkdir",
    "rename": "rename",
    "replace": "rename",
    "unlink": "remove",
    "remove": "remove",
    "rmdir": "remove",
    "link": "link",
    "symlink": "link",
    "chmod": "chmod",
}


@dataclass
class Calls:
    """What was counted."""

    kinds: Counter[str] = field(default_factory=Counter)
    paths: list[tuple[str, str]] = field(default_factory=list)

    @property
    def total(self) -> int:
        """All of them."""
        return sum(self.kinds.values())


@contextlib.contextmanager
def counted(root: Path) -> Iterator[Calls]:
    """Count calls on paths below `root`, by this process's Python code, all threads."""
    calls, prefix, inside = Calls(), os.fspath(root), set()
    real_fsync, real_close = os.fsync, os.close

    def note(kind: str, path: Any) -> bool:
        if isinstance(path, int):
            return False
        name = os.fsdecode(path)
        if not name.startswith(prefix):
            return False
        calls.kinds[kind] += 1
        calls.paths.append((kind, os.path.relpath(name, prefix)))
        return True

    def wrap(kind: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(path: Any = ".", *arguments: Any, **options: Any) -> Any:
            is_ours = note(kind, path)
            result = real(path, *arguments, **options)
            if is_ours and kind == "open" and isinstance(result, int):
                inside.add(result)
            return result

        return call

    def fsync(fd: int) -> None:
        if fd in inside:
            calls.kinds["fsync"] += 1
        real_fsync(fd)

    def close(fd: int) -> None:
        inside.discard(fd)
        real_close(fd)

    with contextlib.ExitStack() as stack:
        for name, kind in _BY_PATH.items():
            stack.enter_context(mock.patch.object(os, name, wrap(kind, getattr(os, name))))
        stack.enter_context(mock.patch.object(io, "open", wrap("open", io.open)))
        stack.enter_context(mock.patch.object(os, "fsync", fsync))
        stack.enter_context(mock.patch.object(os, "close", close))
        stack.enter_context(mock.patch.object(shutil, "_use_fd_functions", False))  # removals by path
        yield calls
