"""A run of many that cannot begin holds the others up for moments, and leaves nothing open; when their trainer ends."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from prime_hpc.store.errors import StoreError, Unreadable
from prime_hpc.trainer.multi import child_run, loop
from prime_hpc.trainer.multi.child_run import READ_S, begin_child
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
