"""Facts of a node's GPUs, found without touching them: Slurm's list, the driver's list, ECC, the kernel's Xid lines."""

import os
import re
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from prime_hpc.runtime.gpus import SMI_TIMEOUT_S, Runner, num_device_files, run_command, stated_devices, visible_gpus

DMESG_TIMEOUT_S = 5.0
XID_WINDOW_S = 3600.0
HARDWARE_XIDS = {48, 62, 63, 64, 74, 79, 92, 94, 95, 119, 120, 140}
"""Xids that mean hardware or driver trouble; the others are mostly an application's own fault."""
USED_SHARE = 0.1
"""Share of a GPU's memory in use before our roles start from which somebody else is on it."""

_BASIC = "index,uuid,name,memory.total,memory.used"
_FULL = f"{_BASIC},ecc.errors.uncorrected.volatile.total,temperature.gpu"
_XID = re.compile(r"\[\s*(\d+\.\d+)\].*NVRM: Xid \(([^)]*)\): (\d+)")


@dataclass
class GpuFacts:
    """GPUs of this node that this job may use."""

    count: int = 0
    visible: list[str] | None = None
    """CUDA_VISIBLE_DEVICES; None: not set."""
    listed: list[dict[str, str]] = field(default_factory=list)
    """Rows of nvidia-smi for the visible ones; empty where there is no nvidia-smi."""
    problems: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        """For the facts file."""
        return {"count": self.count, "visible": self.visible, "listed": self.listed}


def gpu_facts(
    asked: int | None,
    environ: Mapping[str, str] = os.environ,
    run: Runner = run_command,
    used_share: float = USED_SHARE,
) -> GpuFacts:
    """Count and health of the GPUs; a driver that does not answer is a problem only where GPUs were asked for, and so
    is memory of theirs that somebody else holds beyond `used_share`."""
    facts = GpuFacts(visible=stated_devices(environ))
    rows: list[dict[str, str]] | None = None
    try:
        rows = _smi_rows(run)
    except FileNotFoundError:
        pass  # no NVIDIA driver's tools here: Slurm's word, or the device files, must do
    except subprocess.TimeoutExpired:
        _note(facts, asked, f"nvidia-smi gave no answer within {SMI_TIMEOUT_S:g} s: the driver hangs; reboot the node")
    except OSError as error:
        _note(facts, asked, str(error))
    if rows is not None:
        facts.listed = [row for row in rows if _is_ours(row, facts.visible)]
        _judge_rows(facts, run)
        _judge_memory(facts, asked, run, used_share)
        facts.warnings += xid_lines(run)
    if facts.visible is not None:
        facts.count = len(facts.visible)
    else:
        facts.count = len(facts.listed) if rows is not None else num_device_files()
        if rows is not None:
            facts.count = len(visible_gpus(environ, run)) or facts.count  # MIG slices are more than their GPUs
    return facts


def _note(facts: GpuFacts, asked: int | None, text: str) -> None:
    (facts.problems if asked else facts.warnings).append(text)


def _smi_rows(run: Runner) -> list[dict[str, str]]:
    """nvidia-smi's table; older drivers refuse unknown fields, so a shorter one is tried.
    Raises OSError: it failed, with its own words."""
    for fields in (_FULL, _BASIC):
        code, text = run(["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader,nounits"], SMI_TIMEOUT_S)
        if code == 0:
            rows = [[cell.strip() for cell in line.split(",")] for line in text.splitlines() if line.strip()]
            return [dict(zip(fields.split(","), row, strict=False)) for row in rows]
        if "not a valid field" not in text:
            break
    raise OSError(f"nvidia-smi failed with exit status {code}: {' '.join(text.split())[:300] or 'it said nothing'}")


def _is_ours(row: Mapping[str, str], visible: list[str] | None) -> bool:
    if visible is None:
        return True
    # MIG slices have names of their own, which this table does not list: their GPUs are kept
    return any(
        entry == row["index"] or entry.startswith("MIG-") or (entry[:4] == "GPU-" and row["uuid"].startswith(entry))
        for entry in visible
    )


