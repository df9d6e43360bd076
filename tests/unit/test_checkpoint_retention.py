"""keep-last and keep-interval: what goes, what stays, and when nothing may go."""

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from prime_hpc.store import batch_archive, batches
from prime_hpc.store.batch.rank_batch import RankBatch
from prime_hpc.store.batch.rank_files import write_batch
from prime_hpc.store.batches import list_batches, prune_batches
from prime_hpc.store.checkpoint.checkpoints import move_checkpoints_aside, prune_checkpoints, resolve_resume
from prime_hpc.store.errors import FencedError, StoreError
from prime_hpc.store.io import files
from prime_hpc.store.run_paths import RunPaths, claim_incarnation, list_steps
from prime_hpc.store.weights import list_versions, prune_weights
from tests.support.checkpoints import damage, make_checkpoint, make_weights


@pytest.fixture
def paths(tmp_path: Path) -> RunPaths:
    return RunPaths(tmp_path / "run")


def there(paths: RunPaths) -> list[int]:
    return list_steps(paths.checkpoints, digits=0)


@pytest.mark.parametrize(
    ("keep_last", "keep_interval", "left"),
    [
        (None, None, [2, 4, 6, 8, 9, 10]),
        (1, None, [10]),
        (2, None, [9, 10]),
        (2, 4, [4, 8, 9, 10]),
        (None, 4, [4, 8, 10]),
        (6, None, [2, 4, 6, 8, 9, 10]),
        (7, None, [2, 4, 6, 8, 9, 10]),
    ],
)
def test_what_stays(paths: RunPaths, keep_last: int | None, keep_interval: int | None, left: list[int]) -> None:
    for step in (2, 4, 6, 8, 9, 10):
        make_checkpoint(paths, step)
    removed = prune_checkpoints(paths, keep_last, keep_interval)
    assert there(paths) == left
    assert sorted(removed + left) == [2, 4, 6, 8, 9, 10]
    assert prune_checkpoints(paths, keep_last, keep_interval) == []
    assert not list(paths.checkpoints.glob(".*"))


def test_every_so_many_steps_one_stays_wherever_the_run_saves(paths: RunPaths) -> None:
    """With `ckpt.interval: auto`, or one that does not divide it, next to no step was a multiple, and none stayed."""
    for step in (3, 7, 11, 12, 18, 25, 41, 42, 49):
        make_checkpoint(paths, step)
        prune_checkpoints(paths, 1, 10)
    assert there(paths) == [11, 25, 41, 49]


@pytest.mark.parametrize("kind", ["truncate", "manifest", "missing", "format"])
def test_a_damaged_checkpoint_does_not_count_as_kept(paths: RunPaths, kind: str) -> None:
    for step in (1, 2, 3):
        make_checkpoint(paths, step)
    damage(paths.checkpoint_step(3), kind)
    assert prune_checkpoints(paths, 1) == [1]
    assert resolve_resume(paths.checkpoints, "latest").step == 2
    damage(paths.checkpoint_step(2), kind)
    assert prune_checkpoints(paths, 1) == []


def test_nothing_goes_before_so_many_are_whole(paths: RunPaths) -> None:
    make_checkpoint(paths, 1)
    assert prune_checkpoints(paths, 1) == []
    assert there(paths) == [1]


def test_foreign_directories_are_never_deleted(paths: RunPaths) -> None:
    for step in (5, 6):
        make_checkpoint(paths, step)
    foreign = paths.checkpoint_step(3)
    foreign.mkdir()
    (foreign / "trainer.pt").write_text("somebody's")
    (paths.checkpoints / "notes").mkdir()
    assert prune_checkpoints(paths, 1) == [5]
    assert (foreign / "trainer.pt").exists()
    later = paths.checkpoint_step(9)
    foreign.rename(later)
    assert [path.name.split("-")[2] for path in move_checkpoints_aside(paths, 4)] == ["step_9", "step_6"]
    (aside,) = paths.checkpoints.glob("set-aside-step_9-*")
    assert (aside / "trainer.pt").read_text() == "somebody's"
    assert there(paths) == []


