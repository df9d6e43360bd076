"""Of a server's engine cores and workers, the one that holds the others up. Pure.

server -> engine core (schedules; on one device it computes too) -> workers (one a device; they wait for each other).
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from prime_hpc.supervisor.stalls.stacks import innermost, main_stack, stacks_of, user_frame

Row = dict[str, Any]
LEAST_S = 2.0
"""A call that is shorter holds nobody up."""
_OUTPUT_THREAD = "WorkerAsyncOutputCopy"
"""vLLM's thread that waits for a device's results, while the main one has given the next order already."""
_IDLE_FILES = ("/queue.py", "/threading.py")
_INNER = 8
"""Innermost frames in which a collective is looked for."""


@dataclass
class Held:
    """A part of a server in which something hangs."""

    row: Row
    where: str
    seconds: float | None
    evidence: list[str] = field(default_factory=list)


def parts_of(server: Row, rows: Sequence[Row]) -> list[Row]:
    """Return the engine cores and workers of a server, on all nodes."""
    key = (server["word"]["role"], server["word"]["index"])
    found = [r for r in rows if r["word"].get("part") and (r["word"]["role"], r["word"]["index"]) == key]
    return sorted(found, key=lambda row: (row["word"]["part"], row["word"].get("number", 0)))


def part_name(word: Row) -> str:
    """Name a part: engine core 0, worker 3; "" of what is none."""
    return f"{word['part']} {word.get('number', 0)}" if word.get("part") else ""


def find_held(parts: Sequence[Row], *, now: float, least_s: float) -> Held | None:
    """Find the part that holds the others up; None where none has been in one call for `least_s` seconds.
    `least_s`: a call that has lasted so long hangs, or is slow."""
    stuck = [row for row in parts if _is_mute(row) or _seconds(row, now) >= least_s]
    if not stuck:
        return None
    evidence = [_evidence(row, now) for row in stuck[:8]]
    workers = [row for row in stuck if row["word"]["part"] == "worker"]
    if workers:
        row = _odd_one(workers)
        return Held(row, frame_of(main_stack(row)), _known_seconds(row, now), evidence)
    core = max(stuck, key=lambda row: _seconds(row, now))
    for row in parts:  # the workers' orders are done; what a device was told to do may not be
        stack = dict(stacks_of(row)).get(_OUTPUT_THREAD, []) if row["word"]["part"] == "worker" else []
        if stack and not str(stack[0][0]).endswith(_IDLE_FILES):
            return Held(row, frame_of(stack), _known_seconds(core, now), evidence)
    return Held(core, frame_of(main_stack(core)), _known_seconds(core, now), evidence)


def works(parts: Sequence[Row]) -> int:
    """Return how many calls (an engine's steps, most of them) began while the parts were looked at."""
    return sum(int(row.get("call", {}).get("begun", 0)) for row in parts if row["word"]["part"] != "worker")


def frame_of(stack: Sequence[Any]) -> str:
    """Return the frame of an engine that matters: of a plugin or a user's model, else vLLM's innermost."""
    return user_frame(stack) or innermost(stack)


def call_text(row: Row, now: float) -> str:
    """Write in which call a process is: "in `step` for 12 s"; "" where it is in none, or tells of none."""
    call = row.get("call")
    return f"in `{call['name']}` for {now - call['since']:.0f} s" if call and call["since"] else ""


def _is_mute(row: Row) -> bool:
    return not row.get("answer") and row["state"] not in ("T", "t", "Z", "gone")


def _seconds(row: Row, now: float) -> float:
    """Return how long a part has been in one and the same call."""
    call = row.get("call") or {}
    return now - call["since"] if call.get("since") and not call["begun"] else 0.0


def _known_seconds(row: Row, now: float) -> float | None:
    return _seconds(row, now) or None


def _evidence(row: Row, now: float) -> str:
    text = call_text(row, now) or "idle"
    if _is_mute(row):
        text += ", a call in C holds its interpreter"
    where = frame_of(main_stack(row))
    return f"{part_name(row['word'])} on {row['host']}: {text}{f', at {where}' if where else ''}, {row['cpu']:.0%} CPU"


def _odd_one(workers: Sequence[Row]) -> Row:
    """Of workers that stand in a call, find the one for which the others wait in a collective; else the first.

    One that waits may be mute as well: on a CPU vLLM's collectives hold the interpreter, and wait busily.
    """
    speaking = [row for row in workers if not _is_mute(row) and not _is_in_collective(row)]
    if not speaking:
        mute = [row for row in workers if _is_mute(row)] or list(workers)
        return min(mute, key=lambda row: float(row["cpu"]))
    counts = Counter(frame_of(main_stack(row)) for row in speaking)
    alone = [row for row in speaking if counts[frame_of(main_stack(row))] == 1]
    return min(alone or speaking, key=lambda row: float(row["cpu"]))  # one that computes may only be slow


def _is_in_collective(row: Row) -> bool:
    frames = [str(frame[0]) for frame in main_stack(row)[:_INNER]]
    return any("/distributed/" in file for file in frames)
