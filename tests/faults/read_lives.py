"""Whole attempts whose reads fail: a run is killed after its second checkpoint, a read of the next attempt's start
fails in one of its processes, then it is brought back until it is done, and judged like every other run (see `sweep`).
"""

import random
from pathlib import Path
from typing import Any

from prime_hpc.store.attempts import read_attempts
from tests.faults.inject import Plan
from tests.faults.reads import ERRORS
from tests.faults.sweep import MAX_LIVES, Sweep, record
from tests.faults.verdict import Verdict
from tests.faults.world import PROFILES, World

SAVED = 4
KILL = Plan("", "", "rank0", "rename", "weights/step_000005", 1, "kill-all")
_STEP = f"run/checkpoints/step_{SAVED}"
READS = (
    ("supervisor", "list", "run/checkpoints"),
    ("supervisor", "read", "run/attempts.jsonl"),
    ("supervisor", "read", f"{_STEP}/manifest.json"),
    ("supervisor", "stat", f"{_STEP}/trainer/__1_0.distcp"),
    ("rank0", "read", f"{_STEP}/trainer/__0_0.distcp"),
    ("rank1", "read", f"{_STEP}/trainer/__1_0.distcp"),
    ("rank0", "read", f"{_STEP}/manifest.json"),
    ("orchestrator", "read", f"{_STEP}/orchestrator/state.json"),
)


def whole_points(count: int, seed: int) -> list[Plan]:
    """A seeded sample, of each read about as many."""
    rng = random.Random(seed)
    hows = [f"read:{error}/{duration}" for error in ERRORS for duration in ("once", "for-ever")]
    rounds = [(*read, how) for how in rng.sample(hows, len(hows)) for read in READS]
    return [Plan("", "", role, operation, path, 1, how) for role, operation, path, how in rounds[:count]]


def run_whole(root: Path, model: Path, count: int, seed: int) -> dict[str, Any]:
    """Try them; the figures of all."""
    reference = record(root / "reference", model, ["sync"])
    world = World(root / "lives", model)
    sweep = Sweep(world, reference)
    found: dict[str, Any] = {
        **dict.fromkeys(("deleted_whole", "started_over", "skipped", "duplicated", "mismatches", "failed", "lives"), 0),
        "whole_reached": 0,
        "bad_points": [],
    }
    try:
        for plan in whole_points(count, seed):
            verdict, lives, reached, started_over = _try(world, sweep, plan)
            found["lives"] += lives
            found["whole_reached"] += reached
            found["started_over"] += started_over
            for key in ("skipped", "duplicated", "mismatches"):
                found[key] += len(getattr(verdict, key))
            found["failed"] += len(verdict.broken) + len(verdict.failed)
            if not verdict.ok or started_over:
                point = f"{plan.how} {plan.role} {plan.operation} {plan.path}"
                found["bad_points"].append(f"whole: {point}: {verdict.words()}")
    finally:
        sweep.oracle.close()
        world.close()
    return found


def _try(world: World, sweep: Sweep, plan: Plan) -> tuple[Verdict, int, bool, int]:
    name, ckpt = sweep.next_name(), PROFILES["sync"]
    verdict = Verdict()
    lives = [world.begin(name, ckpt, KILL)]
    try:
        lives[0].wait()
        lives.append(world.resume(name, by_hand=False, plan=plan))
        code = lives[1].wait()
        reached = lives[1].reached
        words = plan.how.removeprefix("read:").partition("/")[0]
        if code and words not in lives[1].log.read_text(errors="replace"):
            verdict.failed.append(f"attempt 2 ended with code {code} and does not say {words}")
        while code != 0 and len(lives) < MAX_LIVES:
            lives.append(world.resume(name, by_hand=False))
            code = lives[-1].wait()
        rows = read_attempts(world.root / name / "attempts.jsonl")[1:]
        began = [row for row in rows if row["why"] != "ended before it began"]
        over = sum((row["resume_step"] or 0) < SAVED for row in began)
        found = sweep.judge(name, ckpt)
        found.failed = verdict.failed + found.failed
        return found, len(lives), reached, over
    finally:
        for life in lives:
            life.end()
        world.forget(name)
