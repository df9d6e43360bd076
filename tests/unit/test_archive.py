"""`prime-hpc archive`: made, broken off and gone on with, compared, restored, and what it refuses."""

import json
import os
import random
import shutil
import subprocess
import sys
import tarfile
import time
from pathlib import Path
from typing import Any

import pytest

from prime_hpc.cli import main
from prime_hpc.launch.archive import archive, contents, packed_file
from prime_hpc.launch.archive.contents import choose
from prime_hpc.launch.archive.folder_copy import FolderCopy
from prime_hpc.launch.archive.packed_file import PackedFile
from prime_hpc.launch.resume import load_to_resume
from prime_hpc.launch.sweep.state import _link_log, log_name
from prime_hpc.store.attempts import Attempt, process_token, write_attempt
from prime_hpc.store.checkpoint.checkpoints import list_checkpoints
from prime_hpc.store.checkpoint.failed_reads import FailedReads
from prime_hpc.store.checkpoint.newest import POINTER, choose_newest, expected_step
from prime_hpc.store.errors import Unreadable
from prime_hpc.store.run_paths import RunPaths
from prime_hpc.store.weights import list_versions
from tests.support.checkpoints import damage, make_checkpoint, make_weights

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A run of four steps that was stopped, with two checkpoints and three versions."""
    return make(tmp_path / "there" / "run")


def make(path: Path, checkpoints: Path | None = None) -> Path:
    """Write a run directory; `checkpoints`: they lie outside."""
    (path / "logs" / "attempt_1" / "trainer").mkdir(parents=True)
    ckpt = f"ckpt: {{path: {checkpoints or 'null'}}}\n"
    env = "orchestrator: {env: [{id: reverse-text}]}\n"
    (path / "run.yaml").write_text(f"output_dir: {path.parent}\nname: {path.name}\nmax_steps: 9\n{ckpt}{env}")
    (path / "logs" / "latest").symlink_to("attempt_1")
    (path / "logs" / "attempt_1" / "trainer" / "trainer.log").write_text("a line\n" * 1000)
    (path / "secrets").mkdir()
    (path / "secrets" / "slurm.env.HF_TOKEN").write_text("hf_secret")
    (path / "metrics").mkdir()
    (path / "metrics" / "trainer.jsonl").write_text('{"step": 4, "loss": 1.0}\n')
    paths = RunPaths(path, checkpoints)
    for step in (2, 4):
        make_checkpoint(paths, step)
    for version in (2, 3, 4):
        make_weights(paths, version)
    if checkpoints is not None:
        (path / POINTER).write_text(json.dumps({"path": str(checkpoints)}))
    now = time.time()
    attempt = Attempt(1, 1, now - 9, "first start", ended=now, outcome="stopped", cause="STOP")
    write_attempt(path / "attempts.jsonl", attempt)
    return path


def ask(capsys: pytest.CaptureFixture, *words: object, code: int = 0) -> Any:
    """Say it; returns the answer, or what was said on standard error."""
    found = main(["archive", *map(str, words), *(["--json"] if code == 0 else [])])
    told = capsys.readouterr()
    assert found == code, told.err
    return json.loads(told.out) if code == 0 else told.err


def content(folder: Path) -> dict[str, bytes | str]:
    return {
        p.relative_to(folder).as_posix(): str(p.readlink()) if p.is_symlink() else p.read_bytes()
        for p in folder.rglob("*")
        if p.is_symlink() or p.is_file()
    }


@pytest.mark.parametrize("suffix", [".tar.zst", ".tar.gz", ".tar", ""])
def test_what_comes_back_is_what_went_in_and_can_go_on(
    run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture, suffix: str
) -> None:
    target = tmp_path / "kept" / f"a{suffix}" if suffix else tmp_path / "kept"
    done = ask(capsys, run_dir, target, *([] if suffix else ["--folder"]))
    path = tmp_path / "kept" / (f"a{suffix}" if suffix else "run")
    assert done["path"] == str(path) and done["checkpoints"] == [4] and not done["deleted"]
    assert [p.name for p in path.parent.iterdir()] == [path.name], "nothing else is left there"
    assert any("secrets/" in note for note in done["notes"]) and any("2 left out" in note for note in done["notes"])
    (tmp_path / "new").mkdir()
    back = Path(ask(capsys, "--restore", path, tmp_path / "new")["path"])
    assert back == tmp_path / "new" / "run"
    before, after = content(run_dir), content(back)
    left = ("checkpoints/step_2/", "weights/step_000002/", "weights/step_000003/", "rollouts/", "secrets/")
    assert {n: c for n, c in before.items() if not n.startswith(left)} == {
        n: c for n, c in after.items() if n != "archive.json"
    }
    assert load_to_resume(back, ["--max-steps", "9"]).experiment.run_dir == back
    ask(capsys, back, tmp_path / "second.tar")
    twice = Path(ask(capsys, "--restore", tmp_path / "second.tar", tmp_path / "twice")["path"])
    assert content(twice).keys() == after.keys(), "a restored run can be archived again"


def test_all_checkpoints_and_rollouts_from_where_they_are_and_the_source_goes(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    outside = tmp_path / "big" / "checkpoints"
    run_dir = make(tmp_path / "there" / "run", outside)
    damage(outside / "step_2", "truncate")
    before = content(run_dir)
    path = tmp_path / "a.tar"
    done = ask(capsys, run_dir, path, "--checkpoints", "all", "--rollouts", "--delete-source")
    assert done["deleted"] and not run_dir.exists() and (outside / "step_4").is_dir()
    assert done["checkpoints"] == [4] and any("2 left out (which are not whole)" in note for note in done["notes"])
    back = Path(ask(capsys, "--restore", path, tmp_path / "back" / "again")["path"])
    assert back == tmp_path / "back" / "again"
    assert [info.step for info in list_checkpoints(RunPaths(back).checkpoints, deep=True)] == [4]
    assert {n for n in content(back) if n.startswith("rollouts/")} == {n for n in before if n.startswith("rollouts/")}
    ckpt = load_to_resume(back, []).experiment.ckpt
    assert ckpt is not None and ckpt.path is None, "they lie in the run directory now"


def test_without_checkpoints_the_last_weights_stay(
    run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    damage_last = RunPaths(run_dir).weights_step(4) / "model.safetensors"
    damage_last.write_bytes(damage_last.read_bytes()[:-1])
    done = ask(capsys, run_dir, tmp_path / "a.tar", "--checkpoints", "none")
    assert any("version 4 left out, it is not whole" in note for note in done["notes"])
    back = Path(ask(capsys, "--restore", tmp_path / "a.tar", tmp_path / "back")["path"])
    assert list_versions(RunPaths(back)) == [3] and not (back / "checkpoints").exists()


@pytest.mark.parametrize("folder", [False, True])
def test_broken_off_it_goes_on_where_it_was(
    run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch, folder: bool
) -> None:
    """A damaged file stops it in the middle; once that is mended, what was copied before is not read again."""
    shard = run_dir / "weights" / "step_000004" / "model.safetensors"
    whole = shard.read_bytes()
    shard.write_bytes(bytes([whole[0] ^ 1]) + whole[1:])
    words = [run_dir, tmp_path / "kept" / ("" if folder else "a.tar.gz"), *(["--folder"] if folder else [])]
    assert str(shard) in ask(capsys, *words, code=1)
    part = tmp_path / "kept" / ("run.part" if folder else "a.tar.gz.part")
    assert part.exists() and not part.with_suffix("").exists()
    shard.write_bytes(whole)
    if not folder:
        with part.open("ab") as file:
            file.write(b"torn")  # as a kill in the middle of a member leaves it
        monkeypatch.setattr(packed_file, "SYNC_BYTES", 0)
    logs = {p: p.stat().st_ino for p in part.rglob("*.log")} if folder else {}
    if folder:
        (part / "rollouts" / "step_000001").mkdir(parents=True)
        (part / "rollouts" / "step_000001" / "rank_0.bin").touch()  # as a try with --rollouts leaves it
    ask(capsys, *words)
    final = tmp_path / "kept" / ("run" if folder else "a.tar.gz")
    assert {final / p.relative_to(part): i for p, i in logs.items()} == {
        p: p.stat().st_ino for p in final.rglob("*.log")
    }
    assert not folder or not (final / "rollouts").exists()  # what no manifest of the archive names
    if not folder:
        with tarfile.open(final) as members:  # by a program that knows nothing of members packed apart
            names = members.getnames()
        assert len(names) == len(set(names)) and "weights/step_000004/model.safetensors" in names
    assert ask(capsys, "--restore", final, tmp_path / "back")["num_files"] > 10
    assert "is there already" in ask(capsys, *words, code=1)


def test_a_full_disk_loses_nothing(run_dir: Path, tmp_path: Path) -> None:
    """On a small tmpfs of its own; with more room the same command ends it."""
    if subprocess.run(["unshare", "-Urm", "true"], capture_output=True, check=False).returncode:
        pytest.skip("no user namespaces here: a small tmpfs cannot be mounted")
    (run_dir / "logs" / "big.log").write_bytes(os.urandom(1 << 20))
    mount = tmp_path / "mount"
    mount.mkdir()
    words = f"{sys.executable} -P -m prime_hpc.cli archive {run_dir} {mount}/a.tar --delete-source"
    script = f"mount -t tmpfs -o size=800k none {mount}; {words}; echo first $?; ls {mount}; "
    script += f"mount -t tmpfs -o remount,size=8m none {mount}; {words}; echo second $?; ls {mount}"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        ["unshare", "-Urm", "sh", "-c", script],
        capture_output=True,
        text=True,
        env=environment,
        timeout=280,
        check=False,
    )
    assert "disk full" in done.stderr and "may not be enough" in done.stderr, done.stderr
    assert "first 1\na.tar.part\na.tar.part.journal\n" in done.stdout, done.stdout + done.stderr
    assert done.stdout.endswith("second 0\na.tar\n"), done.stdout + done.stderr
    assert not run_dir.exists(), "deleted after the second try, not after the first"


def test_a_damaged_archive_is_refused(run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    path = tmp_path / "a.tar"
    ask(capsys, run_dir, path)
    data = path.read_bytes()
    back = tmp_path / "back"
    at = data.index(b"a line\n") + 3
    for broken, said in (
        (data[:at] + b"X" + data[at + 1 :], "trainer.log: expected xxh3"),
        (data[: len(data) // 2], "no whole archive"),
        (b"", "no archive.json"),
        (data.replace(b'"format": 1', b'"format": 2'), "is of format 2"),
        (data.replace(b'"run": "run"', b'"run": "rum"'), "archive.json is damaged"),
    ):
        (tmp_path / "b.tar").write_bytes(broken)
        told = ask(capsys, "--restore", tmp_path / "b.tar", back, code=1)
        assert said in told or (said == "no archive.json" and "archive" in told), told
        assert not back.exists()
    evil = tmp_path / "evil.tar"
    with tarfile.open(evil, "w") as members:
        members.addfile(tarfile.TarInfo("../outside"))
    assert "no archive of a run does" in ask(capsys, "--restore", evil, back, code=1)
    assert "is no archive" in ask(capsys, "--restore", run_dir / "run.yaml", back, code=1)
    assert "there is no such file" in ask(capsys, "--restore", tmp_path / "none.tar.gz", back, code=1)
    assert "is there already" in ask(capsys, "--restore", path, run_dir.parent, code=1)
    assert "is there already" in ask(capsys, "--restore", path, run_dir, code=1), "in no other run"


def test_what_is_refused(run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    assert "all, last or none" in ask(capsys, run_dir, tmp_path / "a.tar", "--checkpoints", "some", code=2)
    assert "no run" in ask(capsys, tmp_path / "none", tmp_path / "a.tar", code=2)
    assert "argument is missing" in ask(capsys, run_dir, code=2)
    assert "goes not with --restore" in ask(capsys, "--restore", "a", "b", "--rollouts", code=2)
    assert "lies in the run directory itself" in ask(capsys, run_dir, run_dir / "a.tar", code=1)
    row = json.loads((run_dir / "attempts.jsonl").read_text())
    row |= {"ended": None, "outcome": None, "host": os.uname().nodename}
    row |= {"pid": os.getpid(), "process": process_token(os.getpid())}
    (run_dir / "attempts.jsonl").write_text(json.dumps(row) + "\n")
    told = ask(capsys, run_dir, tmp_path / "a.tar", "--delete-source", code=3)
    assert f"end it first (prime-hpc cancel {run_dir})" in told
    assert not (tmp_path / "a.tar").exists() and run_dir.exists()


def test_another_users_run_is_not_deleted(
    run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a folder that a group shares, the run's name could be taken from it before its files refused to go."""
    monkeypatch.setattr(os, "geteuid", lambda: run_dir.stat().st_uid + 4242)
    told = ask(capsys, run_dir, tmp_path / "a.tar", "--delete-source", code=2)
    assert "belongs to another user" in told and not (tmp_path / "a.tar").exists()
    assert [path.name for path in run_dir.parent.iterdir() if path.name.startswith(".trash-")] == []
    ask(capsys, run_dir, tmp_path / "a.tar")
    assert run_dir.exists()


