"""`tools/bench ckpt`: what a checkpoint costs a step, synchronous and in the background, paired in one run.

One rank trains a small Qwen3 on CPU. Rounds alternate: a plain step; a step with a background save in flight from its
beginning; a synchronous save; `dd conv=fsync` of as many random bytes, read from memory (/dev/shm), into the same
directory. Every save is whole: sums, fsync, manifest, rename. The training leaves one core to the writer, as GPU nodes
do.

`blocking_share`: what a background save holds training up for, over what a synchronous one does. `step_ratio`: a step
with a save in flight over one without. `speed_to_dd`: bytes a second of a synchronous save over dd's. Each is the
median over rounds. The directory is a temporary one ($TMPDIR chooses the disk).
"""

import os
import statistics
import subprocess
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from _random_qwen3 import save_qwen3

NUM_ROUNDS = 7
TOKENS = 1024
VOCAB = 16_384
DD_TIMEOUT_S = 300.0


class Bench:
    """Policy, train step, a synchronous and an asynchronous checkpointer of the same state."""

    def __init__(self, model: Path, root: Path) -> None:
        from prime_hpc.config.sections.common import CkptConfig, ModelConfig
        from prime_hpc.config.sections.trainer import TrainerConfig
        from prime_hpc.store.run_paths import RunPaths
        from prime_hpc.trainer.batching.micro_batches import build_rank_batch
        from prime_hpc.trainer.checkpointing.checkpointer import Checkpointer
        from prime_hpc.trainer.model.load_policy import load_policy
        from prime_hpc.trainer.objectives import rl_loss
        from prime_hpc.trainer.optim import build_optimizer
        from prime_hpc.trainer.parallel import build_parallel
        from prime_hpc.trainer.train_step import TrainStep

        config = TrainerConfig.model_validate({"optim": {"lr": 1e-5}})
        device = torch.device("cpu")
        policy = load_policy(
            ModelConfig(name=str(model), dtype="float32"),
            model,
            build_parallel(config.parallel_dims, device),
            device,
            reshard_after_forward=True,
            chunk_tokens=2048,
        )
        optimizer = build_optimizer(policy, config.optim)
        self.train_step = TrainStep(
            policy,
            optimizer,
            config,
            max_steps=10_000,
            normalize="token",
            device=device,
            peak_flops=1.0,
        )
        rng = np.random.default_rng(0)
        ids = [rng.integers(0, VOCAB, TOKENS, dtype=np.int32)]
        self.batch = build_rank_batch([[0]], ids, [np.ones(TOKENS, bool)], np.ones(1, np.float32))
        self.objective = partial(rl_loss, config.loss)
        self.paths = RunPaths(root)
        make = partial(Checkpointer, policy, optimizer, self.paths, incarnation=0, meta={})
        self.sync = make(config=CkptConfig(keep_last=1))
        self.background = make(config=CkptConfig(keep_last=1, save_async=True))
        self.count = 0

    def step(self) -> float:
        """One train step; seconds."""
        self.count += 1
        began = time.perf_counter()
        self.train_step.run(self.count, self.batch, self.objective)
        return time.perf_counter() - began

    def save(self, checkpointer: Any) -> None:
        """Save the state after the last step."""
        checkpointer.save(self.count, progress={}, batch_dir=None)


def write_with_dd(size: int, folder: Path, source: Path) -> float:
    """Bytes a second of dd with fsync."""
    file = folder / "dd"
    blocks = max(1, size >> 20)
    if not source.exists():
        source.write_bytes(np.random.default_rng(0).bytes(blocks << 20))
    command = ["dd", f"if={source}", f"of={file}", "bs=1M", f"count={blocks}", "conv=fsync"]
    began = time.perf_counter()
    subprocess.run(command, check=True, capture_output=True, timeout=DD_TIMEOUT_S)
    seconds = time.perf_counter() - began
    file.unlink()
    return (blocks << 20) / seconds


