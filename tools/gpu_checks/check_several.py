"""More GPUs than one: NCCL between ranks and to engines, every parallel layout, trainer and engines apart."""

import json
import os
import shutil
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import yaml
from _setting import Outcome, Setting, metrics, passed, product, run, shown, skipped, tail
from check_loop import KL_LIMIT, STEPS, WORSE_AFTER, experiment
from check_machine import usable_gpus

SUM_BYTES, SEND_BYTES = 256 << 20, 512 << 20
"""Of an all-reduce, and of what a rank sends to engines."""
ROUNDING_ON_GPU = 10.0
"""Bounds of the layouts are those of CPUs times this: kernels of other shapes round at other places."""
TRANSPORTS: dict[str, dict[str, Any]] = {
    "files": {},
    "delta": {"weights": {"transport": "delta"}},
    "gloo": {"weights": {"transport": "gloo"}},
    "nccl": {"weights": {"transport": "nccl"}},
    "nccl, batch invariant": {"weights": {"transport": "nccl"}, "inference": {"batch_invariant": True}},
}
"""`trainer.deterministic` in each: rank and engines are then told other things of NCCL."""


def devices(setting: Setting) -> int:
    """Return how many ranks there can be: of a CPU two, to try the paths."""
    return usable_gpus() if setting.on_gpu else 2


def spawned(work: Callable[..., None], args: Sequence[Any], nprocs: int, limit_s: float = 0.0) -> None:
    """`work(rank, *args)` in fresh processes, for CUDA does not survive a fork; the check's deadline is the limit.
    Raises torch's error, with the traceback of the first that fails."""
    import torch.multiprocessing as processes

    processes.spawn(work, args=tuple(args), nprocs=nprocs)


def ranks(setting: Setting) -> Outcome:
    """Try what ranks say to each other, on every group that the product makes, and what one sends to engines."""
    count = devices(setting)
    if count < 2:
        return skipped("one GPU: nobody to talk to")
    shutil.rmtree(setting.folder("ranks"))
    folder = setting.folder("ranks")
    spawned(talk, (count, str(folder), setting.device), count)
    spawned(send, (count, str(folder), setting.device), count)
    figures = {name: json.loads((folder / f"{name}.json").read_text()) for name in ("talk", "send")}
    words = f"all-reduce {figures['talk']['gb_per_s']:.1f} GB/s, to engines {figures['send']['gb_per_s']:.1f} GB/s"
    return passed(True, f"{count} ranks: {words}", figures)


def begin(rank: int, world_size: int, folder: str, kind: str, **trainer: Any) -> Any:
    """Join the others as a rank of the trainer does; its device."""
    from prime_hpc.config import Experiment
    from prime_hpc.runtime.role_context import RANKS_FILE
    from prime_hpc.trainer.main import start_process_group

    own = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size}
    os.environ |= {name: str(value) for name, value in own.items()}
    os.environ[RANKS_FILE] = f"{folder}/meet/store"
    tree = {"device": kind, "trainer": {"num_ranks": world_size, "dist_timeout_s": 60, **trainer}}
    return start_process_group(Experiment.model_validate(tree))


