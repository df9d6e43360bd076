"""Start of a role from an environment on slow shared storage, unpacked and packed. Run by `tools/bench env_pack`.

The environment, and the pack, are seen through a FUSE mount on which every metadata call costs 5 ms, and names, misses
and attributes are cached for half a minute, as a client of a network file system does. A start is all that the
trainer's process imports; prime-hpc itself and the interpreter's own library are on the local disk in both cases.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from prime_hpc.launch.env_pack import best_kind, pack_environment
from prime_hpc.slurm.packed_env.facts import ENTER
from tests.support.hostile.mount import Node, hostile_mounts, why_not

CHECKOUT = Path(__file__).resolve().parents[2]
LATENCY_S = 0.005
CACHED_S = 30.0
LIMIT_S = 3600.0
IMPORTS = "import prime_hpc.trainer.main, prime_hpc.trainer.rl, prime_hpc.trainer.sft; import sys; print(sys.prefix)"


def start(words: list[str]) -> tuple[float, str]:
    """Seconds of a start, and the environment that it was from."""
    environment = {**os.environ, "PYTHONPATH": str(CHECKOUT), "PYTHONDONTWRITEBYTECODE": "1"}
    began = time.perf_counter()
    done = subprocess.run(
        [*words, "-P", "-c", IMPORTS], env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    seconds = time.perf_counter() - began
    if done.returncode:
        raise RuntimeError(f"{words}: {done.stderr[-2000:]}")
    return seconds, done.stdout.strip()


def slow(node: Node) -> Path:
    """Have every metadata call through a mount cost its time from now on."""
    node.ask(latency_s=LATENCY_S, slow=["stat", "list", "open"])
    return node.path


def from_pack(words: list[str], base: Path, place: str) -> tuple[float, float]:
    """Seconds of the first start of a node, and the middle one of three later ones."""
    try:
        first, prefix = start(words)
        assert prefix.startswith(str(base)) and f"/{place}" in prefix, prefix
        return first, sorted(start(words)[0] for _ in range(3))[1]
    finally:
        for path in base.glob("*/mnt-*"):
            subprocess.run(["umount", "--lazy", str(path)], check=False)


def run() -> dict[str, Any]:
    """Seconds of a start by place, files and bytes before and after."""
    if (reason := why_not()) is not None:
        raise SystemExit(f"no slow mount can be had here: {reason}")
    venv = Path(sys.prefix)
    caches: dict[str, Any] = {"clients": 1, "misses_s": CACHED_S, "attributes_s": CACHED_S}
    with tempfile.TemporaryDirectory(prefix="bench-env-") as scratch:
        folder = Path(scratch)
        (folder / "packs" / "back").mkdir(parents=True)
        (folder / "envs").mkdir()
        (folder / "envs" / "back").symlink_to(venv.resolve().parent)
        began = time.perf_counter()
        pack, facts = pack_environment(venv, folder / "packs" / "back" / "env.pack", best_kind(), print)
        packing = time.perf_counter() - began
        local, _ = start([str(venv / "bin" / "python")])
        with hostile_mounts(folder / "envs", **caches) as (node,):
            python = slow(node) / venv.resolve().name / "bin" / "python"
            before, prefix = start([str(python)])
            assert prefix.startswith(str(node.path)), prefix
        with hostile_mounts(folder / "packs", **caches) as (node,):
            on_node = [
                *("sh", str(ENTER), str(slow(node) / pack.name)),
                str(folder / "node"),
                str(venv / "bin" / "python"),
            ]
            first, later = from_pack(on_node, folder / "node", "env-")
        mounted = mounted_later = float("nan")
        if shutil.which("squashfuse_ll") and facts.kind == "squashfs":
            pack_environment(venv, pack, facts.kind, print, start="mount")
            with hostile_mounts(folder / "packs", **caches) as (node,):
                on_node[2:4] = [str(slow(node) / pack.name), str(folder / "other")]
                mounted, mounted_later = from_pack(on_node, folder / "other", "mnt-")
    return {
        "kind": facts.kind,
        "files": int(facts.files),
        "pack_mib": int(facts.size) / 2**20,
        "packing_s": packing,
        "local_s": local,
        "before_s": before,
        "first_s": first,
        "later_s": later,
        "mounted_s": mounted,
        "mounted_later_s": mounted_later,
        "times_first": before / first,
        "times_later": before / later,
        "times_mounted": before / mounted,
        "times_mounted_later": before / mounted_later,
    }


def render(figures: dict[str, Any]) -> str:
    """Return a table for people."""
    return "\n".join(
        [
            f"{figures['files']:,} files -> 1 {figures['kind']} of {figures['pack_mib']:,.0f} MiB, "
            f"made in {figures['packing_s']:.0f} s",
            f"start of a trainer's process, 5 ms a metadata call: as it lies there {figures['before_s']:.1f} s",
            f"packed, first of a node {figures['first_s']:.1f} s ({figures['times_first']:.1f} times as fast), "
            f"later ones {figures['later_s']:.1f} s ({figures['times_later']:.1f} times)",
            f"mounted (--mount), first of a node {figures['mounted_s']:.1f} s ({figures['times_mounted']:.1f} times as "
            f"fast), later ones {figures['mounted_later_s']:.1f} s ({figures['times_mounted_later']:.1f} times)",
            f"from the local disk {figures['local_s']:.1f} s",
        ]
    )
