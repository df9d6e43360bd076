"""What cannot be read is not broken, and what is broken is not deleted: lives that begin while a file system fails."""

import errno
import os
import re
import shutil
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from prime_hpc.config import ConfigError
from prime_hpc.store import run_paths
from prime_hpc.store.artifact import SET_ASIDE
from prime_hpc.store.attempts import read_attempts
from prime_hpc.store.checkpoint import newest
from prime_hpc.store.checkpoint.checkpoints import resolve_resume
from prime_hpc.store.checkpoint.failed_reads import FailedReads
from prime_hpc.store.errors import ArtifactError, InDoubt, NoRoom, StoreError, Unreadable
from prime_hpc.store.io import files
from prime_hpc.store.io.retry_reads import Patience
from prime_hpc.store.run_paths import RunPaths, list_steps
from prime_hpc.supervisor.attempt import resume
from prime_hpc.supervisor.attempt.start import begin_attempt
from prime_hpc.trainer.checkpointing import verify
from tests.faults.reads import GONE, Fault, ReadFaults
from tests.faults.starts import (
    CHILDREN,
    KINDS,
    SAVED,
    Prepared,
    _compare_tree,
    begin,
    end_attempts,
    normal,
    roots_of,
    try_fault,
)
from tests.faults.starts import Outcome as Judged
from tests.support.checkpoints import SHARD, damage

OLD, NEW = SAVED


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Prepared]:
    folder = tmp_path_factory.mktemp("prepared")
    return {kind: Prepared(folder, kind) for kind in KINDS}


def place(kind: str) -> str:
    """Where the checkpoints are, as points name it."""
    return {"path": "mount/checkpoints", "many": "run/x/run_a/checkpoints"}.get(kind, "run/x/checkpoints")


def run_dir_of(home: Path) -> Path:
    return home / "outputs" / "x"


def aside(paths: RunPaths) -> list[str]:
    """Names of what was set aside, without what tells one writer from another."""
    found = [p for parent in (paths.checkpoints, paths.weights) for p in parent.glob(f"{SET_ASIDE}*")]
    return sorted(f"{p.parent.name}/{p.name.removeprefix(SET_ASIDE).split('-')[0]}" for p in found)


# ------------------------------------------------------------------------- one failed read, and a file system away


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("operation", "name", "how", "for_ever"),
    [
        ("read", "step_20/trainer/__0_0.distcp", "EIO", False),
        ("list", "", "ESTALE", False),
        ("read", "step_20/manifest.json", "EACCES", True),
        ("list", "", GONE, True),
    ],
)
def test_a_read_that_fails_costs_no_checkpoint(
    prepared: dict[str, Prepared], kind: str, operation: str, name: str, how: str, for_ever: bool
) -> None:
    fault = Fault(operation, f"{place(kind)}/{name}".rstrip("/"), 1, how, for_ever)
    outcome = try_fault(prepared[kind], fault)
    assert outcome.reached and outcome.words() == []
    assert kind == "many" or outcome.code == (74 if for_ever else 0)


class _NothingCanBeRead(ReadFaults):
    """The client was evicted: names and sizes are there, content is not."""

    def _strikes(self, operation: str, where: str) -> str | None:
        return "EIO" if operation == "read" and "/checkpoints/" in where else super()._strikes(operation, where)


@pytest.mark.parametrize("kind", KINDS)
def test_where_no_checkpoint_can_be_read_no_life_begins(prepared: dict[str, Prepared], kind: str) -> None:
    own = prepared[kind]
    home = own.copy()
    before, judged = own.contents(home), Judged(kind, Fault("", "", 0, "EIO"))
    first = begin(own, home, _NothingCanBeRead(roots_of(home), normal=normal))
    assert first.code in (1, 74) and first.steps == {}
    assert re.search(r"cannot be read now: Input/output error \[EIO\]", first.words), first.words
    assert "waited 0 s (supervisor.read_timeout_s)" in first.words
    _compare_tree(own, home, before, judged)
    end_attempts(run_dir_of(home), None)
    again = begin(own, home, None)
    assert again.code == 0 and set(again.steps.values()) == {NEW}
    _compare_tree(own, home, before, judged)
    assert judged.words() == []


