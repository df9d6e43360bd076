"""Model family x layout x (whole model, adapter): two ranks against one; each exact, or refused by lint with a reason.

Every family of the installed transformers that trains at all, tiny and random, under FSDP, context, expert and tensor
parallelism. What lint lets pass must train: log-probabilities of five samples, two of which begin alike, and every
gradient must be those of one rank. `wrong` is what differs, and what fails later than lint.

`value`: the greater of the largest difference of a log-probability in nats and the largest difference within a
gradient, relative to its largest element.
"""

import contextlib
import json
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from pydantic import ValidationError

from prime_hpc.config import Experiment
from prime_hpc.config.sections.lora import DEFAULT_TARGETS, last_names
from prime_hpc.config.sections.parallel import ParallelDims
from prime_hpc.config.sections.slurm import SiteConfig
from prime_hpc.launch.checks import linear_modules
from prime_hpc.launch.estimate.model_facts import stored_shapes
from prime_hpc.launch.lint.lint import lint_errors
from prime_hpc.store.batch.rank_batch import RankBatch
from prime_hpc.trainer.batching.micro_batches import build_rank_batch, make_micro_batch
from prime_hpc.trainer.model.load_policy import load_policy
from prime_hpc.trainer.parallel import build_parallel
from prime_hpc.trainer.parallel.gradients import sum_over
from tests.proofs import Proof
from tests.support.every_family import VOCAB, family_names, saved_families
from tests.support.lora import fill_randomly
from tests.support.ranks import spawn

LAYOUTS: dict[str, dict[str, int]] = {"fsdp": {}, "cp": {"cp": 2}, "ep": {"ep": 2}, "tp": {"tp": 2}}
BOUND = 2e-4
"""Float32 through four layers, sums in another order: rounding is below 5e-5 in all families."""
LENGTHS, COMMON = (23, 26, 31, 18, 30), 17
FAMILIES_A_PROCESS = 8
"""Process groups leak threads."""
CPU = torch.device("cpu")
_LEAST = 1e-3
"""Of the largest gradient: smaller ones are rounding."""


@dataclass
class Case:
    """One family under one layout."""

    family: str
    layout: str
    lora: list[str] | None
    """Modules with an adapter; None: the whole model is trained."""
    refusal: str = ""
    """What lint says."""
    experiment: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """For the table."""
        return f"{self.family} {self.layout}" + ("" if self.lora is None else " lora")

    @property
    def alone(self) -> str:
        """Name of what one rank computes."""
        return f"{self.family}.{'model' if self.lora is None else 'lora'}.pt"


def asked(folder: Path, case: Case) -> Case:
    """The case with lint's answer to it."""
    lora = None if case.lora is None else {"rank": 2, "alpha": 4, "target_modules": case.lora}
    case.experiment = {
        "kind": "sft",
        "device": "cpu",
        "name": "x",
        "output_dir": str(folder / "out"),
        "seq_len": 64,
        "model": {"name": str(folder / case.family), "dtype": "float32", "attn": "sdpa", "lora": lora},
        "trainer": {"num_ranks": 2, "parallel": LAYOUTS[case.layout]},
        "sft": {"data": {"type": "fake"}},
    }
    try:
        errors = lint_errors(Experiment.model_validate(case.experiment), SiteConfig.model_validate({"name": "here"}))
        case.refusal = "; ".join(e.message for e in errors)
    except ValidationError as error:
        case.refusal = "; ".join(str(e["msg"]) for e in error.errors())
    return case


def cases_of(folder: Path, family: str) -> list[Case]:
    """All layouts of a family, the whole model and with adapters: on the usual modules, else on all that it has."""
    targets = list(DEFAULT_TARGETS)
    if asked(folder, Case(family, "fsdp", targets)).refusal:
        kind = json.loads((folder / family / "config.json").read_text())["model_type"]
        every = last_names(linear_modules(stored_shapes(folder / family) or {}, kind))
        targets = [name for name in every if not asked(folder, Case(family, "fsdp", [name])).refusal] or targets
    return [asked(folder, Case(family, layout, lora)) for lora in (None, targets) for layout in LAYOUTS]


def samples() -> RankBatch:
    """Five samples in two micro-batches; the second and third begin alike."""
    rng = np.random.default_rng(0)
    ids = [rng.integers(3, VOCAB - 2, n).astype(np.int32) for n in LENGTHS]
    ids[2][:COMMON] = ids[1][:COMMON]
    batch = build_rank_batch([[0, 1, 2], [3, 4]], ids, [np.ones(len(i), bool) for i in ids])
    batch.group_ids[2] = 1
    return batch


