"""`tools/bench wire`: what a token costs between orchestrator and trainer, in bytes and in time.

8.6 million tokens for 32 data-parallel ranks (log-normal sequences of about 2,300 tokens, 80 % of them trained), in one
process, one rank after another:

- `encode_s`: arrays to the bytes of 32 files, with their sums;
- `decode_s`: those bytes to checked arrays (dtypes, offsets, finite values), with their sums;
- `write_s`, `read_s`: the same through the disk, as `write_batch` and every rank's `read_rank_batches` do it, fsyncs,
  manifest and rename included; `plain_write_s` is the same bytes with plain writes and fsyncs, for comparison.

Each is the median of five rounds on the clock; `..._cpu_s` is this process's own time in the same rounds, which other
programs on the machine do not lengthen. A token carries its id, loss mask, log-probability, policy version and
advantage; positions count from 0 in each sequence and follow from its offsets, which `bytes_per_token` includes.
"""

import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from _ends import make_rank_of

from prime_hpc.store.batch.rank_batch import RankBatch, decode_rank, encode_rank
from prime_hpc.store.batch.rank_files import read_rank_batch, write_batch
from prime_hpc.store.run_paths import RunPaths

NUM_TOKENS = 8_600_000
NUM_RANKS = 32
ROUNDS = 5


def _lengths(num_tokens: int, rng: np.random.Generator) -> list[int]:
    """Log-normal lengths that add up to `num_tokens`."""
    lengths: list[int] = []
    left = num_tokens
    while left:
        lengths.append(min(left, max(1, int(rng.lognormal(7.6, 0.5)))))
        left -= lengths[-1]
    return lengths


def _encode(ranks: list[RankBatch]) -> list[tuple[list[Any], str]]:
    """The buffers of each file, as `write_batch` hands them to the file system, and their sum."""
    encoded = []
    for rank in ranks:
        digest, buffers = xxhash.xxh3_64(), []
        for buffer in encode_rank(rank):
            buffers.append(memoryview(buffer).cast("B"))
            digest.update(buffers[-1])
        encoded.append((buffers, digest.hexdigest()))
    return encoded


def _decode(encoded: list[tuple[bytes, str]]) -> list[RankBatch]:
    batches = []
    for content, expected in encoded:
        if xxhash.xxh3_64_hexdigest(content) != expected:
            raise ValueError("the bytes changed on their way")
        batches.append(decode_rank(np.frombuffer(content, np.uint8), Path("memory")))
    return batches


def _write_plainly(folder: Path, encoded: list[tuple[bytes, str]]) -> None:
    folder.mkdir()
    for number, (content, _) in enumerate(encoded):
        with (folder / str(number)).open("wb", buffering=0) as file:
            file.write(content)
            os.fsync(file.fileno())


def run() -> dict[str, Any]:
    """Encode, decode, write and read in turns.

    Raises:
        ValueError: other arrays came back than went in.
    """
    rng = np.random.default_rng(0)
    share = [NUM_TOKENS // NUM_RANKS + (rank < NUM_TOKENS % NUM_RANKS) for rank in range(NUM_RANKS)]
    ranks = [make_rank_of(_lengths(count, rng), seed) for seed, count in enumerate(share)]
    rows: dict[str, list[float]] = {name: [] for name in ("encode", "decode", "write", "read", "plain_write")}
    with tempfile.TemporaryDirectory(prefix="bench-wire-") as scratch:
        for step in range(1, ROUNDS + 1):
            contents = _round(ranks, RunPaths(Path(scratch)), step, rows)
    num_bytes = sum(len(content) for content, _ in contents)
    return {
        "bytes_per_token": num_bytes / NUM_TOKENS,
        **{f"{name}_s": statistics.median(seconds) for name, seconds in rows.items()},
        "num_tokens": NUM_TOKENS,
        "num_ranks": NUM_RANKS,
    }


def _round(ranks: list[RankBatch], paths: RunPaths, step: int, rows: dict[str, list[float]]) -> list[tuple[bytes, str]]:
    """One round; returns the content and sum of each file."""
    directory = paths.rollouts_step(step)
    moments, cpu = [time.perf_counter()], [time.process_time()]

    def lap() -> None:
        moments.append(time.perf_counter())
        cpu.append(time.process_time())

    buffers = _encode(ranks)
    lap()
    contents = [(b"".join(parts), digest) for parts, digest in buffers]
    lap()
    decoded = _decode(contents)
    lap()
    if step == 1:
        _check(ranks, decoded)
    del decoded
    lap()
    write_batch(paths, step, ranks, state={"step": step})
    lap()
    for rank in range(NUM_RANKS):
        read_rank_batch(directory, rank)
    lap()
    _write_plainly(paths.root / f"plain_{step}", contents)
    lap()
    names = ("encode", "", "decode", "", "write", "read", "plain_write")
    for number, name in enumerate(names):
        if name:
            rows[name].append(moments[number + 1] - moments[number])
            rows.setdefault(f"{name}_cpu", []).append(cpu[number + 1] - cpu[number])
    return contents


def _check(ranks: list[RankBatch], decoded: list[RankBatch]) -> None:
    for one, other in zip(ranks, decoded, strict=True):
        for name in vars(one):
            if not np.array_equal(getattr(one, name), getattr(other, name)):
                raise ValueError(f"{name} came back changed")


def render(result: dict[str, Any]) -> str:
    """The figures in words."""
    both = result["encode_s"] + result["decode_s"]
    return (
        f"{result['num_tokens']:,} tokens for {result['num_ranks']} ranks: {result['bytes_per_token']:.2f} bytes each\n"
        f"encode {result['encode_s']:.3f} s, decode {result['decode_s']:.3f} s, together {both:.3f} s "
        f"(of processor time: {result['encode_cpu_s'] + result['decode_cpu_s']:.3f} s)\n"
        f"through the disk: write {result['write_s']:.3f} s ({result['plain_write_s']:.3f} s for plain writes with "
        f"fsync), read {result['read_s']:.3f} s"
    )
