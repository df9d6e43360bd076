"""An attempt that was held up and goes on after a newer one began: what it took is put back, what it left is not
there."""

import errno
import shutil
from pathlib import Path

import pytest

from prime_hpc.config import ConfigError, Experiment
from prime_hpc.store.artifact import ArtifactWriter, discard, prepare_stage
from prime_hpc.store.attempts import Attempt, read_attempts, rewrite_row, write_attempt
from prime_hpc.store.batch.rank_batch import RankBatch
from prime_hpc.store.batch.rank_files import write_batch
from prime_hpc.store.checkpoint.checkpoints import Saved, note_saved, prune_checkpoints, read_saved
from prime_hpc.store.checkpoint.failed_reads import FailedReads
from prime_hpc.store.checkpoint.newest import choose_newest, expected_step
from prime_hpc.store.checkpoint.rollback import rewind
from prime_hpc.store.errors import FencedError, StoreError, Unreadable
from prime_hpc.store.io import files
from prime_hpc.store.leases import min_floor, set_floor
from prime_hpc.store.manifest import verify_artifact
from prime_hpc.store.run_paths import (
    RunPaths,
    claim_incarnation,
    current_incarnation,
    incarnation_starts,
    is_late,
    list_steps,
    record_start,
)
from prime_hpc.store.waiting import wait_for_artifact
from prime_hpc.store.weights import newest_of_attempt, prune_weights
from prime_hpc.supervisor.attempt.start import begin_attempt
from tests.support.checkpoints import make_checkpoint, make_weights


@pytest.fixture
def paths(tmp_path: Path) -> RunPaths:
    paths = RunPaths(tmp_path / "run")
    (paths.root / "incarnation").mkdir(parents=True)
    return paths


def begin(paths: RunPaths, step: int) -> int:
    number = claim_incarnation(paths)
    record_start(paths, number, step)
    return number


