"""What fails on one of two ranks is raised on both, and the next collective is the same on both."""

import datetime
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from prime_hpc.config.sections.common import CkptConfig, ModelConfig
from prime_hpc.config.sections.parallel import ParallelConfig
from prime_hpc.config.sections.trainer import OptimConfig
from prime_hpc.store.artifact import stage_dir
from prime_hpc.store.checkpoint.checkpoints import resolve_resume
from prime_hpc.store.errors import FencedError, StoreError, Unreadable
from prime_hpc.store.io import files
from prime_hpc.store.run_paths import RunPaths
from prime_hpc.trainer.checkpointing import dcp_state, staging
from prime_hpc.trainer.checkpointing.checkpointer import Checkpointer
from prime_hpc.trainer.checkpointing.staging import HostStage
from prime_hpc.trainer.model.load_policy import load_policy
from prime_hpc.trainer.model.policy import Policy
from prime_hpc.trainer.optim import build_optimizer
from prime_hpc.trainer.parallel import build_parallel
from prime_hpc.trainer.rank_group import OF_A_RUN, OF_FILES, RankGroup
from prime_hpc.trainer.replay import dump_failed_step
from prime_hpc.trainer.replay.dump_failed_step import dump_for_replay
from prime_hpc.trainer.train_step import NonFiniteError
from prime_hpc.trainer.weights import gathering
from prime_hpc.trainer.weights.lora_files import AdapterPublisher
from prime_hpc.trainer.weights.publish import Publisher
from tests.support.lora import lora_policy
from tests.support.ranks import spawn
from tests.support.tiny_model import make_tiny_model, random_rank_batch

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

DEADLINE_S = 20.0
"""Of a collective in which one rank waits for the other in vain."""


def begin(rank: int, store: str) -> None:
    torch.set_num_threads(1)
    limit = datetime.timedelta(seconds=DEADLINE_S)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2, timeout=limit)


def load(model: Path) -> Policy:
    parallel = build_parallel(ParallelConfig().dims(2), "cpu")
    config = ModelConfig(name=str(model), dtype="float32")
    return load_policy(config, model, parallel, torch.device("cpu"), reshard_after_forward=True, chunk_tokens=64)


def all_raise(action: Callable[[], Any], match: str) -> None:
    """Both ranks raise the same, and meet again."""
    with pytest.raises(StoreError, match=match) as caught:
        action()
    assert len(set(RankGroup().gather_all(str(caught.value)))) == 1


def agree(rank: int, store: str) -> None:
    begin(rank, store)
    ranks, side = RankGroup(), RankGroup(DEADLINE_S)
    on_all, from_first = ranks.on_all, ranks.from_first
    assert on_all(lambda: rank) == rank and from_first(lambda: f"of rank {rank}") == "of rank 0"
    for group in (ranks, side):
        assert group.gather(rank) == ([0, 1] if rank == 0 else None) and group.gather_all(rank) == [0, 1]
        assert group.broadcast(rank) == 0

    def fail_on(wanted: int, error: Exception) -> Callable[[], None]:
        def act() -> None:
            if rank == wanted:
                raise error

        return act

    all_raise(lambda: on_all(fail_on(1, StoreError("disk full"))), "^rank 1: disk full$")
    all_raise(lambda: on_all(fail_on(rank, StoreError("disk full"))), "^disk full$")
    all_raise(lambda: from_first(fail_on(0, OSError(28, "No space left on device", "/run"))), "No space left")
    with pytest.raises(Unreadable, match=r"rank 0: .*Input/output error"):
        on_all(fail_on(0, OSError(5, "Input/output error", "/run")))
    all_raise(lambda: on_all(fail_on(1, ValueError("another schema")), OF_A_RUN), "^rank 1: ValueError: another schema")
    all_raise(lambda: side.on_all(fail_on(1, RuntimeError("the device"))), "^rank 1: RuntimeError: the device$")
    for told in (OF_FILES, OF_A_RUN):  # its own process's: it ends, and with it the trainer
        with pytest.raises(RuntimeError, match="^the device$") as caught:
            on_all(fail_on(rank, RuntimeError("the device")), told)
        assert not isinstance(caught.value, StoreError)
    side.close()
    dist.destroy_process_group()


def test_a_failure_is_raised_on_every_rank(tmp_path: Path) -> None:
    spawn(agree, (str(tmp_path / "store"),), 2)


