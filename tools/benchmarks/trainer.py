"""`tools/bench trainer`: the trainer's step against a bare PyTorch loop and against TRL's trainers, paired in one run.

Bare: the Hugging Face model with its own attention (packed rows masked from `position_ids`, as transformers does it),
its own loss, backward, AdamW; tensors prepared beforehand, nothing of this project. Ours: the whole train step from
the store's arrays: FSDP2, packed attention, AIPO with its statistics and entropy, gradient norm and clipping, metrics.
Both in one process, float32, steps alternating; `ratio_to_bare` is the median over pairs of bare / ours seconds, the
lower of the two workloads: ragged samples packed, and rows of a single sequence, where packing gains nothing.

TRL (extra `bench`): SFTTrainer and GRPOTrainer on the same model and ragged samples, as many a step. Counted of TRL:
its collator, forward, backward, clipping, optimizer and scheduler, of GRPO also padding, advantages and the loss; not
counted: tokenising, generation, decoding, rewards, logging (off), our steps. Counted of ours: the whole train step from
the store's arrays. GRPO's samples come in groups of 8 with one prompt, as they do in life; for SFT every sample is its
own. Variants of TRL: SFT padded in micro-batches of 8 (its default) and packed; GRPO with the whole batch at once and
in micro-batches of 8. `ratio_to_trl_*` is against the faster variant of each. See `_trl_train.py` for its settings.

Beside each ratio stands the same of the process's CPU seconds, which other load on the machine disturbs less.
"""

import contextlib
import itertools
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from _random_qwen3 import save_qwen3
from _trl_train import Alternation, Samples, now, train_grpo, train_sft

