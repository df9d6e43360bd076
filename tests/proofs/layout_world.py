"""One process of a world of ranks that trains the same steps under one layout after the other: over gloo on CPUs, over
NCCL on GPUs.

Started by `prove_layouts`, once a world size. Rank 0 of each world writes what it
found into files; a world of one rank writes what the others are compared with.
"""

import dataclasses
import json
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from prime_hpc.config.sections.common import CkptConfig, ModelConfig
from prime_hpc.config.sections.trainer import LossConfig, TrainerConfig
from prime_hpc.store.batch.rank_batch import RankBatch
from prime_hpc.store.checkpoint.checkpoints import resolve_resume
from prime_hpc.store.run_paths import RunPaths
from prime_hpc.trainer.batching.micro_batches import redistribute
from prime_hpc.trainer.checkpointing.checkpointer import Checkpointer
from prime_hpc.trainer.model.load_policy import load_policy
from prime_hpc.trainer.model.self_test import SelfTestError
from prime_hpc.trainer.objectives import normalization, rl_loss
from prime_hpc.trainer.objectives.entropy import EntropyBonus
from prime_hpc.trainer.optim import build_optimizer
from prime_hpc.trainer.parallel import build_parallel
from prime_hpc.trainer.train_step import TrainStep
from prime_hpc.trainer.weights.lora_files import adapter_identity
from prime_hpc.trainer.weights.publish import build_publisher
from tests.support.lora import fill_randomly
from tests.support.random_teacher import with_random_teacher
from tests.support.tiny_families import VOCAB, random_routing
from tests.support.tiny_model import random_rank_batch

LENGTHS = [[20, 9], [15, 30, 1], [3], [41, 2], [17]]
"""Five micro-batches, of lengths that no number of ranks divides: two parts get unequal numbers of them."""
LOSSES = [
    {"type": "aipo", "covariance": {"type": "clip", "share": 0.1, "low": 0.1, "high": 9.0}},
    {
        "type": "gspo",
        "kl": {"target": "behaviour", "coef": 0.1},
        "entropy": {"coef": 0.05},
        "distillation": {"divergence": "jsd", "beta": 0.3},
    },
    {
        "type": "reinforce",
        "normalize": "sequence",
        "correction": {"level": "geometric", "high": 1.05, "batch_normalize": True},
        "second_moment": 0.5,
        "top_entropy_quantile": 0.3,
        "covariance": {"type": "kl", "share": 0.1},
    },
]
"""Of steps 1, 2, 3: over tokens, without some of high covariance; over whole sequences, with an entropy bonus and the
divergence to a teacher; with a factor that a whole sequence decides, divided by its mean over the batch, over the
tokens of highest entropy in the whole batch, without those that have moved farthest, held back where covariance is
high."""
METRICS = (
    "loss",
    "entropy",
    "low_entropy_masked",
    "high_covariance",
    "second_moment_masked",
    "correction_mean",
    "kl",
    "ratio",
    "clipped",
    "teacher_divergence",
    "teacher_mass",
    "reward",
    "num_tokens",
    "num_targets",
    "lag_max",
)


@dataclass(frozen=True)
class Case:
    """One model under one layout."""

    family: str
    parallel: dict[str, int]
    optim: str = "adamw"
    ac: str | None = None
    compile: bool = False
    lora: bool = False
    """An adapter is trained, in the frozen model."""
    replay: bool = False
    """Tokens go to experts that the batch names, other ones than the model's choice."""
    break_with: str | None = None
    """Of `layout_breaks`: what is broken on purpose."""

    @property
    def name(self) -> str:
        """For the table."""
        dims = " ".join(f"{k.removeprefix('dp_')} {v}" for k, v in self.parallel.items() if v > 1) or "1 rank"
        extra = [self.optim] if self.optim != "adamw" else []
        extra += ["lora"] if self.lora else []
        extra += [f"ac {self.ac}"] if self.ac else []
        extra += ["compiled"] if self.compile else []
        extra += ["replay"] if self.replay else []
        broken = [f"({self.break_with})"] if self.break_with else []
        return " ".join([self.family, dims, *extra, *broken])

    @property
    def alone(self) -> "Case":
        """The same training in one process."""
        return Case(self.family, {}, optim=self.optim, lora=self.lora, replay=self.replay)


