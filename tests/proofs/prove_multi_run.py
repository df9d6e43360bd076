"""Many runs in one trainer: each run's adapters, version by version, against the same run alone on the same batches.

`alone` is the ordinary trainer of one run with `model.lora` (`rl.py`), not the loop that is proved. Whatever shares the
trainer, in whatever order runs take turns, in whichever slot, not a bit may differ: the bound is zero.

    together    two runs, the scheduler's own order
    any order   three runs, turns drawn at random
    comes       a third run appears when the others have begun, and takes the slot of the first that is done
    goes        one of two runs is deleted half-way; the other is compared
    fails       one of two gets an infinite loss half-way; the other is compared
    resumed     both runs stopped after a drawn step with a save, their slots swapped, taken up again
"""

import random
import shutil
import sys
import tempfile
import warnings
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from loguru import logger

from prime_hpc.config import Experiment
from prime_hpc.config.snapshot import read_experiment
from prime_hpc.observe.role_status import RoleStatus
from prime_hpc.runtime.role_context import RoleContext
from prime_hpc.store.child_runs import STATE, read_state
from prime_hpc.store.messaging.bus import BusClient
from prime_hpc.store.run_paths import RunPaths
from prime_hpc.trainer.multi.admission import Admission
from prime_hpc.trainer.multi.fair_queue import FairQueue
from prime_hpc.trainer.multi.loop import Command, Kind, MultiTrainer
from prime_hpc.trainer.multi.run_slots import RunSlots
from prime_hpc.trainer.rl import run_rl
from prime_hpc.trainer.trainer import build_trainer
from tests.proofs import Proof
from tests.support.many_runs import (
    batch_of,
    broken,
    child_of,
    largest_difference,
    make_child,
    make_parent,
    put_batch,
    put_batches,
    versions,
)
from tests.support.ranks import spawn
from tests.support.tiny_model import make_tiny_model

BITWISE = sys.float_info.min
STEPS = 3
RANKS = (1, 2)
OWN: dict[str, dict[str, Any]] = {
    "run_a": {"seed": 0, "lr": 1e-2},
    "run_b": {
        "seed": 1,
        "lr": 3e-3,
        "trainer": {
            "scheduler": {"type": "cosine", "warmup_steps": 1},
            "num_mini_batches": 2,
            "epochs_per_batch": 2,
        },
    },
    "run_c": {
        "seed": 2,
        "lr": 1e-2,
        "trainer": {
            "loss": {"type": "gspo", "correction": {"high": 1.01, "batch_normalize": True}},
            "optim": {"type": "signsgd", "lr": 1e-3},
        },
    },
}
"""Runs that differ in batches, initial adapter, learning rate, schedule, updates a batch, objective and optimizer."""


class RandomQueue(FairQueue):
    """Turns drawn at random among the ready."""

    def __init__(self, num_slots: int, seed: int) -> None:
        super().__init__(num_slots)
        self._random = random.Random(seed)

    def choose(self, ready: Collection[str]) -> str | None:
        """Any of them."""
        return self._random.choice(sorted(ready)) if ready else None


