"""Artifacts are whole or not there: kills, full disks, damage, fencing, racing writers, waiting readers."""

import errno
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest
from safetensors.numpy import save_file

from prime_hpc.store import artifact
from prime_hpc.store.artifact import (
    ArtifactWriter,
    clean_stale_stages,
    commit_stage,
    hash_files,
    prepare_stage,
    stage_dir,
)
from prime_hpc.store.errors import (
    ArtifactError,
    ArtifactExists,
    ArtifactTimeout,
    FencedError,
    StoreError,
    WaitCancelled,
)
from prime_hpc.store.io import files
from prime_hpc.store.io.files import FileEntry
from prime_hpc.store.manifest import MANIFEST, Manifest, read_manifest, verify_artifact
from prime_hpc.store.run_paths import RunPaths, claim_incarnation, current_incarnation, list_steps
from prime_hpc.store.waiting import wait_for_artifact
from tests.support.ranks import spawn


@pytest.fixture
def paths(tmp_path):
    (tmp_path / "run").mkdir()
    return RunPaths(tmp_path / "run")


def write(final, content=b"hello", incarnation=0, **meta):
    with ArtifactWriter(final, kind="test", step=3, version=2, writer="pytest", incarnation=incarnation) as w:
        (w.path / "sub").mkdir()
        (w.path / "sub" / "a.bin").write_bytes(content)
        w.write("b.bin", [b"more", b"", b"bytes"])
        w.meta.update(meta)
    return w.manifest


def visible(parent):
    return sorted(p.name for p in parent.iterdir() if not p.name.startswith("."))


def hidden(parent):
    return sorted(p.name for p in parent.iterdir() if p.name.startswith("."))


def test_round_trip(paths):
    final = paths.weights_step(2)
    manifest = write(final, rows=7)
    assert verify_artifact(final, deep=True) == manifest == read_manifest(final)
    assert (manifest.kind, manifest.step, manifest.version, manifest.meta) == ("test", 3, 2, {"rows": 7})
    assert manifest.files["sub/a.bin"].size == 5
    assert manifest.total_size == 14
    assert manifest.files["b.bin"] == files.hash_file(final / "b.bin")
    assert (final / "sub" / "a.bin").read_bytes() == b"hello"
    assert hidden(paths.weights) == []


def test_a_run_directory_that_is_gone_is_not_made_again(paths, tmp_path):
    number = claim_incarnation(paths)
    write(paths.checkpoint_step(3), incarnation=number)
    paths.root.rename(tmp_path / "moved")
    with pytest.raises(StoreError, match="was deleted or moved"):
        write(paths.checkpoint_step(4), incarnation=number)
    with pytest.raises(StoreError, match="was deleted or moved"):
        prepare_stage(paths.checkpoint_step(4), number)
    assert not paths.root.exists()


def test_a_run_directory_whose_attempt_is_listed_is_not_gone(paths, monkeypatch):
    """From Python 3.14 on `is_dir` says no for a stale handle and an I/O error too."""
    number, is_dir = claim_incarnation(paths), Path.is_dir
    monkeypatch.setattr(Path, "is_dir", lambda self: self != paths.root and is_dir(self))
    assert prepare_stage(paths.checkpoint_step(3), number).exists()


def test_nothing_visible_before_the_end_nor_after_an_exception(paths):
    final = paths.weights_step(1)
    with (
        pytest.raises(KeyError),
        ArtifactWriter(final, kind="test", writer="pytest") as w,
    ):
        (w.path / "a.bin").write_bytes(b"x")
        assert not final.exists()
        assert list_steps(paths.weights) == []
        raise KeyError("the writer fails")
    assert list(paths.weights.iterdir()) == []


