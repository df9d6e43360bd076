"""The process of each node in preflight: `python -m prime_hpc.supervisor.preflight.node SPEC WAIT_S`.

Started by `facts` through a step, one process a node. It says what it finds twice: as files in the shared directory
(that is the test), and as lines on standard output (so that a node without that directory can still tell). Exit code 0
whatever was found: a non-zero one would make some launchers end the other nodes. No torch, no pydantic.
"""

import contextlib
import json
import os
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from prime_hpc.runtime.gpus import driver_problem, driver_version, torch_build
from prime_hpc.runtime.limits import narrow_limits
from prime_hpc.store.errors import StoreError
from prime_hpc.store.io import disk, files, lustre
from prime_hpc.store.run_dirs import read_json
from prime_hpc.supervisor.preflight.gpu import USED_SHARE, gpu_facts
from prime_hpc.supervisor.preflight.rules import peers_of
from prime_hpc.supervisor.roles.caches import node_local
from prime_hpc.supervisor.roles.ports import is_free

MARK = "PREFLIGHT "
"""Begins every line for the supervisor; a launcher may put a label before it."""
FACTS, RESULT = ".facts.json", ".result.json"
LOST = "lost.json"
"""Written by the supervisor: hosts for which nobody need wait any more."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.02, 1.0
ROOM_BYTES = 1 << 20
"""That each local folder has to take: a role's first files there."""
ROOM_GIB = 1.0
"""Free there; less is soon used up by compilers' caches, or by engines that pass tensors to each other."""
_GIB = 2**30


def report_phase(host: str, phase: str, **more: Any) -> None:
    """One line for the supervisor, in one write."""
    line = MARK + json.dumps({"host": host, "phase": phase, "at": time.time(), **more}) + "\n"
    with contextlib.suppress(OSError):  # nobody listens: the files are there
        os.write(1, line.encode())


def local_hostnames(environ: Mapping[str, str] = os.environ) -> list[str]:
    """List what this node may be called in the plan, the likeliest first."""
    full = socket.gethostname()
    names = [environ.get("SLURMD_NODENAME"), full, full.split(".")[0]]
    return list(dict.fromkeys(name for name in names if name))


def pick_host(hosts: list[str], environ: Mapping[str, str] = os.environ) -> str | None:
    """Return the plan's name of this node; None where it is not in the plan."""
    for name in local_hostnames(environ):
        for host in hosts:
            if name == host or name == host.split(".")[0]:
                return host
    return None


def wait_for_json(path: Path, wait_s: float) -> dict[str, Any] | None:
    """Return a JSON file by exact name once its directory lists it; None where it is not there in time.

    Listing asks the file server again, a look-up by name could be answered from a cached miss.
    """
    end = time.monotonic() + wait_s
    pause = FIRST_PAUSE_S
    while True:
        if path.name in _list(path.parent):
            data = read_json(path)
            if data is not None:
                return data
        if time.monotonic() + pause > end:
            return None
        time.sleep(pause)
        pause = min(pause * 1.5, LONGEST_PAUSE_S)


def _list(folder: Path) -> list[str]:
    try:
        return files.list_dir(folder)
    except OSError:
        return []  # stale handle, no permission: as good as not there; the deadline tells