def answers(case: Case) -> dict[str, Any]:
    """Log-probabilities of this rank's micro-batches and every whole gradient. Collective."""
    experiment = Experiment.model_validate(case.experiment)
    dims = ParallelDims() if dist.get_world_size() == 1 else experiment.trainer.parallel_dims
    parallel, model = build_parallel(dims, "cpu"), experiment.model
    policy = load_policy(model, Path(model.name), parallel, CPU, reshard_after_forward=True, chunk_tokens=512)
    if policy.adapters is not None:
        fill_randomly(policy, 0, seed=5)
    batch, found = samples(), {}
    with contextlib.nullcontext() if policy.adapters is None else policy.adapters.use(0):
        for index in range(parallel.data_rank, batch.num_micro_batches, dims.num_data_ranks):
            micro = make_micro_batch(batch, index, CPU, parallel, single_rows=policy.single_rows)
            with policy.packing(micro):
                logprobs, _ = policy(micro)
                weights = torch.linspace(0.5, 1.5, len(logprobs))
                (logprobs * weights).sum().backward()
            found[index] = logprobs.detach()
    if parallel.tp is not None:
        sum_over([p for module in policy.partly_used for p in module.parameters()], parallel.tp)
    named = policy.hf.named_parameters() if policy.adapters is None else policy.adapters.named_parameters(0).items()
    grads = {name: p.grad for name, p in named if p.grad is not None}
    whole = {n: g.full_tensor() if hasattr(g, "full_tensor") else g for n, g in grads.items()}
    return {"logprobs": found, "grads": whole}


def difference(one: dict[str, Any], two: dict[str, Any]) -> float:
    """See `value` above; infinite where a gradient is missing or anything is not finite."""
    gaps = [float((one["logprobs"][i] - mine).abs().max()) for i, mine in two["logprobs"].items()]
    scale = max(float(g.abs().max()) for g in one["grads"].values())
    for name in one["grads"].keys() | two["grads"].keys():
        expected, found = one["grads"].get(name), two["grads"].get(name)
        if expected is None or found is None:
            gaps.append(float("inf"))
        else:
            largest = max(float(expected.abs().max()), _LEAST * scale)
            gaps.append(float((expected - found).abs().max()) / largest)
    return max(gap if np.isfinite(gap) else float("inf") for gap in gaps)


def run_rank(rank: int, world_size: int, folder: str, cases: Sequence[Case]) -> None:
    """Each case; one rank keeps what it computes, two are compared with it."""
    torch.set_num_threads(1)
    root = Path(folder)
    store = dist.FileStore(f"{root}/store {world_size} {cases[0].name} {len(cases)}", world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    found: dict[str, Any] = {}
    for case in cases:
        if world_size == 1 and (root / case.alone).exists():
            continue
        try:
            answer = answers(case)
        except Exception as error:  # noqa: BLE001 - whatever it is, it comes after lint
            found[case.name] = f"{type(error).__name__}: {str(error)[:300]}"
            continue
        if world_size == 1:
            torch.save(answer, root / case.alone)
        elif (root / case.alone).exists():
            found[case.name] = difference(torch.load(root / case.alone), answer)
        else:
            found[case.name] = "one rank fails"
    (root / f"found {world_size} {rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def compared(folder: Path, cases: list[Case]) -> dict[str, float | str]:
    """Name of each case: its value, or how it failed. Where the processes fail, each case has processes of its own."""
    if not cases:
        return {}
    found: dict[str, float | str] = {}
    try:
        for world_size in (1, 2):
            spawn(run_rank, (world_size, str(folder), cases), world_size, limit_s=600)
            for rank in range(world_size):
                for name, value in json.loads((folder / f"found {world_size} {rank}.json").read_text()).items():
                    before = found.get(name, 0.0)
                    found[name] = value if not isinstance(before, str) and value_is_worse(value, before) else before
    except AssertionError as error:
        if len(cases) == 1:
            return {cases[0].name: str(error)[-300:]}
        return {name: value for case in cases for name, value in compared(folder, [case]).items()}
    return found


def value_is_worse(value: float | str, before: float) -> bool:
    """A failure is worse than any number."""
    return isinstance(value, str) or not value < before


def judge(families: Sequence[str]) -> list[Proof]:
    """All layouts of the named families that can be built tiny."""
    with tempfile.TemporaryDirectory(prefix="families") as temporary:
        folder, cases = Path(temporary), []
        for family in saved_families(families, folder):
            cases += cases_of(folder, family)
        found = compared(folder, [case for case in cases if not case.refusal])
    return [_proof(case, found.get(case.name)) for case in cases]


def _proof(case: Case, found: float | str | None) -> Proof:
    claim = "log-probabilities and gradients"
    if case.refusal:
        return Proof(case.name, claim, 1, 0.0, BOUND, "refused", case.refusal)
    if isinstance(found, float):
        return Proof(case.name, claim, 1, found, BOUND, "exact" if found < BOUND else "wrong")
    return Proof(case.name, claim, 1, float("inf"), BOUND, "wrong", f"after lint: {found}")


def prove(trials: int, families: Sequence[str] = ()) -> Iterable[Proof]:
    """Every family, or each that is named, once, whatever `trials` is."""
    names = families or family_names()
    for first in range(0, len(names), FAMILIES_A_PROCESS):
        yield from judge(names[first : first + FAMILIES_A_PROCESS])
