"""One node's sight of a run, as a JSON-able object; and the report that is made of all nodes'.

The supervisor asks for its own node, its agents for theirs, and `prime-hpc why` through `stalls.on_node`.
"""

import base64
import contextlib
import json
import secrets
import threading
import time
import zlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from prime_hpc.runtime.gpu_use import WITHIN_S as GPUS_WITHIN_S
from prime_hpc.runtime.gpu_use import GpuUse, gpu_use
from prime_hpc.runtime.look import look, probe
from prime_hpc.runtime.role_context import this_node
from prime_hpc.supervisor.stalls.diagnose import Diagnosis, diagnose
from prime_hpc.supervisor.stalls.engines import call_text
from prime_hpc.supervisor.stalls.labels import label, phase
from prime_hpc.supervisor.stalls.stacks import show, stacks_of

MOST_BYTES = 900_000
"""Of one node's answer: a message of the bus may not be longer than 1 MiB."""
LINE_BYTES = 1000
WHY = "WHY"
"""File in the run directory by which the supervisor is asked."""
LOOK_TOPIC = "look"
"""Of the bus: the supervisor asks its agents."""
Seen = dict[str, Any]
"""`host`, `time` (by its own clock), `machine` (its boot, and the namespace of its process ids), `rows`, `probe`,
`gpus`."""


def look_here(run_dir: Path, *, pids: Collection[int] = (), by_name: bool = False) -> Seen:
    """Look at the run's processes on this node, its file system and GPUs, all at once; takes 6 s at most.
    `by_name`: all processes that say to be the run's."""
    found: Seen = {"host": this_node(), "time": time.time()}
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    found["machine"] = f"{boot} {Path('/proc/self/ns/pid').readlink()}"
    questions = {
        "rows": lambda: look(str(run_dir) if by_name else None, pids),
        "probe": lambda: probe(run_dir),
        "gpus": _gpus,
    }

    def ask(name: str) -> None:
        found[name] = questions[name]()

    threads = [threading.Thread(target=ask, args=(name,), name=name, daemon=True) for name in questions]
    for thread in threads:
        thread.start()
    end = time.monotonic() + GPUS_WITHIN_S + 1.0
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))
    return {"rows": [], "probe": {}, "gpus": [], **found}


def _gpus() -> list[dict[str, Any]]:
    """Use of this node's GPUs; [] without any, one `error` where the makers' programs hang, as with their driver."""
    try:
        return [gpu.as_dict() for gpu in gpu_use()]
    except OSError as error:
        return [{"error": str(error)}]


def shortened(seen: Seen, most: int = MOST_BYTES) -> Seen:
    """Leave out stacks, of those first that have the most, until the object is no longer than `most` bytes as JSON."""
    rows = [dict(row) for row in seen["rows"]]
    sizes = {n: len(json.dumps(row, default=str)) for n, row in enumerate(rows)}
    for number in sorted(sizes, key=lambda n: -sizes[n]):
        if sum(sizes.values()) <= most:
            break
        row = rows[number]
        answer = row.get("answer") or {}
        threads = {name: frames[:12] for name, frames in (answer.get("threads") or {}).items() if name == "MainThread"}
        if answer:  # a process that did not answer stays one that did not
            row["answer"] = {"threads": threads, "tasks": [], "details": answer.get("details")}
        row["stacks"] = str(row.get("stacks", ""))[-2000:]
        sizes[number] = len(json.dumps(row, default=str))
    return {**seen, "rows": rows}


def to_lines(seen: Seen) -> Iterator[str]:
    """Write what was seen as short lines, which no srun mixes with those of another node."""
    data = base64.b64encode(zlib.compress(json.dumps(seen, default=str).encode())).decode()
    name, pieces = secrets.token_hex(8), range(0, len(data), LINE_BYTES)
    for number, start in enumerate(pieces):
        yield f"{name} {number} {len(pieces)} {data[start : start + LINE_BYTES]}"


