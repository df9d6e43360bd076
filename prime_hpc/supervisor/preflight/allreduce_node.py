"""One process a trainer node, started by `allreduce`.

    python -m prime_hpc.supervisor.preflight.allreduce_node SPEC WAIT_S

Joins the others over a TCP store, tries all its GPUs and the links between them, its links to its ring neighbours, then
all-reduces of a few sizes: nccl where GPUs were planned, gloo where none was. Says at each phase how far it is, and
once a second that it lives, so that a node that hangs can be named. The only part of preflight that imports torch. Exit
code 0 whatever was found.
"""

import contextlib
import json
import os
import re
import shutil
import socket
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from prime_hpc.runtime.atomic_write import write_atomic
from prime_hpc.runtime.device import Device, require_gpus
from prime_hpc.runtime.gpus import visible_gpus
from prime_hpc.store.io import files
from prime_hpc.store.messaging import sockets
from prime_hpc.store.messaging.network import Network, Place, local_places, network_environment
from prime_hpc.supervisor.preflight.node import local_hostnames, pick_host, report_phase, wait_for_json
from prime_hpc.supervisor.roles import ports

if TYPE_CHECKING:
    import torch

PHASES = ("started", "imported torch", "used its device", "joined", "formed the group", "tried its links", "done")
PROGRESS = ".allreduce.json"
BEAT_S = 1.0
BEYOND_S = 10.0
"""A process that hangs ends itself so long after its deadline."""
CONNECT_TIMEOUT_S = 3.0
LINK_BYTES = {"gloo": 8 << 20, "nccl": 64 << 20}
"""Sent to the next rank; between a node's GPUs as much as by NCCL."""
SIZES = {"gloo": (4 << 10, 1 << 20, 16 << 20), "nccl": (4 << 10, 16 << 20, 256 << 20)}
"""Bytes a rank."""
REPEATS = 5


class Fault(RuntimeError):
    """Something for which one node is to blame: this one, or the one named."""

    def __init__(self, message: str, blamed: str) -> None:
        super().__init__(message)
        self.blamed = blamed