def test_a_run_whose_weights_another_one_uses_is_not_deleted(
    run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PRIMEHPC_OUTPUTS", str(tmp_path / "none"))
    (tmp_path / "alias").symlink_to(run_dir.parent)
    for name, words in (
        ("rl", f"model: {{name: {run_dir}/weights/step_000004}}"),
        ("judged", f"orchestrator: {{teacher: {{model: {tmp_path}/alias/run/weights/step_000004}}}}"),
        ("evaluated", f"kind: eval\neval: {{weights_dir: {run_dir}}}"),
        ("unlike", f"model: {{name: {run_dir}-2/weights/step_000004}}"),
        ("broken", f"model: {{name: {run_dir}"),
    ):
        make(run_dir.parent / name)
        (run_dir.parent / name / "run.yaml").write_text(words + "\n")
    row = json.loads((run_dir.parent / "evaluated" / "attempts.jsonl").read_text()) | {"outcome": "completed"}
    (run_dir.parent / "evaluated" / "attempts.jsonl").write_text(json.dumps(row) + "\n")
    told = ask(capsys, run_dir, tmp_path / "a.tar", "--delete-source", code=2)
    assert "there/rl (" in told and "there/judged (" in told and "say --force" in told
    assert not any(f"there/{name} (" in told for name in ("evaluated", "unlike", "broken", "run"))
    assert run_dir.exists() and not (tmp_path / "a.tar").exists(), "before anything is copied"
    ask(capsys, run_dir, tmp_path / "a.tar")
    assert ask(capsys, run_dir, tmp_path / "b.tar", "--delete-source", "--force")["deleted"]


def test_a_run_that_another_one_uses_by_the_time_it_is_copied_is_not_deleted(
    run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PRIMEHPC_OUTPUTS", str(tmp_path / "none"))

    def late(*compared: Any) -> None:
        (run_dir.parent / "rl").mkdir()
        (run_dir.parent / "rl" / "run.yaml").write_text(f"model: {{name: {run_dir}/weights/step_000004}}\n")

    monkeypatch.setattr(archive, "compare", late)
    told = ask(capsys, run_dir, tmp_path / "a.tar", "--delete-source", code=1)
    assert "a.tar is whole, but" in told and "there/rl (" in told and run_dir.exists()


@pytest.mark.parametrize("folder", [False, True])
def test_links_out_of_the_run_are_kept_as_their_files_and_the_archive_comes_back(
    run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture, folder: bool
) -> None:
    """A sweep's point has one itself: the log of the array's task, which lies beside the points."""
    (run_dir.parent / "logs").mkdir()
    (run_dir.parent / "logs" / log_name("12", "0")).write_text("said by the job\n")
    _link_log(run_dir, {"SLURM_ARRAY_JOB_ID": "12", "SLURM_ARRAY_TASK_ID": "0"})
    (run_dir / "data").symlink_to(tmp_path)
    (run_dir / "gone").symlink_to("/no/such/file")
    (run_dir / "above").symlink_to("logs/latest/../../../logs")  # within by its words, not by the links on its way
    words = [run_dir, tmp_path / "kept" / ("" if folder else "a.tar"), *(["--folder"] if folder else [])]
    done = ask(capsys, *words, "--delete-source")
    assert done["deleted"] and not run_dir.exists()
    left = [note for note in done["notes"] if "a link out of the run" in note]
    assert sorted(note.partition(" ")[0] for note in left) == ["above", "data", "gone"], done["notes"]
    back = Path(ask(capsys, "--restore", done["path"], tmp_path / "back")["path"])
    log = back / "logs" / "slurm-12_0.out"
    assert log.read_text() == "said by the job\n" and not log.is_symlink()
    assert (back / "logs" / "latest").readlink() == Path("attempt_1") and not (back / "data").is_symlink()


@pytest.mark.parametrize("folder", [False, True])
def test_an_archive_that_holds_links_out_of_the_run_comes_back_without_them(
    run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch, folder: bool
) -> None:
    (run_dir / "logs" / "up").symlink_to("../../logs")
    (run_dir / "data").symlink_to("/somewhere")
    (run_dir / "deep").mkdir()
    (run_dir / "above").symlink_to("deep/down/../logs")  # out of it once there is the link on its way
    (run_dir / "deep" / "down").symlink_to("..")
    monkeypatch.setattr(contents, "stays_within", lambda link, root: True)  # as archives were made before
    words = [run_dir, tmp_path / "kept" / ("" if folder else "a.tar"), *(["--folder"] if folder else [])]
    path = ask(capsys, *words)["path"]
    monkeypatch.undo()
    done = ask(capsys, "--restore", path, tmp_path / "back")
    assert sorted(note for note in done["notes"] if "a link out of the run" in note) == [
        "above skipped: a link out of the run (deep/down/../logs)",
        "data skipped: a link out of the run (/somewhere)",
        "logs/up skipped: a link out of the run (../../logs)",
    ]
    kept = {path.relative_to(tmp_path / "back") for path in (tmp_path / "back").rglob("*") if path.is_symlink()}
    assert kept == {Path("logs/latest"), Path("deep/down")}


@pytest.mark.parametrize(("names", "told"), [(["up", "up/x"], "'up/x' below a link"), (["x", "x"], "a name twice")])
def test_an_archive_whose_links_lie_below_others_is_refused(
    run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture, names: list[str], told: str
) -> None:
    """They would be made, or removed, where the others lead."""
    ask(capsys, run_dir, tmp_path / "a.tar")
    with tarfile.open(tmp_path / "a.tar", "a") as archive:
        for name in names:
            info = tarfile.TarInfo(name)
            info.type, info.linkname = tarfile.SYMTYPE, "logs"
            archive.addfile(info)
    assert told in ask(capsys, "--restore", tmp_path / "a.tar", tmp_path / "back", code=1)
    assert not (tmp_path / "back").exists()


@pytest.mark.parametrize("folder", [False, True])
def test_links_are_read_back_before_the_source_goes(
    run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch, folder: bool
) -> None:
    for kind in (PackedFile, FolderCopy):
        finish = kind.finish
        monkeypatch.setattr(kind, "finish", lambda self, small, links, finish=finish: finish(self, small, {}))
    words = [run_dir, tmp_path / "kept" / ("" if folder else "a.tar"), *(["--folder"] if folder else [])]
    told = ask(capsys, *words, "--delete-source", code=1)
    assert "logs/latest: expected a link to attempt_1, found nothing" in told and run_dir.exists()


def test_a_link_to_the_run_goes_with_it(run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    link = tmp_path / "outputs" / "run"
    link.parent.mkdir()
    link.symlink_to(run_dir)
    assert "lies in the run directory itself" in ask(capsys, link, link / "a.tar", "--delete-source", code=1)
    assert ask(capsys, link, tmp_path / "a.tar", "--delete-source")["deleted"]
    assert not run_dir.exists() and list(run_dir.parent.iterdir()) == [] and list(link.parent.iterdir()) == []


def test_a_checkpoint_that_was_saved_and_is_not_there_is_not_left_out_unasked(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    big = tmp_path / "big"
    run_dir = make(tmp_path / "there" / "run", big / "checkpoints")
    big.rename(tmp_path / "unmounted")
    told = ask(capsys, run_dir, tmp_path / "a.tar", "--delete-source", code=1)
    assert "the run saved one of step 4: is its file system mounted here?" in told and run_dir.exists()
    assert ask(capsys, run_dir, tmp_path / "a.tar", "--checkpoints", "none", "--delete-source")["deleted"]


def test_where_the_newest_checkpoint_was_damaged_the_older_one_is_named(
    run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    """An attempt would wait for the one that was saved last, as if its file system were not mounted."""
    damage(run_dir / "checkpoints" / "step_4", "truncate")
    assert ask(capsys, run_dir, tmp_path / "a.tar")["checkpoints"] == [2]
    assert main(["archive", "--restore", str(tmp_path / "a.tar"), str(tmp_path / "back")]) == 0
    assert f"resume {tmp_path}/back --ckpt.resume-step 2 goes on from step 2" in capsys.readouterr().out
    back = RunPaths(tmp_path / "back")
    with pytest.raises(Unreadable, match="the run saved a checkpoint of step 4, and it is not listed"):
        choose_newest(back, FailedReads(0.0), expected=expected_step(back))


def test_episodes_of_an_evaluation_are_no_checkpoints(
    run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    for name in ("checkpoints", "weights", "rollouts"):
        shutil.rmtree(run_dir / name)
    (run_dir / "saved.json").unlink()
    (run_dir / "run.yaml").write_text(f"kind: eval\noutput_dir: {run_dir.parent}\nname: run\n")
    now = time.time()
    attempt = Attempt(2, 2, now - 9, "first start", ended=now, outcome="completed", cause="done", saved_step=60)
    write_attempt(run_dir / "attempts.jsonl", attempt)
    assert ask(capsys, run_dir, tmp_path / "a.tar")["checkpoints"] == []


def test_a_batch_of_which_a_file_is_gone_is_left_out(
    run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    next((run_dir / "rollouts" / "step_000002").glob("rank*")).unlink()
    done = ask(capsys, run_dir, tmp_path / "a.tar", "--rollouts")
    assert any(note.startswith("rollouts/step_000002 left out, it is not whole") for note in done["notes"])
    back = Path(ask(capsys, "--restore", tmp_path / "a.tar", tmp_path / "back")["path"])
    assert [path.name for path in (back / "rollouts").iterdir()] == ["step_000004"]


@pytest.mark.parametrize("folder", [False, True])
def test_a_batch_that_is_damaged_is_named_and_the_rest_is_kept(
    run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture, folder: bool
) -> None:
    file = next((run_dir / "rollouts" / "step_000002").glob("rank*"))
    whole = file.read_bytes()
    file.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    target = tmp_path / ("to" if folder else "a.tar.gz")
    words = ["--rollouts", "--delete-source", *(["--folder"] if folder else [])]
    said = ask(capsys, run_dir, target, *words, code=1)
    assert "left out, it is damaged" in said and f"rollouts/step_000002/{file.name}" in said
    assert run_dir.is_dir()  # what is not in the archive is not deleted
    made = target / run_dir.name if folder else target
    back = Path(ask(capsys, "--restore", made, tmp_path / "back")["path"])
    assert not (back / "rollouts" / "step_000002" / file.name).exists()
    assert (back / "rollouts" / "step_000004").is_dir() and (back / "metrics" / "trainer.jsonl").exists()
    file.write_bytes(whole)  # put back: the next archive has it
    assert ask(capsys, run_dir, tmp_path / "b.tar", "--rollouts")["damaged"] == []


@pytest.mark.parametrize("suffix", [".tar.zst", ".tar.gz"])
def test_an_archive_damaged_in_what_is_compressed_is_refused(
    run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch, suffix: str
) -> None:
    monkeypatch.setattr(packed_file, "CHUNK", 4096)  # what is damaged is met inside a file, not with its header
    rows = random.Random(1)
    text = "".join(json.dumps({"step": step, "loss": rows.random()}) + "\n" for step in range(20_000))
    (run_dir / "logs" / "big").write_text(text)
    whole, broken = tmp_path / f"a{suffix}", tmp_path / f"b{suffix}"
    ask(capsys, run_dir, whole)
    data = whole.read_bytes()
    for byte in (b"\x00", b"\xff"):
        damaged = range(len(data) // 2, len(data) // 2 + 100_000)  # more than a block of either
        broken.write_bytes(data[: damaged.start] + byte * len(damaged) + data[damaged.stop :])
        told = ask(capsys, "--restore", broken, tmp_path / "back", code=1)
        assert "is no whole archive" in told and not (tmp_path / "back").exists()


def test_a_restore_that_is_broken_off_leaves_nothing(
    run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    ask(capsys, run_dir, tmp_path / "a.tar")
    (tmp_path / "back" / "run").mkdir(parents=True)
    assert "is there already" in ask(capsys, "--restore", tmp_path / "a.tar", tmp_path / "back", code=1)
    data = (tmp_path / "a.tar").read_bytes()
    (tmp_path / "a.tar").write_bytes(data[: len(data) // 2])
    assert "is no whole archive" in ask(capsys, "--restore", tmp_path / "a.tar", tmp_path / "other", code=1)
    assert not list(tmp_path.rglob(".restore-*"))


@pytest.mark.parametrize("name", ["../../evil", "/evil", "a/b", "..", "", "a\0b"])
def test_an_archive_chooses_no_other_place(
    run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture, name: str
) -> None:
    ask(capsys, run_dir, tmp_path / "kept", "--folder")
    index = tmp_path / "kept" / "run" / "archive.json"
    said = {**json.loads(index.read_text()), "run": name}
    said["checksum"] = archive._sum({key: value for key, value in said.items() if key != "checksum"})
    index.write_text(json.dumps(said))
    (tmp_path / "x" / "y").mkdir(parents=True)
    assert "would be another place" in ask(capsys, "--restore", tmp_path / "kept" / "run", tmp_path / "x" / "y", code=1)
    assert not any(path.name == "run.yaml" for path in (tmp_path / "x").rglob("*") if ".restore-" not in str(path))


def test_half_written_or_of_another_version_it_is_kept_all_the_same(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    run_dir = tmp_path / "run"
    (run_dir / "weights" / "step_000001").mkdir(parents=True)  # without its manifest
    (run_dir / "run.yaml").write_text("a_key_of_another_version: 1\nckpt: {pa")
    done = ask(capsys, run_dir, tmp_path / "a.tar", "--delete-source")
    assert done["deleted"] and any("version 1 left out" in note for note in done["notes"])
    back = Path(ask(capsys, "--restore", tmp_path / "a.tar", tmp_path / "back")["path"])
    assert (back / "run.yaml").read_text() == "a_key_of_another_version: 1\nckpt: {pa"


def test_a_run_that_changed_meanwhile_is_not_deleted(run_dir: Path, tmp_path: Path) -> None:
    from prime_hpc.launch.archive.archive import delete_source
    from prime_hpc.store.errors import StoreError

    chosen = choose(run_dir, "last", rollouts=False)
    (run_dir / "metrics" / "trainer.jsonl").write_text('{"step": 5, "loss": 0.5}\n')
    with pytest.raises(StoreError, match=r"metrics/trainer\.jsonl has changed"):
        delete_source(run_dir, chosen, choose(run_dir, "last", rollouts=False))
    assert run_dir.exists()