def test_a_list_of_attempts_whose_name_leads_nowhere_is_said_to_be_unreadable(
    paths: RunPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not that a file is missing: where one is, another attempt would begin the list anew."""
    monkeypatch.setattr(files, "VISIBLE_S", 0.05)
    paths.attempts.symlink_to("nowhere")
    with pytest.raises(Unreadable, match="its name is taken, and no file is seen there"):
        write_attempt(paths.attempts, Attempt(1, 1, 0.0, "first start"))


def stop_before(operation: str, what: str, then: object) -> files.Observer:
    """Something happens elsewhere right before the first such operation on such a path."""
    waiting = [then]

    def observe(seen: str, path: Path) -> None:
        if waiting and seen in operation.split("|") and what in path.name:
            waiting.pop()()  # type: ignore[operator]

    return observe


def test_what_is_late_is_known_from_the_lives_starts(paths: RunPaths) -> None:
    assert [begin(paths, step) for step in (0, 4, 2)] == [1, 2, 3]
    claim_incarnation(paths)  # killed before it changed anything
    starts = incarnation_starts(paths)
    assert starts == {1: 0, 2: 4, 3: 2}
    assert not is_late(2, 1, starts) and not is_late(9, 3, starts) and not is_late(9, 4, starts)
    assert is_late(3, 1, starts) and is_late(6, 1, starts) and is_late(6, 2, starts)


def test_what_an_attempt_went_on_from_is_not_late_whoever_wrote_it() -> None:
    starts = {1: 0, 2: 40, 3: 60}  # back to 40, then on from the 60 of attempt 1 after all
    assert not is_late(60, 1, starts) and is_late(70, 1, starts) and is_late(50, 1, starts)
    assert is_late(60, 1, starts | {4: 40})  # and back again
    assert not is_late(60, 4, {4: 0, 5: 40, 6: 60})


def test_a_start_that_was_held_up_is_not_noted(paths: RunPaths) -> None:
    begin(paths, 0)
    make_checkpoint(paths, 40, incarnation=1)
    make_checkpoint(paths, 60, incarnation=1)
    stalled = claim_incarnation(paths)  # it chose 40
    newer = begin(paths, 60)
    with pytest.raises(FencedError):
        record_start(paths, stalled, 40)
    late = claim_incarnation(paths)
    with (
        files.observe_operations(stop_before("create", f"{late:06d}.from_40", lambda: begin(paths, 60))),
        pytest.raises(FencedError),
    ):
        record_start(paths, late, 40)
    assert incarnation_starts(paths) == {1: 0, newer: 60, late + 1: 60}
    choice = choose_newest(paths, FailedReads(0), expected=expected_step(paths))
    assert choice.info is not None and choice.info.step == 60 and not choice.passed_over


@pytest.mark.parametrize("when", ["at once", "in the sweep"])
def test_an_attempt_that_was_held_up_takes_nothing_back_from_the_newer_one(paths: RunPaths, when: str) -> None:
    old, old_file = begin(paths, 0), paths.weights / ".tmp-left"
    paths.weights.mkdir()
    old_file.touch()

    def newer_attempt() -> None:
        begin(paths, 0)
        set_floor(paths, "orchestrator", 3)
        prepare_stage(paths.weights_step(1), 2)
        prepare_stage(paths.checkpoint_step(1), 2)
        note_saved(paths, 7, 2)

    if when == "at once":
        newer_attempt()
    then = newer_attempt if when == "in the sweep" else lambda: None
    with files.observe_operations(stop_before("remove", old_file.name, then)), pytest.raises(FencedError):
        rewind(paths, 0, old)
    note_saved(paths, 3, old)
    assert min_floor(paths) == 3 and read_saved(paths) == Saved(7, 2)
    assert [len(list(folder.glob(".stage-*-i0002"))) for folder in (paths.weights, paths.checkpoints)] == [1, 1]


def test_a_held_up_delete_takes_nothing_from_the_life_after_it(paths: RunPaths) -> None:
    begin(paths, 0)
    for version in range(1, 4):
        make_weights(paths, version, incarnation=1)

    def second_life() -> None:
        begin(paths, 0)
        discard(paths, paths.weights_step(1), 2)
        make_weights(paths, 1, incarnation=2)

    # attempt 1 has decided, and is stopped before the rename that takes version 1 out of sight
    with (
        files.observe_operations(stop_before("rename", ".trash-step_000001", second_life)),
        pytest.raises(FencedError, match="incarnation 2"),
    ):
        prune_weights(paths, 1, 1)
    assert verify_artifact(paths.weights_step(1), deep=True).incarnation == 2
    assert list_steps(paths.weights) == [1, 2, 3]
    assert not list(paths.weights.glob(".*"))


def test_a_late_version_is_neither_waited_for_nor_counted(paths: RunPaths) -> None:
    begin(paths, 0)
    begin(paths, 2)
    for version in (2, 6):
        make_weights_as(paths, version, 1)
    for version in (3, 4):
        make_weights(paths, version, incarnation=2)
    assert newest_of_attempt(paths, 2, 2) == 4 and newest_of_attempt(paths, 4, 2) is None
    assert prune_weights(paths, 1, 2) == [2, 3]  # 6 is not the newest whole one
    assert list_steps(paths.weights) == [4, 6]


def make_weights_as(paths: RunPaths, version: int, incarnation: int) -> None:
    """An artifact of an attempt that is over: as a rename that was held up leaves it."""
    aside = RunPaths(paths.root.parent / f"aside-{version}")
    make_weights(aside, version, incarnation=incarnation)
    paths.weights.mkdir(exist_ok=True)
    aside.weights_step(version).rename(paths.weights_step(version))


def late_checkpoint(paths: RunPaths, step: int, incarnation: int) -> None:
    aside = RunPaths(paths.root.parent / f"aside-checkpoint-{step}")
    make_checkpoint(aside, step, incarnation=incarnation)
    aside.checkpoint_step(step).rename(paths.checkpoint_step(step))


def test_a_late_checkpoint_is_not_resumed_from_and_keeps_nothing_alive(tmp_path: Path) -> None:
    exp = Experiment.model_validate({"name": "x", "output_dir": str(tmp_path), "max_steps": 20, "ckpt": {}})
    paths = RunPaths(exp.run_dir)
    exp.run_dir.mkdir()

    def life() -> int | None:
        attempt = begin_attempt(exp, exp.run_dir)
        paths.attempts.write_text(paths.attempts.read_text().replace('"ended": null', '"ended": 1.0'))
        return attempt.resume_step

    assert life() is None
    make_weights(paths, 4, incarnation=1)
    make_checkpoint(paths, 4, incarnation=1)
    assert life() == 4
    make_weights_as(paths, 6, 1)
    late_checkpoint(paths, 6, 1)  # the first attempt, cut off, goes on
    make_weights(paths, 5, incarnation=2)
    make_checkpoint(paths, 5, incarnation=2)
    assert prune_checkpoints(paths, 1, None, 2) == [4]  # 6 does not count as the newest whole one
    asked = exp.model_copy(update={"ckpt": exp.ckpt.model_copy(update={"resume_step": 6})})  # type: ignore[union-attr]
    with pytest.raises(ConfigError, match="incarnation 1 wrote it after a newer attempt had begun below step 6"):
        begin_attempt(asked, exp.run_dir)
    assert life() == 5
    assert list_steps(paths.checkpoints, 0) == [5] and list_steps(paths.weights) == [4, 5]


def test_an_old_life_that_meets_a_newer_ones_artifact_ends(paths: RunPaths) -> None:
    begin(paths, 0)
    begin(paths, 0)
    write_batch(paths, 1, [RankBatch.empty(1)], state={}, incarnation=2)
    assert wait_for_artifact(paths.rollouts_step(1), deadline_s=5, min_incarnation=2).incarnation == 2
    with pytest.raises(FencedError, match="incarnation 2 wrote it"):
        wait_for_artifact(paths.rollouts_step(1), deadline_s=5, min_incarnation=1)


def test_the_next_life_cleans_up_everywhere(tmp_path: Path) -> None:
    exp = Experiment.model_validate({"name": "x", "output_dir": str(tmp_path), "ckpt": {}})
    paths = RunPaths(exp.run_dir)
    for folder in (paths.root, paths.leases, paths.weights, paths.rollouts, paths.checkpoints, paths.root / "logs"):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f".tmp-x.json-{files.unique_suffix()}").write_text("{")
    prepare_stage(paths.weights_step(3), 0)
    begin_attempt(exp, exp.run_dir)
    assert not list(paths.root.rglob(".*"))


def test_a_write_can_be_torn_in_its_middle(tmp_path: Path) -> None:
    path = tmp_path / "file"
    chunks = [b"ab", b"", b"cdefg", b"h"]
    seen: list[tuple[str, bytes]] = []

    def observe(operation: str, where: Path) -> None:
        seen.append((operation, where.read_bytes() if where.exists() else b""))

    with files.observe_operations(observe):
        entry = files.write_file(path, chunks)
    assert seen == [("create", b""), ("write", b""), ("torn", b"abcd"), ("fsync", b"abcdefgh")]
    assert path.read_bytes() == b"abcdefgh" and entry == files.hash_file(path)
    assert files.write_file(path, (bytes([i % 256]) * 3 for i in range(2000))) == files.hash_file(path)


def test_two_that_begin_at_once_do_not_both_begin(paths: RunPaths) -> None:
    assert claim_incarnation(paths, after=0) == 1
    with pytest.raises(FencedError, match="has begun at the same moment"):
        claim_incarnation(paths, after=0)
    assert current_incarnation(paths) == 1  # the first is not fenced
    assert claim_incarnation(paths, after=1) == 2


def test_an_update_that_was_held_up_loses_no_other_writers_line(tmp_path: Path) -> None:
    path = tmp_path / "attempts.jsonl"
    rewrite_row(path, {"attempt": 1, "ended": None})

    def other() -> None:
        rewrite_row(path, {"attempt": 2, "ended": 5.0})

    for operation in ("create", "write", "torn", "fsync", "rename"):
        path.write_text('{"attempt": 1, "ended": null}\n')
        with files.observe_operations(stop_before(operation, "attempts.jsonl", other)):
            rewrite_row(path, {"attempt": 1, "ended": 3.0})
        assert [(row["attempt"], row["ended"]) for row in read_attempts(path)] == [(1, 3.0), (2, 5.0)], operation
    assert not list(tmp_path.glob(".tmp-*"))


def test_a_first_line_that_was_held_up_takes_no_other_writers_file_away(tmp_path: Path) -> None:
    path = tmp_path / "attempts.jsonl"

    def other() -> None:
        rewrite_row(path, {"attempt": 2, "ended": 5.0})

    for operation in ("create", "write", "torn", "fsync", "link|rename"):
        path.unlink(missing_ok=True)
        with files.observe_operations(stop_before(operation, "attempts.jsonl", other)):
            rewrite_row(path, {"attempt": 1, "ended": 3.0})
        assert [row["attempt"] for row in read_attempts(path)] == [1, 2], operation
    assert not list(tmp_path.glob(".tmp-*"))


def test_a_disk_that_fails_at_the_clean_up_too_hides_no_reason(tmp_path: Path) -> None:
    stage = tmp_path / ".stage-step_000001-i0001"
    stage.mkdir()

    def fail(operation: str, path: Path) -> None:
        raise OSError(errno.EIO, "Input/output error", str(path))

    with files.observe_operations(fail):
        with pytest.raises(StoreError, match="I/O error"):
            files.remove_tree(stage)
        files.clear_away(stage)
    assert stage.exists()
    files.clear_away(stage)
    assert not stage.exists()


def test_a_small_file_that_a_newer_life_swept_up_is_no_missing_file(tmp_path: Path) -> None:
    def sweep() -> None:
        for left in tmp_path.glob(".tmp-*"):
            left.unlink()

    with (
        files.observe_operations(stop_before("rename", "lease.json", sweep)),
        pytest.raises(StoreError, match="swept up the unfinished file"),
    ):
        files.write_atomic(tmp_path / "lease.json", b"{}")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("when", ["while it writes", "before the commit"])
def test_a_life_whose_stage_was_cleaned_away_is_told_that_it_is_fenced(paths: RunPaths, when: str) -> None:
    first = begin(paths, 0)
    writer = ArtifactWriter(paths.weights_step(1), kind="weights", version=1, writer="trainer", incarnation=first)
    with pytest.raises(FencedError), writer:
        writer.write("a.bin", [b"1"])
        rewind(paths, 0, begin(paths, 0))  # a newer attempt begins, and cleans up
        assert not writer.path.exists()
        if when == "while it writes":
            writer.write("b.bin", [b"2"])


def test_a_stage_that_someone_else_removed_is_named(paths: RunPaths) -> None:
    writer = ArtifactWriter(paths.weights_step(1), kind="weights", version=1, writer="trainer")
    with pytest.raises(StoreError, match="was removed while it was written"), writer:
        shutil.rmtree(writer.path)


@pytest.mark.parametrize("order", ["older last", "older first"])
def test_of_two_that_begin_at_once_the_older_one_is_closed(paths: RunPaths, order: str) -> None:
    """It may write nothing once it knows of the other, and the other had not seen its line when it began."""
    two = {"attempt": 1, "incarnation": 1, "began": 5.0}, {"attempt": 2, "incarnation": 2, "began": 7.0}
    older, newer = (Attempt(**one, why="first start") for one in two)  # type: ignore[arg-type]
    for one in (newer, older) if order == "older last" else (older, newer, newer):
        write_attempt(paths.attempts, one)
    first, second = read_attempts(paths.attempts)
    assert (first["ended"], first["outcome"], first["cause"]) == (7.0, "failed", "attempt 2 began meanwhile")
    assert second["ended"] is None
