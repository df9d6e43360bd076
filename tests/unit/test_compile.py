"""`model.compile`: graphs are made in every combination that is allowed, and change no number beyond rounding."""

from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from prime_hpc.config import Experiment
from prime_hpc.config.sections.common import ModelConfig
from prime_hpc.config.sections.parallel import ParallelDims
from prime_hpc.config.sections.trainer import LossConfig, OptimConfig, TrainerConfig
from prime_hpc.trainer.model.load_policy import load_policy
from prime_hpc.trainer.objectives import rl_loss
from prime_hpc.trainer.optim import build_optimizer
from prime_hpc.trainer.parallel import build_parallel
from prime_hpc.trainer.train_step import TrainStep
from tests.support.tiny_model import make_tiny_model, random_rank_batch

CPU = torch.device("cpu")


class Backend:
    """Runs a graph as it is, and counts."""

    def __init__(self) -> None:
        self.graphs = self.products = 0

    def __call__(self, graph: Any, inputs: Any) -> Any:
        self.graphs += 1
        names = [str(node.target) for node in graph.graph.nodes]
        linear = ("linear", "matmul", "trampoline_autograd_apply")  # the last: float8's own function
        self.products += sum(any(word in name for word in linear) for name in names)
        return graph.forward


@pytest.fixture(scope="module")
def folders(group: None, tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """A dense model and one with experts, in a process group of one."""
    return {n: make_tiny_model(tmp_path_factory.mktemp("model"), experts=n) for n in (0, 4)}


def train(folder: Path, model: dict[str, Any]) -> dict[str, float]:
    """Two RL steps' last metrics."""
    config = ModelConfig.model_validate({"name": str(folder), "dtype": "float32", **model})
    policy = load_policy(
        config, folder, build_parallel(ParallelDims(), "cpu"), CPU, reshard_after_forward=True, chunk_tokens=64
    )
    adapter, section = None, OptimConfig(lr=1e-2)
    if policy.adapters is not None:
        policy.adapters.reset(0, 0)
        adapter = policy.adapters.parameters(0)
    train_step = TrainStep(
        policy, build_optimizer(policy, section, adapter), TrainerConfig(optim=section, no_sync=False),
        max_steps=9, normalize="token", device=CPU, peak_flops=1.0,
    )  # fmt: skip
    for step in (1, 2):
        batch = random_rank_batch([[20, 9], [15]], seed=step, step=step)
        metrics = train_step.run(step, batch, partial(rl_loss, LossConfig()))
    return metrics


BFLOAT16 = {"dtype": "bfloat16"}
CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "alone": (0, {}),
    "ac full": (0, {"ac": {}}),
    "ac selective": (0, {"ac": {"mode": "selective"}}),
    "ac offload": (0, {"ac": {"offload": True}}),
    "lora, ac": (0, {"lora": {"rank": 4}, "ac": {}}),
    "fp8, ac selective": (0, {**BFLOAT16, "fp8": True, "ac": {"mode": "selective"}}),
    "experts, ac": (4, {"ac": {}}),
}


SAMPLE = {"fp8, ac selective"}


@pytest.mark.parametrize(
    ("experts", "model"),
    [
        pytest.param(*case, id=name, marks=[] if name in SAMPLE else pytest.mark.exhaustive)
        for name, case in CASES.items()
    ],
)
def test_graphs_are_made_and_numbers_stay(folders: dict[int, Path], experts: int, model: dict[str, Any]) -> None:
    eager, backend = train(folders[experts], model), Backend()
    torch.compiler.reset()
    with mock.patch.object(torch, "compile", partial(torch.compile, backend=backend)):
        found = train(folders[experts], model | {"compile": True})
    assert backend.graphs > 0 and backend.products > 0
    rel = 2e-2 if model.get("dtype") == "bfloat16" else 1e-4
    for key in ("loss", "grad_norm", "entropy", "kl"):
        assert found[key] == pytest.approx(eager[key], rel=rel, abs=1e-6), key


def test_float8_goes_with_compilation() -> None:
    with pytest.raises(ValueError, match=r"model\.fp8.*model\.compile"):
        Experiment.model_validate({"model": {"fp8": True}})
    Experiment.model_validate({"model": {"fp8": True, "compile": True}})
