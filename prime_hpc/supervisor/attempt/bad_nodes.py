"""The ledger of bad nodes: one JSON line each time a node failed, shared by all runs of an output directory.

    ledger = ledger_path(output_dir)
    record(ledger, "n3", "preflight: it sees 7 of 8 GPUs", run="first")
    bad_nodes(ledger, days=7)                      # {"n3": "preflight: ..."}; older lines are forgotten

Bad is a node that an attempt has lost: it went down, was started again or fell silent under it, or failed preflight.
Written and read by the supervisor alone, at an attempt's end. Plain text: to forgive a node by hand, delete its lines.
No locks (a shared file system may not have any): lines are appended in one write and read back, a line that a network
file system lost to another writer is written again; readers skip what is torn.
"""

import contextlib
import json
import os
import time
import uuid
from pathlib import Path
from typing import Any

from loguru import logger

from prime_hpc.config import Experiment
from prime_hpc.config.sections.slurm import SiteConfig
from prime_hpc.store.io.files import list_dir
from prime_hpc.store.run_dirs import AttemptRow

DAY_S = 86400.0
COMPACT_BYTES = 1 << 20
KEPT_DAYS = 365.0
REST_S = 3600.0
"""A file that was set aside is read for so long before it is merged: nobody can still be appending to it then."""
TRIES = 5
_ASIDE = ".aside-"


def ledger_path(output_dir: Path) -> Path:
    """Return the ledger of an output directory's runs."""
    return output_dir / ".prime-hpc" / "bad_nodes.jsonl"


def record(path: Path, node: str, cause: str, run: str, when: float | None = None) -> bool:
    """Append one line. Never raises for a file system that refuses: returns whether the line is there.

    Args:
        path: the ledger; its directory is made.
        node: as Slurm names it.
        cause: for people; line breaks become spaces.
        when: epoch seconds; default now.
    """
    row = {
        "id": uuid.uuid4().hex[:12],
        "time": round(time.time() if when is None else when, 3),
        "node": node,
        "cause": " ".join(cause.split())[:1000],
        "run": run,
    }
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        for _ in range(TRIES):
            _append(path, [row])
            if any(kept.get("id") == row["id"] for kept in _rows(path)):
                break
        else:
            logger.warning(f"{path}: the line about {node} did not stay; other runs write there too")
            return False
        if _size(path) > COMPACT_BYTES:
            compact(path)
    except OSError as error:
        logger.warning(f"the ledger of bad nodes could not be written: {error}")
        return False
    return True


def bad_nodes(path: Path, days: float, now: float | None = None) -> dict[str, str]:
    """Newest cause by node of everything not yet forgotten. An unreadable ledger knows nobody.

    A line from the future (the clock was set back since) counts if it is not further ahead than `days`: its node is
    forgotten at the latest after twice that.
    """
    now = time.time() if now is None else now
    try:
        rows = [row for row in _rows(path) if abs(now - row["time"]) < days * DAY_S]
    except OSError as error:
        logger.warning(f"the ledger of bad nodes could not be read: {error}")
        return {}
    return {row["node"]: str(row["cause"]) for row in sorted(rows, key=lambda row: float(row["time"]))}


def record_bad_nodes(experiment: Experiment, ended: AttemptRow) -> None:
    """Write the nodes that an attempt has lost into the ledger that the runs of this output directory share, as of its
    end: of one that ended without a word a resume hears weeks later."""
    for node in ended.get("lost_nodes", []):
        record(ledger_path(experiment.output_dir), node, ended.get("cause") or "", experiment.name, ended.get("ended"))


def are_avoided(experiment: Experiment, site: SiteConfig) -> bool:
    """Return whether bad nodes are kept from the next attempt."""
    stated = experiment.slurm.restart.exclude_bad_nodes
    return site.exclude_bad_nodes if stated is None else stated


def nodes_to_avoid(experiment: Experiment, site: SiteConfig, ended: AttemptRow) -> list[str]:
    """Nodes that the next attempt should not get: those just lost, and those of the ledger that are not forgotten."""
    if not are_avoided(experiment, site):
        return []
    known = bad_nodes(ledger_path(experiment.output_dir), experiment.slurm.restart.bad_node_days)
    return list(dict.fromkeys([*ended.get("lost_nodes", []), *known]))


def compact(path: Path, now: float | None = None) -> int:
    """Drop lines older than `KEPT_DAYS`; loses no younger one, whoever writes at the same time. Returns lines dropped.

    In two steps, which two calls at least an hour apart do: the ledger is renamed aside (readers go on reading it; who
    opened it before may still append to it), and what was set aside long ago is merged into the ledger and deleted.
    """
    now = time.time() if now is None else now
    dropped = 0
    for old in _list_aside(path):
        if now - _aside_since(old) < REST_S:
            continue
        rows = _read(old)
        known = {row["id"] for row in _read(path)}
        live = [row for row in rows if row["id"] not in known and abs(now - row["time"]) < KEPT_DAYS * DAY_S]
        if live:
            _append(path, live)
            known = {row["id"] for row in _read(path)}
        if all(row["id"] in known for row in live):
            with contextlib.suppress(FileNotFoundError):  # another run merged it too: ids tell twins apart
                old.unlink()
            dropped += len(rows) - len(live)
    if _size(path) > COMPACT_BYTES:
        with contextlib.suppress(FileNotFoundError):
            path.rename(path.with_name(f"{path.name}{_ASIDE}{int(now)}-{uuid.uuid4().hex[:8]}"))
    return dropped


def _append(path: Path, rows: list[dict[str, Any]]) -> None:
    """All rows in one write of a file opened for appending, after a line break where the last line is torn."""
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        size = os.fstat(fd).st_size
        torn = size > 0 and os.pread(fd, 1, size - 1) != b"\n"
        data = (("\n" if torn else "") + text).encode()
        if os.write(fd, data) != len(data):
            raise OSError(f"{path}: a line was written only in part (disk full?)")
        os.fsync(fd)
    finally:
        os.close(fd)


def _rows(path: Path) -> list[dict[str, Any]]:
    """Every whole line of the ledger and of what was set aside, twins once."""
    found: dict[str, dict[str, Any]] = {}
    before: set[Path] = set()
    while True:
        # in this order no row is missed that moves from what is set aside to the ledger; where the ledger itself was
        # set aside meanwhile, what it held is looked for again
        aside = _list_aside(path)
        for file in (*aside, path):
            found |= {row["id"]: row for row in _read(file)}
        before |= set(aside)
        if before.issuperset(_list_aside(path)):
            return list(found.values())


def _read(path: Path) -> list[dict[str, Any]]:
    try:
        lines = path.read_bytes().splitlines()
    except FileNotFoundError:
        return []
    rows = []
    for line in lines:
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if _is_row(row):
            # a line written by hand may have no id
            rows.append({"cause": "", "run": "", "id": f"{row['node']}@{row['time']}", **row})
    return rows


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0  # set aside by another run


def _is_row(row: Any) -> bool:
    if not isinstance(row, dict) or not isinstance(row.get("node"), str):
        return False
    return isinstance(row.get("time"), int | float) and not isinstance(row["time"], bool)


def _list_aside(path: Path) -> list[Path]:
    return [path.with_name(name) for name in sorted(list_dir(path.parent)) if name.startswith(path.name + _ASIDE)]


def _aside_since(path: Path) -> float:
    stamp = path.name.partition(_ASIDE)[2].partition("-")[0]
    return float(stamp) if stamp.isdigit() else 0.0