def _in_child(work):
    """Run `work` in a fork of this process, which has no other threads; how it ended, as from os.waitpid."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            work()
            code = 0
        finally:
            os._exit(code)
    return os.waitpid(pid, 0)[1]


def _kill_at_every_operation(_, root):
    paths = RunPaths(Path(root))
    final = paths.weights_step(1)
    files.make_dir(paths.weights)
    killed = 0
    for k in range(100):

        def work(k=k):
            count = [0]

            def kill(operation, path):
                if count[0] == k:
                    os.kill(os.getpid(), signal.SIGKILL)
                count[0] += 1

            with files.observe_operations(kill):
                write(final)

        status = _in_child(work)
        if final.exists():  # killed after the rename (or not at all): it must be whole
            assert verify_artifact(final, deep=True).kind == "test"
            shutil.rmtree(final)
        else:
            assert os.WIFSIGNALED(status)
            killed += 1
        assert visible(paths.weights) == []
        clean_stale_stages(paths.weights)
        assert hidden(paths.weights) == []
        if os.WIFEXITED(status):
            assert os.WEXITSTATUS(status) == 0
            break
    assert killed >= 10


def test_killed_at_every_operation(paths):
    spawn(_kill_at_every_operation, (str(paths.root),), 1)


def test_an_io_error_of_the_look_for_a_newer_attempt_is_in_words(paths, monkeypatch):
    """The role ended because of a bug, with a traceback."""

    def fail(path):
        raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))

    monkeypatch.setattr(files, "list_dir", fail)
    with pytest.raises(StoreError, match="incarnation: the file system reports an I/O error"):
        write(paths.weights_step(1))


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
def test_disk_error_at_every_operation(paths, number):
    final = paths.weights_step(1)
    files.make_dir(paths.weights)
    for k in range(100):
        count = [0]
        failed = [False]

        def fail(operation, path, k=k, count=count, failed=failed):
            if count[0] == k and operation != "remove":
                failed[0] = True
                raise OSError(number, os.strerror(number), str(path))
            count[0] += 1

        done = None
        with files.observe_operations(fail):
            try:
                done = write(final)
            except StoreError as error:
                assert "MiB free" in str(error)
                assert str(paths.weights) in str(error)
        if done is not None and not failed[0]:
            break
        assert done is None
        assert hidden(paths.weights) == []
        if final.exists():  # only the last fsync of the parent was left
            verify_artifact(final, deep=True)
            shutil.rmtree(final)
    assert k >= 10


FULL_DISK = """
    import sys, os
    from pathlib import Path
    import numpy as np
    from safetensors.numpy import save_file
    from prime_hpc.store.artifact import ArtifactWriter, StoreError
    final = Path(sys.argv[1]) / "weights" / "step_000001"
    def by_store(w): w.write("a.bin", [bytes(8 << 20)])
    def by_python(w): (w.path / "a.bin").write_bytes(bytes(8 << 20))
    def by_safetensors(w): save_file({"a": np.zeros(8 << 20, np.uint8)}, w.path / "a.safetensors")
    for how in (by_store, by_python, by_safetensors):
        try:
            with ArtifactWriter(final, kind="weights", writer="pytest") as w:
                how(w)
        except StoreError as error:
            assert "disk full" in str(error) and "MiB free" in str(error) and str(final.parent) in str(error), error
            assert "output_dir" in str(error) and "--output" in str(error), error
        else:
            raise SystemExit(f"{how.__name__}: no StoreError")
        assert os.listdir(final.parent) == [], os.listdir(final.parent)
    with ArtifactWriter(final, kind="weights", writer="pytest") as w:
        w.write("a.bin", [bytes(1 << 20)])