class Progress:
    """How far this node is, said on standard output and in its progress file; repeated while it lives."""

    def __init__(self, host: str, folder: Path, token: str) -> None:
        self._host = host
        self._path = folder / (host + PROGRESS)
        self._token = token
        self._lock = threading.Lock()
        self._beat = 0
        self._over = threading.Event()
        self.phase = PHASES[0]

    def __enter__(self) -> "Progress":
        self.reach(PHASES[0])
        threading.Thread(target=self._beats, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()

    def reach(self, phase: str, **more: Any) -> None:
        """Say that this phase is behind us."""
        with self._lock:
            self.phase = phase
            self._write(more)

    def finish(self, result: dict[str, Any]) -> None:
        """Write the last word."""
        self._over.set()
        with self._lock:
            self._write({"result": result})

    def _beats(self) -> None:
        while not self._over.wait(BEAT_S):
            with self._lock:
                if not self._over.is_set():
                    self._write({})

    def _write(self, more: dict[str, Any]) -> None:
        self._beat += 1
        report_phase(self._host, self.phase, beat=self._beat, **more)
        state = {"host": self._host, "token": self._token, "phase": self.phase, "beat": self._beat, **more}
        with contextlib.suppress(OSError):  # the same words go out by standard output
            write_atomic(self._path, json.dumps(state), sync=False)


def machine() -> str:
    """Equal for processes that share a loopback interface."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    space = Path("/proc/self/ns/net")
    return f"{boot.read_text().strip() if boot.exists() else ''}:{space.readlink() if space.is_symlink() else ''}"


def local_addresses(place: Place | None = None) -> list[str]:
    """Names and addresses under which others may reach this node, the likeliest first; `place`: that one alone."""
    if place is not None:
        return [place.address]
    return [*local_hostnames(), *(p.address for p in local_places() if not sockets.is_loopback(p.address))]


def reachable(addresses: list[str], port: int) -> str | None:
    """Return the first address at which something listens on `port`; loopback ones lead to this machine only."""
    for address in addresses:
        with contextlib.suppress(OSError):
            for *_, (number, *_) in socket.getaddrinfo(address, port, type=socket.SOCK_STREAM):
                with contextlib.suppress(OSError):
                    if not sockets.is_loopback(str(number)):
                        socket.create_connection((str(number), port), timeout=CONNECT_TIMEOUT_S).close()
                        return str(number)
    return None


def join(spec: Mapping[str, Any], folder: Path, rank: int, world: int, end: float) -> "torch.distributed.TCPStore":
    """Return the store in which all ranks meet; rank 0 keeps it and publishes where it is.
    Raises Fault: rank 0 published nothing in time, or none of its addresses can be reached."""
    from torch.distributed import TCPStore

    path = folder / f"rendezvous-{spec['token'][:8]}.json"
    left = timedelta(seconds=max(1.0, end - time.monotonic()))
    if rank == 0:
        network = Network.from_env()
        within, place = network.ports or ports.BUILT_IN, network.place("collectives")
        (port,) = ports.choose(1, ports.run_base(folder, within=within), sockets.ALL, within)
        store = TCPStore(sockets.loopback(), port, world, True, timeout=left, wait_for_workers=False)
        names = local_addresses(place) if place is not None else [spec["hosts"][0], *local_addresses()]
        where = {"addresses": names, "port": port, "machine": machine()}
        files.write_atomic(path, json.dumps(where).encode())
        return store
    told = wait_for_json(path, end - time.monotonic())
    if told is None:
        raise Fault(f"the first trainer node, {spec['hosts'][0]}, did not publish its address", spec["hosts"][0])
    here = told["machine"] == machine()
    address = sockets.loopback() if here else reachable(told["addresses"], told["port"])
    if address is None:
        tried = ", ".join(dict.fromkeys(told["addresses"]))
        raise Fault(f"it cannot reach port {told['port']} of {spec['hosts'][0]} (tried {tried})", spec["hosts"][0])
    return TCPStore(address, told["port"], world, False, timeout=left, wait_for_workers=False)


def try_device(gpus: int | None) -> int:
    """Try every GPU that was planned; how many torch has here.

    Args:
        gpus: so many at least; 0: none is wanted; None: not known, then those that are to be seen.

    Raises:
        RuntimeError: one computes wrongly, or what is copied from one to the next arrives changed.
        ValueError: torch sees fewer than were planned, with the reason.
    """
    import torch

    if gpus is None:
        gpus = len(visible_gpus())
    if not gpus:
        return 0
    count = require_gpus(Device("cuda"), process="its roles")
    if count < gpus:
        raise ValueError(f"torch sees {count} of the {gpus} GPUs that were planned")
    results = []
    for index in range(count):
        ones = torch.ones(1024, 1024, device=f"cuda:{index}")
        results.append(ones @ ones)
        if float(results[-1].sum()) != 1024.0**3:
            raise RuntimeError(f"its GPU {index} computes a wrong matrix product")
    for index in range(count if count > 1 else 0):
        after = (index + 1) % count
        if not torch.equal(results[index].to(f"cuda:{after}"), results[after]):
            raise RuntimeError(f"what is copied from its GPU {index} to its GPU {after} arrives changed")
    torch.cuda.set_device(0)
    return count


def try_gpu_links(count: int, sync: Callable[[int], None]) -> list[float]:
    """Copy from each of a node's GPUs to the next one, as roles with several GPUs do all the time: GB/s of each.
    `sync`: waits until a GPU has done what was asked of it."""
    import torch

    found = []
    for index in range(count if count > 1 else 0):
        after = (index + 1) % count
        data = torch.ones(LINK_BYTES["nccl"] // 4, device=f"cuda:{index}")
        there = torch.empty_like(data, device=f"cuda:{after}")

        def once(data: "torch.Tensor" = data, there: "torch.Tensor" = there) -> None:
            there.copy_(data, non_blocking=True)

        def both(index: int = index, after: int = after) -> None:
            sync(index)
            sync(after)

        found.append(round(LINK_BYTES["nccl"] / timed(once, REPEATS, both) / 1e9, 1))
    return found


def fastest_port(root: Path = Path("/sys/class/infiniband")) -> tuple[str, float] | None:
    """Return the InfiniBand or RoCE port in use with the highest rate, and that rate in GB/s; None where there is
    none."""
    best: tuple[str, float] | None = None
    for port in sorted(root.glob("*/ports/*")):
        try:
            state, rate = (port / "state").read_text(), (port / "rate").read_text()
        except OSError:
            continue
        match = re.match(r"([\d.]+)\s*Gb/sec", rate)
        if "ACTIVE" in state and match and (best is None or float(match[1]) / 8 > best[1]):
            best = f"{port.parent.parent.name} port {port.name}", float(match[1]) / 8
    return best


def timed(call: Callable[[], None], repeats: int, sync: Callable[[], None]) -> float:
    """Median seconds of a call, after one that is not counted."""
    spans = []
    for index in range(repeats + 1):
        sync()
        began = time.perf_counter()
        call()
        sync()
        if index:
            spans.append(time.perf_counter() - began)
    return statistics.median(spans)


def try_links(backend: str, rank: int, world: int, device: "torch.device", sync: Callable[[], None]) -> float:
    """Send to the next rank of the ring while receiving from the previous one: GB/s out of this node."""
    import torch
    import torch.distributed as dist

    size = LINK_BYTES[backend]
    data = torch.full((size // 4,), float(rank), device=device)
    got = torch.empty_like(data)

    def once() -> None:
        after, before = (rank + 1) % world, (rank - 1) % world
        operations = [dist.P2POp(dist.isend, data, after), dist.P2POp(dist.irecv, got, before)]
        for work in dist.batch_isend_irecv(operations):
            work.wait()

    seconds = timed(once, REPEATS, sync)
    if float(got[-1]) != float((rank - 1) % world):
        raise RuntimeError("what arrived from its neighbour is not what was sent")
    return size / seconds / 1e9


def try_allreduce(
    backend: str, rank: int, world: int, device: "torch.device", sync: Callable[[], None]
) -> dict[str, Any]:
    """All-reduces of a few sizes. Bandwidths are bus bandwidths: 2 (n-1)/n * bytes / seconds."""
    import torch
    import torch.distributed as dist

    found: dict[str, Any] = {"sizes": {}}
    for size in SIZES[backend]:
        tensor = torch.empty(size // 4, device=device)

        def once(tensor: "torch.Tensor" = tensor) -> None:
            tensor.fill_(rank + 1)
            dist.all_reduce(tensor)

        seconds = timed(once, REPEATS, sync)
        if float(tensor[-1]) != world * (world + 1) / 2:
            raise RuntimeError(f"an all-reduce of {size} bytes gave {float(tensor[-1])}, not {world * (world + 1) / 2}")
        speed = 2 * (world - 1) / world * size / seconds / 1e9
        found["sizes"][size] = {"seconds": seconds, "gb_per_s": round(speed, 3)}
        found.setdefault("latency_us", round(seconds * 1e6, 1))
        found["gb_per_s"] = round(speed, 3)
    return found


def transport(log: Path) -> str | None:
    """Return the network that NCCL chose, from its own log: `IB`, `Socket`, a plugin's name; None where it does not
    say."""
    try:
        text = log.read_text(errors="replace")
    except OSError:
        return None
    match = re.search(r"Using network (\S+)", text) or re.search(r"NET/(\w+)", text)
    return match[1] if match else None


def measure(
    spec: Mapping[str, Any], folder: Path, rank: int, progress: Progress, end: float, log: Path
) -> dict[str, Any]:
    """All phases of this node. Raises RuntimeError, OSError, ImportError, ValueError for what goes wrong.

    `log` is where NCCL writes to.
    """
    os.environ.setdefault("NCCL_DEBUG", "INFO")
    os.environ.setdefault("NCCL_DEBUG_SUBSYS", "INIT,NET")
    os.environ.setdefault("NCCL_DEBUG_FILE", str(log))
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    hosts: list[str] = spec["hosts"]
    os.environ.update(network_environment(Network.from_env(), os.environ, hosts, hosts[rank]))  # as for a role
    import torch
    import torch.distributed as dist

    world = len(hosts)
    progress.reach("imported torch")
    num_gpus = try_device(spec["gpus"][rank])
    cuda = num_gpus > 0
    progress.reach("used its device", num_gpus=num_gpus)
    store = join(spec, folder, rank, world, end)
    progress.reach("joined")
    store.set(f"cuda/{rank}", "1" if cuda else "0")
    cudas = [store.get(f"cuda/{other}") == b"1" for other in range(world)]
    if any(cudas) and not cuda:
        store.set(f"over/{rank}", "1")
        raise Fault("torch sees no CUDA device here, on other trainer nodes it does", spec["hosts"][rank])
    if any(cudas) and not all(cudas):
        raise RuntimeError("some other trainer nodes have no CUDA device")
    backend = "nccl" if cuda else "gloo"
    device = torch.device("cuda:0" if cuda else "cpu")
    left = timedelta(seconds=max(1.0, end - time.monotonic()))
    dist.init_process_group(backend, store=dist.PrefixStore("group", store), rank=rank, world_size=world, timeout=left)

    def sync() -> None:
        if cuda:
            torch.cuda.synchronize()

    sync()
    dist.barrier()
    progress.reach("formed the group")
    found: dict[str, Any] = {"backend": backend}
    if world > 1:
        found["to_next"] = {
            "host": spec["hosts"][(rank + 1) % world],
            "gb_per_s": round(try_links(backend, rank, world, device, sync), 3),
        }
    progress.reach("tried its links")
    found |= try_allreduce(backend, rank, world, device, sync)
    if cuda:
        found |= {"transport": transport(Path(os.environ["NCCL_DEBUG_FILE"])), "num_gpus": num_gpus}
        found["gpu_links_gb_per_s"] = try_gpu_links(num_gpus, torch.cuda.synchronize)
        if (port := fastest_port()) is not None:
            found |= {"ports": port[0], "fastest_port_gb_per_s": round(port[1], 1)}
    store.set(f"over/{rank}", "1")
    if rank == 0:  # its end takes the store away
        store.wait([f"over/{other}" for other in range(world)], timedelta(seconds=5))
    return found


def main(argv: list[str]) -> int:
    """Take part as SPEC says. WAIT_S: how long SPEC may take to become visible."""
    spec_path, wait_s = Path(argv[0]), float(argv[1])
    began = time.monotonic()
    spec = wait_for_json(spec_path, wait_s)
    host = pick_host(spec["hosts"]) if spec is not None else None
    if spec is None or host is None:
        reason = f"it does not see {spec_path}" if spec is None else "it is not in the list of the trainer's nodes"
        report_phase(local_hostnames()[0], PHASES[0], result={"problem": reason})
        return 0
    # whatever hangs below, and though the launcher may be gone: this process ends
    scratch = Path(tempfile.mkdtemp(prefix="preflight-"))
    watchdog = threading.Timer(spec["timeout_s"] + BEYOND_S, _leave, (scratch,))
    watchdog.daemon = True
    watchdog.start()
    with Progress(host, spec_path.parent, spec["token"]) as progress:
        try:
            rank, end = spec["hosts"].index(host), began + spec["timeout_s"]
            result = measure(spec, spec_path.parent, rank, progress, end, scratch / "nccl.log")
            progress.phase = PHASES[-1]
        except (RuntimeError, OSError, ImportError, ValueError) as error:
            result = {"problem": " ".join(str(error).split())[:500] or type(error).__name__}
            if isinstance(error, Fault):
                result["blamed"] = error.blamed
        shutil.rmtree(scratch, ignore_errors=True)  # before the result: the launcher is ended once all have come
        progress.finish(result)
    sys.stdout.flush()
    return _leave(scratch)


def _leave(scratch: Path) -> NoReturn:
    """End now: a communicator that hangs would hold up the interpreter's orderly end."""
    shutil.rmtree(scratch, ignore_errors=True)
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1:])
