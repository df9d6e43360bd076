"""Two mounts of one directory stand for two nodes of a cluster. Used by the fault tests and `tools/bench latency`.

with hostile_mounts(folder, names_s=5, misses_s=30) as (n1, n2):
    ... processes of one node use n1.path, those of the other n2.path ...
    n1.fail(op="write", errno="ENOSPC", match="rollouts", nth=3)
"""

import contextlib
import ctypes.util
import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
MOUNT_S = 30.0


def why_not() -> str | None:
    """Why hostile mounts cannot be had here; None where they can."""
    if not Path("/dev/fuse").exists():
        return "no /dev/fuse"
    if not os.access("/dev/fuse", os.R_OK | os.W_OK):
        return "/dev/fuse may not be opened"
    if importlib.util.find_spec("mfusepy") is None:
        return "mfusepy is not installed (pip install -e '.[dev]')"
    if not any(ctypes.util.find_library(name) for name in ("fuse3", "fuse")):  # as mfusepy looks for it
        return "libfuse is not installed (as root: apt-get install fuse3)"
    # Without fusermount only root may mount, and only with the capability (CAP_SYS_ADMIN, bit 21).
    effective = next(
        (int(line.split()[1], 16) for line in Path("/proc/self/status").read_text().splitlines() if "CapEff" in line), 0
    )
    if not (effective >> 21 & 1) and not any(
        (Path(folder) / name).exists()
        for folder in os.environ.get("PATH", "").split(":")
        for name in ("fusermount", "fusermount3")
    ):
        return "no right to mount"
    return None


@dataclass
class Node:
    """One client."""

    path: Path
    control: Path

    def ask(self, **content: Any) -> None:
        """Replace what the control file asks for."""
        temporary = self.control.with_suffix(".new")
        temporary.write_text(json.dumps(content))
        temporary.replace(self.control)

    def fail(self, **fault: Any) -> None:
        """One fault, see `fuse.Control`."""
        self.ask(faults=[fault])


@contextlib.contextmanager
def hostile_mounts(
    folder: Path,
    *,
    clients: int = 2,
    names_s: float = 0.0,
    misses_s: float = 0.0,
    attributes_s: float = 0.0,
    rate: float = 0.0,
) -> Iterator[list[Node]]:
    """Mount `folder / "back"` once per client as `folder / "n<i>"`; unmounted at the end, whatever happened."""
    (folder / "back").mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        nodes = []
        for number in range(1, clients + 1):
            node = Node(folder / f"n{number}", folder / f"n{number}.json")
            node.path.mkdir(exist_ok=True)
            flags = ["--client", node.path.name, "--names", names_s, "--misses", misses_s]
            flags += ["--attributes", attributes_s, "--control", node.control, "--rate", rate]
            stack.enter_context(_mounted(folder / "back", node.path, [str(flag) for flag in flags]))
            nodes.append(node)
        yield nodes


@contextlib.contextmanager
def _mounted(back: Path, mount: Path, flags: list[str]) -> Iterator[None]:
    log = mount.with_suffix(".log")
    with log.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.hostile.fuse", str(back), str(mount), *flags],
            cwd=ROOT,
            stdout=file,
            stderr=subprocess.STDOUT,
        )
    try:
        end = time.monotonic() + MOUNT_S
        while not os.path.ismount(mount):
            if process.poll() is not None or time.monotonic() > end:
                raise RuntimeError(f"{mount} was not mounted: {log.read_text()[-2000:]}")
            time.sleep(0.02)
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(mount)], capture_output=True, check=False)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
