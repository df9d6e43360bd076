"""A run of many that cannot begin, or has no room, holds no other up; it leaves nothing open; when their trainer
ends."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from loguru import logger

from prime_hpc.config import Experiment
from prime_hpc.store.errors import NoRoom, StoreError, Unreadable
from prime_hpc.store.io import room
from prime_hpc.trainer.multi import child_run, loop
from prime_hpc.trainer.multi.admission import Admission
from prime_hpc.trainer.multi.child_run import READ_S, Child, begin_child
from prime_hpc.trainer.rank_group import RankGroup


@pytest.mark.parametrize("is_built", [True, False])
def test_what_was_opened_is_closed_again(
    group: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_built: bool
) -> None:
    closed: list[bool] = []
    asked: list[float] = []

    def load(info: object, patience_s: float) -> dict[str, int]:
        asked.append(patience_s)
        raise Unreadable(tmp_path / "__0_0.distcp", "Input/output error", 5)

    def close() -> None:
        closed.append(True)
        raise OSError(28, "No space left on device")  # its metrics cannot be flushed: that is not why it did not begin

    saver = SimpleNamespace(checkpointer=SimpleNamespace(load=load))
    control = RankGroup()
    trainer = SimpleNamespace(saver=saver, close=close, experiment=None, control=control)
    monkeypatch.setattr(child_run, "open_trainer", lambda *_: trainer)
    monkeypatch.setattr(child_run, "check_schedule", lambda _: None)
    monkeypatch.setattr(child_run, "loss_of", lambda _: None)
    if not is_built:  # as where another rank cannot open it
        on_all = control.on_all

        def failing(action: Any, told: Any) -> Any:
            on_all(action, told)
            raise StoreError("rank 1: disk full")

        monkeypatch.setattr(control, "on_all", failing)
    admission: Any = SimpleNamespace(
        path=tmp_path, incarnation=1, name="run_a", experiment=None, slot=0, resume=SimpleNamespace(step=3)
    )
    bus: Any = SimpleNamespace()
    base: Any = SimpleNamespace(control=control)
    with pytest.raises(StoreError, match="Input/output error" if is_built else "rank 1: disk full") as caught:
        begin_child(base, admission, 64, bus)
    assert closed == [True] and isinstance(caught.value, Unreadable) == is_built
    assert asked == ([READ_S] if is_built else [])


def test_each_pass_over_a_batch_counts_for_a_runs_turn() -> None:
    trainer: Any = SimpleNamespace(experiment=Experiment.model_validate({"trainer": {"epochs_per_batch": 3}}))
    none: Any = None
    child = Child("run_a", trainer, none, 64, 1, 8, 100, trained=({"num_tokens": 100.0}, 0.0))
    assert child.last_tokens == 300


def test_the_idle_time_begins_when_the_last_run_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever was trained before, however long and without a pause in which nobody was ready."""
    now = [1000.0]
    monkeypatch.setattr(loop.time, "monotonic", lambda: now[0])
    multi: Any = object.__new__(loop.MultiTrainer)
    multi._children, multi._is_idle, multi._idle_since = {"run_a": None}, False, now[0]
    multi._status = SimpleNamespace(beat=lambda **_: None)
    multi._run_slots = SimpleNamespace(waiting=[], is_changing=False, look=lambda now: None)
    multi._experiment = SimpleNamespace(trainer=SimpleNamespace(runs_idle_timeout_s=300.0))
    assert multi._idle() is None
    now[0] += 400.0  # steps, one after the other
    multi._children.clear()
    assert multi._idle() is None
    now[0] += 299.0
    assert multi._idle() is None
    now[0] += 2.0
    assert multi._idle().kind is loop.Kind.END


