"""A run directory that is gone, purged in part, or only not to be seen now: what the supervisor believes of it."""

import errno
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from prime_hpc.config.run_files import STOP
from prime_hpc.runtime.clock import AwakeClock
from prime_hpc.store.attempts import Ended
from prime_hpc.store.io import files
from prime_hpc.store.run_paths import RunPaths, claim_incarnation
from prime_hpc.supervisor.agent import FENCE_LOOK_S
from prime_hpc.supervisor.attempt.fence import EXIT_GONE, Fence
from prime_hpc.supervisor.heartbeat import LoopGaps
from prime_hpc.supervisor.stop_requests import Controls
from prime_hpc.supervisor.supervisor import Supervisor


class Clock:
    """Seconds that pass where somebody sleeps."""

    def __init__(self) -> None:
        self.now = 1000.0

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def fence_of(root: Path, clock: Clock) -> Fence:
    claim_incarnation(RunPaths(root))
    return Fence(RunPaths(root), 1, lambda: clock.now, 600.0, clock.sleep)


def test_a_run_directory_that_is_gone_is_believed_when_it_still_is_a_moment_later(tmp_path: Path) -> None:
    fence = fence_of(tmp_path / "run", clock := Clock())
    fence.look()
    (tmp_path / "run").rename(tmp_path / "moved")
    clock.now += FENCE_LOOK_S
    fence.look()
    (tmp_path / "moved").rename(tmp_path / "run")  # no more than a moment
    clock.now += FENCE_LOOK_S
    fence.look()
    done = Ended(0, "done")
    assert fence.true_end(done) is done and not fence.is_fenced
    (tmp_path / "run").rename(tmp_path / "moved")
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)  # a role's doing
    end = fence.true_end(done)
    assert end.code == EXIT_GONE and "deleted or moved" in end.cause and fence.is_fenced


def test_a_supervisor_that_was_stopped_looks_for_a_newer_attempt_before_it_takes_a_stop(tmp_path: Path) -> None:
    """Woken, it would for some seconds take away the file STOP that a user puts there for the newer one."""
    raw = Clock()
    clock = AwakeClock(lambda: raw.now)
    claim_incarnation(RunPaths(tmp_path / "run"))
    fence = Fence(RunPaths(tmp_path / "run"), 1, clock.now)
    supervisor = Supervisor.__new__(Supervisor)
    health, pulse = SimpleNamespace(take_asking_s=lambda: 0.0), SimpleNamespace(tick=lambda: None)
    led = SimpleNamespace(clock=clock, pulse=pulse, roles=[])
    vars(supervisor).update(_fence=fence, _led=led, _health=health, _children=None)
    vars(supervisor).update(_controls=Controls(tmp_path / "run", None, 60.0), _gaps=LoopGaps(clock))
    fence.look()
    claim_incarnation(RunPaths(tmp_path / "run"), after=1)
    (tmp_path / "run" / STOP).touch()
    raw.now += 600.0
    with pytest.raises(Ended, match="incarnation 2 has begun"):
        supervisor._tick()
    assert (tmp_path / "run" / STOP).exists() and fence.is_fenced


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE, errno.EACCES])
def test_a_run_directory_that_cannot_be_listed_is_not_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    fence = fence_of(tmp_path / "run", clock := Clock())

    def fail(path: Path) -> list[str]:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(files, "list_dir", fail)
    for _ in range(100):
        fence.look()
        clock.now += FENCE_LOOK_S
    assert not fence.is_fenced


def test_a_miss_before_an_error_is_of_the_same_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fence = fence_of(tmp_path / "run", clock := Clock())
    answers: Iterator[list[str] | OSError] = iter([[], OSError(errno.EIO, "I/O error"), []])

    def answer(path: Path) -> list[str]:
        if isinstance(found := next(answers), OSError):
            raise found
        return found

    monkeypatch.setattr(files, "list_dir", answer)
    for _ in range(3):
        fence.look()
        clock.now += FENCE_LOOK_S
    assert not fence.is_fenced


def test_a_number_that_was_purged_from_scratch_is_no_run_directory_that_is_gone(tmp_path: Path) -> None:
    root = tmp_path / "run"
    root.mkdir()
    (root / "run.yaml").write_text("max_steps: 3\n")
    fence = fence_of(root, clock := Clock())
    shutil.rmtree(root / "incarnation")
    for _ in range(100):
        fence.look()
        clock.now += FENCE_LOOK_S
    assert not fence.is_fenced
    (root / "run.yaml").rename(tmp_path / "old")  # another run begins in its place
    (root / "run.yaml").write_text("max_steps: 3\n")
    with pytest.raises(Ended, match="deleted or moved"):
        for _ in range(100):
            fence.look()
            clock.now += FENCE_LOOK_S


def test_a_folder_of_runs_that_was_deleted_takes_its_runs_along(tmp_path: Path) -> None:
    """An evaluation in it failed once it had played all, with words on what it could not write."""
    fence = fence_of(tmp_path / "runs" / "own" / "run", Clock())
    shutil.rmtree(tmp_path / "runs")
    assert fence.true_end(Ended(1, "no such file")).code == EXIT_GONE


def test_a_file_system_that_is_not_mounted_for_a_while_has_deleted_nothing(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    fence = fence_of(runs / "run", clock := Clock())
    fence._device = -1  # that of a file system of its own
    runs.rename(tmp_path / "elsewhere")
    for _ in range(59):
        fence.look()
        clock.now += FENCE_LOOK_S
    clock.now += FENCE_LOOK_S
    with pytest.raises(Ended, match="deleted or moved"):
        fence.look()