def node_facts(
    check: Mapping[str, Any],
    run_dir: Path,
    min_free_gib: float,
    *,
    max_gpu_memory_used: float = USED_SHARE,
    ask_osts: bool = False,
) -> dict[str, Any]:
    """Everything about this node that needs no other one.

    Args:
        check: `gpus_asked`, `on_gpus` and `ports` of this host.
        run_dir: where space is needed.
        max_gpu_memory_used: share of a GPU's memory that others may hold.
        ask_osts: look at Lustre's single OSTs too; one node's word about them is enough.

    Returns:
        facts, with `problems` (the node must not be used), those of them that are `shared` (of the run directory, which
        all nodes see: none is to be avoided for it) and `warnings`.
    """
    problems, shared, warnings = list[str](), list[str](), list[str]()
    on_gpus = bool(check.get("on_gpus"))
    gpus = gpu_facts(check["gpus_asked"] if on_gpus else None, used_share=max_gpu_memory_used)
    driver = driver_version() if on_gpus else None
    build = torch_build() if on_gpus else None
    if on_gpus and driver is None:
        problems.append("it has no NVIDIA driver, but roles are to compute on its GPUs")
    elif build is not None and (build[1] or "").startswith("cuda "):
        old = driver_problem(str(build[1]).split()[1], driver)
        problems += [old] if old else []
    problems += gpus.problems
    warnings += gpus.warnings
    free_gib: float | None = None
    try:
        free = disk.free_bytes(run_dir)
        free_gib = None if free == disk.UNSTATED else free / _GIB
        if free_gib is not None and free_gib < min_free_gib:
            wanted = f"{min_free_gib:g} GiB are needed (slurm.preflight.min_free_gib): free some space"
            shared.append(f"{run_dir} has {free_gib:.2f} GiB free, {wanted}")
    except OSError as error:
        problems.append(f"{run_dir} cannot be asked for its free space: {error.strerror}")
    full = lustre.full_osts(run_dir) if ask_osts else None
    warnings += [full] if full else []
    taken = [port for port in check["ports"] if not is_free(port, "")]
    if taken:
        problems.append(f"port {', '.join(map(str, taken))} is taken on it; end what listens there")
    low, high = ephemeral_range()
    if any(low <= port <= high for port in check["ports"]):
        warnings.append(
            f"ports asked for lie in its ephemeral range {low}-{high}: an outgoing connection may take them"
        )
    load, cpus = os.getloadavg()[0], len(os.sched_getaffinity(0))
    if load > 2 * (os.cpu_count() or 1):
        warnings.append(f"its load is {load:.0f} with {os.cpu_count()} CPUs: somebody else works on it")
    for found, more in zip((problems, shared, warnings), local_room(run_dir, on_gpus), strict=True):
        found += more
    address = local_address()
    return {
        "names": local_hostnames(),
        "pid": os.getpid(),
        "python": sys.executable,
        "address": address,
        "gpus": gpus.as_json(),
        "driver": driver,
        "free_gib": None if free_gib is None else round(free_gib, 3),
        "tmp_free_gib": _free_gib(os.environ.get("TMPDIR") or "/tmp"),
        "shm_gib": round(shutil.disk_usage("/dev/shm").total / _GIB, 3) if Path("/dev/shm").is_dir() else None,
        "memory": memory_gib(),
        "load": round(load, 2),
        "cpus": cpus,
        "problems": problems + shared,
        "shared": shared,
        "warnings": warnings,
    }


def _free_gib(folder: str) -> float | None:
    """Room there; None where the folder is not: a container may not have the host's TMPDIR."""
    try:
        return round(shutil.disk_usage(folder).free / _GIB, 3)
    except OSError:
        return None


def local_room(
    run_dir: Path, on_gpus: bool, environ: Mapping[str, str] = os.environ, shared_memory: str = "/dev/shm"
) -> tuple[list[str], list[str], list[str]]:
    """Look at this node's own folders, where roles put sockets, compiled code and shared memory (jobs of all users fill
    them, and what was killed leaves its files behind), and at limits that no process can lift.

    Returns:
        what no role can start with; the same of a folder that lies with the run directory, so that the node is not to
        blame; what soon may be too little.
    """
    has_infiniband = any(Path("/sys/class/infiniband").glob("*"))
    warnings = narrow_limits(on_gpus=on_gpus, has_infiniband=has_infiniband)
    problems, shared = list[str](), list[str]()
    for folder in dict.fromkeys([environ.get("TMPDIR") or "/tmp", str(node_local(environ)), shared_memory]):
        if (free := _free_gib(folder)) is None:
            continue
        try:
            with tempfile.TemporaryFile(dir=folder) as file:
                file.write(bytes(ROOM_BYTES))
                file.flush()
        except OSError as error:
            said = f"its {folder} takes no files ({error.strerror}, {free:.2f} GiB free): no role can start on it; "
            said += "whose files fill it they, or the site's staff, can delete"
            (shared if Path(folder).stat().st_dev == run_dir.stat().st_dev else problems).append(said)
            continue
        if free < ROOM_GIB:
            warnings.append(f"its {folder} has {free:.2f} GiB free: roles may fail on it")
    return problems, shared, warnings


def local_address() -> str | None:
    """Return the address that this node's own name resolves to; gloo and others listen there."""
    try:
        return str(socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)[0][4][0])
    except OSError:
        return None


def ephemeral_range() -> tuple[int, int]:
    """Ports that the kernel gives to outgoing connections; (0, -1) where it does not say."""
    try:
        low, high = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()
    except (OSError, ValueError):
        return 0, -1
    return int(low), int(high)


