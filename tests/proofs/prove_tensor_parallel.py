"""Model family x (exact split, refused): log-probabilities and gradients of two tensor-parallel ranks against one.

Every family of the installed transformers that trains at all: a tiny one, random, with an even number of key-value
heads, is loaded whole on one rank and split over two. A family in `config.families.SPLIT` must come out the same, one
outside of it must be refused when it is loaded.

`value`: the greater of the largest difference of a log-probability in nats and the largest relative difference of a
gradient's norm.
"""

import json
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from prime_hpc.config.families import SPLIT
from prime_hpc.config.sections.common import ModelConfig
from prime_hpc.config.sections.parallel import ParallelDims
from prime_hpc.trainer.batching.micro_batches import make_micro_batch
from prime_hpc.trainer.model.load_policy import load_policy
from prime_hpc.trainer.parallel import build_parallel
from prime_hpc.trainer.parallel.gradients import sum_over
from tests.proofs import Proof
from tests.proofs.prove_families import samples
from tests.support.every_family import family_names, saved_families
from tests.support.ranks import spawn

BOUND = 1e-4
CPU = torch.device("cpu")
_LEAST = 1e-3
"""Of the largest gradient: smaller ones are rounding."""


def answers(folder: Path, layout: ParallelDims) -> dict[str, Any]:
    """Log-probabilities of the samples and every gradient's norm. Collective."""
    parallel = build_parallel(layout, "cpu")
    config = ModelConfig(name=str(folder), dtype="float32", attn="sdpa")
    policy = load_policy(config, folder, parallel, CPU, reshard_after_forward=True, chunk_tokens=512)
    micro = make_micro_batch(samples()[0], 0, CPU, parallel, single_rows=policy.single_rows)
    with policy.packing(micro):
        logprobs, _ = policy(micro)
        (logprobs.sum() / parallel.dims.num_data_ranks).backward()  # gradients are summed over copies of the samples
    if parallel.tp is not None:
        sum_over([p for module in policy.partly_used for p in module.parameters()], parallel.tp)
    grads = {name: p.grad for name, p in policy.hf.named_parameters() if p.grad is not None}
    norms = {n: float((g.full_tensor() if hasattr(g, "full_tensor") else g).double().norm()) for n, g in grads.items()}
    return {"logprobs": logprobs.tolist(), "norms": norms}


def difference(whole: dict[str, Any], split: dict[str, Any]) -> float:
    """See `value` above; infinite where a gradient is missing or anything is not finite."""
    logprobs = torch.tensor([whole["logprobs"], split["logprobs"]], dtype=torch.float64)
    norms = torch.tensor([[each["norms"].get(n, torch.nan) for n in whole["norms"]] for each in (whole, split)])
    relative = (norms[0] - norms[1]).abs() / norms[0].clamp(min=_LEAST * float(norms[0].max()))
    worst = torch.stack([(logprobs[0] - logprobs[1]).abs().max(), relative.max()]).max()
    return float(worst) if bool(worst.isfinite()) else float("inf")


def run_rank(rank: int, folder: str, names: Sequence[str]) -> None:
    """Each family on one rank, then on both."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", 2), rank=rank, world_size=2)
    found: dict[str, Any] = {}
    for name in names:
        source = Path(folder) / name
        try:
            split = answers(source, ParallelDims(tp=2))
        except ValueError as error:
            found[name] = str(error)
            continue
        # a copy of the whole model on each rank
        found[name] = difference(answers(source, ParallelDims(dp_replicate=2)), split)
    if rank == 0:
        (Path(folder) / "found.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def judge(families: Iterable[str]) -> list[Proof]:
    """The named families that can be built tiny."""
    with tempfile.TemporaryDirectory() as folder:
        built = list(saved_families(families, Path(folder)))
        spawn(run_rank, (folder, built), 2, limit_s=1200)
        found = json.loads((Path(folder) / "found.json").read_text())
    return [_proof(family, found[family]) for family in built]


def _proof(family: str, found: float | str) -> Proof:
    if isinstance(found, str):
        wrong = "refused, though the table has it: " if family in SPLIT else ""
        verdict, worst, reason = "wrong" if wrong else "refused", float("inf") if wrong else 0.0, wrong + found
    elif family not in SPLIT:
        verdict, worst, reason = "wrong", float("inf"), "split, though the table does not have it"
    else:
        verdict, worst, reason = "exact_split", found, ""
    return Proof(family, "log-probabilities and gradients", 1, worst, BOUND, verdict, reason)


def prove(trials: int, families: Sequence[str] = ()) -> Iterable[Proof]:
    """Every family, or each that is named, once, whatever `trials` is."""
    return judge(families or family_names())
