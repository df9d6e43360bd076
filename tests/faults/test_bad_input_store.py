"""A run directory full of foreign things, and two jobs that were told to use the same one."""

import os
from pathlib import Path

import pytest

from prime_hpc.config import ConfigError, Experiment
from prime_hpc.store import attempts
from prime_hpc.store.artifact import ArtifactWriter
from prime_hpc.store.batches import list_batches, prune_batches, read_state
from prime_hpc.store.checkpoint.checkpoints import list_checkpoints, prune_checkpoints, resolve_resume
from prime_hpc.store.errors import FencedError
from prime_hpc.store.leases import min_floor, set_floor
from prime_hpc.store.manifest import verify_artifact
from prime_hpc.store.run_paths import RunPaths, current_incarnation
from prime_hpc.store.weights import list_versions, prune_weights
from prime_hpc.supervisor.attempt.start import begin_attempt
from tests.support.checkpoints import make_checkpoint, make_weights

ODD_NAMES = (
    "step_7",
    "step_000007.bak",
    "step_000007 (copy)",
    "Step_000007",
    "step_",
    "step_-1",
    "step_0000007",
    "ü\n",
)


@pytest.fixture
def exp(tmp_path: Path) -> Experiment:
    base = {
        "output_dir": str(tmp_path),
        "name": "x",
        "max_steps": 40,
        "orchestrator": {"env": [{"id": "reverse-text"}]},
    }
    exp = Experiment.model_validate(base)
    exp.run_dir.mkdir()
    return exp


def litter(run_dir: Path, outside: Path) -> dict[str, bytes]:
    """Foreign things in every place of a run directory; path -> content of what must stay as it is."""
    outside.mkdir()
    (outside / "thesis.tex").write_bytes(b"years of work")
    kept = [outside / "thesis.tex"]
    for place in ("", "weights", "rollouts", "checkpoints", "leases", "incarnation", "logs", "metrics"):
        folder = run_dir / place
        folder.mkdir(exist_ok=True)
        for name in ODD_NAMES:
            if place == "checkpoints" and name == "step_7":
                continue  # there this is a checkpoint's name
            (folder / name).write_bytes(b"mine")
            kept.append(folder / name)
        (folder / "a folder").mkdir()
        (folder / "a folder" / "notes").write_bytes(b"mine too")
        kept.append(folder / "a folder" / "notes")
        (folder / "to nowhere").symlink_to(folder / "nothing")
        (folder / "to itself").symlink_to(folder / "to itself")
        (folder / "to outside").symlink_to(outside)
        with open(os.fsencode(folder) + b"/not-utf8-\xff", "wb") as file:  # noqa: PTH123 - no str can name it plainly
            file.write(b"bytes")
    return {os.fspath(path): path.read_bytes() for path in kept}


def assert_kept(kept: dict[str, bytes]) -> None:
    for path, content in kept.items():
        assert Path(path).read_bytes() == content, path


def end_last(run_dir: Path) -> None:
    path = run_dir / "attempts.jsonl"
    path.write_text(path.read_text().replace('"ended": null', '"ended": 1.0'))


def test_a_run_lives_among_foreign_things_and_touches_none(exp: Experiment, tmp_path: Path) -> None:
    kept = litter(exp.run_dir, tmp_path / "outside")
    paths = RunPaths(exp.run_dir)
    assert begin_attempt(exp, exp.run_dir).incarnation == 1
    for step in range(1, 7):
        make_weights(paths, step, 1)
        make_checkpoint(paths, step, incarnation=1)
    assert list_versions(paths) == list_batches(paths) == [1, 2, 3, 4, 5, 6]
    assert min_floor(paths) is None
    set_floor(paths, "orchestrator", 5)
    assert min_floor(paths) == 5
    assert prune_checkpoints(paths, 2, None, 1) == [1, 2, 3, 4]
    assert prune_weights(paths, 1, 1) == [1, 2, 3, 4]
    assert prune_batches(paths, 1, 6, 1) == [1, 2, 3, 4, 5]
    assert [info.step for info in list_checkpoints(paths.checkpoints)] == [5, 6]
    assert_kept(kept)
    end_last(exp.run_dir)
    second = begin_attempt(exp, exp.run_dir)
    assert (second.incarnation, second.resume_step) == (2, 6)
    assert_kept(kept)


