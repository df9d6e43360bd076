"""`tools/bench weights`: from a finished update until every engine serves it, against the raw bytes, paired in one run.

Two FSDP2 ranks publish a random Qwen3 as a weight version (files, sums, fsync, manifest, rename); a real vLLM server
with two data-parallel engines loads it (checks, pause, load, label, resume) by the call that the orchestrator makes.
The raw side of a round: `dd conv=fsync` of as many random bytes from memory (/dev/shm) into the same directory, then
as many readers as engines read that file at once (into nothing: what an engine does with the bytes, it does beyond
that). Each ratio is the median over rounds; sides take turns in going
first. Everything is on one machine: raw readers and engines both find the bytes in its page cache.

The directory is a temporary one ($TMPDIR chooses the disk).
"""

import asyncio
import mmap
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from _random_qwen3 import save_qwen3
from _ranks import COMMAND_TIMEOUT_S, NUM_RANKS, load_rank, started_ranks

VARIANTS = {"--delta": "_weights_delta", "--gloo": "_weights_network", "--gather": "_weights_gather"}
"""Instead: `weights.transport` `delta` or `gloo` against whole files; how what must be gathered comes to its file."""
NUM_ROUNDS = 9
NUM_ENGINES = 2
VOCAB = 16_384
FREE_BYTES = 1 << 30
"""What a version and its raw twin take in the page cache, and more."""
READY_S = 300.0


def save_model(folder: Path) -> int:
    """A float32 Qwen3 with tokenizer, its tensors as large as those of real small models; returns the parameters."""
    from tests.support.tiny_tokenizer import make_tokenizer

    folder.mkdir(parents=True)
    tokenizer = make_tokenizer(folder)
    ends = {"eos_token_id": tokenizer.eos_token_id, "bos_token_id": None, "pad_token_id": tokenizer.pad_token_id}
    return save_qwen3(folder, vocab=VOCAB, hidden=1024, layers=4, head_dim=64, context=1024, **ends)


def publish_on_request(rank: int, model: Path, root: Path, pipe: Connection) -> None:
    """One trainer rank: publishes the version that it is told, answers with its seconds and its core-seconds."""
    import torch
    import torch.distributed as dist

    from prime_hpc.runtime.process_memory import freeze_gc
    from prime_hpc.store.run_paths import RunPaths
    from prime_hpc.trainer.weights.publish import Publisher

    policy = load_rank(rank, model, root / "rendezvous", "float32")
    publisher = Publisher(policy, model, RunPaths(root), dtype=torch.float32, incarnation=0, model_name=str(model))
    freeze_gc()  # as the trainer's own main does
    while (said := pipe.recv()) is not None:
        dist.barrier()
        began, worked = time.perf_counter(), time.process_time()
        publisher.publish(said[0])
        pipe.send((time.perf_counter() - began, time.process_time() - worked))
    dist.destroy_process_group()


@contextmanager
def trainer(model: Path, root: Path) -> Iterator[Any]:
    """The ranks; gives a function version -> seconds of rank 0, which commits, and core-seconds of all."""
    with started_ranks(publish_on_request, model, root) as tell:

        def publish(version: int) -> tuple[float, float]:
            seconds = tell(version)
            return seconds[0][0], sum(cpu for _, cpu in seconds)

        yield publish


@contextmanager
def server(
    model: Path, root: Path, dtype: str = "float32", num_engines: int = NUM_ENGINES, transport: str = "files"
) -> Iterator[tuple[str, int]]:
    """A vLLM server with its engines; gives its URL and process id."""
    import yaml

    root.mkdir()
    tree = {
        "kind": "rl",
        "name": root.name,
        "seq_len": 256,
        "model": {"name": str(model), "dtype": dtype},
        "orchestrator": {"sampling": {"max_tokens": 64}},
        "inference": {"cpu_kv_cache_gib": 0.25, "data_parallel_size": num_engines},
        "weights": {"transport": transport},
    }
    (root / "run.yaml").write_text(yaml.safe_dump(tree), encoding="utf-8")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "prime_hpc.inference.main", str(root), "--port", str(port)]
    with (root / "server.log").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=_server_environment())
    try:
        yield f"http://127.0.0.1:{port}", process.pid
        if process.poll() is not None:
            raise RuntimeError(f"the server ended:\n{(root / 'server.log').read_text(errors='replace')[-3000:]}")
    finally:
        process.terminate()
        try:
            process.wait(15)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _server_environment() -> dict[str, str]:
    """Sockets need short paths: not below a long $TMPDIR."""
    path = os.pathsep.join([str(Path(__file__).resolve().parents[2]), os.environ.get("PYTHONPATH", "")])
    return {**os.environ, "TMPDIR": "/tmp", "PYTHONPATH": path.rstrip(os.pathsep)}


def raw_write(size: int, folder: Path, source: Path) -> float:
    """Seconds of dd with fsync into `folder/raw`."""
    began = time.perf_counter()
    command = ["dd", f"if={source}", f"of={folder / 'raw'}", "bs=1M", f"count={size >> 20}", "conv=fsync"]
    subprocess.run(command, check=True, capture_output=True, timeout=COMMAND_TIMEOUT_S)
    return time.perf_counter() - began


def raw_read(folder: Path) -> float:
    """Seconds until as many readers as engines have read `folder/raw`."""
    began = time.perf_counter()
    command = ["dd", f"if={folder / 'raw'}", "of=/dev/null", "bs=1M"]
    readers = [subprocess.Popen(command, stderr=subprocess.DEVNULL) for _ in range(NUM_ENGINES)]
    for reader in readers:
        reader.wait(COMMAND_TIMEOUT_S)
    return time.perf_counter() - began


