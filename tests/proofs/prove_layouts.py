"""Layout x claim: training over 2 and 4 gloo ranks against one process, three updates of a tiny model.

`loaded`: weights that were read shard by shard and published are those of the checkpoint, exactly; `metrics`: loss,
entropy, KL, counts of every step; `grad norm`; `weights`: published after three updates, relative to how far they
moved; `resumed`: the third step once more from the checkpoint that ANOTHER layout wrote after the second. All of it in
float32: sums are taken in other orders, nothing else differs.
"""

import json
import shutil
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

from tests.proofs import Proof
from tests.proofs.layout_world import LOSSES, Case, each_error, work
from tests.support.ranks import spawn
from tests.support.tiny_families import make_family

BOUNDS = {"loaded": 1e-12, "metrics": 2e-5, "grad norm": 2e-5, "weights": 2e-4, "resumed": 2e-4}
"""Float32: about 1e-6 a step in losses and gradients, which Adam's division amplifies; reading loses nothing."""
FAMILIES = ("qwen3", "llama", "qwen3_moe")


def layouts(family: str, world_size: int) -> list[dict[str, int]]:
    """What is proved of a family over so many ranks."""
    if world_size == 2:
        every = [{"dp_shard": 2}, {"dp_replicate": 2}, {"tp": 2}, {"cp": 2}]
        return [*every, {"ep": 2}] if family == "qwen3_moe" else every
    if family == "qwen3_moe":
        return [
            {"ep": 4},
            {"dp_shard": 2, "tp": 2},
            {"dp_shard": 2, "tp": 2, "ep": 2},
            {"dp_shard": 2, "cp": 2, "ep": 2},
            {"cp": 2, "tp": 2, "ep": 4},
            {"dp_replicate": 2, "dp_shard": 2, "ep": 2},
        ]
    every = [
        {"dp_shard": 4},
        {"dp_replicate": 2, "dp_shard": 2},
        {"dp_shard": 2, "tp": 2},
        {"dp_replicate": 2, "tp": 2},
        {"dp_shard": 2, "cp": 2},
        {"dp_replicate": 2, "cp": 2},
    ]
    # Qwen3's 4 key-value heads split over 4 ranks; Llama's 2 are repeated for 4 context-parallel ones
    return [*every, {"tp": 4}, {"cp": 2, "tp": 2}] if family == "qwen3" else [*every, {"cp": 4}]


def every_case(world_size: int) -> list[Case]:
    """All layouts, and some with Muon, with an adapter and with recomputation."""
    cases = [Case(family, layout) for family in FAMILIES for layout in layouts(family, world_size)]
    if world_size == 2:
        cases += [Case("qwen3", layout, lora=True) for layout in ({"cp": 2}, {"dp_replicate": 2})]
        cases += [Case("qwen3_moe", layout, ac="full", replay=True) for layout in ({"ep": 2}, {"cp": 2}, {"tp": 2})]
    if world_size == 4:
        cases += [
            Case("qwen3", {"dp_shard": 2, "tp": 2}, optim="muon"),
            Case("qwen3_moe", {"dp_shard": 2, "cp": 2, "ep": 2}, optim="muon"),
            Case("llama", {"dp_shard": 2, "cp": 2}, lora=True),
            Case("qwen3", {"dp_replicate": 2, "dp_shard": 2}, lora=True),
            Case("qwen3_moe", {"cp": 2, "tp": 2, "ep": 2}, ac="full"),
            Case("qwen3_moe", {"dp_shard": 2, "tp": 2, "ep": 2}, ac="selective"),
            Case("qwen3_moe", {"cp": 2, "tp": 2, "ep": 4}, ac="full", replay=True),
        ]
    return cases


def every_case_of_eight() -> list[Case]:
    """Three dimensions at once."""
    return [
        Case("qwen3", {"dp_replicate": 2, "dp_shard": 2, "tp": 2}),
        Case("qwen3", {"dp_shard": 2, "cp": 2, "tp": 2}),
        Case("qwen3_moe", {"dp_replicate": 2, "cp": 2, "tp": 2, "ep": 4}),
        Case("qwen3_moe", {"dp_shard": 8, "ep": 8}, ac="full", replay=True),
    ]


def run_worlds(
    folder: Path, worlds: dict[int, list[Case]], start: Callable[..., None] = spawn, kind: str = "cpu"
) -> dict[str, dict[str, float]]:
    """Train every case; errors by name.

    Args:
        folder: of models and runs.
        worlds: number of ranks -> cases.
        start: starts `work(rank, *args)` on every rank, as `spawn` does, whose processes are no GPU's.
        kind: of device.
    """
    alone = list({case.alone.name: case.alone for cases in worlds.values() for case in cases}.values())
    for family in {case.family for case in alone}:
        make_family(folder / "models" / family, family)
    found: dict[str, dict[str, float]] = {}
    resume: dict[str, str] = {}
    for world_size, cases in {1: alone, **worlds}.items():
        start(work, (world_size, str(folder), cases, resume, len(LOSSES), kind), world_size, limit_s=1800)
        result = json.loads((folder / f"world_{world_size}.json").read_text(encoding="utf-8"))
        found |= {f"{name} of {world_size}": errors for name, errors in result["errors"].items()}
        resume = result["resume"]
    return found


def bound_of(claim: str) -> float:
    """What an error must stay below."""
    return BOUNDS[claim]


def prove(trials: int) -> Iterable[Proof]:
    """Every layout once, whatever `trials`."""
    folder = Path(tempfile.mkdtemp(prefix="layouts"))
    try:
        found = run_worlds(folder, {n: every_case(n) for n in (2, 4)})
    finally:
        shutil.rmtree(folder)
    for name, claim, error in each_error(found):
        yield Proof(name, claim, len(LOSSES), error, bound_of(claim))