@pytest.mark.parametrize("place", ["weights", "rollouts", "checkpoints"])
@pytest.mark.parametrize("kind", ["file", "folder", "link", "dangling"])
def test_what_bears_an_artifacts_name_is_set_aside_not_deleted(
    exp: Experiment, tmp_path: Path, place: str, kind: str
) -> None:
    """It would be in the way of step 3, and taken for the newest version by whoever lists."""
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "thesis.tex").write_bytes(b"years of work")
    (exp.run_dir / place).mkdir()
    for step in (3, 99):
        path = exp.run_dir / place / (f"step_{step}" if place == "checkpoints" else f"step_{step:06d}")
        if kind == "file":
            path.write_bytes(b"years of work")
        elif kind == "folder":
            path.mkdir()
            (path / "thesis.tex").write_bytes(b"years of work")
        else:
            path.symlink_to(outside if kind == "link" else outside / "nothing")
    begin_attempt(exp, exp.run_dir)
    paths = RunPaths(exp.run_dir)
    assert list_versions(paths) == list_batches(paths) == []
    for step in range(1, 5):
        make_weights(paths, step, 1)
        make_checkpoint(paths, step, incarnation=1)
    assert prune_weights(paths, 1, 1) == []  # checkpoints hold them
    assert resolve_resume(paths.checkpoints, "latest").step == 4
    aside = sorted((exp.run_dir / place).glob("set-aside-step_*"))
    assert len(aside) == 2
    for path in aside:
        assert path.is_symlink() or (path if kind == "file" else path / "thesis.tex").read_bytes() == b"years of work"
    assert (outside / "thesis.tex").read_bytes() == b"years of work"


def test_foreign_things_that_come_later_are_left_alone_by_retention(exp: Experiment) -> None:
    begin_attempt(exp, exp.run_dir)
    paths = RunPaths(exp.run_dir)
    for step in (3, 4, 5):
        make_weights(paths, step, 1)
        make_checkpoint(paths, step, incarnation=1)
    (paths.weights / "step_000001").write_bytes(b"mine")
    (paths.rollouts / "step_000001").mkdir()
    (paths.rollouts / "step_000001" / "mine").write_bytes(b"mine")
    (paths.checkpoints / "step_1").write_bytes(b"mine")
    assert prune_checkpoints(paths, 1, None, 1) == [3, 4]
    assert prune_weights(paths, 1, 1) == [3, 4]
    prune_batches(paths, 1, 5, 1)
    assert (paths.weights / "step_000001").read_bytes() == (paths.checkpoints / "step_1").read_bytes() == b"mine"
    assert (paths.rollouts / "step_000001" / "mine").read_bytes() == b"mine"


def test_a_second_job_on_this_machine_is_refused_and_on_another_fences_the_first(
    exp: Experiment, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = begin_attempt(exp, exp.run_dir, job_id="100")
    paths = RunPaths(exp.run_dir)
    with pytest.raises(ConfigError, match=r"attempt 1 still runs here \(process \d+\).*or choose another --name"):
        begin_attempt(exp, exp.run_dir, job_id="101")
    assert current_incarnation(paths) == first.incarnation  # nothing was touched
    make_weights(paths, 1, 1)
    make_checkpoint(paths, 1, incarnation=1)
    monkeypatch.setattr(attempts.socket, "gethostname", lambda: "another-node")
    second = begin_attempt(exp, exp.run_dir, job_id="101")
    assert (second.attempt, second.incarnation, second.resume_step) == (2, 2, 1)
    with pytest.raises(FencedError, match="belongs to incarnation 1, but incarnation 2 has begun"):
        make_weights(paths, 2, 1)
    with pytest.raises(FencedError), ArtifactWriter(paths.rollouts_step(2), kind="batch", writer="o", incarnation=1):
        pass
    for prune in (lambda: prune_weights(paths, 1, 1), lambda: prune_batches(paths, 1, 1, 1)):
        with pytest.raises(FencedError):
            prune()
    make_weights(paths, 2, 2)
    assert verify_artifact(paths.weights_step(2), deep=True).incarnation == 2
    assert read_state(paths.rollouts_step(1))["step"] == 1
