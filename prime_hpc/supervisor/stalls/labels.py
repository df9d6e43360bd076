"""Names of processes and of what they do, for people. Pure."""

from collections.abc import Mapping, Sequence
from typing import Any

from prime_hpc.config.run_files import ENGINE_ROLES
from prime_hpc.supervisor.stalls.engines import part_name

Row = dict[str, Any]


def owner(row: Row, rows: Sequence[Row]) -> Row:
    """Return the word of a process, or of the nearest one above it that has one."""
    by_pid = {one["pid"]: one for one in rows if one["host"] == row["host"]}
    seen: set[int] = set()
    while not row["word"] and row["parent"] in by_pid and row["pid"] not in seen:
        seen.add(row["pid"])
        row = by_pid[row["parent"]]
    return dict(row["word"])


def label(row: Row, rows: Sequence[Row]) -> str:
    """Name a process as people do: trainer rank 3, inference server 0, orchestrator."""
    word = owner(row, rows)
    role = str(word.get("role") or row["comm"])
    if role == "trainer":
        text = f"trainer rank {word['index']}"
    elif role in ENGINE_ROLES:
        text = f"{role} server {word['index']}"
        text = f"{part_name(word)} of {text}" if word.get("part") else text
    elif role in ("environment", "agent"):
        text = f"{role} {'process of ' if role == 'environment' else 'of '}{word.get('label', '')}"
    else:
        text = role
    return text if row["word"] or not word else f"{row['comm']} of {text}"


def phase(word: Mapping[str, Any]) -> str:
    """Write what a process does, and what it waits for."""
    awaits = f", waiting for {word['awaits']}" if word.get("awaits") else ""
    return f"`{word.get('phase', '?')}`{awaits}"


def in_kernel(row: Row) -> str:
    """Name the kernel's functions in which a process waits."""
    places = sorted({place for place in row["waits"].values() if place})
    return ", ".join(places) or "state D, uninterruptible"
