"""Adapters of the tinker service: what one may load of another one's saves."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from prime_hpc.config import Experiment, load_experiment
from prime_hpc.store.errors import Unreadable
from prime_hpc.store.run_paths import RunPaths
from prime_hpc.trainer.checkpointing import dcp_state
from prime_hpc.trainer.parallel.tensor import local
from prime_hpc.trainer.tinker.adapter import AdamStep, Adapter
from prime_hpc.trainer.tinker.batches import BadRequestError, check_data, check_loss
from prime_hpc.trainer.tinker.paths import Saved, Shape, new_save
from prime_hpc.trainer.tinker.wire import Datum
from prime_hpc.trainer.tinker.worker import CONTAINED
from prime_hpc.trainer.trainer import Base, load_base
from tests.support.tiny_model import make_tiny_model

pytestmark = pytest.mark.usefixtures("group")

LENGTHS = ["--seq-len", "64", "--orchestrator.sampling.max-tokens", "32"]
LORA = ["--model.dtype", "float32", "--model.lora.rank", "4", "--trainer.max-concurrent-runs", "2", "--trainer.tinker"]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory, group: None) -> tuple[Base, Experiment]:
    model = make_tiny_model(tmp_path_factory.mktemp("model"))
    experiment = load_experiment(["--model.name", str(model), *LORA, *LENGTHS], "trainer", {}).experiment
    return load_base(experiment, torch.device("cpu"), 2), experiment


def adapter(world: tuple[Base, Experiment], slot: int, root: Path, train_attn: bool = True) -> Adapter:
    return Adapter(*world, slot, Shape(world[1].model.name, 4, slot, train_attn), RunPaths(root))


def forward(one: Adapter) -> None:
    tokens = np.arange(1, 11)
    data: Any = [Datum(tokens, {"target_tokens": tokens + 1, "weights": np.ones(10, np.float32)})]
    examples = check_data(data, "cross_entropy", 64, 64)
    one.run_pass(examples, "cross_entropy", check_loss("cross_entropy", {}), forward_only=False)


def update(one: Adapter) -> None:
    one.update(AdamStep(1e-2, (0.9, 0.95), 1e-12, 0.0, 0.0))


def step(one: Adapter) -> None:
    forward(one)
    update(one)


def save(one: Adapter, root: Path) -> Saved:
    one.save(1)
    kept = new_save(1, one.steps, has_optimizer=one.has_optimizer, user_metadata=None)
    return Saved("tinker://a/weights/x", "a", "weights", "x", one._shape, kept, RunPaths(root))


def tensors(one: Adapter) -> dict[str, torch.Tensor]:
    named = dcp_state.named_state(one._base.policy, one._optimizer, one.slot)
    return {name: local(tensor).clone() for name, tensor in named.items()}


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_the_optimizer_of_other_parts_is_refused_and_the_weights_are_not(world: Any, tmp_path: Path) -> None:
    partly = adapter(world, 0, tmp_path / "a", train_attn=False)
    step(partly)
    saved = save(partly, tmp_path / "a")
    whole = adapter(world, 1, tmp_path / "b")
    step(whole)
    before = tensors(whole)
    with pytest.raises(BadRequestError, match=r"train_attn=False.*load the weights without the optimizer"):
        whole.load(saved, with_optimizer=True)
    assert same(tensors(whole), before) and whole.steps == 1
    whole.load(saved, with_optimizer=False)
    loaded, then = tensors(whole), tensors(partly)
    assert all(torch.equal(loaded[name], then[name]) for name in loaded) and whole.steps == 0
    again = adapter(world, 1, tmp_path / "c", train_attn=False)
    again.load(saved, with_optimizer=True)
    assert same(tensors(again), then) and again.steps == 1


def test_a_save_that_lacks_tensors_is_the_clients_error(
    world: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = adapter(world, 0, tmp_path / "a")
    step(one)
    saved = save(one, tmp_path / "a")
    read = dcp_state.read_metadata

    def without(part: str) -> Any:
        def reading(directory: Path) -> Any:
            found = read(directory)
            names = [name for name in found.state_dict_metadata if part in name]
            del found.state_dict_metadata[names[0]]
            return found

        return reading

    for part, said in (("model.lora", "another model"), (".exp_avg_sq", "another optimizer's state")):
        monkeypatch.setattr(dcp_state, "read_metadata", without(part))
        before = tensors(one)
        with pytest.raises(BadRequestError, match=said):
            one.load(saved, with_optimizer=True)
        now = tensors(one)
        assert all(torch.equal(now[name], before[name]) for name in now if name.startswith(dcp_state.MODEL))


@pytest.mark.parametrize("with_optimizer", [True, False])
def test_an_adapter_is_as_before_where_a_save_cannot_be_read(
    with_optimizer: bool, world: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was left with a part of the other's weights, without its own optimizer and gradients, and trained on."""
    other = adapter(world, 0, tmp_path / "other")
    step(other)
    saved = save(other, tmp_path / "other")
    reads, ends = dcp_state.load_state, list[dict[str, torch.Tensor]]()

    def breaks(directory: Path, state: dict[str, torch.Tensor]) -> None:
        reads(directory, dict(list(state.items())[:3]))
        raise Unreadable(directory, "Stale file handle", 116)

    monkeypatch.setattr(dcp_state, "load_state", breaks)
    for fails in (False, True):
        one = adapter(world, 1, tmp_path / str(fails))
        step(one)
        forward(one)
        if fails:
            before = tensors(one)
            with pytest.raises(Unreadable, match="Stale file handle"):
                one.load(saved, with_optimizer=with_optimizer)
            assert same(tensors(one), before)
        update(one)
        ends.append(tensors(one))
    assert same(*ends) and one.steps == 2


def test_what_torch_cannot_load_is_an_error_that_is_contained(world: Any, tmp_path: Path) -> None:
    one = adapter(world, 0, tmp_path / "a")
    save(one, tmp_path / "a")
    folder = RunPaths(tmp_path / "a").checkpoint_step(1) / "trainer"
    with pytest.raises(CONTAINED, match=r"cannot be loaded: rank 0: .*no_such"):
        dcp_state.load_state(folder, {"no_such": torch.zeros(1)})
    for file in folder.glob("*.distcp"):
        file.unlink()
    with pytest.raises(CONTAINED, match="cannot be loaded: rank 0"):
        dcp_state.load_state(folder, tensors(one))
