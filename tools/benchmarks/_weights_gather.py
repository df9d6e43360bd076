"""`tools/bench weights --gather`: tensors that lie on several ranks come to the rank whose file they stand in.

Matrices of a small model's shapes, sharded by rows over 2 and over 4 gloo ranks of this machine, all of them to be
gathered (as over nodes); each rank owns a share. Two ways, in turns, in one run: `owner`, as publishing does it
(`trainer.weights.gathering`), and `all`, torch's `full_tensor()` of each tensor on every rank. Bytes are what all ranks
receive together; memory is the growth of the largest rank's peak while it gathers (`VmHWM`).
"""

import os
import statistics
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from _ranks import started_ranks

NUM_ROUNDS = 5
SHAPES = [(16_384, 1024)] + [(3072, 1024), (3072, 1024), (1024, 3072), (2048, 1024)] * 4
WAYS = ("owner", "all")


def gather(rank: int, num_ranks: int, rendezvous: Path, pipe: Connection) -> None:
    """One rank: gathers the way that it is told; answers seconds, bytes received and growth of its peak memory."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    from prime_hpc.trainer.weights.gathering import Gathering, Wanted
    from prime_hpc.trainer.weights.write_plan import balance_writes, ranks_of_copy

    store = dist.FileStore(str(rendezvous), num_ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks)
    mesh = init_device_mesh("cpu", (num_ranks,))
    tensors = {str(n): distribute_tensor(torch.randn(s), mesh, [Shard(0)]) for n, s in enumerate(SHAPES)}
    owners = balance_writes([rows * columns for rows, columns in SHAPES], num_ranks)
    wanted = [
        Wanted(str(n), owner, shape, torch.bfloat16, may_split=True)
        for n, (owner, shape) in enumerate(zip(owners, SHAPES, strict=True))
    ]
    plan = Gathering(wanted, tensors, {name: ranks_of_copy(tensor) for name, tensor in tensors.items()})
    received = [0]
    exchange: Any = dist.all_to_all_single

    def counted(output: torch.Tensor, *others: Any) -> Any:
        received[0] += output.nbytes
        return exchange(output, *others)

    setattr(dist, "all_to_all_single", counted)  # noqa: B010  # a type checker holds it constant
    total = sum(rows * columns for rows, columns in SHAPES) * 2
    while (said := pipe.recv()) is not None:
        Path("/proc/self/clear_refs").write_text("5")  # the peak counts anew
        before, received[0] = _peak(), 0
        dist.barrier()
        began = time.perf_counter()
        if said[0] == "owner":
            for _, _, values in plan.gather(tensors):
                values.sum()  # as much as to write them
        else:
            for n, owner in enumerate(owners):
                half: Any = tensors[str(n)].detach().to(torch.bfloat16)
                whole = half.full_tensor()
                if owner == rank:
                    whole.sum()
            received[0] = total * (num_ranks - 1) // num_ranks
        dist.barrier()
        pipe.send((time.perf_counter() - began, received[0], _peak() - before))
    dist.destroy_process_group()


def _peak() -> int:
    line = next(row for row in Path("/proc/self/status").read_text().splitlines() if row.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def run() -> dict[str, Any]:
    """The figures."""
    import torch

    os.environ.setdefault("OMP_NUM_THREADS", "1")
    torch.set_num_threads(1)
    result: dict[str, Any] = {"bytes": sum(rows * columns for rows, columns in SHAPES) * 2, "rounds": NUM_ROUNDS}
    for num_ranks in (2, 4):
        rows: dict[str, list[tuple[float, int, int]]] = {way: [] for way in WAYS}
        with tempfile.TemporaryDirectory() as name:
            target = Path(name) / "rendezvous"
            with started_ranks(gather, num_ranks, target, num_ranks=num_ranks) as tell:
                for number in range(NUM_ROUNDS + 1):
                    for way in WAYS if number % 2 else reversed(WAYS):
                        answers = tell(way)
                        if number:  # the first warms up
                            seconds, received, grown = zip(*answers, strict=True)
                            rows[way].append((max(seconds), sum(received), max(grown)))
        found: dict[str, Any] = {}
        for way in WAYS:
            for key, values in zip(("s", "bytes", "peak_bytes"), zip(*rows[way], strict=True), strict=True):
                found[f"{way}_{key}"] = statistics.median(values)
        pairs = zip(rows["owner"], rows["all"], strict=True)
        found["time_ratio"] = round(statistics.median(ours[0] / other[0] for ours, other in pairs), 3)
        result[f"ranks_{num_ranks}"] = found
    result["cores"] = len(os.sched_getaffinity(0))
    return result


def render(result: dict[str, Any]) -> str:
    """The figures as lines."""
    lines = [f"{result['bytes'] / 1e6:.0f} MB, medians of {result['rounds']} rounds, {result['cores']} cores"]
    for num_ranks in (2, 4):
        found = result[f"ranks_{num_ranks}"]
        ways = [
            f"to {way}: {found[f'{way}_bytes'] / 1e6:.0f} MB received in {found[f'{way}_s']:.3f} s, peak "
            f"+{found[f'{way}_peak_bytes'] / 1e6:.0f} MB"
            for way in WAYS
        ]
        lines.append(f"{num_ranks} ranks, {'; '.join(ways)}; time ratio {found['time_ratio']:.2f}")
    return "\n".join(lines)