def measure(bench: Bench, folder: Path, source: Path) -> dict[str, list[float]]:
    """All rounds."""
    rows: dict[str, list[float]] = {
        key: [] for key in ("plain", "in_flight", "stall", "write", "sync", "speed", "dd", "covered")
    }
    bench.step()
    bench.background.prepare()
    for checkpointer in (bench.sync, bench.background):  # plans, first pages
        bench.step()
        bench.save(checkpointer)
        checkpointer.finish()
    for _ in range(NUM_ROUNDS):
        rows["plain"].append(bench.step())
        began = time.perf_counter()
        bench.save(bench.background)
        bench.step()
        rows["in_flight"].append(time.perf_counter() - began)  # with what the save itself blocks
        bench.background.finish()
        figures = bench.background.take_figures()
        assert figures is not None  # it has just finished
        rows["stall"].append(figures.stall_s)
        rows["write"].append(figures.write_s)
        rows["covered"].append(min(1.0, figures.write_s / rows["in_flight"][-1]))
        bench.step()
        bench.save(bench.sync)
        figures = bench.sync.take_figures()
        assert figures is not None
        rows["sync"].append(figures.stall_s)
        rows["speed"].append(figures.size / figures.write_s)
        bench.step()  # both writers come after a step: a virtual machine gives freed memory back meanwhile
        rows["dd"].append(write_with_dd(figures.size, folder, source))
        rows.setdefault("bytes", [figures.size])
    return rows


def run() -> dict[str, Any]:
    """The figures."""
    from loguru import logger

    logger.disable("prime_hpc")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    cores = len(os.sched_getaffinity(0))
    torch.set_num_threads(max(1, cores - 1))
    with tempfile.TemporaryDirectory() as name, tempfile.TemporaryDirectory(dir="/dev/shm") as memory:
        folder = Path(name)
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        try:
            # about 40M parameters, few and large as those of real models
            num_parameters = save_qwen3(
                folder / "model", vocab=VOCAB, hidden=1024, layers=2, head_dim=64, context=TOKENS
            )
            rows = measure(Bench(folder / "model", folder / "run"), folder, Path(memory) / "source")
        finally:
            dist.destroy_process_group()
    median = {key: statistics.median(values) for key, values in rows.items()}

    def ratio(over: str, under: str) -> float:
        return statistics.median(a / b for a, b in zip(rows[over], rows[under], strict=True))

    return {
        "blocking_share": ratio("stall", "sync"),
        "step_ratio": ratio("in_flight", "plain"),
        "speed_to_dd": ratio("speed", "dd"),
        "num_parameters": num_parameters,
        "bytes": int(median["bytes"]),
        "step_s": median["plain"],
        "step_s_in_flight": median["in_flight"],
        "share_of_step_in_flight": median["covered"],
        "stall_s": median["stall"],
        "background_write_s": median["write"],
        "sync_s": median["sync"],
        "gb_per_s": median["speed"] / 1e9,
        "dd_gb_per_s": median["dd"] / 1e9,
        "num_rounds": NUM_ROUNDS,
        "threads": max(1, cores - 1),
        "cores": cores,
    }


def render(result: dict[str, Any]) -> str:
    """The figures as lines."""
    return "\n".join(
        [
            f"{result['num_parameters'] / 1e6:.0f}M parameters, {result['bytes'] / 1e6:.0f} MB a checkpoint, "
            f"{result['threads']} of {result['cores']} cores train, {result['num_rounds']} rounds",
            f"synchronous save  {result['sync_s']:.3f} s, {result['gb_per_s']:.2f} GB/s; dd with fsync "
            f"{result['dd_gb_per_s']:.2f} GB/s: {result['speed_to_dd']:.2f} of dd",
            f"background save   held training up for {result['stall_s'] * 1e3:.1f} ms: "
            f"{result['blocking_share']:.1%} of a synchronous one; whole after {result['background_write_s']:.3f} s",
            f"step              {result['step_s']:.3f} s plain, {result['step_s_in_flight']:.3f} s with a save in "
            f"flight for {result['share_of_step_in_flight']:.0%} of it: ratio {result['step_ratio']:.3f}",
        ]
    )
