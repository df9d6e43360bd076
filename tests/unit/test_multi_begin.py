"""A run of many that cannot begin: it holds the others up for moments, and leaves nothing open."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from prime_hpc.store.errors import Unreadable
from prime_hpc.trainer.multi import child_run
from prime_hpc.trainer.multi.child_run import READ_S, begin_child
from prime_hpc.trainer.multi.collective_call import RunFailed


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
    trainer = SimpleNamespace(saver=saver, close=close, experiment=None)
    monkeypatch.setattr(child_run, "open_trainer", lambda *_: trainer)
    monkeypatch.setattr(child_run, "check_schedule", lambda _: None)
    monkeypatch.setattr(child_run, "loss_of", lambda _: None)
    if not is_built:  # as where another rank cannot open it
        call = child_run.call_collectively

        def failing(action: Any) -> Any:
            call(action)
            raise RunFailed("rank 1: disk full")

        monkeypatch.setattr(child_run, "call_collectively", failing)
    admission: Any = SimpleNamespace(
        path=tmp_path, incarnation=1, name="run_a", experiment=None, slot=0, resume=SimpleNamespace(step=3)
    )
    bus: Any = SimpleNamespace(of_run=lambda _: None)
    base: Any = None
    with pytest.raises(RunFailed, match="Input/output error" if is_built else "rank 1: disk full") as caught:
        begin_child(base, admission, 64, bus)
    assert closed == [True] and caught.value.is_unread == is_built
    assert asked == ([READ_S] if is_built else [])
