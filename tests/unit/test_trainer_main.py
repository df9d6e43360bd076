"""How a trainer rank listens to SIGTERM."""

import gc
import os
import signal
import stat
import threading
from typing import Any

import pytest

from prime_hpc.trainer.main import watch_sigterm


def test_the_wake_up_descriptor_stays_the_watchers_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Closed, its number would soon be a checkpoint's file, and the watching thread would spin on the end of file."""
    monkeypatch.delenv("PRIMEHPC_LED", raising=False)
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    status: Any = None
    try:
        watch_sigterm(status)
        gc.collect()
        descriptor = signal.set_wakeup_fd(-1)
        assert stat.S_ISSOCK(os.fstat(descriptor).st_mode)
        os.write(descriptor, b"\0")  # a signal that it does not wait for; at an end of file this would fail
        assert [t for t in threading.enumerate() if t.name == "sigterm" and t.is_alive()]
    finally:
        signal.set_wakeup_fd(-1)
        for number, handler in before.items():
            signal.signal(number, handler)