def talk(rank: int, world_size: int, folder: str, kind: str) -> None:
    """One rank: objects, failures, every collective on every group, bisections over all ranks, slow ranks."""
    import torch
    import torch.distributed as dist

    from prime_hpc.config.sections.parallel import ParallelDims
    from prime_hpc.store.errors import StoreError
    from prime_hpc.trainer.objectives.second_moment import second_moment_bound
    from prime_hpc.trainer.objectives.top_share import top_share_threshold
    from prime_hpc.trainer.parallel import build_parallel
    from prime_hpc.trainer.rank_group import RankGroup
    from prime_hpc.trainer.ranks import control_group
    from prime_hpc.trainer.slow_ranks import EVERY, SlowRanks

    device = begin(rank, world_size, folder, kind)
    for group in (RankGroup(), control_group(device, 60.0)):
        assert group.broadcast({"rank": rank}) == {"rank": 0}
        assert group.gather_all(rank) == list(range(world_size))
        assert (group.gather(rank) is None) == (rank != 0)
        try:
            group.on_all(lambda: _fail(rank))
        except StoreError as error:
            assert "rank 1: no disk" in str(error), error
        else:
            raise AssertionError("a rank has not heard of another's failure")
    layouts = [ParallelDims(dp_shard=world_size), ParallelDims(dp_shard=world_size // 2, tp=2, ep=2)]
    layouts += [ParallelDims(dp_replicate=world_size // 2, cp=2)]
    for dims in layouts if world_size % 2 == 0 else layouts[:1]:
        parallel = build_parallel(dims, device, 60.0)
        meshes = [parallel.fsdp, parallel.tp, parallel.cp, parallel.expert_fsdp, parallel.ep]
        for each in {g for mesh in meshes if mesh is not None for g in mesh.get_all_groups()}:
            _every_collective(each, device)
    values = torch.arange(100.0, device=device) * world_size + rank  # together 0, 1, 2, ...
    assert top_share_threshold(values, 0.1, counts=True).item() == 90 * world_size
    near = (values < 7 * world_size).float() * 0.01 + (values >= 7 * world_size) * 300.0
    assert 299.0 < second_moment_bound(near, 0.5, counts=True).item() < 300.0  # up to where the far ones begin
    slow = SlowRanks(device, ["here"] * world_size)
    for step in (EVERY, EVERY + 1):
        row = torch.tensor(slow.take(step), dtype=torch.float64, device=device)
        table = row.new_empty((world_size, len(row)))
        dist.all_gather_single(table, row[None])
        slow.compare(step, table.cpu().numpy())
    assert slow.figures["ranks/product_ratio"] < 100, slow.figures
    data = torch.ones(SUM_BYTES // 4 if kind == "cuda" else 1 << 18, device=device)
    seconds = min(_timed(lambda: dist.all_reduce(data), device) for _ in range(5))
    if rank == 0:
        speed = 2 * (world_size - 1) / world_size * data.nbytes / seconds / 1e9
        (Path(folder) / "talk.json").write_text(json.dumps({"gb_per_s": speed} | slow.figures))
    dist.barrier()
    dist.destroy_process_group()


def _fail(rank: int) -> None:
    from prime_hpc.store.errors import StoreError

    if rank == 1:
        raise StoreError("no disk")


def _every_collective(group: Any, device: Any) -> None:
    """Of one group, in the types in which the product uses them."""
    import torch
    import torch.distributed as dist

    size, own = dist.get_world_size(group), dist.get_rank(group)
    for dtype in (torch.float32, torch.bfloat16, torch.float64, torch.int64):
        x = torch.full((5,), own + 1, dtype=dtype, device=device)
        dist.all_reduce(x, group=group)
        assert x.tolist() == [size * (size + 1) / 2] * 5, (dtype, x)
    most = torch.tensor([own, -own], device=device)
    dist.all_reduce(most, op=dist.ReduceOp.MAX, group=group)
    assert most.tolist() == [size - 1, 0]
    table = torch.empty((size, 3), device=device)
    dist.all_gather_single(table, torch.full((1, 3), float(own), device=device), group=group)
    assert table[:, 0].tolist() == list(range(size))
    part = torch.empty((1, 3), device=device)
    dist.reduce_scatter_single(part, table, group=group)
    assert part[0].tolist() == [float(own * size)] * 3
    # uneven, and nothing at all from the last one, as experts' tokens and parts of versions go
    sent = [0 if own == size - 1 else to + 1 for to in range(size)]
    received = [0 if of == size - 1 else own + 1 for of in range(size)]
    arrived = torch.empty(sum(received), dtype=torch.uint8, device=device)
    dist.all_to_all_single(
        arrived, torch.full((sum(sent),), own, dtype=torch.uint8, device=device), received, sent, group=group
    )
    assert arrived.tolist() == [of for of, count in enumerate(received) for _ in range(count)]


def _timed(call: Callable[[], Any], device: Any) -> float:
    import torch

    began = time.perf_counter()
    call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - began


def send(rank: int, world_size: int, folder: str, kind: str) -> None:
    """Rank 0 is a trainer's, with `trainer.deterministic`; the others are workers of engines that are batch-invariant:
    what each is told of NCCL differs."""
    import torch

    from prime_hpc.store.messaging.network import Network
    from prime_hpc.trainer.determinism import make_deterministic
    from prime_hpc.weight_transport.network import group
    from prime_hpc.weight_transport.network.nccl import read_again

    own = torch.device("cuda", rank) if kind == "cuda" else torch.device("cpu")
    backend, place = "nccl" if kind == "cuda" else "gloo", Path(folder) / "place.json"
    os.environ |= read_again(os.environ)
    size = SEND_BYTES if kind == "cuda" else 1 << 20
    if kind == "cuda":
        torch.cuda.set_device(own)
    if rank == 0:
        make_deterministic()
        store, port = group.listen("127.0.0.1", Network())
        place.with_suffix(".part").write_text(str(port))
        place.with_suffix(".part").rename(place)
        joined = group.Group(store, "engines", 0, world_size, backend, "127.0.0.1", own)
        joined.connect()
    else:
        while not place.exists():
            time.sleep(0.05)
        joined = _join_as_engine(group, int(place.read_text()), rank, world_size, backend, own)
    host = torch.arange(size // 8).view(torch.uint8)
    seconds = []
    with joined.beside():
        for _ in range(3):
            values = host.to(own) if rank == 0 else torch.empty(size, dtype=torch.uint8, device=own)
            seconds.append(_timed(partial(joined.broadcast, values), own))
            assert torch.equal(values.cpu(), host)
    if rank == 0:
        (Path(folder) / "send.json").write_text(json.dumps({"gb_per_s": size / min(seconds) / 1e9}))
    joined.close()


def _join_as_engine(group: Any, port: int, rank: int, size: int, backend: str, own: Any) -> Any:
    """As `TransferEngine.init_transfer_engine` does in a worker whose engine has its own settings of NCCL."""
    from vllm.utils.nccl import pin_nccl_env, unpinned_nccl_env

    pin_nccl_env({"NCCL_PROTO": "LL", "NCCL_ALGO": "ring,tree;allreduce:tree", "NCCL_MAX_NCHANNELS": "1"})
    joined = group.Group(group.connect("127.0.0.1", port), "engines", rank, size, backend, "127.0.0.1", own)
    with unpinned_nccl_env():
        joined.connect()
    return joined


def layouts(setting: Setting) -> Outcome:
    """Three updates of tiny models under every layout against one rank, in float32; published, saved, resumed."""
    from tests.proofs.prove_layouts import bound_of, every_case, every_case_of_eight, run_worlds

    count = devices(setting)
    if count < 2:
        return skipped("one GPU has one layout")
    worlds = {size: every_case(size) for size in (2, 4) if size <= count}
    if count >= 8:
        worlds[8] = every_case_of_eight()
    if not setting.on_gpu:  # `tools/proofs layouts` has them all
        worlds = {2: worlds[2][:1]}
    room = ROUNDING_ON_GPU if setting.on_gpu else 1.0
    found = run_worlds(setting.folder("layouts"), worlds, spawned, setting.device)
    wrong = {
        name: {claim: error for claim, error in errors.items() if not error < room * bound_of(claim)}
        for name, errors in found.items()
    }
    wrong = {name: errors for name, errors in wrong.items() if errors}
    summary = f"{len(found) - len(wrong)} of {len(found)} train as one rank does" + (f"; not: {wrong}" if wrong else "")
    return passed(not wrong, summary, {"errors": found}, "tools/proofs layouts (on CPUs)")


def apart(setting: Setting) -> Outcome:
    """RL with the trainer on half of the GPUs and engines on the other half, by each way of the weights."""
    count = devices(setting)
    if count < 2:
        return skipped("one GPU: `agreement` shares it")
    folder, figures = setting.folder("apart"), dict[str, Any]()
    for name, change in TRANSPORTS.items() if setting.on_gpu else [("gloo", TRANSPORTS["gloo"])]:
        path = _on_halves(setting, folder, name.replace(", ", "-").replace(" ", "-"), count, change)
        argv = product(setting, "rl", "@", str(path), "--clean")
        log = path.with_suffix(".log")
        if run(argv, log):
            return Outcome("fail", f"{name} failed: {tail(log)}", figures, shown(argv))
        rows = metrics(folder / path.stem)
        differences = [row["logprob_diff"] for row in rows]
        figures[name] = {"logprob_diff": differences, "kl": max(row["kl"] for row in rows)}
        figures[name]["transports"] = _transports(folder / path.stem)
        print(name, figures[name], flush=True)
    wrong = [name for name, found in figures.items() if not _follows(name, found)]
    words = ", ".join(f"{name} {max(found['logprob_diff']):.1e}" for name, found in figures.items())
    summary = f"log-probabilities off by at most (mean of a step): {words}" + (f"; wrong: {wrong}" if wrong else "")
    return passed(not wrong, summary, figures, shown(argv))


def _on_halves(setting: Setting, folder: Path, name: str, count: int, change: dict[str, Any]) -> Path:
    path = experiment(setting, folder, name, 1.0, STEPS)
    tree = yaml.safe_load(path.read_text())
    half = count // 2
    tree["trainer"]["num_ranks"] = half
    tree["weights"] = change.get("weights", {})
    tree["inference"] |= change.get("inference", {})
    if setting.on_gpu:
        tree |= {"trainer_gpu_ids": list(range(half)), "inference_gpu_ids": list(range(half, 2 * half))}
        tree["inference"] |= {"gpu_memory_utilization": 0.5, "tensor_parallel_size": 2 if half % 2 == 0 else 1}
        tree["inference"]["data_parallel_size"] = half // tree["inference"]["tensor_parallel_size"]
    path.write_text(yaml.safe_dump(tree))
    return path


def _transports(run_dir: Path) -> list[str]:
    """How each version went: `files`, or what its manifest names."""
    from prime_hpc.store.manifest import read_manifest

    versions = sorted((run_dir / "weights").glob("step_*"))
    return [str(read_manifest(version).meta.get("transport", "files")) for version in versions]


def _follows(name: str, found: dict[str, Any]) -> bool:
    """Return whether engines sampled by what was trained, and a version went over the network that was to: the first
    one, and those that stay, are files, and so are changes where too much has changed."""
    first, *later = found["logprob_diff"]
    wanted = name.split(",")[0]
    is_near = len(later) == STEPS - 1 and max(later) <= WORSE_AFTER * first + 1e-4 and found["kl"] < KL_LIMIT
    return is_near and (wanted in ("files", "delta") or wanted in found["transports"])