def _judge_rows(facts: GpuFacts, run: Runner) -> None:
    for row in facts.listed:
        name = f"GPU {row['index']} ({row['name']})"
        errors = _number(row.get("ecc.errors.uncorrected.volatile.total"))
        if errors:
            facts.problems.append(f"{name} counts {errors:.0f} uncorrected ECC errors since its last reset")
    if facts.visible is not None:
        indices = {row["index"] for row in facts.listed}
        lost = [entry for entry in facts.visible if entry.isdigit() and entry not in indices]
        if lost:
            facts.problems.append(f"GPU {', '.join(lost)}, which Slurm gave, is not listed by nvidia-smi")
    if facts.listed:
        _judge_remapped(facts, run)


def _judge_memory(facts: GpuFacts, asked: int | None, run: Runner, share: float) -> None:
    """Our roles do not run yet: whatever memory is taken is somebody else's, or was left behind by a dead attempt."""
    for row in facts.listed:
        used, total = _number(row.get("memory.used")), _number(row.get("memory.total"))
        if used and total and used > share * total:
            holders = _holders(row["uuid"], run)
            by = f"process {', '.join(holders)}" if holders else "somebody whom nvidia-smi does not name"
            text = f"GPU {row['index']} ({row['name']}) has {used:.0f} of {total:.0f} MiB in use by {by}"
            remedy = ": engines that take nearly all of it would not start; end it, or exclude the node"
            _note(facts, asked, text + (remedy if asked else ""))


def _holders(uuid: str, run: Runner) -> list[str]:
    """Ids and MiB of the processes on a GPU, as far as they may be seen."""
    try:
        code, text = run(
            ["nvidia-smi", "--query-compute-apps=gpu_uuid,pid,used_memory", "--format=csv,noheader,nounits"],
            SMI_TIMEOUT_S,
        )
    except (OSError, subprocess.TimeoutExpired):
        return []
    rows = [[cell.strip() for cell in line.split(",")] for line in text.splitlines()] if code == 0 else []
    return [f"{row[1]} ({row[2]} MiB)" for row in rows if len(row) == 3 and row[0] == uuid]


def _judge_remapped(facts: GpuFacts, run: Runner) -> None:
    fields = "gpu_uuid,remapped_rows.pending,remapped_rows.failure"
    try:
        code, text = run(["nvidia-smi", f"--query-remapped-rows={fields}", "--format=csv,noheader"], SMI_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired):
        return  # the table before had an answer: a driver too old for this question
    if code != 0:
        return
    index = {row["uuid"]: row["index"] for row in facts.listed}
    for line in text.splitlines():
        uuid, pending, failure = ([cell.strip().lower() for cell in line.split(",")] + ["", "", ""])[:3]
        name = next((i for u, i in index.items() if u.lower() == uuid), None)
        if name is None:
            continue
        if failure in ("yes", "1"):
            facts.problems.append(f"GPU {name} could not remap a bad memory row: it must be replaced")
        elif pending in ("yes", "1"):
            facts.warnings.append(f"GPU {name} waits for a reset to remap a bad memory row")


def _number(text: str | None) -> float | None:
    try:
        return float(text) if text is not None else None
    except ValueError:
        return None  # [N/A], [Not Supported]


def xid_lines(run: Runner = run_command, uptime_s: float | None = None) -> list[str]:
    """Sentences about hardware Xids in the kernel log of the last hour; [] where it may not be read."""
    try:
        code, text = run(["dmesg"], DMESG_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired):
        return []
    if code != 0:
        return []
    now = time.clock_gettime(time.CLOCK_BOOTTIME) if uptime_s is None else uptime_s
    found: dict[tuple[str, str], int] = {}
    for match in _XID.finditer(text):
        if now - float(match[1]) < XID_WINDOW_S and int(match[3]) in HARDWARE_XIDS:
            found[match[2], match[3]] = found.get((match[2], match[3]), 0) + 1
    return [
        f"the kernel logged Xid {xid} of {gpu} {times} times in the last hour" for (gpu, xid), times in found.items()
    ]