def test_a_checkpoint_directory_that_is_not_mounted_is_waited_for(prepared: dict[str, Prepared]) -> None:
    own = prepared["path"]
    home = own.copy()
    before, judged = own.contents(home), Judged("path", Fault("", "", 0, GONE))
    (home / "mount").rename(home / "its disk")
    (home / "mount").mkdir()
    first = begin(own, home, None)
    assert first.code == 74 and "is its file system mounted here?" in first.words and "--clean" in first.words
    assert list((home / "mount").iterdir()) == []
    assert list_steps(RunPaths(run_dir_of(home)).weights)[-1] == 22
    row = read_attempts(run_dir_of(home) / "attempts.jsonl")[-1]
    assert row["outcome"] == "failed" and row["exit_code"] == 74 and "mounted" in str(row["cause"])
    (home / "mount").rmdir()
    (home / "its disk").rename(home / "mount")
    again = begin(own, home, None)
    assert again.steps == {"x": NEW}
    _compare_tree(own, home, before, judged)
    assert judged.words() == []


def test_a_file_system_that_comes_while_it_is_waited_for_is_enough(tmp_path: Path) -> None:
    root, now = tmp_path / "there", [0.0]

    def sleep(seconds: float) -> None:
        now[0] += seconds
        if now[0] > 100 and not root.exists():
            root.mkdir()

    def read() -> str:
        if not root.exists():
            raise Unreadable(root, "not mounted")
        return "content"

    assert Patience(600, clock=lambda: now[0], sleep=sleep)(read) == "content" and 100 < now[0] < 130


def test_patience_ends_with_the_reason_and_can_be_told_to_end() -> None:
    now = [0.0]

    def sleep(seconds: float) -> None:
        now[0] += seconds

    def fail() -> None:
        raise OSError(errno.ESTALE, "Stale file handle", "/data/x")

    patience = Patience(600, clock=lambda: now[0], sleep=sleep)
    with pytest.raises(Unreadable, match=r"/data/x: cannot be read now: Stale file handle; waited 600 s .*\[ESTALE\]"):
        patience(fail)
    assert 600 <= now[0] < 700
    with pytest.raises(FileNotFoundError):  # a file system that answers is not asked again
        patience(lambda: Path("/nowhere").read_bytes())

    class Stopped(Exception):
        pass

    def heed() -> None:
        raise Stopped

    with pytest.raises(Stopped):
        Patience(600, on_wait=heed)(fail)


def test_who_waits_for_a_second_reading_is_asked_all_along() -> None:
    """Else a STOP would be heard minutes later."""
    now, asked, doubts = [0.0], [0.0], [InDoubt(Path("/data/x"), "expected 2 bytes, found 1 bytes", 120.0)]

    def sleep(seconds: float) -> None:
        now[0] += seconds

    def read() -> str:
        if doubts:
            raise doubts.pop()
        return "content"

    patience = Patience(600, on_wait=lambda: asked.append(now[0]), clock=lambda: now[0], sleep=sleep)
    assert patience(read) == "content" and now[0] == 120
    assert max(later - earlier for earlier, later in pairwise([*asked, now[0]])) < 10


# ------------------------------------------------------------------------- what is broken is proved, and set aside


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("how", ["truncate", "manifest", "flip"])
def test_going_back_sets_aside_and_deletes_nothing(prepared: dict[str, Prepared], kind: str, how: str) -> None:
    own = prepared[kind]
    home = own.copy()
    before = own.contents(home)
    for paths in own.runs(home):
        damage(paths.checkpoint_step(NEW), how)
    first = begin(own, home, None)
    assert first.code == 0 and set(first.steps.values()) == {OLD}, first.words
    assert "it is read again in" in first.words and "are set aside, not deleted" in first.words
    for paths in own.runs(home):
        assert list_steps(paths.checkpoints, 0) == [OLD] and "checkpoints/step_20" in aside(paths)
        assert kind == "sft" or f"weights/step_{NEW:06d}" in aside(paths)
    lost = set(before.values()) - set(own.contents(home).values())
    assert bool(lost) == (how == "manifest")  # of what has no manifest, no digest is known