"""


def test_really_full_disk(tmp_path):
    if subprocess.run(["unshare", "-rm", "true"], capture_output=True, check=False).returncode:
        pytest.skip("no user namespaces here: a small tmpfs cannot be mounted")
    script = tmp_path / "full.py"
    script.write_text(textwrap.dedent(FULL_DISK))
    mount = tmp_path / "disk"
    mount.mkdir()
    command = f"mount -t tmpfs -o size=2m none {mount} && exec {sys.executable} {script} {mount}"
    done = subprocess.run(
        ["unshare", "-rm", "sh", "-c", command], capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_truncated_file_is_found_without_reading_and_a_flipped_byte_by_reading(paths):
    final = paths.weights_step(1)
    write(final)
    target = final / "sub" / "a.bin"
    target.write_bytes(b"hellO")
    verify_artifact(final)
    with pytest.raises(ArtifactError, match="xxh3") as caught:
        verify_artifact(final, deep=True)
    assert caught.value.file == target
    target.write_bytes(b"hell")
    with pytest.raises(ArtifactError, match="expected 5 bytes, found 4 bytes") as caught:
        verify_artifact(final)
    assert caught.value.file == target
    target.unlink()
    with pytest.raises(ArtifactError, match="No such file"):
        verify_artifact(final)


def test_every_changed_byte_of_a_manifest_is_found(paths):
    final = paths.weights_step(1)
    manifest = write(final, note="text")
    whole = (final / MANIFEST).read_bytes()
    for position in range(len(whole)):
        damaged = whole[:position] + bytes([whole[position] ^ 1]) + whole[position + 1 :]
        (final / MANIFEST).write_bytes(damaged)
        try:
            assert read_manifest(final) == manifest  # white space may change
            assert chr(whole[position]).isspace()
        except ArtifactError as error:
            assert MANIFEST in str(error)


def test_manifest_of_a_newer_format_and_names_that_lead_out(tmp_path):
    def manifest(name="a"):
        return Manifest("test", None, None, "pytest", 0, {name: files.FileEntry(1, "0")})

    newer = manifest().to_bytes().replace(b'"format": 1', b'"format": 2')
    with pytest.raises(ArtifactError, match="format 2"):
        Manifest.from_bytes(newer, tmp_path / MANIFEST)
    for name in ("../a", "/etc/passwd", "b/../../a"):
        with pytest.raises(ArtifactError, match="leads out"):
            Manifest.from_bytes(manifest(name).to_bytes(), tmp_path / MANIFEST)
    with pytest.raises(ArtifactError, match="a manifest"):
        Manifest.from_bytes(b"[1]", tmp_path / MANIFEST)
    with pytest.raises(ValueError, match="plain JSON"):
        Manifest("test", None, None, "pytest", 0, {}, {"x": object()}).to_bytes()


def _write_with_umask(_, root, umask, version):
    os.umask(umask)
    with ArtifactWriter(RunPaths(Path(root)).weights_step(version), kind="weights", writer="pytest") as w:
        save_file({}, w.path / "model.safetensors")  # creates it with mode 0600
        w.write("direct.bin", [b"x"])


def test_files_are_readable_for_others_as_the_umask_allows(paths):
    for version, (umask, mode) in enumerate([(0o022, 0o644), (0o077, 0o600), (0o000, 0o644)], start=1):
        spawn(_write_with_umask, (str(paths.root), umask, version), 1)
        for name in ("model.safetensors", "direct.bin", MANIFEST):
            assert (paths.weights_step(version) / name).stat().st_mode & 0o777 == mode, name


def test_same_content_again_is_accepted_other_content_refused(paths):
    final = paths.weights_step(1)
    first = write(final)
    assert write(final).digest == first.digest
    with pytest.raises(ArtifactExists, match="other content"):
        write(final, b"HELLO")
    assert verify_artifact(final, deep=True) == first
    assert hidden(paths.weights) == []


@pytest.mark.parametrize("foreign", ["file", "directory"])
def test_foreign_things_in_the_way_are_not_touched(paths, foreign, monkeypatch):
    monkeypatch.setattr(artifact, "IN_THE_WAY_S", 0.1)
    final = paths.weights_step(1)
    if foreign == "file":
        final.parent.mkdir(parents=True)
        final.write_text("mine")
    else:
        final.mkdir(parents=True)
        (final / "mine").write_text("mine")
    with pytest.raises(ArtifactExists, match="in the way"):
        write(final)
    assert (final if foreign == "file" else final / "mine").read_text() == "mine"
    assert hidden(paths.weights) == []


def test_incarnations_count_up_and_racing_claims_differ(paths):
    assert current_incarnation(paths) == 0
    claimed = []
    threads = [threading.Thread(target=lambda: claimed.append(claim_incarnation(paths))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(claimed) == list(range(1, 9))
    assert current_incarnation(paths) == 8


def test_an_older_life_is_refused_at_the_start_and_at_the_commit(paths):
    assert claim_incarnation(paths) == 1
    final = paths.weights_step(1)
    with (
        pytest.raises(FencedError, match="incarnation 2 has begun"),
        ArtifactWriter(final, kind="test", writer="pytest", incarnation=1) as w,
    ):
        w.write("a.bin", [b"x"])
        assert claim_incarnation(paths) == 2
    assert list(paths.weights.iterdir()) == []
    with (
        pytest.raises(FencedError),
        ArtifactWriter(final, kind="test", writer="pytest", incarnation=1),
    ):
        pytest.fail("an old attempt may not even begin to write")
    with pytest.raises(FencedError):
        prepare_stage(final, 1)
    assert write(final, incarnation=2).incarnation == 2


def test_a_newer_life_replaces_what_a_fenced_one_left(paths):
    final = paths.weights_step(1)
    claim_incarnation(paths)
    write(final, b"old", incarnation=1)
    claim_incarnation(paths)
    write(final, b"newer", incarnation=2)
    assert (final / "sub" / "a.bin").read_bytes() == b"newer"
    assert verify_artifact(final, deep=True).incarnation == 2
    assert hidden(paths.weights) == []


def test_many_ranks_one_artifact(paths):
    final = paths.checkpoint_step(10)
    stage = prepare_stage(final, 0)
    assert stage == stage_dir(final, 0)
    (stage / "trainer").mkdir()
    entries: dict[str, FileEntry] = {}
    for rank in range(4):
        name = f"trainer/rank_{rank}.bin"
        (stage / name).write_bytes(bytes([rank]) * (rank + 1))
        entries |= hash_files(stage, [name])
    manifest = Manifest("checkpoint", 10, 10, "trainer", 0, entries)
    (stage / "stray").write_bytes(b"?")
    with pytest.raises(StoreError, match="stray"):
        commit_stage(stage, final, manifest)
    (stage / "stray").unlink()
    commit_stage(stage, final, manifest)
    assert verify_artifact(final, deep=True).total_size == 10


def test_preparing_a_stage_removes_what_a_killed_try_left(paths):
    final = paths.weights_step(1)
    stage = prepare_stage(final, 0)
    (stage / "half").write_bytes(b"x")
    assert list(prepare_stage(final, 0).iterdir()) == []


def test_clean_up_spares_newer_lives_and_finished_artifacts(paths):
    write(paths.weights_step(1))
    old, new = stage_dir(paths.weights_step(2), 1), stage_dir(paths.weights_step(2), 2)
    for stage in (old, new, paths.weights / ".trash-step_000000-x"):
        stage.mkdir()
        (stage / "x").write_text("x")
    (paths.weights / ".tmp-lease").write_text("x")
    (paths.weights / ".keep").write_text("foreign")
    assert old.name in clean_stale_stages(paths.weights, before_incarnation=2)
    assert hidden(paths.weights) == [".keep", new.name]
    clean_stale_stages(paths.weights)
    assert visible(paths.weights) == ["step_000001"]
    assert hidden(paths.weights) == [".keep"]
    assert clean_stale_stages(paths.root / "nowhere") == []


def test_concurrent_writers_of_one_name_leave_one_whole_artifact(paths):
    final = paths.weights_step(1)
    files.make_dir(paths.weights)
    won, lost = [], []
    barrier = threading.Barrier(6)

    def race(i):
        barrier.wait(10)
        try:
            write(final, bytes([i]) * 1000)
            won.append(i)
        except ArtifactExists:
            lost.append(i)

    threads = [threading.Thread(target=race, args=(i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(won) == 1
    assert len(lost) == 5
    verify_artifact(final, deep=True)
    assert (final / "sub" / "a.bin").read_bytes() == bytes(won) * 1000
    assert hidden(paths.weights) == []


def test_wait_finds_by_listing(paths):
    final = paths.weights_step(1)
    timer = threading.Timer(0.3, write, [final])
    timer.start()
    assert wait_for_artifact(final, deadline_s=20).step == 3
    timer.join()


def test_wait_that_ends_names_what_was_awaited(paths):
    final = paths.rollouts_step(4)
    with pytest.raises(ArtifactTimeout, match=r"waited 0.1 s for .*step_000004 \(batch \{'step': 4\}\)") as caught:
        wait_for_artifact(final, deadline_s=0.1, topic="batch", key={"step": 4})
    assert isinstance(caught.value, TimeoutError)
    with pytest.raises(WaitCancelled):
        wait_for_artifact(final, deadline_s=20, cancelled=lambda: True)


def test_wait_retries_a_file_that_is_still_short_and_then_names_it(paths):
    final = paths.weights_step(1)
    write(final)
    target = final / "b.bin"
    whole = target.read_bytes()
    target.write_bytes(whole[:3])
    timer = threading.Timer(0.3, target.write_bytes, [whole])
    timer.start()
    wait_for_artifact(final, deadline_s=20)
    timer.join()
    target.write_bytes(whole[:3])
    start = time.monotonic()
    with pytest.raises(ArtifactError, match=r"b\.bin: expected 9 bytes, found 3 bytes"):
        wait_for_artifact(final, deadline_s=0.2)
    assert time.monotonic() - start >= 0.2


def test_wait_refuses_an_older_life(paths):
    final = paths.rollouts_step(1)
    write(final, incarnation=1)
    with pytest.raises(ArtifactError, match="incarnation 2 or newer, found incarnation 1"):
        wait_for_artifact(final, deadline_s=0.1, min_incarnation=2)
    assert wait_for_artifact(final, deadline_s=0.1, min_incarnation=1).incarnation == 1


def test_transient_errors_of_network_file_systems_are_retried():
    answers = [OSError(errno.ESTALE, "stale"), FileNotFoundError(errno.ENOENT, "gone")]

    def read():
        if answers:
            raise answers.pop(0)
        return "content"

    assert files.retry_read(read, deadline_s=20) == "content"
    with pytest.raises(OSError, match="no"):
        files.retry_read(lambda: (_ for _ in ()).throw(OSError(errno.EACCES, "no")), deadline_s=20)