def test_an_older_life_may_not_prune(paths: RunPaths) -> None:
    for step in (1, 2):
        make_checkpoint(paths, step)
    claim_incarnation(paths)
    with pytest.raises(FencedError):
        prune_checkpoints(paths, 1, incarnation=0)
    assert there(paths) == [1, 2]
    with pytest.raises(ValueError, match="at least 1"):
        prune_checkpoints(paths, 0, incarnation=1)


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    interval=st.integers(1, 3),
    keep_last=st.integers(1, 3),
    keep_interval=st.none() | st.integers(1, 4),
    keep_weights=st.integers(1, 2),
    killed_at=st.integers(0, 40),
)
def test_killed_anywhere_a_checkpoint_with_its_weights_is_left(
    tmp_path_factory: pytest.TempPathFactory,
    interval: int,
    keep_last: int,
    keep_interval: int | None,
    keep_weights: int,
    killed_at: int,
) -> None:
    """A run of ten steps in the trainer's order, ended at any change of the file system: the newest whole checkpoint
    is the last one that was committed, and its weights are there."""
    paths = RunPaths(tmp_path_factory.mktemp("run"))
    committed: list[int] = []
    count = 0

    class Killed(BaseException):
        pass

    def watch(operation: str, path: Path) -> None:
        nonlocal count
        count += operation in ("rename", "remove")
        if count > killed_at:
            raise Killed

    try:
        with files.observe_operations(watch):
            for step in range(1, 11):
                make_weights(paths, step)
                prune_weights(paths, keep_weights)
                if step % interval == 0:
                    make_checkpoint(paths, step)
                    committed.append(step)
                    prune_checkpoints(paths, keep_last, keep_interval)
    except Killed:
        pass
    steps = there(paths)
    if committed:
        newest = resolve_resume(paths.checkpoints, "latest").step
        assert newest >= committed[-1]
        assert len(steps) >= min(keep_last, len(committed))
    versions = list_versions(paths)
    for step in steps:
        assert step in versions


def test_a_disk_that_refuses_to_delete_says_so(paths: RunPaths) -> None:
    for step in (1, 2):
        make_checkpoint(paths, step)

    def refuse(operation: str, path: Path) -> None:
        if operation == "rename":
            raise PermissionError(13, "Permission denied", str(path))

    with files.observe_operations(refuse), pytest.raises(StoreError, match="not writable"):
        prune_checkpoints(paths, 1)
    assert there(paths) == [1, 2]


def test_batches_that_somebody_put_there_stay(paths: RunPaths) -> None:
    for step in (1, 2, 3):
        write_batch(paths, step, [RankBatch.empty(1)], state={"step": step})
    number = claim_incarnation(paths)
    for step in (4, 5):
        write_batch(paths, step, [RankBatch.empty(1)], state={"step": step}, incarnation=number)
    assert prune_batches(paths, 1, trained=5, incarnation=number) == [4] and list_batches(paths) == [1, 2, 3, 5]


def test_batches_that_somebody_put_there_are_read_once(paths: RunPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    """A trainer looks after every step: of 100,000 recorded batches each look would read all that it has passed."""
    for step in range(1, 9):
        write_batch(paths, step, [RankBatch.empty(1)], state={"step": step})
    number, given = claim_incarnation(paths), set[int]()
    read: list[Path] = []

    def is_given(directory: Path) -> bool:
        read.append(directory)
        return batches.read_manifest(directory).incarnation == 0

    for module in (batches, batch_archive):
        monkeypatch.setattr(module, "is_given", is_given)
    packer = batch_archive.RolloutArchiver(paths, number)
    for step in range(3, 9):
        assert prune_batches(paths, 1, trained=step, incarnation=number, given=given) == []
        packer._run(step - 1)
    packer._run(7)
    assert len(read) == 14 and given == set(range(1, 8))


def test_old_batches_go_only_when_nothing_needs_them(paths: RunPaths) -> None:
    for step in range(1, 7):
        write_batch(paths, step, [RankBatch.empty(1)], state={"step": step})
    assert prune_batches(paths, 2, trained=4, keep=[2]) == [1]
    assert list_batches(paths) == [2, 3, 4, 5, 6]  # 5 and 6 are still to be trained on
    assert prune_batches(paths, 2, trained=4) == [2]
    make_checkpoint(paths, 3)
    assert prune_batches(paths, 1, trained=6) == [3, 4, 5]
    assert resolve_resume(paths.checkpoints, 3).orchestrator_state is not None
    with pytest.raises(ValueError, match="at least 1"):
        prune_batches(paths, 0, trained=6)
    claim_incarnation(paths)
    with pytest.raises(FencedError):
        prune_batches(paths, 1, trained=7)