def trainer_of(policy: Policy, rank: int, root: Path) -> Any:
    """What of a trainer keeps a refused step."""
    return SimpleNamespace(
        experiment=SimpleNamespace(
            model=ModelConfig(name=str(root / "model"), dtype="float32"), trainer=SimpleNamespace(critic=None)
        ),
        paths=RunPaths(root / "run"),
        rank=rank,
        world_size=2,
        parallel=policy.parallel,
        source=root / "model",
        train_step=SimpleNamespace(policy=policy, slot=0, state={}, critic=None),
    )


def keep_refused(rank: int, store: str, root: Path) -> None:
    """A refused step is kept while one rank after the other meets a disk that has no room, wherever it writes."""
    begin(rank, store)
    os.environ |= {"LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0"}  # as two nodes: tensors are gathered as they are written
    policy = load(root / "model")
    trainer: Any = trainer_of(policy, rank, root)
    error = NonFiniteError("nan", 3, random_rank_batch([[5]], seed=rank))
    written: list[Path] = []
    setattr(dump_failed_step, "write_snapshot", lambda _, folder, __: written.append(folder))  # noqa: B010
    setattr(dump_failed_step, "_with_model", lambda experiment, _: experiment)  # noqa: B010
    kept = RunPaths(trainer.paths.failed_step(3))
    for failing in (0, 1):
        for wanted in ("mkdir", "create", "write", "fsync") if failing == 0 else ("create", "write", "fsync"):

            def full(operation: str, path: Path, wanted: str = wanted, failing: int = failing) -> None:
                if operation == wanted and rank == failing and "failed" in path.parts:
                    raise OSError(28, "No space left on device", str(path))

            with files.observe_operations(full):
                all_raise(lambda: dump_for_replay(trainer, error), "disk full")
            assert not kept.weights_step(2).exists() and not stage_dir(kept.weights_step(2), 0).exists()
    snapshot = dump_failed_step.write_snapshot

    def wrong(*_: Any) -> None:
        raise ValueError("no such key")

    setattr(dump_failed_step, "write_snapshot", wrong)  # noqa: B010
    all_raise(lambda: RankGroup().on_all(lambda: dump_for_replay(trainer, error), OF_A_RUN), "ValueError: no such key")
    setattr(dump_failed_step, "write_snapshot", snapshot)  # noqa: B010
    dump_for_replay(trainer, error)
    assert kept.weights_step(2).exists() and written == ([kept.root] if rank == 0 else [])
    with files.observe_operations(full_at("rename", rank)):  # what an earlier attempt has left cannot be taken away
        all_raise(lambda: dump_for_replay(trainer, error), "disk full")
    dist.destroy_process_group()


def gather_on_full_device(rank: int, store: str, root: Path, where: str, keeps: bool) -> None:
    """A rank whose device is full while tensors are gathered leaves with its own error, and so ends the other's wait.
    `keeps`: a refused step is kept, else a version is published."""
    begin(rank, store)
    os.environ |= {"LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0"}  # as two nodes: tensors are gathered as they are written
    setattr(gathering, "ROUND_BYTES", 8192)  # noqa: B010 - of many rounds it is neither the first nor the last
    policy = load(root / "model")
    action, rounds = getattr(gathering.Gathering, where), []

    def full(*arguments: Any) -> Any:
        rounds.append(arguments)
        if rank == 1 and len(rounds) == 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return action(*arguments)

    setattr(gathering.Gathering, where, full)
    with pytest.raises(torch.OutOfMemoryError if rank == 1 else RuntimeError) as caught:
        if keeps:
            trainer: Any = trainer_of(policy, rank, root)
            dump_for_replay(trainer, NonFiniteError("nan", 3, random_rank_batch([[5]], seed=rank)))
        else:
            paths = RunPaths(root / "run")
            publisher = Publisher(policy, root / "model", paths, dtype=torch.float32, incarnation=0, model_name="tiny")
            publisher.publish(1)
    assert isinstance(caught.value, torch.OutOfMemoryError) == (rank == 1)
    assert not list((root / "run").rglob("*.safetensors")) or rank == 1


@pytest.mark.parametrize("keeps", [False, True], ids=["published", "kept"])
@pytest.mark.parametrize("where", ["_exchange", "_assemble"])
def test_a_rank_whose_device_is_full_while_it_gathers_ends_the_others_wait(
    tmp_path: Path, where: str, keeps: bool
) -> None:
    (tmp_path / "model").mkdir()
    make_tiny_model(tmp_path / "model")
    spawn(gather_on_full_device, (str(tmp_path / "store"), tmp_path, where, keeps), 2)


