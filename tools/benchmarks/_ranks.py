"""Trainer ranks that a benchmark tells what to do, as processes of their own. For both forms of `weights`."""

import multiprocessing
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from prime_hpc.trainer.model.policy import Policy

NUM_RANKS = 2
COMMAND_TIMEOUT_S = 300.0
Tell = Callable[..., list[Any]]
"""Sends its arguments to all ranks; returns their answers, by rank."""


def load_rank(rank: int, model: Path, rendezvous: Path, dtype: str) -> "Policy":
    """Join the process group of all ranks, and load this rank's shard of a model."""
    import torch
    import torch.distributed as dist

    from prime_hpc.config.sections.common import ModelConfig
    from prime_hpc.config.sections.parallel import ParallelDims
    from prime_hpc.trainer.model.load_policy import load_policy
    from prime_hpc.trainer.parallel import build_parallel

    os.environ |= {"LOCAL_WORLD_SIZE": str(NUM_RANKS), "LOCAL_RANK": str(rank)}
    store = dist.FileStore(str(rendezvous), NUM_RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=NUM_RANKS)
    parallel = build_parallel(ParallelDims(dp_shard=NUM_RANKS), "cpu")
    config = ModelConfig(name=str(model), dtype=dtype)
    return load_policy(config, model, parallel, torch.device("cpu"), reshard_after_forward=True, chunk_tokens=2048)


@contextmanager
def started_ranks(target: Callable[..., None], *arguments: Any, num_ranks: int = NUM_RANKS) -> Iterator[Tell]:
    """Run `target(rank, *arguments, pipe)` in a process for each rank.

    It answers each tuple of words that it receives, and ends upon None.
    """
    context = multiprocessing.get_context("fork")  # a benchmark has no importable name; nothing computes here
    pipes, ranks = [], []
    for rank in range(num_ranks):
        ours, theirs = context.Pipe()
        process = context.Process(target=target, args=(rank, *arguments, theirs), daemon=True)
        process.start()
        pipes.append(ours)
        ranks.append(process)

    def tell(*words: Any) -> list[Any]:
        for pipe in pipes:
            pipe.send(words)
        answers = []
        for pipe in pipes:
            if not pipe.poll(COMMAND_TIMEOUT_S):
                raise RuntimeError(f"{words} was not done within {COMMAND_TIMEOUT_S:.0f} s")
            answers.append(pipe.recv())
        return answers

    try:
        yield tell
        for pipe in pipes:
            pipe.send(None)
        for process in ranks:
            process.join(30)
    finally:
        for process in ranks:
            if process.is_alive():
                process.kill()
