"""A file system that loses an answer, refuses every question, or has a clock of its own; processes that are no more."""

import errno
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from prime_hpc.runtime import atomic_write
from prime_hpc.store import attempts
from prime_hpc.store.checkpoint import failed_reads
from prime_hpc.store.checkpoint.checkpoints import load_checkpoint
from prime_hpc.store.checkpoint.failed_reads import FailedReads, record_failed_read
from prime_hpc.store.errors import ArtifactError, FencedError, InDoubt, StoreError
from prime_hpc.store.io import disk, files
from prime_hpc.store.manifest import read_manifest
from prime_hpc.store.run_dirs import AttemptRow, list_runs
from prime_hpc.store.run_paths import RunPaths, claim_incarnation
from tests.support.checkpoints import SHARD, damage, make_checkpoint, make_weights


@pytest.fixture
def paths(tmp_path: Path) -> RunPaths:
    return RunPaths(tmp_path / "run")


def lose_answers(monkeypatch: pytest.MonkeyPatch, named: str, meanwhile: Callable[[], object] = lambda: None) -> None:
    """Renames onto such a name are carried out, and the server answers the repeated request."""
    rename = Path.rename

    def rename_twice(self: Path, target: Path) -> Path:
        moved = rename(self, target)
        if Path(target).name == named:
            meanwhile()
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(self))
        return moved

    monkeypatch.setattr(Path, "rename", rename_twice)