def cpu_seconds(pid: int) -> float:
    """Core-seconds so far of a process and all that it started."""
    import psutil

    top = psutil.Process(pid)
    times = [process.cpu_times() for process in (top, *top.children(recursive=True))]
    return sum(time.user + time.system for time in times)


def settle(folder: Path) -> None:
    """Before either side: nothing is owed, and there is memory to write into.

    Let the file system end its write-back and the discards of deleted files, else the side that comes next pays for it.
    And have free memory that the machine really holds: a virtual one gives idle pages back to its host, and to get them
    again costs more than to fill them (here 1.1 s a gigabyte, whoever is the first to write there).
    """
    subprocess.run(["sync", "-f", str(folder)], check=True, timeout=COMMAND_TIMEOUT_S)
    with mmap.mmap(-1, FREE_BYTES) as memory:
        for offset in range(0, FREE_BYTES, mmap.PAGESIZE):
            memory[offset] = 1


async def measure(
    publish: Any, url: str, server_pid: int, root: Path, folder: Path, memory: Path
) -> dict[str, list[float]]:
    """All rounds."""
    import numpy as np

    from prime_hpc.client.inference import InferenceClient
    from prime_hpc.runtime.process_memory import freeze_gc
    from prime_hpc.store.manifest import read_manifest
    from prime_hpc.store.run_paths import RunPaths
    from prime_hpc.store.weights import prune_weights

    paths = RunPaths(root)
    rows: dict[str, list[float]] = {}

    def note(**values: float) -> None:
        for key, value in values.items():
            rows.setdefault(key, []).append(value)

    async with InferenceClient(url, timeout_s=60) as client:
        await client.wait_ready(READY_S)
        freeze_gc()  # as the orchestrator, whose call this is, does

        async def ours(version: int) -> None:
            settle(folder)
            publish_s, publish_cpu_s = publish(version)
            worked, began = cpu_seconds(server_pid), time.perf_counter()
            answer = await client.update_weights(paths.weights_step(version), version)
            load_s = time.perf_counter() - began
            note(publish=publish_s, load=load_s, ours=publish_s + load_s, paused=answer["seconds"]["paused"])
            note(publish_cpu=publish_cpu_s, load_cpu=cpu_seconds(server_pid) - worked)

        await ours(1)  # warm-up: plans, first pages, first load
        size = read_manifest(paths.weights_step(1)).total_size
        source = memory / "source"
        source.write_bytes(np.random.default_rng(0).bytes((size >> 20) << 20))

        def raw() -> None:
            settle(folder)
            write_s = raw_write(size, folder, source)
            read_s = raw_read(folder)
            note(raw_write=write_s, raw_read=read_s, raw=write_s + read_s)

        raw()
        (folder / "raw").unlink()
        rows.clear()
        for number in range(NUM_ROUNDS):
            if number % 2:
                raw()
            await ours(2 + number)
            if not number % 2:
                raw()
            prune_weights(paths, 1)
            (folder / "raw").unlink()
        if await client.policy_version() != 1 + NUM_ROUNDS:
            raise RuntimeError("the server does not serve the version that was published last")
    rows["bytes"] = [size]
    return rows


def run() -> dict[str, Any]:
    """The figures."""
    import torch
    from loguru import logger

    logger.disable("prime_hpc")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    torch.set_num_threads(1)  # processes are forked from this one
    with tempfile.TemporaryDirectory() as name, tempfile.TemporaryDirectory(dir="/dev/shm") as memory:
        folder, root = Path(name), Path(name) / "run"
        root.mkdir()
        num_parameters = save_model(folder / "model")
        with trainer(folder / "model", root) as publish, server(folder / "model", folder / "server") as (url, pid):
            rows = asyncio.run(measure(publish, url, pid, root, folder, Path(memory)))
    ratios = [a / b for a, b in zip(rows["ours"], rows["raw"], strict=True)]
    median = {key: statistics.median(values) for key, values in rows.items()}
    return {
        "ratio_to_raw": statistics.median(ratios),
        "ratios": [round(ratio, 3) for ratio in ratios],
        "publish_to_raw_write": statistics.median(
            a / b for a, b in zip(rows["publish"], rows["raw_write"], strict=True)
        ),
        "num_parameters": num_parameters,
        "bytes": int(median["bytes"]),
        **{
            f"{key}_s": median[key]
            for key in ("publish", "publish_cpu", "load", "load_cpu", "paused", "ours", "raw_write", "raw_read", "raw")
        },
        "num_ranks": NUM_RANKS,
        "num_engines": NUM_ENGINES,
        "num_rounds": NUM_ROUNDS,
        "cores": len(os.sched_getaffinity(0)),
    }


def render(result: dict[str, Any]) -> str:
    """The figures as lines."""
    return "\n".join(
        [
            f"{result['num_parameters'] / 1e6:.0f}M parameters, {result['bytes'] / 1e6:.0f} MB a version, "
            f"{result['num_ranks']} trainer ranks, {result['num_engines']} engines, {result['cores']} cores, "
            f"{result['num_rounds']} rounds",
            f"published {result['publish_s']:.3f} s ({result['publish_cpu_s']:.2f} core-seconds of all ranks) + loaded "
            f"{result['load_s']:.3f} s ({result['load_cpu_s']:.2f} core-seconds of the server and its engines; paused "
            f"{result['paused_s']:.3f} s) = {result['ours_s']:.3f} s",
            f"raw: written {result['raw_write_s']:.3f} s + read {result['raw_read_s']:.3f} s = {result['raw_s']:.3f} s",
            f"ratio {result['ratio_to_raw']:.2f} (rounds: {', '.join(f'{r:.2f}' for r in result['ratios'])}); "
            f"publishing alone {result['publish_to_raw_write']:.2f} of the raw write",
        ]
    )
