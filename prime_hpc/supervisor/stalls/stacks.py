"""Of the stacks of a process, the line that matters: that of an environment, or the innermost of the product's own."""

from collections.abc import Iterable, Sequence
from typing import Any

_PLUMBING = {"prime_hpc", "verifiers", "aiohttp", "anyio", "httpx", "httpcore", "openai"}
_PLUMBING |= {"uvloop", "loguru", "pydantic", "torch"}
"""Packages that carry an episode, and are none of its own code."""
_OF_USERS = ("/prime_hpc/envs/tasksets/", "/prime_hpc/envs/benchmarks/")
Stack = Sequence[Sequence[Any]]
"""Frames (file, line, function), innermost first."""


def package_of(file: str) -> str:
    """Return the package that a file belongs to; `python` for the standard library, "" for a user's own file."""
    if any(part in file for part in _OF_USERS):
        return ""
    for mark in ("/site-packages/", "/dist-packages/"):
        if mark in file:
            return file.rpartition(mark)[2].partition("/")[0].removesuffix(".py")
    if "/prime_hpc/" in file:
        return "prime_hpc"
    return "python" if "/lib/python3" in file or file.startswith("<") else ""


def user_frame(stack: Stack) -> str:
    """Return the innermost frame of a user's own code, else of a package that is no plumbing; "" where it has none."""
    named = [(package_of(str(file)), show(frame)) for frame in stack for file in frame[:1]]
    own = next((text for package, text in named if not package), "")
    return own or next((text for package, text in named if package not in _PLUMBING | {"python"}), "")


def innermost(stack: Stack) -> str:
    """Return the innermost frame of ours; the innermost of all where it has none."""
    frames = [show(frame) for frame in stack if package_of(str(frame[0])) == "prime_hpc"]
    return (frames or [show(frame) for frame in stack] or [""])[0]


def show(frame: Sequence[Any]) -> str:
    """Write a frame as `function (file:line)`."""
    file, line, function = frame
    parts = str(file).split("/")
    return f"{str(function).rpartition('.')[2]} ({'/'.join(parts[-2:])}:{line})"


def stacks_of(row: dict[str, Any]) -> list[tuple[str, Stack]]:
    """Return a process's stacks by the name of their thread or task: of tasks, then of threads."""
    answer = row.get("answer") or {}
    tasks = [(str(task["name"]), task["frames"]) for task in answer.get("tasks") or []]
    return [*tasks, *((answer.get("threads") or {}).items()), *parse_dump(str(row.get("stacks", "")))]


def main_stack(row: dict[str, Any]) -> Stack:
    """Return the main thread's frames, from its answer or from a dump; [] where there are none."""
    return dict(stacks_of(row)).get("MainThread", [])


def parse_dump(text: str) -> list[tuple[str, Stack]]:
    """Read a dump by faulthandler, whose last thread is the main one."""
    found: list[tuple[str, list[tuple[str, int, str]]]] = []
    for line in text.splitlines():
        if line.startswith(("Thread ", "Current thread ")):
            found.append((line.partition(" (")[0], []))
        elif line.startswith('  File "') and found:
            file, _, rest = line.removeprefix('  File "').partition('", line ')
            number, _, function = rest.partition(" in ")
            found[-1][1].append((file, int(number) if number.isdigit() else 0, function))
    return [("MainThread" if n == len(found) - 1 else name, stack) for n, (name, stack) in enumerate(found)]


def busy_episode(rows: Iterable[dict[str, Any]], env: str) -> tuple[str, str]:
    """Find where an environment's episodes stand. `rows`: of the processes in which they are played.
    Returns the frame of its own code, and which task or thread it is; empty where nothing of it is found."""
    found: list[tuple[str, str]] = []
    for row in rows:
        for name, stack in stacks_of(row):
            frame = user_frame(stack) if name not in ("MainThread", "why") else ""
            if frame:
                found.append((frame, name))
    named = [pair for pair in found if pair[1].startswith(f"{env} task")]
    nameless = [pair for pair in found if " task " not in pair[1]]  # the others say that they are another one's
    return (named or nameless or [("", "")])[0]