def save_and_load(rank: int, store: str, root: Path) -> None:
    """Of two ranks one has no room for the copies of its saves; then one cannot read what a checkpoint holds."""
    begin(rank, store)
    policy = load(root / "model")
    optimizer = build_optimizer(policy, OptimConfig())
    paths, meta = RunPaths(root / "run"), {"kind": "sft"}
    local = root / f"stage{rank}"
    if rank == 1:
        local.write_text("no directory")
    config = CkptConfig(save_async=True, staging_dir=local)
    checkpointer = Checkpointer(policy, optimizer, paths, incarnation=0, meta=meta, config=config)
    all_raise(checkpointer.prepare, "rank 1: .*stage1")
    all_raise(lambda: checkpointer.save(1, progress={}, batch_dir=None), "rank 1: .*stage1")
    if rank == 1:
        local.unlink()
    touch, measured = HostStage.touch, []

    def touch_late(room: HostStage) -> None:
        measured.append(len(list(root.glob("measured*"))))
        touch(room)

    def measure(size: int, directory: Path) -> Any:
        (root / f"measured{rank}").touch()
        return file_backed(size, directory)

    file_backed = staging._file_backed
    setattr(HostStage, "touch", touch_late)  # noqa: B010
    setattr(staging, "_file_backed", measure)  # noqa: B010
    checkpointer.prepare()
    checkpointer.save(1, progress={}, batch_dir=None)
    checkpointer.finish()
    assert measured == [2]  # neither takes memory while the other still measures it

    def newer() -> None:
        raise FencedError("a newer attempt")

    setattr(checkpointer, "prune", newer)  # noqa: B010
    checkpointer.save(2, progress={}, batch_dir=None)
    all_raise(checkpointer.finish, "a newer attempt$")
    info = resolve_resume(paths.checkpoints, 1, deep=False)
    read = dcp_state.read_metadata

    def unreadable(directory: Path) -> Any:
        raise OSError(5, "Input/output error", str(directory))

    setattr(dcp_state, "read_metadata", unreadable if rank == 1 else read)  # noqa: B010
    with pytest.raises(Unreadable, match="rank 1: .*Input/output error"):
        RankGroup().on_all(lambda: checkpointer.load(info), OF_A_RUN)
    setattr(dcp_state, "read_metadata", read)  # noqa: B010
    assert checkpointer.load(info) == {"step": 1}
    dist.destroy_process_group()


def test_a_rank_without_room_and_one_that_cannot_read_are_the_runs_trouble_on_every_rank(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    make_tiny_model(tmp_path / "model")
    spawn(save_and_load, (str(tmp_path / "store"), tmp_path), 2)


def publish_adapter(rank: int, store: str, root: Path) -> None:
    """Rank 0 alone writes an adapter's versions, and its disk is full."""
    begin(rank, store)
    policy = lora_policy(root / "model")
    paths = RunPaths(root / "run")
    publisher = AdapterPublisher(policy, root / "model", paths, incarnation=0, model_name="tiny")
    for wanted in ("mkdir", "create", "write", "fsync", "rename"):
        with files.observe_operations(full_at(wanted, rank)):
            all_raise(lambda: publisher.publish(1), "disk full|No space left")
        assert not paths.weights_step(1).exists() and not stage_dir(paths.weights_step(1), 0).exists()
    assert (publisher.publish(1) is not None) == (rank == 0) and paths.weights_step(1).exists()
    dist.destroy_process_group()


def test_an_adapter_that_cannot_be_written_is_said_on_every_rank(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    make_tiny_model(tmp_path / "model")
    spawn(publish_adapter, (str(tmp_path / "store"), tmp_path), 2)


def full_at(wanted: str, rank: int) -> Callable[[str, Path], None]:
    """A disk that is full where rank 0 does one thing."""

    def full(operation: str, path: Path) -> None:
        if operation == wanted and rank == 0:
            raise OSError(28, "No space left on device", str(path))

    return full


def test_a_refused_step_that_cannot_be_kept_is_said_on_every_rank(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    make_tiny_model(tmp_path / "model")
    spawn(keep_refused, (str(tmp_path / "store"), tmp_path), 2)