@dataclass
class Stage:
    """Where the runs of one rank's process live; rank 0 writes, all ranks train."""

    root: Path
    model: Path
    alone: dict[str, dict] = field(default_factory=dict)

    def parent(self, name: str, runs: Iterable[str], **changes: Any) -> tuple[Path, Experiment]:
        """A parent with these runs and all their batches."""
        directory = self.root / name
        if dist.get_rank() == 0:
            parent = make_parent(directory, self.model, num_ranks=dist.get_world_size(), **changes)
            for run in runs:
                self.add(directory, parent, run)
        dist.barrier()
        return directory, read_experiment(directory / "run.yaml")

    def add(self, directory: Path, parent: Experiment, run: str) -> RunPaths:
        """One more run, with its batches; they are there before it has its name."""
        scratch = directory / f".adding-{run}-batches"
        put_batches(RunPaths(scratch), int(OWN[run]["seed"]), range(1, STEPS + 1), dist.get_world_size())
        paths = make_child(parent, directory, run, max_steps=STEPS, ckpt={"interval": 100}, **OWN[run])
        scratch.joinpath("rollouts").rename(paths.rollouts)
        scratch.rmdir()
        return paths

    def trainer(
        self, directory: Path, parent: Experiment, queue_seed: int | None = None, life: int = 1
    ) -> MultiTrainer:
        """The trainer of a parent, with its own or a random scheduler."""
        context = RoleContext("trainer", directory, index=dist.get_rank(), incarnation=life, attempt=life)
        bus = BusClient(None, "proof")
        trainer = MultiTrainer(parent, context, torch.device("cpu"), bus, RoleStatus(context, bus))
        if queue_seed is not None:
            trainer._queue = RandomQueue(parent.trainer.max_concurrent_runs, queue_seed)
        return trainer

    def train_alone(self, run: str) -> dict:
        """Versions of the run in an ordinary trainer."""
        if run not in self.alone:
            directory, parent = self.parent(f"of_{run}", [])
            own = directory / run
            if dist.get_rank() == 0:
                put_batches(RunPaths(own), int(OWN[run]["seed"]), range(1, STEPS + 1), dist.get_world_size())
            dist.barrier()
            experiment = child_of(parent, directory, run, max_steps=STEPS, **OWN[run])
            context = RoleContext("trainer", own, index=dist.get_rank())
            bus = BusClient(None, "proof")
            trainer = build_trainer(experiment, context, torch.device("cpu"), bus, RoleStatus(context, bus))
            run_rl(trainer)
            trainer.close()
            dist.barrier()
            self.alone[run] = versions(RunPaths(own))
        return self.alone[run]

    def error(self, directory: Path, runs: Iterable[str]) -> float:
        """The largest difference of these runs to themselves alone."""
        dist.barrier()
        return max(largest_difference(versions(RunPaths(directory / r)), self.train_alone(r)) for r in runs)


def together(stage: Stage, trial: int) -> float:
    """Two runs in the scheduler's own order."""
    directory, parent = stage.parent(f"together{trial}", ("run_a", "run_b"))
    stage.trainer(directory, parent).run()
    return stage.error(directory, ("run_a", "run_b"))


def any_order(stage: Stage, trial: int) -> float:
    """Three runs, turns drawn."""
    directory, parent = stage.parent(f"order{trial}", OWN, slots=3)
    stage.trainer(directory, parent, queue_seed=trial).run()
    return stage.error(directory, OWN)


def _after(trainer: MultiTrainer, num_turns: int, action: Callable[[], object]) -> None:
    """On rank 0: do something once so many training turns were ordered; directories are looked at every turn."""
    if dist.get_rank() != 0:
        return
    inner, roster, turns = trainer._decide, trainer._run_slots, [0]
    assert roster is not None

    def decide() -> Command:
        if turns[0] == num_turns:
            turns[0] += 1
            action()
        roster._next_look = 0.0
        order = inner()
        turns[0] += order.kind is Kind.TRAIN
        return order

    trainer._decide = decide  # type: ignore[method-assign]


def comes(stage: Stage, trial: int) -> float:
    """A third run is added while two train in two slots."""
    directory, parent = stage.parent(f"comes{trial}", ("run_a", "run_b"))
    trainer = stage.trainer(directory, parent, queue_seed=trial)
    _after(trainer, 1 + trial % 4, lambda: stage.add(directory, parent, "run_c"))
    trainer.run()
    return stage.error(directory, OWN)


def goes(stage: Stage, trial: int) -> float:
    """One of two is deleted while both train."""
    directory, parent = stage.parent(f"goes{trial}", ("run_a", "run_b"))
    trainer = stage.trainer(directory, parent, queue_seed=trial)
    gone, stays = ("run_a", "run_b") if trial % 2 else ("run_b", "run_a")
    _after(trainer, 1 + trial % 2, lambda: shutil.rmtree(directory / gone))
    trainer.run()
    return stage.error(directory, (stays,))