def from_lines(lines: Iterable[str]) -> list[Seen]:
    """Put together what `to_lines` has written, of several nodes in any order; what is not whole is left out."""
    pieces: dict[tuple[str, str], dict[int, str]] = {}
    for line in lines:
        words = line.split()
        if len(words) == 4 and words[1].isdigit() and words[2].isdigit():
            pieces.setdefault((words[0], words[2]), {})[int(words[1])] = words[3]
    found = []
    for (_, count), parts in pieces.items():
        with contextlib.suppress(ValueError, zlib.error):
            if len(parts) == int(count):
                found.append(json.loads(zlib.decompress(base64.b64decode("".join(parts[n] for n in sorted(parts))))))
    return found


def report(
    run_dir: Path,
    nodes: Iterable[Seen],
    *,
    patience_s: float,
    facts: Mapping[str, Any] | None = None,
    silent: Collection[str] = (),
) -> dict[str, Any]:
    """Put together what the nodes have seen, and name who holds the run up; `silent` are nodes that said nothing.
    Returns `run`, `time`, `headline`, `diagnosis`, `processes`, `file_systems`, `gpus`, and the `facts` that are given.
    """
    nodes, now = list(nodes), time.time()
    rows: dict[tuple[str, int], dict[str, Any]] = {}
    for seen in nodes:  # two names of one machine (a development cluster) have seen the same processes
        for row in seen["rows"]:
            if row["state"] == "Z" and row["comm"] == "srun":  # its second process outlives it: the supervisor has it
                continue
            row = _by_clock(row, now - seen.get("time", now))
            rows.setdefault((str(seen.get("machine", seen["host"])), int(row["pid"])), row)
    probes = {seen["host"]: seen["probe"] for seen in nodes}
    found = diagnose(list(rows.values()), probes, patience_s=patience_s, now=now, silent=silent)
    return {
        "run": str(run_dir),
        "time": round(now, 1),
        "headline": found.headline(),
        **(facts or {}),
        "diagnosis": found.as_dict(),
        "processes": list(rows.values()),
        "file_systems": probes,
        "gpus": {seen["host"]: seen["gpus"] for seen in nodes if seen["gpus"]},
    }


def _by_clock(row: dict[str, Any], ahead_s: float) -> dict[str, Any]:
    """Return a process's row with the times that its node told by this clock, which is so far ahead of the node's: how
    long it has been at something must not depend on whose clock is right."""
    told = {name: row.get(name) for name in ("word", "call")}
    return row | {name: {**of, "since": of["since"] + ahead_s} for name, of in told.items() if of and of.get("since")}


def text_of(document: Mapping[str, Any], *, with_stacks: bool = False) -> str:
    """Write a report for people: the answer first, then what it rests on."""
    found = Diagnosis(**document["diagnosis"])
    lines = [document["headline"]]
    for title, parts in (("waiting", found.chain), ("seen", found.evidence), ("do", [found.advice])):
        lines += [f"  {title if n == 0 else '':<9}{part}" for n, part in enumerate(filter(None, parts))]
    if slurm := document.get("slurm"):
        lines.append(f"  {'slurm':<9}{slurm}")
    for host, gpus in document["gpus"].items():
        shown = [str(gpu["error"]) if "error" in gpu else GpuUse(**gpu).text() for gpu in gpus]
        lines.append(f"  {'gpus':<9}{host}: {'; '.join(shown)}")
    rows = sorted(document["processes"], key=lambda r: (not r["word"], r["host"], r["pid"]))
    for n, row in enumerate(r for r in rows if r["word"] or r["state"] not in ("S", "R")):
        doing = phase(row["word"]) if row["word"] else row["comm"]
        doing = ", ".join(filter(None, (doing, call_text(row, document["time"]))))
        who = f"{label(row, rows)}, {row['host']}, process {row['pid']}"
        lines.append(f"  {'process' if n == 0 else '':<9}{who}: {row['state']}, {row['cpu']:.0%} CPU, {doing}")
    if with_stacks:
        lines += _stacks(rows)
    return "\n".join(lines) + "\n"


def _stacks(rows: Sequence[dict[str, Any]]) -> list[str]:
    lines = []
    for row in rows:
        for name, stack in stacks_of(row):
            lines.append(f"\n{label(row, rows)}, process {row['pid']}, {name}, innermost first")
            lines += [f"    {show(frame)}" for frame in stack]
    return lines