def test_a_first_reading_is_not_believed(prepared: dict[str, Prepared]) -> None:
    own = prepared["rl"]
    home = own.copy()
    shard = own.runs(home)[0].checkpoint_step(NEW) / SHARD
    whole = shard.read_bytes()
    failed_reads = FailedReads(120, clock=lambda: 0.0)
    paths = own.runs(home)[0]
    shard.write_bytes(whole[:-1])
    with pytest.raises(InDoubt, match="expected 100 bytes, found 99 bytes; it is read again in 120 s"):
        newest.choose_newest(paths, failed_reads, expected=NEW)
    shard.write_bytes(whole)  # the cache of this node was old
    choice = newest.choose_newest(paths, failed_reads, expected=NEW)
    assert choice.info is not None and choice.info.step == NEW and not choice.passed_over


def test_a_step_that_is_asked_for_is_read_twice_before_it_is_refused(prepared: dict[str, Prepared]) -> None:
    own = prepared["rl"]
    home = own.copy()
    paths = own.runs(home)[0]
    shard = paths.checkpoint_step(OLD) / SHARD
    whole = shard.read_bytes()
    now = [0.0]
    reading, failed_reads = resume.Reading(True, NEW, 1), FailedReads(120, clock=lambda: now[0])
    shard.write_bytes(whole[:-1])
    with pytest.raises(InDoubt, match="it is read again in 120 s"):
        resume.choose_start(_asked(home, own, OLD), paths, reading, failed_reads)
    now[0] = 120.0
    with pytest.raises(ConfigError, match=f"checkpoint of step {OLD} is damaged"):
        resume.choose_start(_asked(home, own, OLD), paths, reading, failed_reads)
    shard.write_bytes(whole)  # the cache of this node was old
    start = resume.choose_start(_asked(home, own, OLD), paths, reading, failed_reads)
    assert start is not None and start.info.step == OLD


@pytest.mark.parametrize("text", ["{", "[]", "{}"])
def test_a_note_that_somebody_has_changed_is_named(tmp_path: Path, text: str) -> None:
    paths = RunPaths(tmp_path)
    for name in ("checkpoints.json", "saved.json", "resume.json"):
        (tmp_path / name).write_text(text)
    for read in (newest.read_pointer, newest.read_saved, partial(resume._answered_at, asked=OLD)):
        with pytest.raises(StoreError, match="is not what was written there .*: restore or delete it"):
            read(paths)


def test_a_run_does_not_start_over_when_all_is_broken(prepared: dict[str, Prepared]) -> None:
    own = prepared["sft"]
    home = own.copy()
    for step in SAVED:
        damage(own.runs(home)[0].checkpoint_step(step), "truncate")
    first = begin(own, home, None)
    assert first.code == 2 and "no checkpoint is left to go on from" in first.words and "--clean" in first.words
    assert list_steps(own.runs(home)[0].checkpoints, 0) == list(SAVED)


@pytest.mark.parametrize("kind", ["rl", "sft", "many"])
def test_a_run_does_not_start_over_when_its_checkpoints_are_gone(prepared: dict[str, Prepared], kind: str) -> None:
    own = prepared[kind]
    home = own.copy()
    for paths in own.runs(home):
        shutil.rmtree(paths.checkpoints)
    first = begin(own, home, None)
    assert first.code in (1, 74) and first.steps == {}
    assert "the run saved a checkpoint of step 20, and it is not listed" in first.words
    for paths in own.runs(home):
        assert kind == "sft" or list_steps(paths.weights)[-1] == 22


def test_attempts_alone_say_what_was_saved(prepared: dict[str, Prepared]) -> None:
    own = prepared["rl"]
    home = own.copy()
    (run_dir_of(home) / "saved.json").unlink()
    shutil.rmtree(own.runs(home)[0].checkpoints)
    assert begin(own, home, None).code == 74


def test_a_config_that_names_another_checkpoint_directory_is_told_where_they_are(prepared: dict[str, Prepared]) -> None:
    own = prepared["path"]
    home = own.copy()
    text = (run_dir_of(home) / "run.yaml").read_text()
    (run_dir_of(home) / "run.yaml").write_text(text.replace("mount/checkpoints", "elsewhere"))
    first = begin(own, home, None)
    assert first.code == 2 and re.search(r"lie in .*mount/checkpoints: set ckpt.path back", first.words), first.words
    assert list_steps(home / "mount" / "checkpoints", 0) == list(SAVED)


