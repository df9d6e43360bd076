"""What the trainers do while a batch was announced and is not there, or not whole."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from loguru import logger

from prime_hpc.store.batch.rank_batch import RankBatch
from prime_hpc.store.batch.rank_files import write_batch
from prime_hpc.store.errors import ArtifactError, ArtifactTimeout, StoreError, Unreadable
from prime_hpc.store.run_paths import RunPaths
from prime_hpc.trainer import rl
from prime_hpc.trainer.multi import loop
from prime_hpc.trainer.trainer import Signal

STEP = 3


class Clock:
    """Time that passes when it is told to."""

    def __init__(self) -> None:
        self.time = 100.0

    def now(self) -> float:
        return self.time


class AnnouncingBus:
    """A bus on which batch 3 was announced."""

    connected, closed = True, False

    def latest(self, topic: str) -> dict[str, Any] | None:
        return {"step": STEP} if topic == "batch" else None


@pytest.fixture
def trainer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(rl, "LOOK_S", 0.02)
    paths = RunPaths(tmp_path)
    paths.rollouts.mkdir()
    return SimpleNamespace(
        requested=lambda: None,
        paths=paths,
        bus=AnnouncingBus(),
        handover=None,
        context=SimpleNamespace(incarnation=1),
        has_news=False,
    )


def look(trainer: Any, patience: Any) -> Signal:
    return rl._look(trainer, STEP, patience, is_fake=False)


def test_an_announced_batch_may_be_out_of_sight_for_a_while(trainer: Any) -> None:
    clock: Any = Clock()
    patience = rl._Patience(1800.0, clock)
    for _ in range(3):
        assert look(trainer, patience) is Signal.WAIT
        clock.time += rl.VISIBLE_S / 3 - 1
    write_batch(trainer.paths, STEP, [RankBatch.empty(1)], state={}, incarnation=1)
    assert look(trainer, patience) is Signal.GO


def test_a_batch_that_stays_out_of_sight_or_comes_too_late_ends_the_wait(trainer: Any) -> None:
    clock: Any = Clock()
    patience = rl._Patience(1800.0, clock)
    assert look(trainer, patience) is Signal.WAIT
    clock.time += rl.VISIBLE_S + 1
    with pytest.raises(ArtifactError, match="step_000003"):
        look(trainer, patience)
    late = rl._Patience(10.0, clock)
    clock.time += 11
    with pytest.raises(ArtifactError):
        look(trainer, late)


def test_a_batch_that_was_never_announced_is_a_timeout(trainer: Any) -> None:
    trainer.bus = None
    clock: Any = Clock()
    patience = rl._Patience(10.0, clock)
    assert look(trainer, patience) is Signal.WAIT
    clock.time += 11
    with pytest.raises(ArtifactTimeout, match="batch_timeout_s = 10 s"):
        look(trainer, patience)


def test_a_long_wait_is_said_more_and_more_rarely(trainer: Any) -> None:
    trainer.bus = None
    clock: Any = Clock()
    patience, said = rl._Patience(1800.0, clock), list[str]()
    sink = logger.add(lambda message: said.append(message.record["message"]), level="INFO")
    for _ in range(40):
        assert look(trainer, patience) is Signal.WAIT
        clock.time += 5.0
    logger.remove(sink)
    where = f"no batch 3 from the orchestrator in {trainer.paths.rollouts} for"
    at_most = "waiting, for 1800 s at most (trainer.batch_timeout_s)"
    assert said == [f"{where} {seconds} s: {at_most}" for seconds in (30, 60, 120)]


def trouble(errors: list[StoreError | None], monkeypatch: pytest.MonkeyPatch, limit: float = 1800.0) -> list[Any]:
    """What is said of a run whose announced batch has these errors, one every 50 s."""
    clock = Clock()
    monkeypatch.setattr(loop.time, "monotonic", clock.now)
    batch = SimpleNamespace(error=None, found_at=clock.time)
    experiment = SimpleNamespace(trainer=SimpleNamespace(batch_timeout_s=limit))
    bus = SimpleNamespace(latest=lambda topic: None)
    child = SimpleNamespace(step=2, trainer=SimpleNamespace(bus=bus, experiment=experiment))
    watch = loop._Watch(batch, clock.time)  # type: ignore[arg-type]
    trainer: Any = SimpleNamespace(_children={"a": child}, _watches={"a": watch})
    said = []
    for error in errors:
        clock.time += 50
        batch.error = error
        said.append(loop.MultiTrainer._trouble(trainer, "a"))
    return said


def test_of_many_runs_one_fails_by_what_is_proven_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    unread, broken = Unreadable("f", "stale handle"), ArtifactError(Path("f"), "a file", "none")
    assert trouble([unread] * 10, monkeypatch) == [None] * 10
    assert trouble([unread] * 5 + [broken, broken, None, None], monkeypatch) == [None] * 9
    *before, last = trouble([broken] * 3, monkeypatch)
    assert before == [None, None] and last is not None and "is broken" in str(last.reason)
    *before, last = trouble([unread] * 3, monkeypatch, limit=120.0)
    assert before == [None, None] and last is not None and "batch_timeout_s = 120 s: f: cannot be read" in last.reason
