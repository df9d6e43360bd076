"""Model family x (exact packed, exact one sample a row, refused): the whole path from lint to log-probabilities.

Every family of the installed transformers that has a causal language model: a tiny one, random, is written to disk and
goes through lint's table, the trainer's loading and its self-test, and the forward and backward pass on three samples,
two of which begin alike. The reference is transformers' own eager code on each sample alone.

`value`: largest difference of a log-probability, in nats.
"""

import contextlib
import json
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from prime_hpc.config.families import family_of
from prime_hpc.config.sections.common import ModelConfig
from prime_hpc.config.sections.parallel import ParallelDims
from prime_hpc.store.batch.rank_batch import RankBatch
from prime_hpc.trainer.batching.micro_batches import build_rank_batch, make_micro_batch
from prime_hpc.trainer.model.load_policy import load_policy
from prime_hpc.trainer.parallel import build_parallel
from prime_hpc.trainer.perf import FlopsModel
from tests.proofs import Proof
from tests.support.every_family import VOCAB, CannotBuildError, family_names, is_tied, tiny_config, tiny_model

BOUND = 1e-4
"""Float32 through four layers and a vocabulary of 96: rounding is below 3e-5 in all families, a leak above 1e-2."""
LENGTHS, COMMON = (23, 26, 31), 17


@dataclass(frozen=True)
class Verdict:
    """What became of one family."""

    family: str
    verdict: str
    """exact_packed, exact_single, refused (at lint), not_built, or wrong."""
    worst: float = 0.0
    """Largest difference of a log-probability."""
    reason: str = ""


def samples() -> tuple[RankBatch, list[np.ndarray]]:
    """Three samples in one micro-batch; the last two share their beginning."""
    rng = np.random.default_rng(0)
    common, *rest = (rng.integers(3, VOCAB - 2, n).astype(np.int32) for n in (COMMON, LENGTHS[0], 9, 14))
    ids = [rest[0], np.concatenate([common, rest[1]]), np.concatenate([common, rest[2]])]
    batch = build_rank_batch([[0, 1, 2]], ids, [np.ones(len(i), bool) for i in ids])
    return replace(batch, group_ids=np.array([0, 1, 1])), ids


@torch.no_grad()
def alone(model: torch.nn.Module, ids: list[np.ndarray]) -> torch.Tensor:
    """Log-probabilities of each sample by transformers' own forward pass, one after the other, on the CPU."""
    device = next(model.parameters()).device
    found = []
    for sample in ids:
        tokens = torch.from_numpy(sample.astype(np.int64))[None].to(device)
        logprobs = model(input_ids=tokens, use_cache=False).logits[0].double().log_softmax(-1)
        found.append(logprobs[:-1].gather(1, tokens[0, 1:, None])[:, 0])
    return torch.cat(found).cpu()


@contextlib.contextmanager
def one_rank(device: str = "cpu") -> Iterator[None]:
    """A process group of this process alone, unless there is one."""
    if dist.is_initialized():
        yield
        return
    dist.init_process_group("nccl" if device == "cuda" else "gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def judge(family: str, folder: Path, **changes: object) -> Verdict:
    """One family's verdict.

    Args:
        family: its model_type.
        folder: an empty directory.
        changes: fields of its config other than the small ones.
    """
    refusal = family_of({"model_type": family}).refusal
    if refusal:
        return Verdict(family, "refused", reason=refusal)
    try:
        model = tiny_model(tiny_config(family, **{"tie_word_embeddings": is_tied(family)} | changes))
    except CannotBuildError as error:
        return Verdict(family, "not_built", reason=str(error))
    batch, ids = samples()
    expected = alone(model, ids)
    if not expected.isfinite().all() or float(expected.std()) < 1e-3:
        return Verdict(family, "not_built", reason="its small model does not answer")
    model.save_pretrained(folder)
    found = family_of(json.loads((folder / "config.json").read_text()))
    if found.refused:
        return Verdict(family, "refused", reason=found.refusal)
    try:
        with one_rank():
            worst = worst_gap(folder, batch, expected)
    except Exception as error:  # noqa: BLE001 - whatever it is, it comes after lint
        return Verdict(family, "wrong", float("inf"), f"after lint: {type(error).__name__}: {str(error)[:200]}")
    exact = "exact_packed" if found.rows == "packed" else "exact_single"
    return Verdict(family, exact if worst < BOUND else "wrong", worst, found.reason)


def worst_gap(
    folder: Path, batch: RankBatch, expected: torch.Tensor, device: str = "cpu", dtype: str = "float32"
) -> float:
    """Largest difference over the ways in which the trainer lays out the samples; gradients must be finite."""
    attn = "sdpa" if device == "cpu" else "auto"
    config = ModelConfig.model_validate({"name": str(folder), "dtype": dtype, "attn": attn})
    parallel, where = build_parallel(ParallelDims(), device), torch.device(device)
    policy = load_policy(config, folder, parallel, where, reshard_after_forward=True, chunk_tokens=512)
    assert FlopsModel.of(policy.hf).block_flops > 0  # every step asks for them
    worst = 0.0
    for share in (False,) if policy.single_rows else (False, True):
        micro = make_micro_batch(batch, 0, where, share_prefixes=share, single_rows=policy.single_rows)
        with policy.packing(micro):
            logprobs, _ = policy(micro)
            logprobs.sum().backward()
        gap = float((logprobs.detach().double().cpu() - expected).abs().max())
        worst = max(worst, gap if np.isfinite(gap) else float("inf"))
    grads = [p.grad for p in policy.parameters() if p.grad is not None]
    finite = all(bool(torch.isfinite(g.to_local() if hasattr(g, "to_local") else g).all()) for g in grads)
    return worst if grads and finite else float("inf")


def prove(trials: int, families: Sequence[str] = ()) -> Iterable[Proof]:
    """Every family, or each named one, once, whatever `trials` is; what cannot be built is listed without a claim."""
    for family in families or family_names():
        with tempfile.TemporaryDirectory() as folder:
            found = judge(family, Path(folder))
        if found.verdict == "refused":
            yield Proof(family, "log-probabilities", 1, 0.0, BOUND, "refused", found.reason)
        elif found.verdict == "not_built":
            yield Proof(family, "log-probabilities", 1, 0.0, BOUND, "not_built", found.reason)
        else:
            yield Proof(family, "log-probabilities", 1, found.worst, BOUND, found.verdict, found.reason)