def test_an_old_life_that_ran_while_the_mount_was_away_costs_nothing(prepared: dict[str, Prepared]) -> None:
    """An attempt of an earlier prime-hpc started over: its number makes the old checkpoints look late."""
    own = prepared["path"]
    home = own.copy()
    paths = own.runs(home)[0]
    before = set(own.contents(home).values())
    run_paths.claim_incarnation(paths)
    run_paths.record_start(paths, 2, 0)
    begun = begin(own, home, None)
    assert begun.code in (0, 2)
    assert set(before) - set(own.contents(home).values()) <= {
        d for n, d in own.contents(own.home).items() if int(n.rpartition("_")[2]) > NEW
    }


# ------------------------------------------------------------------------- quota, other users, explicit steps


def _asked(home: Path, own: Prepared, step: int) -> Any:
    experiment = own._experiment(home)
    assert experiment.ckpt is not None
    return experiment.model_copy(update={"ckpt": experiment.ckpt.model_copy(update={"resume_step": step})})


@pytest.mark.parametrize("number", range(1, 9))
def test_a_quota_in_the_middle_of_a_roll_back_loses_nothing(prepared: dict[str, Prepared], number: int) -> None:
    own = prepared["rl"]
    home = own.copy()
    before, renames = own.contents(home), [0]
    experiment = _asked(home, own, OLD)

    def full(operation: str, path: Path) -> None:
        renames[0] += operation == "rename"
        if operation in ("rename", "create") and renames[0] >= number:
            raise OSError(errno.EDQUOT, "Disk quota exceeded", str(path))

    with files.observe_operations(full), pytest.raises(NoRoom, match="quota exceeded.*waited"):
        begin_attempt(experiment, run_dir_of(home), patience=Patience(0.1))
    assert set(before.values()) <= set(own.contents(home).values())
    attempt = begin_attempt(experiment, run_dir_of(home))
    assert attempt.resume_step == OLD
    paths = own.runs(home)[0]
    assert list_steps(paths.checkpoints, 0) == [OLD] and list_steps(paths.weights)[-1] == OLD
    assert set(before.values()) <= set(own.contents(home).values())  # set aside, each of them


@pytest.mark.parametrize("is_first", [False, True])
def test_a_mount_that_becomes_read_only_has_the_job_come_back_where_the_run_lived_before(
    prepared: dict[str, Prepared], is_first: bool
) -> None:
    own = prepared["rl"]
    home = own.copy()
    if is_first:
        (run_dir_of(home) / "attempts.jsonl").unlink()
        shutil.rmtree(run_dir_of(home) / "incarnation")

    def read_only(operation: str, path: Path) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))

    with files.observe_operations(read_only), pytest.raises(ConfigError if is_first else Unreadable, match="ead-only"):
        begin_attempt(_asked(home, own, OLD), run_dir_of(home), patience=Patience(0.1))


def test_another_users_run_directory_is_refused(prepared: dict[str, Prepared], monkeypatch: pytest.MonkeyPatch) -> None:
    own = prepared["rl"]
    home = own.copy()
    run_dir = run_dir_of(home)
    names = sorted(os.fspath(path) for path in run_dir.rglob("*"))
    if os.geteuid() == 0:
        os.chown(run_dir, 4242, -1)
    else:
        monkeypatch.setattr(run_paths.os, "geteuid", lambda: 4242)
    with pytest.raises(
        ConfigError, match=r"belongs to another user \(.*uid \d+; this is uid \d+\): choose another --name"
    ):
        begin_attempt(own._experiment(home), run_dir)
    assert sorted(os.fspath(path) for path in run_dir.rglob("*")) == names


