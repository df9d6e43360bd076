"""`tools/bench loss`: the objective against a loop over sequences, and the LM head in chunks against whole logits.

Objective: forward and backward over 65,536 targets in 1,024 ragged sequences. The loop is what a list of sequences
leads to: split the flat tensors, and for each sequence in Python compute its ratio, mask and means, then add up. Both
give the same loss, gradient and statistics; they alternate in one process, and the figures are medians over pairs.
`num_ops` counts what torch is asked to do for 16 and for 1,024 sequences: the same number means no loop over them.

LM head: log-probabilities and their gradients at a vocabulary of 151,936 (Qwen3's). Each way runs in a child process
of its own, whose high-water mark of memory above what it held before is compared with `[targets, vocab]` float32.
"""

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

TOP = Path(__file__).resolve().parents[2]
NUM_TOKENS = 65_536
NUM_SEQUENCES = 1024
NUM_PAIRS = 7
OBJECTIVES = ("aipo", "grpo", "gspo")
VOCAB = 151_936
HIDDEN = 64
NUM_TARGETS = 8192
NUM_TARGETS_WHOLE = 2048
"""Whole logits of all targets would not fit beside their softmax and gradient on a small machine."""


# ------------------------------------------------------------------------------------------------ objective


def make_batch(num_sequences: int) -> Any:
    """Log-probabilities, advantages and ragged lengths that sum to `NUM_TOKENS` targets."""
    from prime_hpc.trainer.batching.micro_batches import MicroBatch
    from prime_hpc.trainer.objectives import target_weights  # noqa: F401 - imported here, not inside what is timed

    rng = np.random.default_rng(0)
    cuts = np.sort(rng.choice(np.arange(1, NUM_TOKENS), num_sequences - 1, replace=False))
    lengths = np.diff([0, *cuts, NUM_TOKENS])
    behaviour = torch.from_numpy(rng.normal(-1.5, 0.8, NUM_TOKENS).clip(max=-1e-3).astype(np.float32))
    empty = torch.zeros(0)
    return MicroBatch(
        input_ids=empty,
        position_ids=empty,
        packing=None,  # type: ignore[arg-type]  # the objective does not look at it
        target_index=empty,
        targets=torch.zeros(NUM_TOKENS, dtype=torch.int64),
        sequence=torch.from_numpy(np.repeat(np.arange(num_sequences), lengths)),
        targets_of_sequence=torch.from_numpy(lengths.astype(np.int64)),
        temperatures=empty,
        behaviour_logprobs=behaviour,
        advantages=torch.from_numpy(np.repeat(rng.standard_normal(num_sequences), lengths).astype(np.float32)),
        num_tokens=NUM_TOKENS,
    )


def policy_logprobs(micro: Any) -> torch.Tensor:
    """log pi near log mu, a leaf."""
    noise = torch.from_numpy(np.random.default_rng(1).normal(0, 0.3, NUM_TOKENS).astype(np.float32))
    return (micro.behaviour_logprobs + noise).clamp(max=-1e-4).requires_grad_()


Result = tuple[torch.Tensor, dict[str, torch.Tensor]]


def flat(name: str, micro: Any, logprobs: torch.Tensor) -> Result:
    """The project's way: weights, objective, statistics, all over flat tensors."""
    from prime_hpc.config.sections.trainer import LossConfig
    from prime_hpc.trainer.objectives import normalization, rl_loss, target_weights

    config = LossConfig(type=name)
    counts = micro.targets_of_sequence
    weights = target_weights(micro.sequence, counts, normalization(config), NUM_TOKENS, len(counts))
    loss, stats = rl_loss(config, micro, logprobs, weights)
    loss.backward()
    return loss.detach(), {**stats.sums, **stats.maxima}


def one_sequence(name: str, logprobs: torch.Tensor, behaviour: torch.Tensor, advantage: torch.Tensor) -> Result:
    """Loss (unnormalised: a sum over its tokens, or the sequence's own mean) and statistics of one sequence."""
    difference = logprobs - behaviour
    if name == "aipo":
        ratio = difference.detach().exp().clamp(max=8.0)
        clipped = difference.detach().exp() > 8.0
        loss = -(ratio * advantage * logprobs).sum()
    elif name == "grpo":
        ratio = difference.exp()
        surrogate = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
        clipped = ((advantage > 0) & (ratio > 1.2)) | ((advantage < 0) & (ratio < 0.8))
        loss = -surrogate.mean()
    else:
        ratio = difference.mean().exp().expand_as(logprobs)
        low, high = 1 - 3e-4, 1 + 4e-4
        loss = -torch.minimum(ratio * advantage, ratio.clamp(low, high) * advantage).mean()
        clipped = ((advantage > 0) & (ratio > high)) | ((advantage < 0) & (ratio < low))
    gap = difference.detach()
    rho = gap.exp()
    stats = {
        "logprob_diff": gap.abs().sum(),
        "ratio": rho.sum(),
        "kl": (rho - 1 - gap).sum(),
        "clipped": clipped.sum().float(),
        "logprob_diff_max": gap.abs().max(),
        "ratio_max": rho.max(),
    }
    return loss, stats


