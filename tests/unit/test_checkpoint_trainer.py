"""The trainer's checkpoints in one process: what is saved is the state at the boundary, whatever comes after."""

import errno
import os
import shutil
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from prime_hpc.config.sections.common import CkptConfig, ModelConfig
from prime_hpc.config.sections.trainer import TrainerConfig
from prime_hpc.runtime.failures import is_permanent
from prime_hpc.store.batch.rank_files import write_batch
from prime_hpc.store.checkpoint.checkpoints import resolve_resume
from prime_hpc.store.errors import NoRoom, StoreError
from prime_hpc.store.io import files, room
from prime_hpc.store.messaging.bus import BusClient, BusServer
from prime_hpc.store.model.fingerprint import model_identity
from prime_hpc.store.run_paths import RunPaths, claim_incarnation, list_steps
from prime_hpc.trainer.checkpointing import dcp_state, staging
from prime_hpc.trainer.checkpointing.checkpointer import Checkpointer
from prime_hpc.trainer.checkpointing.saver import Saver
from prime_hpc.trainer.checkpointing.staging import HostStage
from prime_hpc.trainer.model.load_policy import load_policy
from prime_hpc.trainer.objectives import rl_loss
from prime_hpc.trainer.optim import build_optimizer
from prime_hpc.trainer.parallel import build_parallel
from prime_hpc.trainer.parallel.tensor import local
from prime_hpc.trainer.train_step import TrainStep
from tests.support.tiny_model import make_tiny_model, random_rank_batch

CONFIG = TrainerConfig.model_validate({"optim": {"lr": 1e-2}})


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"))


class Trainer:
    """A policy, its engine and its checkpointer."""

    def __init__(self, model: Path, root: Path, trainer: TrainerConfig = CONFIG, **ckpt: Any) -> None:
        parallel = build_parallel(trainer.parallel_dims, "cpu")
        config = ModelConfig(name=str(model), dtype="float32")
        self.policy = load_policy(
            config, model, parallel, torch.device("cpu"), reshard_after_forward=True, chunk_tokens=512
        )
        self.optimizer = build_optimizer(self.policy, trainer.optim)
        self.train_step = TrainStep(
            self.policy,
            self.optimizer,
            trainer,
            max_steps=100,
            normalize="token",
            device=torch.device("cpu"),
            peak_flops=1.0,
        )
        self.paths = RunPaths(root)
        meta = {"kind": "rl", "identity": model_identity(model)}
        self.checkpointer = Checkpointer(
            self.policy, self.optimizer, self.paths, incarnation=0, meta=meta, config=CkptConfig(**ckpt)
        )

    def step(self, n: int) -> None:
        batch = random_rank_batch([[20, 9], [15]], seed=n, step=n)
        self.train_step.run(n, batch, partial(rl_loss, CONFIG.loss))
        if not self.paths.rollouts_step(n).exists():
            write_batch(self.paths, n, [batch], state={"step": n})

    def save(self, n: int) -> None:
        self.checkpointer.save(n, progress={"num_samples": 3 * n}, batch_dir=self.paths.rollouts_step(n))

    def state(self) -> dict[str, torch.Tensor]:
        named = dcp_state.named_state(self.policy, self.optimizer)
        return {name: local(tensor).clone() for name, tensor in named.items()}


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def stages(paths: RunPaths) -> list[str]:
    return [name for name in files.list_dir(paths.checkpoints) if name.startswith(".")]


def test_save_and_load_are_exact(group: None, model: Path, tmp_path: Path) -> None:
    first = Trainer(model, tmp_path / "run")
    first.step(1)
    torch.manual_seed(7)
    np.random.seed(8)
    first.save(1)
    expected, draws = first.state(), (torch.rand(3), np.random.rand(3))
    second = Trainer(model, tmp_path / "run")
    second.step(5)
    info = resolve_resume(first.paths.checkpoints, "latest")
    assert second.checkpointer.load(info) == {"step": 1, "num_samples": 3}
    assert same(second.state(), expected)
    assert torch.equal(torch.rand(3), draws[0]) and np.array_equal(np.random.rand(3), draws[1])
    first.step(2)
    second.step(2)
    assert same(first.state(), second.state())
    assert not stages(first.paths)