class _Run:
    """One of many, whose disk is full so many times, from the given step on."""

    needs = 0

    def __init__(self, name: str, full: dict[int, int]) -> None:
        self.name, self.step, self.full, self.saved = name, 0, full, 0
        self.trained: tuple[dict[str, float], float] | None = None
        bus = SimpleNamespace(latest=lambda topic: None)
        checkpointer = SimpleNamespace(has_ended=False)
        self.trainer: Any = SimpleNamespace(
            bus=bus,
            paths=SimpleNamespace(root=Path(name), checkpoint_step=lambda step: Path(name) / f"step_{step}"),
            saver=SimpleNamespace(checkpointer=checkpointer, is_asked=False, room_s=None),
            experiment=SimpleNamespace(trainer=SimpleNamespace(batch_timeout_s=60.0)),
        )
        self.num_samples = self.num_tokens = self.published = 0
        self.last_tokens = 8.0

    @property
    def is_done(self) -> bool:
        return self.step >= 2

    def next_batch(self) -> Any:
        return SimpleNamespace(poll=lambda: 1.0, found_at=1.0, error=None)

    def advance(self) -> None:
        self.step += 1
        self.trained = {"num_tokens": 8.0}, 0.0

    def settle(self) -> dict[str, float]:
        assert self.trained is not None
        self._write()
        metrics, self.trained = self.trained[0], None
        return metrics

    def save(self, *, is_last: bool) -> None:
        self._write()
        self.saved = self.step

    def _write(self) -> None:
        if self.full.get(self.step, 0) > 0:
            self.full[self.step] -= 1
            raise NoRoom("c: disk full", self.needs)

    def close(self, error: BaseException | None = None) -> str | None:
        return None


def _multi(monkeypatch: pytest.MonkeyPatch, runs: list[_Run], room_s: float) -> tuple[Any, list[float], list[str]]:
    """A trainer of these runs, as far as its turns reach; the time; what became of each."""
    now, ends = [0.0], list[str]()
    monkeypatch.setattr(loop.time, "monotonic", lambda: now[0])
    multi: Any = object.__new__(loop.MultiTrainer)
    multi._experiment = SimpleNamespace(supervisor=SimpleNamespace(write_timeout_s=room_s))
    multi._rank, multi._bus, multi._leaving, multi._held = 0, SimpleNamespace(latest=lambda topic: None), [], {}
    multi._children = {run.name: run for run in runs}
    multi._watches = {run.name: loop._Watch(run.next_batch()) for run in runs}
    multi._queue = loop.FairQueue(2)
    for run in runs:
        multi._queue.add(run.name)
    multi._run_slots = SimpleNamespace(
        look=lambda: [],
        admit=lambda: None,
        trained=lambda *_: None,
        ended=lambda name, phase, reason: ends.append(f"{name} {phase} {reason}"),
    )
    multi._report, multi._idle = lambda *_: None, lambda: None
    return multi, now, ends


def _turns(multi: Any, now: list[float]) -> list[str]:
    """Every turn until no run is left, a second each."""
    turns = list[str]()
    for _ in range(60):
        command = multi._next_command()
        if command is not None:
            turns.append(f"{command.kind} {command.name}")
            multi._execute(command)
        now[0] += 1.0
    return turns


def test_a_run_for_which_there_is_no_room_lets_the_others_train(monkeypatch: pytest.MonkeyPatch) -> None:
    multi, now, ends = _multi(monkeypatch, [_Run("a", {2: 3}), _Run("b", {})], 600.0)
    turns = _turns(multi, now)
    assert ends == ["b done None", "a done None"] and not multi._children and not multi._held
    tries = [turn for turn in turns if turn == "settle a"]
    assert len(tries) == 3 and turns.index("train b") < turns.index("settle a")
    assert turns.count("train a") == 2, "a step is trained once"


def test_a_run_for_which_there_is_no_room_for_long_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    multi, now, ends = _multi(monkeypatch, [_Run("a", {1: 99}), _Run("b", {})], 0.0)
    _turns(multi, now)
    assert ends[0].startswith("a failed c: disk full; waited 0 s") and ends[1:] == ["b done None"]


def test_a_run_that_has_to_leave_trains_no_further_while_its_checkpoint_has_no_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runs = [_Run("a", {1: 3}), _Run("b", {})]
    runs[0].step = 1
    multi, now, ends = _multi(monkeypatch, runs, 600.0)
    multi._leaving = [loop.Leave("a", "stopped", "asked to", save=True)]
    turns = _turns(multi, now)
    assert turns.count("leave a") == 4 and "train a" not in turns and "train b" in turns[:4]
    assert sorted(ends) == ["a stopped asked to", "b done None"] and runs[0].saved == 1


