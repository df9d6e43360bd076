"""`tools/bench pack`: how fast and how densely samples become per-rank micro-batches.

2,048 samples for 64 ranks at 8,192 tokens a micro-batch. Every rank must get the same number M of micro-batches, so
64 * M * 8,192 tokens of room come in steps of 524,288: a mean of 2,560 tokens fills M = 10 to the brim, a mean of
exactly 2,600 needs M = 11 on every rank, where no packer can fill more than 92.3 %. The headline (`seconds`, `fill`)
is the log-normal workload of mean 2,550; the others are there to show the bound (`fill_at_most`) and that it is met.

`busy` is the figure that training time follows: tokens over what the ranks could have processed while the fullest
rank of each micro-step was busy (packed batches carry no padding, so a half-filled budget costs nothing by itself).

The second table has groups whose samples begin with the same prompt, which a micro-batch computes once: the tokens of
the fullest ranks with and without keeping groups together, and what one micro-batch for everything would compute, all
as shares of the batch's tokens.
"""

import time
from typing import Any

import numpy as np
import numpy.typing as npt

from prime_hpc.store.batch.packing import fewest_micro_batches, fill, pack
from prime_hpc.store.batch.shared_prefixes import Sharing

NUM_SAMPLES = 2048
NUM_RANKS = 64
BUDGET = 8192
_REPEATS = 3


def lognormal_lengths(mean: int, num_samples: int, seed: int) -> npt.NDArray[np.int64]:
    """[num_samples] log-normal lengths (sigma 0.5), capped at the budget, whose mean is `mean` to within a token."""
    shape = np.exp(0.5 * np.random.default_rng(seed).standard_normal(num_samples))
    lengths = shape * mean / shape.mean()
    for _ in range(20):  # the cap takes from the mean, the scale gives back
        lengths = np.minimum(lengths * mean / lengths.mean(), BUDGET)
    return np.clip(lengths.round().astype(np.int64), 1, BUDGET)


def measure(name: str, lengths: npt.NDArray[np.int64], num_ranks: int) -> dict[str, Any]:
    """Pack one workload `_REPEATS` times: the slowest run's seconds, the packing's figures."""
    seconds = []
    for _ in range(_REPEATS):
        start = time.perf_counter()
        assignment = pack(lengths, num_ranks, BUDGET)
        seconds.append(time.perf_counter() - start)
    tokens = np.array([[lengths[micro].sum() for micro in rank] for rank in assignment])
    num_micro = tokens.shape[1]
    least = fewest_micro_batches(lengths, num_ranks, BUDGET)
    return {
        "workload": name,
        "num_samples": len(lengths),
        "num_ranks": num_ranks,
        "mean_tokens": float(lengths.mean()),
        "seconds": max(seconds),
        "fill": fill(assignment, lengths, BUDGET),
        "fill_at_most": float(lengths.sum()) / (num_ranks * least * BUDGET),
        "num_micro_batches": num_micro,
        "busy": float(lengths.sum()) / (num_ranks * float(tokens.max(axis=0).sum())),
        "rank_max_over_mean": float(tokens.sum(axis=1).max() / tokens.sum(axis=1).mean()),
    }


def measure_groups(
    name: str, num_groups: int, rollouts: int, prompt: int, answer: int, num_ranks: int
) -> dict[str, Any]:
    """Pack groups with prompts and answers of about these lengths, with and without keeping them together."""
    rng = np.random.default_rng(0)
    prompts = np.clip(rng.normal(prompt, prompt / 8, num_groups).round().astype(np.int64), 1, BUDGET // 2)
    groups = np.repeat(np.arange(num_groups), rollouts)
    lengths = prompts[groups] + np.minimum(lognormal_lengths(answer, len(groups), 1), BUDGET // 2)
    sharing = Sharing(groups, prompts[groups])
    seconds = []
    for _ in range(_REPEATS):
        start = time.perf_counter()
        kept = pack(lengths, num_ranks, BUDGET, sharing)
        seconds.append(time.perf_counter() - start)
    return {
        "workload": name,
        "num_samples": len(lengths),
        "num_ranks": num_ranks,
        "seconds": max(seconds),
        "scattered": _computed(pack(lengths, num_ranks, BUDGET), lengths, sharing),
        "kept": _computed(kept, lengths, sharing),
        "least": 1 - sharing.num_tokens / float(lengths.sum()),
    }


def _computed(assignment: list[list[npt.NDArray[np.int64]]], lengths: npt.NDArray[np.int64], sharing: Sharing) -> float:
    """Tokens computed by the fullest rank of each micro-step, times the ranks, as a share of all tokens."""
    num_micro = len(assignment[0])
    bins = np.empty(len(lengths), np.int64)
    for r, rank in enumerate(assignment):
        for m, micro in enumerate(rank):
            bins[micro] = r * num_micro + m
    table = sharing.computed(lengths, bins, len(assignment) * num_micro).reshape(-1, num_micro)
    return float(table.max(axis=0).sum()) * len(assignment) / float(lengths.sum())


def run() -> dict[str, Any]:
    """All workloads; `seconds` and `fill` are the headline's."""
    groups = [
        measure_groups("prompts 1,000, answers 250", 64, 8, 1000, 250, 8),
        measure_groups("prompts 500, answers 1,500", 128, 16, 500, 1500, 64),
        measure_groups("prompts 100, answers 40", 64, 8, 100, 40, 2),
    ]
    rows = [
        measure("log-normal, mean 2,550", lognormal_lengths(2550, NUM_SAMPLES, 0), NUM_RANKS),
        measure("log-normal, mean 2,600", lognormal_lengths(2600, NUM_SAMPLES, 0), NUM_RANKS),
        measure("constant 2,600", np.full(NUM_SAMPLES, 2600), NUM_RANKS),
        measure("log-normal, mean 2,600, one rank", lognormal_lengths(2600, NUM_SAMPLES, 0), 1),
    ]
    return {
        "seconds": rows[0]["seconds"],
        "fill": rows[0]["fill"],
        "micro_batch_tokens": BUDGET,
        "workloads": rows,
        "groups": groups,
    }


def render(result: dict[str, Any]) -> str:
    """The figures as a table."""
    lines = [
        f"{NUM_SAMPLES:,} samples, {result['micro_batch_tokens']:,} tokens a micro-batch",
        f"{'workload':<34}{'ranks':>6}{'M':>5}{'fill':>8}{'at most':>9}{'busy':>8}{'rank max/mean':>15}{'seconds':>9}",
    ]
    for row in result["workloads"]:
        lines.append(
            f"{row['workload']:<34}{row['num_ranks']:>6}{row['num_micro_batches']:>5}{row['fill']:>8.1%}"
            f"{row['fill_at_most']:>9.1%}{row['busy']:>8.1%}{row['rank_max_over_mean']:>15.4f}{row['seconds']:>9.3f}"
        )
    lines.append(f"\n{'groups':<34}{'ranks':>6}{'scattered':>11}{'kept':>7}{'least':>7}{'seconds':>9}")
    for row in result["groups"]:
        lines.append(
            f"{row['workload']:<34}{row['num_ranks']:>6}{row['scattered']:>11.2f}{row['kept']:>7.2f}"
            f"{row['least']:>7.2f}{row['seconds']:>9.3f}"
        )
    return "\n".join(lines)
