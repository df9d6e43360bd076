"""`tools/bench weights --gloo`: versions over the network against whole files of the same weights, in one run.

The model of `weights --delta` in bfloat16, two FSDP2 ranks, a vLLM server with one engine, all on one machine. Each
round is a step; then the ranks publish it both ways, and the server loads both, by the call that the orchestrator
makes. Sides take turns in going first. Publishing is timed from the call until rank 0 has committed, loading from the
request until the server answers; `pause` is the engine's. A version over the network comes during the pause; of files
all is read before.
"""

import asyncio
import os
import statistics
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from _ranks import COMMAND_TIMEOUT_S, NUM_RANKS
from _weights_delta import LR, save_model, trainer
from weights import READY_S, server, settle

NUM_ROUNDS = 5
NUM_WARM = 2
KINDS = ("gloo", "files")


async def measure(tell: Any, url: str, root: Path) -> dict[str, Any]:
    """All rounds."""
    from prime_hpc.client.inference import InferenceClient
    from prime_hpc.store.manifest import read_manifest
    from prime_hpc.store.run_paths import RunPaths
    from prime_hpc.store.weights import holds_weights

    rows: dict[str, dict[str, list[float]]] = {kind: {} for kind in KINDS}
    tell("begin", root, LR, KINDS)
    async with InferenceClient(url, timeout_s=COMMAND_TIMEOUT_S) as client:
        await client.wait_ready(READY_S)
        for version in range(1, NUM_WARM + NUM_ROUNDS + 1):
            await asyncio.to_thread(tell, "step")
            for kind in KINDS if version % 2 else reversed(KINDS):
                await asyncio.to_thread(settle, root.parent)
                publish_s = await asyncio.to_thread(tell, "publish", kind, version)
                folder = RunPaths(root / kind).weights_step(version)
                began = time.perf_counter()
                answer = await client.update_weights(folder, version)
                load_s = time.perf_counter() - began
                if version > NUM_WARM:
                    manifest = read_manifest(folder)
                    if holds_weights(manifest) == (kind == "gloo"):
                        raise RuntimeError(f"{folder} is not of the form that is measured")
                    found = {"publish": publish_s, "load": load_s, "both": publish_s + load_s}
                    found |= {"pause": answer["seconds"]["paused"], "file_bytes": manifest.total_size}
                    for key, value in found.items():
                        rows[kind].setdefault(key, []).append(value)
    figures: dict[str, Any] = {
        f"{kind}_{key}": round(statistics.median(values), 4) for kind in KINDS for key, values in rows[kind].items()
    }
    for key in ("publish", "load", "both", "pause"):
        pairs = zip(rows["gloo"][key], rows["files"][key], strict=True)
        figures[f"{key}_to_files"] = round(statistics.median(ours / files for ours, files in pairs), 3)
    return figures


def run() -> dict[str, Any]:
    """The figures."""
    import torch
    from loguru import logger

    from prime_hpc.runtime.role_context import BUS
    from prime_hpc.store.messaging.bus import BusServer

    logger.disable("prime_hpc")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    torch.set_num_threads(1)  # processes are forked from this one
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        model = save_model(folder / "model")
        hub_secret = "of-this-benchmark"
        os.environ[BUS] = f"{hub_secret}@127.0.0.1:1"  # before the ranks are forked, and the hub has threads
        tell = stack.enter_context(trainer(folder / "model", folder))
        hub = BusServer(secret=hub_secret)
        stack.callback(hub.close)
        os.environ[BUS] = hub.address
        url, _ = stack.enter_context(server(folder / "model", folder / "server", "bfloat16", 1, "gloo"))
        figures = asyncio.run(measure(tell, url, folder / "runs"))
    del os.environ[BUS]
    return {
        "model": model,
        **figures,
        "num_rounds": NUM_ROUNDS,
        "num_ranks": NUM_RANKS,
        "cores": len(os.sched_getaffinity(0)),
    }


def render(result: dict[str, Any]) -> str:
    """The figures as lines."""
    lines = [
        f"{result['model']}, {result['files_file_bytes'] / 1e6:.0f} MB a version, {result['num_ranks']} ranks, one "
        f"engine, {result['cores']} cores, medians of {result['num_rounds']} rounds"
    ]
    for kind in KINDS:
        lines.append(
            f"{kind}: published {result[f'{kind}_publish']:.3f} s + loaded {result[f'{kind}_load']:.3f} s = "
            f"{result[f'{kind}_both']:.3f} s, paused {result[f'{kind}_pause']:.3f} s, "
            f"{result[f'{kind}_file_bytes'] / 1e6:.2f} MB in files"
        )
    lines.append(
        f"gloo to files: published {result['publish_to_files']:.2f}, loaded {result['load_to_files']:.2f}, both "
        f"{result['both_to_files']:.2f}, paused {result['pause_to_files']:.2f}"
    )
    return "\n".join(lines)