def looped(name: str, micro: Any, logprobs: torch.Tensor) -> Result:
    """The other way: split by sequence, loop, add up."""
    sizes = micro.targets_of_sequence.tolist()
    total: Any = 0.0
    collected: dict[str, list[torch.Tensor]] = {}
    parts = zip(
        logprobs.split(sizes), micro.behaviour_logprobs.split(sizes), micro.advantages.split(sizes), strict=True
    )
    for own, behaviour, advantage in parts:
        loss, stats = one_sequence(name, own, behaviour, advantage)
        total = total + loss
        for key, value in stats.items():
            collected.setdefault(key, []).append(value)
    total = total / (NUM_TOKENS if name == "aipo" else len(sizes))
    total.backward()
    stacked = {key: torch.stack(values) for key, values in collected.items()}
    return total.detach(), {k: v.max() if k.endswith("_max") else v.sum() for k, v in stacked.items()}


class _Counter(TorchDispatchMode):
    """Counts the operators that torch runs."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def count_ops(name: str, num_sequences: int) -> int:
    """Operators of one forward and backward pass over so many sequences."""
    micro = make_batch(num_sequences)
    with _Counter() as counter:
        flat(name, micro, policy_logprobs(micro))
    return counter.count


def compare(name: str) -> dict[str, Any]:
    """Time both ways on one batch and check that they agree."""
    micro = make_batch(NUM_SEQUENCES)
    ways: dict[str, Callable[..., Result]] = {"loop": looped, "flat": flat}
    seconds: dict[str, list[float]] = {key: [] for key in ways}
    results: dict[str, Any] = {}
    for i in range(NUM_PAIRS + 1):
        for key in ways if i % 2 else reversed(ways):
            logprobs = policy_logprobs(micro)
            start = time.perf_counter()
            loss, stats = ways[key](name, micro, logprobs)
            elapsed = time.perf_counter() - start
            if i:  # the first pair warms up
                seconds[key].append(elapsed)
            results[key] = (loss, logprobs.grad, stats)
    (loss_a, grad_a, stats_a), (loss_b, grad_b, stats_b) = results["loop"], results["flat"]
    return {
        "ratio": statistics.median(a / b for a, b in zip(seconds["loop"], seconds["flat"], strict=True)),
        "seconds": statistics.median(seconds["flat"]),
        "loop_seconds": statistics.median(seconds["loop"]),
        "num_ops": count_ops(name, NUM_SEQUENCES),
        "num_ops_of_16_sequences": count_ops(name, 16),
        "loss_difference": abs(float(loss_a - loss_b)),
        "gradient_error": float((grad_a - grad_b).abs().max() / grad_a.abs().max()),
        "statistics_error": max(
            float(abs(stats_a[k] - stats_b[k]) / stats_a[k].abs().clamp(min=1e-12)) for k in stats_a if k in stats_b
        ),
    }


# ------------------------------------------------------------------------------------------------ LM head


def head_inputs(num_targets: int) -> tuple[torch.Tensor, ...]:
    """Hidden states, head, targets, temperatures, the gradient that reaches the log-probabilities."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(num_targets, HIDDEN, generator=generator).requires_grad_()
    weight = (torch.randn(VOCAB, HIDDEN, generator=generator) * 0.05).requires_grad_()
    targets = torch.randint(0, VOCAB, (num_targets,), generator=generator)
    return hidden, weight, targets, torch.ones(num_targets), torch.randn(num_targets, generator=generator)


def whole_logits(hidden: Any, weight: Any, targets: Any, temperatures: Any) -> torch.Tensor:
    """Log-probabilities through logits of every target at once, as plain autograd code writes it."""
    logits = torch.nn.functional.linear(hidden, weight) / temperatures[:, None]
    return logits.log_softmax(-1).gather(1, targets[:, None])[:, 0]


def chunked(hidden: Any, weight: Any, targets: Any, temperatures: Any) -> torch.Tensor:
    """The project's, with the trainer's default chunk, with the entropy."""
    from prime_hpc.config.sections.trainer import TrainerConfig
    from prime_hpc.trainer.ops.logprobs import token_logprobs

    chunk = TrainerConfig().logits_chunk_tokens
    return token_logprobs(hidden, weight, targets, temperatures, chunk_tokens=chunk, with_entropy=True)[0]