def whole_batch(step: int, replay: bool = False) -> RankBatch:
    """All parts of batch `step`, as one; with `replay`, named experts for nine tokens of ten."""
    batch = random_rank_batch(LENGTHS, seed=100 + step, vocab_size=VOCAB, step=step)
    batch.logprobs[:] = np.where(batch.loss_mask, batch.logprobs / 2 - 2, 0)  # nearer to the policy: ratios count
    batch = with_random_teacher(batch, VOCAB, top_k=7, seed=step)
    return dataclasses.replace(batch, routed=random_routing(batch.num_tokens, seed=step)) if replay else batch


def own_device() -> torch.device:
    """Of this rank, by the backend of its process group."""
    return torch.device("cuda", torch.cuda.current_device()) if dist.get_backend() == "nccl" else torch.device("cpu")


class World:
    """Policy, optimizer and what the trainer does with them, under one layout."""

    def __init__(self, case: Case, models: Path, out: Path) -> None:
        self.case, self.source, self.device = case, models / case.family, own_device()
        self.trainer = TrainerConfig.model_validate(
            # eps: the update stays a smooth function of gradients that are about zero
            {
                "optim": {"type": case.optim, "lr": 1e-2, "eps": 1e-3, "max_norm": 0.5, "weight_decay": 0.1},
                "num_ranks": dist.get_world_size(),
                "parallel": case.parallel,
            }
        )
        self.parallel = build_parallel(self.trainer.parallel_dims, self.device)
        ac = {"mode": case.ac} if case.ac else None
        config: dict[str, Any] = {"name": str(self.source), "dtype": "float32", "ac": ac, "compile": case.compile}
        config["lora"] = {"rank": 3, "alpha": 6} if case.lora else None
        self.policy = load_policy(
            ModelConfig.model_validate(config),
            self.source,
            self.parallel,
            self.device,
            reshard_after_forward=True,
            chunk_tokens=32,
            replays_routers=case.replay,
        )
        self.policy._chunk_tokens = 32  # several chunks of logits, small as the vocabulary is
        adapter = None
        meta: dict[str, Any] = {"kind": "rl"}
        if self.policy.adapters is not None:
            fill_randomly(self.policy, 0, seed=5)
            adapter = self.policy.adapters.parameters(0)
            meta |= {"adapter": adapter_identity(self.policy.adapters.config, self.source)}
        self.optimizer = build_optimizer(self.policy, self.trainer.optim, adapter)
        self.paths = RunPaths(out)
        self.checkpointer = Checkpointer(
            self.policy, self.optimizer, self.paths, incarnation=0, meta=meta, config=CkptConfig()
        )

    def step(self, step: int) -> dict[str, float]:
        """Metrics of one update."""
        loss = LossConfig.model_validate(LOSSES[(step - 1) % len(LOSSES)])
        train_step = TrainStep(
            self.policy,
            self.optimizer,
            # each way: whole gradients are what small models have by themselves
            self.trainer.model_copy(update={"no_sync": step % 2 == 1, "loss": loss}),
            max_steps=100,
            normalize=normalization(loss),
            device=self.device,
            peak_flops=1.0,
            entropy=None if loss.entropy is None else EntropyBonus(loss.entropy),
            top_entropy=loss.top_entropy_quantile,
        )
        part = redistribute(
            [whole_batch(step, self.case.replay)], self.parallel.data_rank, self.parallel.dims.num_data_ranks
        )
        return train_step.run(step, part, partial(rl_loss, loss))

    def publish(self, version: int) -> Path:
        """The directory of the published weights."""
        publisher = build_publisher(
            self.policy, self.source, self.paths, dtype=torch.float32, incarnation=0, model_name=self.case.family
        )
        publisher.publish(version)
        dist.barrier()
        return self.paths.weights_step(version)

    def close(self) -> None:
        """Nothing is kept."""
        del self.policy, self.optimizer, self.checkpointer


def read_weights(directory: Path) -> dict[str, np.ndarray]:
    """Tensors of a published version, by name."""
    from safetensors.numpy import load_file

    return {k: v for file in sorted(directory.glob("*.safetensors")) for k, v in load_file(file).items()}


def relative(found: float, expected: float) -> float:
    """Error, relative from 1 on."""
    return abs(found - expected) / max(1.0, abs(expected))


def moved(found: dict[str, np.ndarray], expected: dict[str, np.ndarray], before: dict[str, np.ndarray]) -> float:
    """The greatest error of any weight, relative to how far the weights of its tensor moved at most."""
    assert found.keys() == expected.keys(), found.keys() ^ expected.keys()
    errors = [np.abs(found[k] - expected[k]).max() / max(np.abs(expected[k] - before[k]).max(), 1e-9) for k in expected]
    return float(np.max(errors))