@pytest.mark.parametrize("has_to_leave", [True, False])
def test_what_takes_more_than_is_free_is_not_tried(monkeypatch: pytest.MonkeyPatch, has_to_leave: bool) -> None:
    """All ranks would write until the disk is full, and the others' runs wait for it."""
    runs, free = [_Run("a", {1: 1}), _Run("b", {})], {"a": 5, "a/step_1": 5}
    monkeypatch.setattr(room, "free_bytes", lambda path: free[str(path)])
    runs[0].needs = 10
    multi, now, ends = _multi(monkeypatch, runs, 600.0)
    if has_to_leave:
        runs[0].step = 1
        multi._leaving = [loop.Leave("a", "stopped", "asked to", save=True)]
    turns = _turns(multi, now)
    assert [turn for turn in turns if turn.endswith("a")] == ["leave a" if has_to_leave else "train a"]
    assert ends == ["b done None"]
    free["a/step_1" if has_to_leave else "a"] = 10
    _turns(multi, now)
    assert len(ends) == 2 and not multi._children


@pytest.mark.parametrize("has_to_leave", [True, False])
def test_a_save_is_made_while_there_is_no_room_for_a_version(
    monkeypatch: pytest.MonkeyPatch, has_to_leave: bool
) -> None:
    """Checkpoints may lie on another disk; what the last save answers needs none before it."""
    run, taken = _Run("a", {1: 3}), list[int]()
    saver = run.trainer.saver

    def take_up() -> None:
        saver.is_asked = False
        taken.append(run.step)

    saver.take_up = take_up
    multi, now, _ = _multi(monkeypatch, [run], 600.0)
    if has_to_leave:
        run.step = 1
        multi._leaving = [loop.Leave("a", "stopped", "asked to", save=True)]
    multi._execute(multi._next_command())
    assert multi._held
    saver.is_asked, run.save = True, lambda **_: None  # type: ignore[method-assign]
    assert [turn for turn in _turns(multi, now) if turn == "save a"] == ([] if has_to_leave else ["save a"])
    assert taken == [1] and not multi._children


def test_runs_of_a_trainer_that_ends_wait_for_room_when_all_others_have_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = [_Run("a", {1: 1}), _Run("b", {})]
    multi, _, _ = _multi(monkeypatch, runs, 5.0)
    for run in runs:
        run.step = 1
    order = list[tuple[str, float | None]]()
    for run in runs:
        run.save = lambda *, is_last, run=run: (order.append((run.name, run.trainer.saver.room_s)), run._write())  # type: ignore
    multi._end(loop.Command(loop.Kind.END, save=True))
    assert order == [("a", None), ("b", None), ("a", 5.0)]


def test_an_end_writes_nothing_again_that_failed_for_good_and_leaves_no_stopped_run_to_train(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A save that failed counts as done when it is asked for again; a STOP file is gone once it was seen."""
    runs = [_Run("a", {1: 1}), _Run("b", {}), _Run("c", {})]
    multi, _, ends = _multi(monkeypatch, runs, 600.0)
    for run in runs:
        run.step = 1
    tries = list[str]()

    def fail(*, is_last: bool) -> None:
        tries.append("b")
        if len(tries) == 1:
            raise StoreError("b: I/O error")

    runs[1].save = fail  # type: ignore[method-assign]
    multi._execute(loop.Command(loop.Kind.LEAVE, "a", leave=loop.Leave("a", "stopped", "asked to", save=True)))
    multi._leaving = [loop.Leave("c", "failed", "no orchestrator", save=True)]
    said = list[str]()
    number = logger.add(lambda message: said.append(str(message)), level="ERROR", format="{message}")
    multi._end(loop.Command(loop.Kind.END, save=True))
    logger.remove(number)
    assert tries == ["b"] and said == ["b: its checkpoint of step 1 was not saved: b: I/O error\n"]
    assert ends == ["a stopped asked to"] and runs[0].saved == 1


@pytest.mark.parametrize("has_version", [True, False])
def test_a_run_whose_last_version_had_no_room_is_done_once_that_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_version: bool
) -> None:
    """An attempt that had to end has saved the last step, which a version belongs to."""
    info: Any = SimpleNamespace(step=2)
    admission = Admission("a", tmp_path, Experiment.model_construct(max_steps=2), 0, 2, info, not has_version)
    assert admission.is_done == has_version
    run = _Run("a", {})
    run.step = 2
    multi, _, ends = _multi(monkeypatch, [], 600.0)
    multi._experiment.micro_batch_tokens, multi._base = 64, None
    monkeypatch.setattr(loop, "begin_child", lambda *_: run)
    multi._run_slots.began, multi._say_idle, run.progress = lambda *_: None, lambda is_idle: None, {}  # type: ignore
    multi._execute(loop.Command(loop.Kind.ADMIT, "a", admission=admission))
    assert ends == ["a done None"] and not multi._children and not multi._watches