def memory_gib() -> dict[str, float]:
    """Total and available memory of the node in GiB, from /proc/meminfo."""
    found = {}
    with contextlib.suppress(OSError, ValueError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            key, value = line.split(":")
            if key in ("MemTotal", "MemAvailable"):
                found[{"MemTotal": "total", "MemAvailable": "available"}[key]] = round(int(value.split()[0]) / 2**20, 2)
    return found


def watch_peers(
    folder: Path, peers: list[str], token: str, wait_s: float
) -> tuple[dict[str, tuple[float, float]], list[str], float]:
    """Wait until the file of every peer is there and whole.

    Returns:
        by peer when it was first seen (this node's clock) and when it had been written (the writer's clock); the peers
        that the supervisor gave up as lost; when this node looked last (its clock).
    """
    end = time.monotonic() + wait_s
    pause = FIRST_PAUSE_S
    seen: dict[str, tuple[float, float]] = {}
    lost: list[str] = []
    missing = list(peers)
    looked = time.time()
    while missing:
        looked = time.time()
        names = set(_list(folder))
        for host in [h for h in missing if h + FACTS in names]:
            data = read_json(folder / (host + FACTS))
            if data is not None and data.get("token") == token:
                seen[host] = time.time(), data["times"]["wrote"]
        if LOST in names:
            told = read_json(folder / LOST)
            if told is not None and told.get("token") == token:
                lost = [host for host in told["hosts"] if host in peers and host not in seen]
        missing = [host for host in peers if host not in seen and host not in lost]
        if time.monotonic() + pause > end:
            break
        if missing:
            time.sleep(pause)
            pause = min(pause * 1.5, LONGEST_PAUSE_S)
    return seen, lost, looked


def check_node(spec: Mapping[str, Any], spec_path: Path, host: str, times: dict[str, float]) -> dict[str, Any]:
    """Run all checks of this node; its result. Raises StoreError where the shared directory cannot be written."""
    folder, token = spec_path.parent, spec["token"]
    hosts = [check["host"] for check in spec["hosts"]]
    index = hosts.index(host)
    facts = node_facts(
        spec["hosts"][index],
        Path(spec["run_dir"]),
        spec["min_free_gib"],
        max_gpu_memory_used=spec["max_gpu_memory_used"],
        ask_osts=index == 0,
    )
    times["wrote"] = time.time()
    report_phase(host, "facts", facts=facts)
    mine = {"host": host, "token": token, "facts": facts, "times": times}
    files.write_atomic(folder / (host + FACTS), json.dumps(mine).encode())
    times["looking"] = time.time()
    peers = [hosts[i] for i in peers_of(index, len(hosts))]
    seen, lost, times["looked"] = watch_peers(folder, peers, token, spec["watch_s"])
    unseen = [peer for peer in peers if peer not in seen and peer not in lost]
    return {**mine, "seen": seen, "lost": lost, "unseen": unseen}


def main(argv: list[str]) -> int:
    """Check this node as SPEC says. WAIT_S: how long SPEC may take to become visible."""
    started = time.time()
    spec_path, wait_s = Path(argv[0]), float(argv[1])
    name = local_hostnames()[0]
    report_phase(name, "started", started=started)
    spec = wait_for_json(spec_path, wait_s)
    if spec is None:
        problem = f"it does not see {spec_path} within {wait_s:g} s: does it mount the run directory's file system?"
        report_phase(name, "result", result={"problems": [problem]})
        return 0
    times = {"started": started, "spec_seen": time.time()}
    host = pick_host([check["host"] for check in spec["hosts"]])
    if host is None:
        report_phase(
            name, "result", result={"problems": [f"it calls itself {' or '.join(local_hostnames())}: not in the plan"]}
        )
        return 0
    try:
        result = check_node(spec, spec_path, host, times)
        files.write_atomic(spec_path.parent / (host + RESULT), json.dumps(result).encode())
        report_phase(host, "result", result={key: result[key] for key in ("times", "seen", "lost", "unseen")})
    except (StoreError, OSError) as error:
        problem = f"it cannot write to the run directory: {error}"
        shared = [problem] if disk.is_full(error) else []
        if "looking" not in times:
            times.pop("wrote", None)  # that failed: nobody misses its file
        report_phase(host, "result", result={"times": times, "problems": [problem], "shared": shared})
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