def run_alone(case: Case, models: Path, out: Path, steps: int) -> None:
    """World of one: `steps` updates; checkpoints, weights and metrics of all of them."""
    world = World(case, models, out)
    world.publish(0)
    metrics = {}
    for step in range(1, steps + 1):
        metrics[step] = world.step(step)
        world.publish(step)
        world.checkpointer.save(step, progress={}, batch_dir=None)
    (out / "metrics.json").write_text(json.dumps(metrics), encoding="utf-8")


def compare(metrics: dict[str, float], wanted: dict[str, float]) -> dict[str, float]:
    """Errors of one step's metrics."""
    return {
        "metrics": float(np.max([relative(metrics[k], wanted[k]) for k in METRICS if k in wanted])),
        "grad norm": relative(metrics["grad_norm"] / wanted["grad_norm"], 1.0),
    }


def run_case(case: Case, models: Path, alone: Path, resume: Path, out: Path, steps: int) -> dict[str, float]:
    """Errors of one layout against the run alone.

    Args:
        case: the layout.
        models: folder of the families.
        alone: output of `run_alone`.
        resume: run directory of another layout, or of the run alone, with a checkpoint of step `steps - 1`.
        out: run directory of this layout; its checkpoint of step `steps - 1` is for the next one.
        steps: updates.
    """
    wanted = {int(k): v for k, v in json.loads((alone / "metrics.json").read_text(encoding="utf-8")).items()}
    weights = [read_weights(RunPaths(alone).weights_step(v)) for v in range(steps + 1)]
    try:
        world = World(case, models, out)
    except SelfTestError:  # noticed before the first step
        if case.break_with is None:
            raise
        return {"metrics": float("inf")}
    errors: dict[str, float] = {}
    if case.break_with is None:
        errors["loaded"] = moved(read_weights(world.publish(0)), weights[0], weights[1])
    for step in range(1, steps + 1):
        for claim, error in compare(world.step(step), wanted[step]).items():
            errors[claim] = float(np.max([errors.get(claim, 0.0), error]))
        if step == steps - 1 and case.break_with is None:
            world.checkpointer.save(step, progress={}, batch_dir=None)
    errors["weights"] = moved(read_weights(world.publish(steps)), weights[steps], weights[0])
    world.close()
    if case.break_with is not None:
        return errors
    world = World(case, models, out)
    world.checkpointer.load(resolve_resume(RunPaths(resume).checkpoints, steps - 1))
    again = compare(world.step(steps), wanted[steps])
    resumed = moved(read_weights(world.publish(steps + 1)), weights[steps], weights[steps - 1])
    errors["resumed"] = float(np.max([resumed, *again.values()]))
    return errors


def work(
    rank: int, world_size: int, folder: str, cases: list[Case], resume: dict[str, str], steps: int, kind: str = "cpu"
) -> None:
    """One rank's life, on a `cpu` or a `cuda` device. Rank 0 writes `world_<n>.json`: errors by case name."""
    from tests.proofs.layout_breaks import broken

    torch.set_num_threads(1)
    root, own = Path(folder), torch.device("cuda", rank) if kind == "cuda" else None
    if own is not None:
        torch.cuda.set_device(own)
    dist.init_process_group(
        "gloo" if own is None else "nccl",
        init_method=f"file://{root}/store_{world_size}_{len(cases)}",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=120),
        device_id=own,
    )
    found: dict[str, Any] = {}
    for i, case in enumerate(cases):
        out = root / f"run_{world_size}_{i}"
        if world_size == 1:
            run_alone(case, root / "models", root / f"alone {case.name}", steps)
            continue
        alone = root / f"alone {case.alone.name}"
        before = Path(resume.get(case.alone.name, str(alone)))
        with broken(case.break_with):
            found[case.name] = run_case(case, root / "models", alone, before, out, steps)
        if case.break_with is None:
            resume[case.alone.name] = str(out)
    if rank == 0:
        result = {"errors": found, "resume": resume}
        (root / f"world_{world_size}.json").write_text(json.dumps(result), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


def each_error(found: dict[str, dict[str, float]]) -> Iterator[tuple[str, str, float]]:
    """(case, claim, error)."""
    for name, errors in found.items():
        for claim, error in errors.items():
            yield name, claim, error