def test_ranks_on_the_cpu_leave_the_machines_gpus_alone(
    group: None, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`trainer.backend = gloo` by hand: to ask CUDA for anything makes a context on the first GPU, of every rank."""

    def touched(*_: Any) -> None:
        raise AssertionError("a GPU was touched")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)  # optimizers ask it; ranks hide GPUs from it
    for name in ("get_rng_state", "current_stream", "cudart"):
        monkeypatch.setattr(torch.cuda, name, touched)
    trainer = Trainer(model, tmp_path / "run", save_async=True)
    trainer.step(1)
    trainer.checkpointer.save(1, progress={}, batch_dir=None)
    trainer.checkpointer.finish()
    assert trainer.paths.checkpoint_step(1).is_dir()


@pytest.mark.parametrize("staging", ["memory", "disk"])
def test_in_the_background_the_state_at_the_boundary_is_saved(
    group: None, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, staging: str
) -> None:
    """The copy begins only when the next update is asked for, which must wait for it; the disk lets nothing through
    until two more steps are done."""
    where: dict[str, Any] = {"staging_dir": tmp_path / "local"} if staging == "disk" else {}
    trainer = Trainer(model, tmp_path / "run", save_async=True, **where)
    trainer.step(1)
    trainer.checkpointer.prepare()
    expected = trainer.state()
    copy, update = HostStage.copy, trainer.train_step._update
    asked, go = threading.Event(), threading.Event()

    def late_copy(*args: Any) -> None:
        assert asked.wait(30)
        time.sleep(0.05)
        copy(*args)

    def marked_update(*args: Any) -> None:
        asked.set()
        update(*args)

    def slow_disk(operation: str, path: Path) -> None:
        if operation == "fsync" and threading.current_thread().name == "save-1":
            go.wait(30)

    monkeypatch.setattr(HostStage, "copy", late_copy)
    monkeypatch.setattr(trainer.train_step, "_update", marked_update)
    with files.observe_operations(slow_disk):
        trainer.save(1)
        assert trainer.checkpointer.in_flight == 1
        trainer.step(2)
        trainer.step(3)
        assert not trainer.checkpointer.has_ended
        assert list_steps(trainer.paths.checkpoints, digits=0) == []
        go.set()
        trainer.checkpointer.finish()
    assert trainer.checkpointer.in_flight is None
    figures = trainer.checkpointer.take_figures()
    assert figures is not None and figures.step == 1 and figures.stall_s >= 0.05
    again = Trainer(model, tmp_path / "run")
    again.checkpointer.load(resolve_resume(trainer.paths.checkpoints, 1))
    assert same(again.state(), expected) and not same(again.state(), trainer.state())
    if staging == "disk":
        assert list((tmp_path / "local").iterdir()) == []


def test_one_save_at_a_time_and_each_is_its_own(group: None, model: Path, tmp_path: Path) -> None:
    trainer = Trainer(model, tmp_path / "run", save_async=True, keep_last=2)
    states = {}
    for n in range(1, 5):
        trainer.step(n)
        trainer.save(n)
        states[n] = trainer.state()
    trainer.checkpointer.finish()
    assert list_steps(trainer.paths.checkpoints, digits=0) == [3, 4]
    for n in (3, 4):
        again = Trainer(model, tmp_path / "run")
        again.checkpointer.load(resolve_resume(trainer.paths.checkpoints, n))
        assert same(again.state(), states[n])


def test_a_request_is_answered_by_the_save_of_its_own_step(group: None, model: Path, tmp_path: Path) -> None:
    """Not by one that was in flight when it came: who asked ends the attempt then, and loses the steps between."""
    trainer = Trainer(model, tmp_path / "run", save_async=True)
    go = threading.Event()

    def slow_disk(operation: str, path: Path) -> None:
        if operation == "fsync" and threading.current_thread().name == "save-1":
            go.wait(30)

    heard: list[tuple[int, list[int]]] = []
    hub = BusServer(on_message=lambda _, said: heard.append((said["step"], said["ids"])))
    bus = BusClient(hub.address, "trainer[0]")
    config = CkptConfig(save_async=True)
    saver = Saver(trainer.checkpointer, trainer.paths, bus, config=config, max_steps=9)

    def save(step: int) -> None:
        saver.save(step, progress={}, batch_dir=trainer.paths.rollouts_step(step))

    with files.observe_operations(slow_disk):
        trainer.step(1)
        save(1)
        hub.publish("save", id=7)
        assert bus.wait("save", lambda _: True, 30) is not None
        saver.take_up()
        trainer.step(2)
        go.set()
        save(2)
        saver.finish()
    bus.close()
    hub.close()
    assert heard == [(1, []), (2, [7])]


def test_a_disk_without_room_is_told_in_units_that_fit(
    group: None, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = Trainer(model, tmp_path / "run", save_async=False)
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=2048))
    with pytest.raises(StoreError, match=r"takes about [1-9][\d.]* [KM]iB, 2.0 KiB are free"):
        trainer.save(1)


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("operation", ["create", "write", "fsync", "mkdir", "rename"])
def test_a_full_disk_ends_the_save_with_its_reason(
    group: None, model: Path, tmp_path: Path, is_async: bool, operation: str
) -> None:
    trainer = Trainer(model, tmp_path / "run", save_async=is_async)
    trainer.step(1)

    def full(seen: str, path: Path) -> None:
        if seen == operation and "checkpoints" in path.parts:
            raise OSError(28, "No space left on device", str(path))

    with files.observe_operations(full), pytest.raises(StoreError, match="disk full"):
        trainer.save(1)
        trainer.step(2)
        while not trainer.checkpointer.has_ended:
            time.sleep(0.01)
        trainer.checkpointer.wait_for_save()
    assert list_steps(trainer.paths.checkpoints, digits=0) == [] and not stages(trainer.paths)
    trainer.save(1)  # the disk has room again
    trainer.checkpointer.finish()
    assert list_steps(trainer.paths.checkpoints, digits=0) == [1]


def test_an_older_life_cannot_commit_in_the_background(group: None, model: Path, tmp_path: Path) -> None:
    trainer = Trainer(model, tmp_path / "run", save_async=True)
    trainer.step(1)
    claim_incarnation(trainer.paths)
    trainer.save(1)
    with pytest.raises(StoreError, match="incarnation 1 has begun"):
        trainer.checkpointer.finish()
    assert list_steps(trainer.paths.checkpoints, digits=0) == []


def test_too_little_memory_is_said_before_the_first_save(
    group: None, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = Trainer(model, tmp_path / "run", save_async=True)
    trainer.step(1)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(1 << 24))
    with pytest.raises(StoreError, match=r"needs .* GiB of host memory.*ckpt.staging_dir"):
        trainer.checkpointer.prepare()


def test_what_does_not_fit_is_refused_with_the_reason(group: None, model: Path, tmp_path: Path) -> None:
    trainer = Trainer(model, tmp_path / "run")
    trainer.step(1)
    trainer.save(1)
    info = resolve_resume(trainer.paths.checkpoints, 1)
    untied = make_tiny_model(tmp_path / "untied", tied=False)
    with pytest.raises(StoreError, match="tie_word_embeddings was True, is False"):
        Trainer(untied, tmp_path / "other").checkpointer.load(info)
    blind = Trainer(untied, tmp_path / "other")  # as when a checkpoint does not say what it is of
    blind.checkpointer._meta = {}
    with pytest.raises(StoreError, match=r"of another model: it lacks model.hf.lm_head.weight \(1 tensors differ\)"):
        blind.checkpointer.load(info)
    sign = TrainerConfig.model_validate({"optim": {"type": "signsgd", "lr": 1e-2}})
    with pytest.raises(StoreError, match="another optimizer's state.*resume with the optimizer") as caught:
        Trainer(model, tmp_path / "other", sign).checkpointer.load(info)
    assert is_permanent(caught.value), "no attempt that the queue gives it would end otherwise"
    sft = Trainer(model, tmp_path / "other")
    sft.checkpointer._meta = {"kind": "sft"}
    with pytest.raises(StoreError, match="of a rl run, this is sft"):
        sft.checkpointer.load(info)


def test_parameters_without_a_gradient_have_no_state_then_and_now(group: None, model: Path, tmp_path: Path) -> None:
    """As a vision tower that no text reaches, and as before the first step."""
    first = Trainer(model, tmp_path / "run")
    write_batch(first.paths, 1, [random_rank_batch([[20]], seed=1, step=1)], state={})
    first.save(1)
    second = Trainer(model, tmp_path / "run")
    second.step(5)
    second.checkpointer.load(resolve_resume(first.paths.checkpoints, 1))
    assert not second.optimizer.state and same(second.state(), first.state())
    first.step(2)
    idle, *_ = first.policy.parameters()
    del first.optimizer.state[idle]
    first.save(2)
    third = Trainer(model, tmp_path / "run")
    third.checkpointer.load(resolve_resume(first.paths.checkpoints, 2))
    assert same(third.state(), first.state())
    for trainer in (first, third):
        trainer.step(3)
    assert same(third.state(), first.state()) and len(first.optimizer.state) == len(list(first.policy.parameters()))


@pytest.mark.parametrize("kind", ["muon", "signsgd"])
def test_other_optimizers_are_exact_too(group: None, model: Path, tmp_path: Path, kind: str) -> None:
    config = TrainerConfig.model_validate({"optim": {"type": kind, "lr": 1e-3, "momentum": 0.9}})
    first = Trainer(model, tmp_path / "run", config, save_async=True)
    first.step(1)
    first.save(1)
    first.checkpointer.finish()
    second = Trainer(model, tmp_path / "run", config)
    second.checkpointer.load(resolve_resume(first.paths.checkpoints, 1))
    first.step(2)
    second.step(2)
    assert same(first.state(), second.state())


def saver_of(trainer: Trainer, *, is_async: bool, max_steps: int = 9, room_s: float = 60.0) -> Saver:
    config = CkptConfig(save_async=is_async, interval=1)
    bus = BusClient(None, "trainer[0]")
    return Saver(trainer.checkpointer, trainer.paths, bus, config=config, max_steps=max_steps, room_s=room_s)


@pytest.mark.parametrize("is_async", [False, True])
def test_training_goes_on_without_a_checkpoint_for_which_there_is_no_room(
    group: None, model: Path, tmp_path: Path, is_async: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = Trainer(model, tmp_path / "run", save_async=is_async, keep_last=2)
    saver = saver_of(trainer, is_async=is_async)
    is_full, tried = [False], list[str]()

    def full(operation: str, path: Path) -> None:
        if is_full[0] and operation == "write" and "checkpoints" in path.parts:
            tried.append(path.name)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    def save(step: int) -> None:
        trainer.step(step)
        if saver.is_due(step, lambda yes: yes):
            saver.save(step, progress={}, batch_dir=trainer.paths.rollouts_step(step))
            saver.finish()

    with files.observe_operations(full):
        save(1)
        save(2)
        is_full[0] = True
        save(3)  # keep_last: with this one the first would have gone
        assert list_steps(trainer.paths.checkpoints, digits=0) == [2] and not stages(trainer.paths)
        saver._config = None  # the next one is due because this one failed
        save(4)
        save(5)
        assert len(tried) == 2, "at once where retention has freed some, else after RETRY_S"
        is_full[0] = False
        monkeypatch.setattr(saver, "_again_at", 0.0)
        save(6)
        save(7)
    assert list_steps(trainer.paths.checkpoints, digits=0) == [2, 6] and not stages(trainer.paths)


def test_while_the_next_one_is_being_written_no_further_one_is_due(
    group: None, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = Trainer(model, tmp_path / "run", save_async=True)
    saver = saver_of(trainer, is_async=True)
    is_full, may_write = True, threading.Event()

    def observe(operation: str, path: Path) -> None:
        if operation == "write" and "checkpoints" in path.parts:
            if is_full:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
            may_write.wait(60)

    with files.observe_operations(observe):
        trainer.step(1)
        saver.save(1, progress={}, batch_dir=trainer.paths.rollouts_step(1))
        saver.finish()
        is_full, saver._config = False, None
        monkeypatch.setattr(saver, "_again_at", 0.0)
        trainer.step(2)
        assert saver.is_due(2, lambda yes: yes)
        saver.save(2, progress={}, batch_dir=trainer.paths.rollouts_step(2))
        assert saver.in_flight == 2 and not saver.is_due(3, lambda yes: yes)
        may_write.set()
        saver.finish()
    assert list_steps(trainer.paths.checkpoints, digits=0) == [2]


@pytest.mark.parametrize("is_async", [False, True])
def test_no_checkpoint_is_deleted_because_the_file_system_answers_with_errors(
    group: None, model: Path, tmp_path: Path, is_async: bool
) -> None:
    trainer = Trainer(model, tmp_path / "run", save_async=is_async, keep_last=2)
    saver = saver_of(trainer, is_async=is_async)
    is_broken = False

    def observe(operation: str, path: Path) -> None:
        if is_broken and operation == "write" and "checkpoints" in path.parts:
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))

    with files.observe_operations(observe):
        for step in (1, 2, 3):
            is_broken = step == 3
            trainer.step(step)
            saver.save(step, progress={}, batch_dir=trainer.paths.rollouts_step(step))
            saver.finish()
    assert list_steps(trainer.paths.checkpoints, digits=0) == [1, 2]


@pytest.mark.parametrize("is_async", [False, True])
def test_the_last_checkpoint_waits_for_room(
    group: None, model: Path, tmp_path: Path, is_async: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(room, "FIRST_PAUSE_S", 0.01)
    trainer = Trainer(model, tmp_path / "run", save_async=is_async)
    saver = saver_of(trainer, is_async=is_async, max_steps=2)
    left = [3]

    def full(operation: str, path: Path) -> None:
        if operation == "write" and "checkpoints" in path.parts and left[0]:
            left[0] -= 1
            raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT), str(path))

    with files.observe_operations(full):
        trainer.step(1)
        saver.save(1, progress={}, batch_dir=trainer.paths.rollouts_step(1), is_last=True)  # before a stop
        assert list_steps(trainer.paths.checkpoints, digits=0) == [1] and left == [0]
        left[0] = 3
        trainer.step(2)
        saver.save(2, progress={}, batch_dir=trainer.paths.rollouts_step(2))
        assert list_steps(trainer.paths.checkpoints, digits=0) == [1, 2] and left == [0]
        left[0] = 99
        saver.room_s = 0.0
        saver.max_steps = 3
        trainer.step(3)
        with pytest.raises(NoRoom, match="quota exceeded.*waited 0 s"):
            saver.save(3, progress={}, batch_dir=trainer.paths.rollouts_step(3))
    assert not stages(trainer.paths)


def test_a_nodes_disk_that_is_too_small_for_staging_is_no_want_of_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the run would wait for it, and delete checkpoints on another disk."""

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("os.posix_fallocate", full)
    with pytest.raises(StoreError, match="disk full") as found:
        staging._file_backed(1 << 20, tmp_path / "local")
    assert not isinstance(found.value, NoRoom)