def test_requests_that_cannot_be_read_are_not_obeyed_twice(prepared: dict[str, Prepared]) -> None:
    """The run would fall back to that step in every attempt."""
    own = prepared["rl"]
    home = own.copy()
    experiment = _asked(home, own, OLD)
    assert begin_attempt(experiment, run_dir_of(home)).resume_step == OLD
    end_attempts(run_dir_of(home), None)
    faults = ReadFaults(roots_of(home), Fault("read", "run/x/resume.json", 1, "EIO"), normal)
    with faults.installed():
        start = resume._answered_at
        with pytest.raises(OSError, match="Input/output error"):
            start(own.runs(home)[0], OLD)
    assert faults.reached


# ------------------------------------------------------------------------- sums, by the ranks that load


def test_a_sum_that_a_rank_finds_wrong_is_read_again_by_the_next_life(
    prepared: dict[str, Prepared], monkeypatch: pytest.MonkeyPatch
) -> None:
    own = prepared["sft"]
    home = own.copy()
    paths = own.runs(home)[0]
    monkeypatch.setattr(newest, "SMALL", 0)
    damage(paths.checkpoint_step(NEW), "flip")
    assert begin(own, home, None).steps == {"x": NEW}  # sizes are right
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(dist, "get_world_size", lambda: 1)
    info = resolve_resume(paths.checkpoints, NEW, deep=False)
    with pytest.raises(Unreadable, match=r"rank 0: .*__0_0.distcp: expected xxh3 .*the next attempt reads it again"):
        verify.verify_parts(info, paths)
    end_attempts(run_dir_of(home), None)
    again = begin(own, home, None)
    assert again.steps == {"x": OLD} and "read twice" in again.words and aside(paths) == ["checkpoints/step_20"]
    assert not (paths.root / "doubts").exists()


def test_what_limits_a_rank_s_patience_is_no_key(
    prepared: dict[str, Prepared], monkeypatch: pytest.MonkeyPatch
) -> None:
    home = prepared["sft"].copy()
    paths = prepared["sft"].runs(home)[0]
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(dist, "get_world_size", lambda: 1)
    info = resolve_resume(paths.checkpoints, NEW, deep=False)
    fault = Fault("read", f"run/x/checkpoints/step_{NEW}/trainer/__0_0.distcp", 1, "EIO", for_ever=True)
    faults = ReadFaults(roots_of(home), fault, normal)
    with faults.installed(), pytest.raises(Unreadable, match=r"waited 0 s \[EIO\]$"):
        verify.verify_parts(info, paths, patience_s=0.0)
    assert faults.reached


def test_each_rank_reads_its_own_files() -> None:
    names = ["trainer/.metadata", "orchestrator/state.json", *[f"trainer/__{rank}_0.distcp" for rank in range(4)]]
    shares = [verify.share_of(names, rank, 4) for rank in range(4)]
    assert shares[2] == ["trainer/__2_0.distcp"] and len(shares[0]) == 3
    assert sorted(name for share in [verify.share_of(names, rank, 3) for rank in range(3)] for name in share) == sorted(
        names
    )


def test_broken_and_unreadable_are_two_things(tmp_path: Path) -> None:
    from prime_hpc.store.io.files import hash_bytes
    from prime_hpc.store.manifest import check_file

    path = tmp_path / "x"
    path.write_bytes(b"abc")
    entry = hash_bytes(b"abd")
    with pytest.raises(ArtifactError):
        check_file(path, entry, deep=True)
    with pytest.raises(ArtifactError, match="No such file"):
        check_file(tmp_path / "nothing", entry, deep=True)
    for how in ("EIO", "ESTALE", "ENOTCONN", "EACCES"):
        faults = ReadFaults({"t": tmp_path}, Fault("read", "t/x", 1, how))
        with faults.installed(), pytest.raises(Unreadable, match=rf"\[{how}\]") as caught:
            check_file(path, entry, deep=True)
        assert not isinstance(caught.value, ArtifactError) and isinstance(caught.value, StoreError)


def test_children_of_one_parent_do_not_wait_for_one_anothers_files(prepared: dict[str, Prepared]) -> None:
    own = prepared["many"]
    home = own.copy()
    fault = Fault("read", "run/x/run_a/checkpoints/step_20/manifest.json", 1, "EIO", for_ever=True)
    begun = begin(own, home, ReadFaults(roots_of(home), fault, normal))
    assert begun.code == 0 and begun.steps == {CHILDREN[1]: NEW} and "run_a waits:" in begun.words