def test_a_rename_whose_answer_was_lost_has_been_done(paths: RunPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    lose_answers(monkeypatch, "step_000001")
    make_weights(paths, 1)
    assert read_manifest(paths.weights_step(1)).version == 1 and not list(paths.weights.glob(".*"))
    lose_answers(monkeypatch, "saved.json")
    files.write_atomic(paths.root / "saved.json", b"{}")
    monkeypatch.undo()
    with pytest.raises(StoreError, match="swept up the unfinished file"):
        lose_answers(monkeypatch, "saved.json", lambda: (paths.root / "saved.json").write_bytes(b"another's"))
        files.write_atomic(paths.root / "saved.json", b"{}")


def refuse(monkeypatch: pytest.MonkeyPatch, where: Any, name: str, number: int) -> None:
    """The system call answers so."""

    def refused(*arguments: Any, **options: Any) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(where, name, refused)


@pytest.mark.parametrize("number", [errno.EPERM, errno.EOPNOTSUPP])
def test_a_mount_without_links_and_modes_takes_a_run(
    paths: RunPaths, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """An SMB share, an object store: `logs/latest` is a convenience, and modes are the mount's."""
    refuse(monkeypatch, os, "fchmod", number)
    refuse(monkeypatch, os, "symlink", number)
    paths.root.mkdir()
    attempts.show_latest_logs(paths, attempts.Attempt(1, 1, 0.0, "first start"))
    assert not list((paths.root / "logs").iterdir())
    (paths.root / "whole").write_bytes(b"x")
    assert files.finalize_file(paths.root / "whole", 0o644) == files.hash_bytes(b"x")
    refuse(monkeypatch, os, "symlink", errno.ENOSPC)
    with pytest.raises(StoreError, match="disk full"):
        attempts.show_latest_logs(paths, attempts.Attempt(1, 1, 0.0, "first start"))


def test_a_mount_that_cannot_sync_a_directory_takes_a_run(paths: RunPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    fsync = os.fsync

    def files_alone(fd: int) -> None:
        if Path(f"/proc/self/fd/{fd}").resolve().is_dir():
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        fsync(fd)

    monkeypatch.setattr(os, "fsync", files_alone)
    make_weights(paths, 1)
    atomic_write.write_atomic(paths.root / "record", "{}", sync_name=True)
    refuse(monkeypatch, os, "fsync", errno.EIO)
    with pytest.raises(StoreError, match="I/O error"):
        files.fsync_dir(paths.root)


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE])
def test_a_stage_that_cannot_be_listed_for_a_moment_is_committed(
    paths: RunPaths, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    scandir, refused = os.scandir, list[Any]()

    def fails_twice(path: Any) -> Any:
        if ".stage-" in str(path) and len(refused) < 2:
            refused.append(path)
            raise OSError(number, os.strerror(number), str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", fails_twice)
    make_weights(paths, 1)
    assert len(refused) == 2 and read_manifest(paths.weights_step(1)).version == 1


def test_a_stage_that_cannot_be_listed_is_an_error_of_the_file_system(
    paths: RunPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "STALE_S", 0.0)
    scandir = os.scandir

    def fails(path: Any) -> Any:
        if ".stage-" in str(path):
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        return scandir(path)

    claim_incarnation(paths)
    monkeypatch.setattr(os, "scandir", fails)
    with pytest.raises(StoreError, match=r"weights/.stage-.*: the file system reports an I/O error"):
        make_weights(paths, 1, incarnation=1)


def test_a_stage_that_is_gone_is_not_taken_for_a_lost_answer(paths: RunPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    claim_incarnation(paths)
    make_weights(paths, 1, incarnation=1)
    lose_answers(monkeypatch, "step_000002", lambda: paths.weights_step(2).rename(paths.weights / "elsewhere"))
    with pytest.raises(StoreError, match="was removed while it was written"):
        make_weights(paths, 2, incarnation=1)
    lose_answers(monkeypatch, "step_000003", lambda: claim_incarnation(paths))
    make_weights(paths, 3, incarnation=1)  # it has its name, however late that is told
    with pytest.raises(FencedError):
        make_weights(paths, 4, incarnation=1)


@pytest.mark.parametrize(
    ("number", "words"), [(errno.EACCES, "not writable"), (errno.EIO, "I/O error"), (errno.EDQUOT, "quota exceeded")]
)
def test_a_directory_that_answers_nothing_is_still_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, words: str
) -> None:
    """Neither its free space nor whether it exists can be asked for."""
    broken = tmp_path / "broken"

    def failing(original: Callable[..., Any]) -> Callable[..., Any]:
        def ask(path: Any, *args: Any, **named: Any) -> Any:
            if not isinstance(path, int) and Path(path).is_relative_to(broken):
                raise OSError(number, os.strerror(number), str(path))
            return original(path, *args, **named)

        return ask

    for name in ("open", "stat", "statvfs", "mkdir"):
        monkeypatch.setattr(os, name, failing(getattr(os, name)))
    for write in (
        lambda: files.write_file(broken / "x", [b"1"]),
        lambda: files.create_exclusive(broken / "x"),
        lambda: files.make_dir(broken / "x"),
    ):
        with pytest.raises(StoreError, match=f"broken/x: .*{words}"):
            write()


def test_free_space_is_that_of_the_nearest_directory(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    whole = disk.free_bytes(tmp_path)
    assert whole > 0
    for path in (tmp_path / "a" / "b", tmp_path / "file" / "c"):
        assert abs(disk.free_bytes(path) - whole) < whole


def test_links_in_a_circle_hide_no_run(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "run.yaml").touch()
    (tmp_path / "loop").symlink_to("loop")
    assert sorted(path.name for path in list_runs(tmp_path)) == ["a", "b"]


@pytest.fixture
def zombie() -> Iterator[tuple[int, str]]:
    """A process that has ended, and whose parent has not asked how; and what told it from others while it lived."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.read(read, 1)
        os._exit(0)
    token = attempts.process_token(pid)
    assert token is not None
    os.write(write, b"x")
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    yield pid, token
    os.waitpid(pid, 0)
    os.close(read)
    os.close(write)


@pytest.mark.parametrize("has_token", [True, False])
def test_a_process_that_nobody_buried_holds_no_run(zombie: tuple[int, str], has_token: bool) -> None:
    pid, token = zombie
    row = AttemptRow(
        attempt=1,
        began=time.time(),
        host=socket.gethostname(),
        ended=None,
        pid=pid,
        process=token if has_token else None,
    )
    assert psutil.Process(pid).status() == "zombie" and not attempts.is_held(row)
    row["pid"], row["process"] = os.getpid(), attempts.process_token(os.getpid()) if has_token else None
    assert attempts.is_held(row)


@pytest.mark.parametrize("clock", [-600.0, 600.0])
def test_a_doubt_is_as_old_as_its_file_whatever_the_ranks_clock_says(
    paths: RunPaths, monkeypatch: pytest.MonkeyPatch, clock: float
) -> None:
    make_checkpoint(paths, 2)
    info = load_checkpoint(paths.checkpoints, 2)
    now = time.time()
    with monkeypatch.context() as rank:
        rank.setattr(failed_reads.time, "time", lambda: now + clock)
        record_failed_read(paths, 2, info.manifest, SHARD, ArtifactError(info.path / SHARD, "a", "b"))
    damage(info.path, "flip")
    with pytest.raises(InDoubt):
        FailedReads(120).read_again(paths, 2, info.path, info.manifest)
    [note] = failed_reads.list_failed_reads(paths)
    os.utime(note, (now - 200, now - 200))
    with pytest.raises(ArtifactError, match="xxh3"):
        FailedReads(120).read_again(paths, 2, info.path, info.manifest)
    assert [path.name for path in note.parent.iterdir()] == [note.name]


FILES = """
import sys
from pathlib import Path
from prime_hpc.store.io import files
for number in range(10):
    files.write_file(Path(sys.argv[1]) / str(number), [b"1"])
"""


def test_a_file_system_without_inodes_is_not_told_as_one_without_bytes(tmp_path: Path) -> None:
    if subprocess.run(["unshare", "-Urm", "true"], capture_output=True, check=False).returncode:
        pytest.skip("no user namespaces here: a small tmpfs cannot be mounted")
    words = f"mount -t tmpfs -o size=1m,nr_inodes=4 none {tmp_path} && exec {sys.executable} -c '{FILES}' {tmp_path}"
    asked = ["unshare", "-Urm", "sh", "-c", words]
    done = subprocess.run(asked, capture_output=True, text=True, timeout=200, check=False)
    assert re.search(r"/3: disk full, it takes no more files \([01]\.\d MiB free\): delete some or", done.stderr), done


FULL = """
import errno, json, sys
from pathlib import Path
from prime_hpc.config.run_files import ATTEMPTS_JSONL, STATUS_JSON
from prime_hpc.launch.monitor.run_facts import read_evidence
from prime_hpc.store import attempts
from prime_hpc.store.errors import StoreError
from prime_hpc.supervisor.attempt.crash_recovery import _cause
from prime_hpc.supervisor.status_file import LiveStatus
run = Path(sys.argv[1])
own = attempts.begin(run / ATTEMPTS_JSONL, incarnation=1, why="first start", resume_step=None, job_id=None)
live = LiveStatus(run, attempt=own.attempt)
live.write(now=True, state="running", roles={"trainer": "ready"}, cause="x" * 200)
with (run / "others").open("wb", buffering=0) as file:
    try:
        while True:
            file.write(bytes(512))
    except OSError as error:
        assert error.errno == errno.ENOSPC
live.write(now=True, state="running", step=5)
assert json.loads((run / STATUS_JSON).read_text())["step"] == 5  # a sign of life
live.write(now=True, state="ended", outcome="failed", cause="trainer: disk full")
try:
    attempts.write_attempt(run / ATTEMPTS_JSONL, own)
except StoreError as error:
    print(error)
last = read_evidence(run).last
print(last["outcome"], last["cause"], _cause(attempts.read_attempts(run / ATTEMPTS_JSONL)[-1], None, run))
live.write(now=True, state="ended", cause="x" * 5000)  # more than it has room for
assert json.loads((run / STATUS_JSON).read_text())["cause"] == "trainer: disk full"
"""


def test_on_a_full_disk_an_attempt_says_that_it_lives_and_how_it_ended(tmp_path: Path) -> None:
    """Its line in attempts.jsonl is replaced, and takes room; its last word goes where the one before stood."""
    if subprocess.run(["unshare", "-Urm", "true"], capture_output=True, check=False).returncode:
        pytest.skip("no user namespaces here: a small tmpfs cannot be mounted")
    (tmp_path / "script.py").write_text(FULL)
    (tmp_path / "run").mkdir()
    words = (
        f"mount -t tmpfs -o size=64k none {tmp_path}/run && exec {sys.executable} {tmp_path}/script.py {tmp_path}/run"
    )
    asked = ["unshare", "-Urm", "sh", "-c", words]
    done = subprocess.run(asked, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    written, ended = done.stdout.splitlines()
    assert "attempts.jsonl" in written and "disk full" in written
    assert ended == "failed trainer: disk full ('failed', 'trainer: disk full', [])"