def fails(stage: Stage, trial: int) -> float:
    """One of two has a batch with an infinite loss."""
    directory, parent = stage.parent(f"fails{trial}", ("run_a", "run_b"))
    fallen, stays = ("run_a", "run_b") if trial % 2 else ("run_b", "run_a")
    if dist.get_rank() == 0:
        paths = RunPaths(directory / fallen)
        shutil.rmtree(paths.rollouts_step(2))
        put_batch(paths, 2, broken(batch_of(int(OWN[fallen]["seed"]), 2)), dist.get_world_size())
    dist.barrier()
    stage.trainer(directory, parent, queue_seed=trial).run()
    assert "failed" in (directory / fallen / STATE).read_text()
    return stage.error(directory, (stays,))


def resumed(stage: Stage, trial: int) -> float:
    """Both are stopped with a save after a drawn number of turns, and go on in the other's slot."""
    directory, parent = stage.parent(f"resumed{trial}", ("run_a", "run_b"))
    trainer = stage.trainer(directory, parent, queue_seed=trial)
    num_turns = 2 + trial % 3

    def stop() -> None:
        trainer._bus.latest = lambda topic: {"save": True} if topic == "stop" else None  # type: ignore[method-assign]

    _after(trainer, num_turns, stop)
    trainer.run()
    dist.barrier()
    second = stage.trainer(directory, parent, queue_seed=trial + 1, life=2)
    if second._run_slots is not None:
        _swap_and_feed(second._run_slots, directory)
    second.run()
    dist.barrier()
    states = [read_state(directory / name) for name in ("run_a", "run_b")]
    assert sum(s.resume_step or 0 for s in states if s is not None) == num_turns, states
    return stage.error(directory, ("run_a", "run_b"))


def _swap_and_feed(roster: RunSlots, directory: Path) -> None:
    """The last by name comes first; each gets the batches that a new attempt has to make again, under its number."""
    roster.look()
    for i, name in enumerate(sorted(roster._seen, reverse=True)):
        roster._seen[name].since = float(i)
    admit = roster.admit

    def feed() -> Admission | None:
        admission = admit()
        if admission is not None:
            first = admission.resume.step + 1 if admission.resume is not None else 1
            for step in range(first, STEPS + 1):
                batch = batch_of(int(OWN[admission.name]["seed"]), step)
                put_batch(RunPaths(admission.path), step, batch, dist.get_world_size(), admission.incarnation)
        return admission

    roster.admit = feed  # type: ignore[method-assign]


CLAIMS: dict[str, Callable[[Stage, int], float]] = {
    "together": together,
    "any order": any_order,
    "comes": comes,
    "goes": goes,
    "fails": fails,
    "resumed": resumed,
}


def work(rank: int, world_size: int, root: str, trials: int, claims: list[str]) -> None:
    """One rank: every claim; rank 0 leaves the errors in a file."""
    torch.set_num_threads(1)
    logger.remove()
    warnings.filterwarnings("ignore", category=FutureWarning)
    store = f"file://{root}/store{world_size}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world_size)
    base = Path(root)
    stage = Stage(base / f"ranks{world_size}", base / "model")
    stage.root.mkdir(exist_ok=True)
    errors = {claim: [CLAIMS[claim](stage, trial) for trial in range(trials)] for claim in claims}
    if rank == 0:
        torch.save(errors, base / f"errors{world_size}")
    dist.destroy_process_group()


def errors_of(num_ranks: int, trials: int, claims: Iterable[str] = CLAIMS) -> dict[str, list[float]]:
    """The errors of every trial of each claim, on so many ranks."""
    with tempfile.TemporaryDirectory() as root:
        make_tiny_model(Path(root) / "model")
        spawn(work, (num_ranks, root, trials, list(claims)), num_ranks)
        return torch.load(Path(root) / f"errors{num_ranks}")


def prove(trials: int) -> Iterable[Proof]:
    """Each claim on one and on two ranks, `trials` / 10 times each (a trial is several trainings)."""
    count = max(1, trials // 10)
    for num_ranks in RANKS:
        subject = f"{num_ranks} rank" + ("s" if num_ranks > 1 else "")
        for claim, errors in errors_of(num_ranks, count).items():
            yield Proof(subject, claim, len(errors), max(errors), BITWISE)