def resident_bytes(key: str) -> int:
    """`VmRSS` (now) or `VmHWM` (its high-water mark) of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    (line,) = [line for line in lines if line.startswith(key + ":")]
    return int(line.split()[1]) * 1024


def head_child(way: str, num_targets: int) -> None:
    """In the child process: one forward and backward pass; prints the figures."""
    function = {"whole": whole_logits, "chunked": chunked}[way]
    small = head_inputs(4)
    (function(*small[:4]) * small[4]).sum().backward()  # imports and thread pools are not the pass's memory
    hidden, weight, targets, temperatures, grad = head_inputs(num_targets)
    before = resident_bytes("VmRSS")
    start = time.perf_counter()
    logprobs = function(hidden, weight, targets, temperatures)
    (logprobs * grad).sum().backward()
    elapsed = time.perf_counter() - start
    assert hidden.grad is not None and weight.grad is not None
    print(
        json.dumps(
            {
                "seconds": elapsed,
                "bytes": resident_bytes("VmHWM") - before,
                "logprobs": logprobs[:64].tolist(),
                "hidden_grad": hidden.grad[:64, 0].tolist(),
                "weight_grad_norm": float(weight.grad.double().norm()),
                "weight_grad": weight.grad[:, 0][targets[:64]].tolist(),
            }
        )
    )


def run_head(way: str, num_targets: int) -> dict[str, Any]:
    """`head_child` in a process of its own."""
    argv = [sys.executable, str(Path(__file__).resolve()), way, str(num_targets)]
    environment = {**os.environ, "PYTHONPATH": str(TOP)}
    done = subprocess.run(argv, capture_output=True, text=True, env=environment, timeout=900, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(argv)} failed:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def compare_heads() -> dict[str, Any]:
    """Peak memory of both ways as a share of the logits', and how far their results differ."""
    whole, same = run_head("whole", NUM_TARGETS_WHOLE), run_head("chunked", NUM_TARGETS_WHOLE)
    large = run_head("chunked", NUM_TARGETS)

    def share(row: dict[str, Any], num_targets: int) -> float:
        return row["bytes"] / (num_targets * VOCAB * 4)

    def error(key: str) -> float:
        a, b = np.array(whole[key]), np.array(same[key])
        return float(np.abs(a - b).max() / np.abs(a).max())

    return {
        "peak_share_of_logits": share(large, NUM_TARGETS),
        "peak_gib": large["bytes"] / 2**30,
        "logits_gib": NUM_TARGETS * VOCAB * 4 / 2**30,
        "whole_peak_share_of_logits": share(whole, NUM_TARGETS_WHOLE),
        "whole_seconds": whole["seconds"],
        "chunked_seconds": same["seconds"],
        "largest_error": max(map(error, ("logprobs", "hidden_grad", "weight_grad", "weight_grad_norm"))),
    }


def run() -> dict[str, Any]:
    """Both parts; `ratio` is the smallest of the objectives'."""
    objectives = {name: compare(name) for name in OBJECTIVES}
    return {
        "ratio": min(row["ratio"] for row in objectives.values()),
        "num_tokens": NUM_TOKENS,
        "num_sequences": NUM_SEQUENCES,
        "objectives": objectives,
        "head": compare_heads(),
    }


def render(result: dict[str, Any]) -> str:
    """The figures as a table."""
    lines = [
        f"objective, forward and backward: {result['num_tokens']:,} targets in {result['num_sequences']:,} sequences",
        f"  {'':<6}{'loop':>11}{'flat':>11}{'ratio':>8}{'ops (16 seq.)':>16}{'gradient error':>16}",
    ]
    for name, row in result["objectives"].items():
        ops = f"{row['num_ops']} ({row['num_ops_of_16_sequences']})"
        lines.append(
            f"  {name:<6}{row['loop_seconds'] * 1e3:>8.1f} ms{row['seconds'] * 1e3:>8.1f} ms{row['ratio']:>8.1f}"
            f"{ops:>16}{row['gradient_error']:>16.1e}"
        )
    head = result["head"]
    lines += [
        f"LM head, vocabulary {VOCAB:,}: peak {head['peak_gib']:.2f} GiB for {NUM_TARGETS:,} targets, "
        f"{head['peak_share_of_logits']:.3f} of their logits' {head['logits_gib']:.2f} GiB "
        f"(whole logits: {head['whole_peak_share_of_logits']:.2f})",
        f"  {NUM_TARGETS_WHOLE:,}: {head['chunked_seconds']:.1f} s chunked, {head['whole_seconds']:.1f} s whole; "
        f"largest relative difference {head['largest_error']:.1e}",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    head_child(sys.argv[1], int(sys.argv[2]))