NUM_PAIRS = 5
TRL_PAIRS = 3
ROWS = 4
ROW_TOKENS = 1024
VOCAB = 512
LEARNING_RATE = 1e-4
NUM_SAMPLES = 32
GROUP_SIZE = 8
PROMPT_TOKENS = 24
TRL_SFT = {
    # name -> what SFTTrainer makes a step of
    "padding": {"per_device_train_batch_size": 8, "gradient_accumulation_steps": NUM_SAMPLES // 8},
    "packing": {"per_device_train_batch_size": 1, "packing": True, "max_length": ROW_TOKENS},
}
TRL_GRPO = {
    "whole batch": {"per_device_train_batch_size": NUM_SAMPLES},
    "micro-batches of 8": {"per_device_train_batch_size": 8, "gradient_accumulation_steps": NUM_SAMPLES // 8},
}


def ragged_lengths(rng: np.random.Generator) -> list[list[int]]:
    """Rows of log-normal samples (median about 90 tokens), each filled to its last token."""
    rows = []
    for _ in range(ROWS):
        row: list[int] = []
        while (left := ROW_TOKENS - sum(row)) > 0:
            row.append(min(left, int(np.clip(rng.lognormal(4.5, 0.7), 8, ROW_TOKENS))))
        rows.append(row)
    return rows


def build_batch(rows: list[list[int]], rng: np.random.Generator) -> Any:
    """A rank batch of random tokens, all trained."""
    from prime_hpc.trainer.batching.micro_batches import build_rank_batch

    lengths = [n for row in rows for n in row]
    ids = [rng.integers(0, VOCAB, n, dtype=np.int32) for n in lengths]
    edges = np.cumsum([0, *(len(row) for row in rows)])
    micro = [list(range(a, b)) for a, b in itertools.pairwise(edges)]
    masks = [np.ones(n, bool) for n in lengths]
    return build_rank_batch(micro, ids, masks, rng.standard_normal(len(lengths)).astype(np.float32))


def bare_step(folder: Path, batch: Any) -> Callable[[], float]:
    """The bare loop's step; returns its mean loss."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)
    rows = []
    for m in range(batch.num_micro_batches):
        ids = torch.from_numpy(batch.token_ids[batch.tokens_of(m)].astype(np.int64))[None]
        sequences = batch.sequences_of(m)
        lengths = np.diff(batch.seq_offsets[sequences.start : sequences.stop + 1])
        positions = torch.from_numpy(np.concatenate([np.arange(n) for n in lengths]))[None]
        labels = ids.masked_fill(positions == 0, -100)
        rows.append((ids, positions, labels))
    num_targets = sum(int((labels != -100).sum()) for _, _, labels in rows)

    def step() -> float:
        total = 0.0
        for ids, positions, labels in rows:
            out = model(input_ids=ids, position_ids=positions, labels=labels, use_cache=False)
            loss = out.loss * (int((labels != -100).sum()) / num_targets)
            loss.backward()
            total += loss.item()
        optimizer.step()
        optimizer.zero_grad()
        return total

    return step


def our_step(folder: Path, batch: Any, kind: str = "rl") -> Callable[[], float]:
    """This project's train step of either kind; returns its mean negative log-likelihood."""
    from prime_hpc.config.sections.common import ModelConfig
    from prime_hpc.config.sections.trainer import TrainerConfig
    from prime_hpc.trainer.model.load_policy import load_policy
    from prime_hpc.trainer.objectives import LossStats, rl_loss, sft_loss
    from prime_hpc.trainer.optim import build_optimizer
    from prime_hpc.trainer.parallel import build_parallel
    from prime_hpc.trainer.train_step import TrainStep

    device = torch.device("cpu")
    config = TrainerConfig.model_validate({"optim": {"lr": LEARNING_RATE}})
    policy = load_policy(
        ModelConfig(name=str(folder), dtype="float32"),
        folder,
        build_parallel(config.parallel_dims, device),
        device,
        reshard_after_forward=config.reshard_after_forward,
        chunk_tokens=config.logits_chunk_tokens,
    )
    train_step = TrainStep(
        policy,
        build_optimizer(policy, config.optim),
        config,
        max_steps=1000,
        normalize="token",
        device=device,
        peak_flops=1.0,
        with_entropy=kind == "rl",
    )

    def objective(micro: Any, logprobs: torch.Tensor, weights: torch.Tensor) -> tuple[torch.Tensor, LossStats]:
        if kind == "sft":
            loss, stats = sft_loss(micro, logprobs, weights)
        else:
            loss, stats = rl_loss(config.loss, micro, logprobs, weights)
        stats.sums["nll"] = -logprobs.detach().sum()
        return loss, stats

    counter = iter(range(1, 1000))
    return lambda: train_step.run(next(counter), batch, objective)["nll"]


def measure(name: str, folder: Path, rows: list[list[int]]) -> dict[str, Any]:
    """Alternate both steps on one workload."""
    batch = build_batch(rows, np.random.default_rng(1))
    steps = {"bare": bare_step(folder, batch), "ours": our_step(folder, batch)}
    losses = {key: step() for key, step in steps.items()}  # warms up; both models still hold the same weights
    seconds: dict[str, list[np.ndarray]] = {"bare": [], "ours": []}
    for i in range(NUM_PAIRS):
        for key in ("bare", "ours") if i % 2 == 0 else ("ours", "bare"):
            start = now()
            steps[key]()
            seconds[key].append(now() - start)
    return {
        "workload": name,
        "num_sequences": batch.num_sequences,
        **compare(seconds["bare"], seconds["ours"], batch.num_tokens),
        "first_loss_difference": abs(losses["bare"] - losses["ours"]),
    }


def compare(theirs: list[np.ndarray], ours: list[np.ndarray], num_tokens: int) -> dict[str, float]:
    """Medians over pairs of steps, each as `now` counts it."""
    ratios = np.array(theirs) / np.array(ours)
    return {
        "ratio": float(np.median(ratios[:, 0])),
        "ratio_min": float(ratios[:, 0].min()),
        "ratio_max": float(ratios[:, 0].max()),
        "cpu_ratio": float(np.median(ratios[:, 1])),
        "tokens_per_s": num_tokens / float(np.median(ours, axis=0)[0]),
        "their_tokens_per_s": num_tokens / float(np.median(theirs, axis=0)[0]),
        "num_tokens": num_tokens,
    }


def ragged_samples(rng: np.random.Generator) -> Samples:
    """Log-normal completions (median about 90 tokens) in groups with one prompt each and random rewards."""
    lengths = np.clip(rng.lognormal(4.5, 0.7, NUM_SAMPLES), 8, ROW_TOKENS - PROMPT_TOKENS).astype(int)
    prompts = rng.integers(3, VOCAB, (NUM_SAMPLES // GROUP_SIZE, PROMPT_TOKENS)).repeat(GROUP_SIZE, axis=0).tolist()
    return Samples(
        token_ids=[prompt + rng.integers(3, VOCAB, n).tolist() for prompt, n in zip(prompts, lengths, strict=True)],
        prompt_lengths=[PROMPT_TOKENS] * NUM_SAMPLES,
        logprobs=[rng.normal(-6.2, 0.1, n).tolist() for n in lengths],
        rewards=rng.random(NUM_SAMPLES).tolist(),
    )


def our_batch(samples: Samples, kind: str) -> Any:
    """The samples as this project packs them; SFT trains every token, RL the completions."""
    from prime_hpc.store.batch.packing import pack
    from prime_hpc.trainer.batching.micro_batches import build_rank_batch

    ids = [np.array(row, np.int32) for row in samples.token_ids]
    first = [0 if kind == "sft" else n for n in samples.prompt_lengths]
    masks = [np.arange(len(row)) >= n for row, n in zip(ids, first, strict=True)]
    [packed] = pack([len(row) for row in ids], 1, ROWS * ROW_TOKENS)
    rewards = np.array(samples.rewards, np.float32).reshape(-1, GROUP_SIZE)
    batch = build_rank_batch(
        [micro.tolist() for micro in packed], ids, masks, (rewards - rewards.mean(1, keepdims=True)).ravel()
    )
    return batch if kind == "sft" else replace(batch, group_ids=batch.sample_ids // GROUP_SIZE)


def against_trl(folder: Path, scratch: Path) -> dict[str, dict[str, float]]:
    """Every variant of both TRL trainers, each with our steps between its own."""
    samples = ragged_samples(np.random.default_rng(2))
    longest, tokens = max(map(len, samples.token_ids)), sum(map(len, samples.token_ids))
    steps = {kind: our_step(folder, our_batch(samples, kind), kind) for kind in ("sft", "grpo")}
    for step in steps.values():
        step()
    common = {"learning_rate": LEARNING_RATE}
    rows: dict[str, dict[str, float]] = {}
    for name, options in TRL_SFT.items():
        if options.get("packing"):  # a packed row is one sample to it: as many rows as the tokens fill
            options = options | {"gradient_accumulation_steps": -(-tokens // ROW_TOKENS)}
        done = train_sft(folder, samples, TRL_PAIRS + 1, steps["sft"], scratch, **common, **options)
        rows[f"SFTTrainer, {name}"] = summary(done, tokens)
    limits = {"num_generations": GROUP_SIZE, "max_completion_length": longest, "beta": 0.0, "temperature": 1.0}
    for name, options in TRL_GRPO.items():
        done = train_grpo(folder, samples, TRL_PAIRS + 1, steps["grpo"], scratch, **common, **limits, **options)
        rows[f"GRPOTrainer, {name}"] = summary(done, tokens)
    return rows


def summary(done: Alternation, num_tokens: int) -> dict[str, float]:
    """Medians over the pairs after the first, which warms up."""
    return compare(done.trl_seconds[1:], done.our_seconds[1:], num_tokens)


@contextlib.contextmanager
def process_group() -> Any:
    """A process group of one."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def run() -> dict[str, Any]:
    """All workloads; the ratios are the lowest of their kind."""
    from loguru import logger

    from prime_hpc.starter.tokenizer import build_tokenizer

    logger.disable("prime_hpc")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
    began = time.monotonic()
    ragged = ragged_lengths(np.random.default_rng(0))
    with tempfile.TemporaryDirectory() as made, process_group():
        folder = Path(made) / "model"
        num_parameters = save_qwen3(folder, vocab=VOCAB, hidden=256, layers=6, head_dim=32, context=ROW_TOKENS)
        build_tokenizer(ROW_TOKENS).save_pretrained(folder)
        part = partial(measure, folder=folder)
        workloads = [
            part("ragged samples, packed", rows=ragged),
            part("one sequence a row", rows=[[ROW_TOKENS]] * ROWS),
        ]
        trl = against_trl(folder, Path(made) / "trl")
    kinds = {"sft": "SFTTrainer", "grpo": "GRPOTrainer"}
    return {
        "ratio_to_bare": min(row["ratio"] for row in workloads),
        **{f"ratio_to_trl_{k}": min(r["ratio"] for name, r in trl.items() if v in name) for k, v in kinds.items()},
        "tokens_per_s": workloads[0]["tokens_per_s"],
        "bare_tokens_per_s": workloads[0]["their_tokens_per_s"],
        "num_parameters": num_parameters,
        "num_threads": torch.get_num_threads(),
        "num_pairs": NUM_PAIRS,
        "seconds": time.monotonic() - began,
        "workloads": workloads,
        "trl": trl,
    }


def render(result: dict[str, Any]) -> str:
    """The figures as two tables."""
    size = result["num_parameters"] / 1e6
    lines = [
        f"Qwen3 of {size:.1f}M parameters, {ROWS} rows of {ROW_TOKENS} tokens a step, {result['num_threads']} threads, "
        f"{result['num_pairs']} pairs ({result['seconds']:.0f} s)"
    ]
    for title, rows in (
        ("bare", [(row["workload"], row["num_sequences"], row) for row in result["workloads"]]),
        ("TRL", [(name, NUM_SAMPLES, row) for name, row in result["trl"].items()]),
    ):
        lines.append(
            f"{'':<34}{'samples':>8}{title + ' tok/s':>12}{'ours tok/s':>12}{'ours/' + title:>11}{'min .. max':>16}"
            f"{'CPU seconds':>13}"
        )
        for name, num, row in rows:
            spread = f"{row['ratio_min']:.2f} .. {row['ratio_max']:.2f}"
            lines.append(
                f"{name:<34}{num:>8}{row['their_tokens_per_s']:>12,.0f}{row['tokens_per_s']:>12,.0f}"
                f"{row['ratio']:>11.3f}{spread:>16}{row['cpu_ratio']:>13.3f}"
            )
    return "\n".join(lines)
