"""When a run is asked to save or to end: by files, signals, and a time limit that may change."""

import errno
import signal
import threading
import time
from pathlib import Path

import pytest

from prime_hpc.config.run_files import SAVE, STOP
from prime_hpc.slurm import client, termination, time_limit
from prime_hpc.slurm.allocation import Allocation
from prime_hpc.slurm.client import parse_shown
from prime_hpc.slurm.termination import AT_LIMIT
from prime_hpc.slurm.time_limit import TimeLimit
from prime_hpc.store.errors import StoreError
from prime_hpc.store.io import files
from prime_hpc.supervisor import stop_requests
from prime_hpc.supervisor.stop_requests import Controls
from tests.support.shown_job import shown


def controls(run_dir: Path, *, left_s: float | None = None, lead_s: float = 60, needs_s: float = 1.0) -> Controls:
    ends = None if left_s is None else time.time() + left_s
    job = Allocation("7", (("n1",),), "n1", 0, ends_at=ends)
    return Controls(run_dir, job if left_s is not None else None, lead_s, lambda: needs_s)


def test_files_ask_for_a_save_and_for_the_end(tmp_path: Path) -> None:
    one = controls(tmp_path)
    assert one.poll() is None
    (tmp_path / SAVE).touch()
    one._next_look = 0.0
    assert one.poll() is None
    assert one.num_saves == 1
    assert not (tmp_path / SAVE).exists()
    (tmp_path / STOP).touch()
    one._next_look = 0.0
    request = one.poll()
    assert request is not None
    assert (request.outcome, request.code, request.save) == ("stopped", 0, True)
    assert not (tmp_path / STOP).exists()
    assert one.poll() == request, "whoever asks first is not the only one to hear of it"


@pytest.mark.parametrize("error", [StoreError("STOP: not writable"), OSError(errno.ESTALE, "Stale file handle")])
def test_a_file_that_cannot_be_removed_asks_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """Another user's in a folder with the sticky bit, or on a file system that is read-only by now: no reason to end as
    failed, at its end with its roles left behind, or to save at every look."""

    def fails(path: Path) -> None:
        raise error

    one, remove = controls(tmp_path), files.remove_file
    monkeypatch.setattr(files, "remove_file", fails)
    (tmp_path / SAVE).touch()
    for _ in range(3):
        one._next_look = 0.0
        assert one.poll() is None and one.num_saves == 1
    monkeypatch.setattr(files, "remove_file", remove)
    one._next_look = 0.0
    assert one.poll() is None and one.num_saves == 1 and not (tmp_path / SAVE).exists(), "the same request"
    (tmp_path / SAVE).touch()
    one._next_look = 0.0
    assert one.poll() is None and one.num_saves == 2
    monkeypatch.setattr(files, "remove_file", fails)
    (tmp_path / STOP).touch()
    assert (final := one.final_request()) is not None and final.outcome == "stopped"
    one._next_look = 0.0
    assert one.poll() == final


def test_the_time_limit_is_seen_before_it_strikes(tmp_path: Path) -> None:
    assert controls(tmp_path, left_s=500).poll() is None
    request = controls(tmp_path, left_s=50).poll()
    assert request is not None
    assert (request.outcome, request.save) == ("requeued", True)
    assert request.budget_s <= 45
    # a step and a save that take long need more than the signal's lead
    assert controls(tmp_path, left_s=500, needs_s=480).poll() is None
    assert controls(tmp_path, left_s=500, needs_s=495).poll() is not None


def test_the_time_limit_may_change() -> None:
    now = float(int(time.time()))
    limit = TimeLimit("7", now + 3600)
    limit.update(parse_shown(shown("01:00:00", now + 3600), "7"))
    assert limit.ends_at == now + 3600
    limit.update(parse_shown(shown("01:00:00", now + 30), "7"))
    assert limit.ends_at == now + 3600, "a preemption's grace moves the end alone"
    limit.update(parse_shown(shown("02:00:00", now + 7200), "7"))
    assert limit.ends_at == now + 7200, "extended"
    limit.update(parse_shown(shown("00:20:00", now + 1200), "7"))
    assert limit.ends_at == now + 1200, "shortened"
    limit.update(parse_shown(shown("00:20:00", now + 1500), "7"))
    assert limit.ends_at == now + 1500, "suspended for 5 min"
    limit.update(parse_shown(shown("00:20:00", now + 1200, "COMPLETING"), "7"))
    assert limit.ends_at == now + 1500, "the job is ending"
    limit.update(parse_shown(shown("UNLIMITED", None), "7"))
    assert limit.ends_at is None
    limit.update(parse_shown(shown("01:00:00", now + 3600), "7"))
    assert limit.ends_at == now + 3600
    limit.update(parse_shown(f"{shown('01:00:00', now + 3600)}\n{shown('00:30:00', now + 1800)}", "7"))
    assert limit.ends_at == now + 1800, "of a het job the first of the components' ends"
    unknown = TimeLimit("7", None)
    unknown.update(parse_shown(shown("01:00:00", now + 3600), "7"))
    assert unknown.ends_at == now + 3600, "the controller was away at the start"


def test_a_save_is_made_before_the_jobs_reservation_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    until: int | None = 600
    now, over, num_configs = float(int(time.time())), "0 min", 0
    monkeypatch.setattr(time_limit, "CONFIG_S", 0.0)

    def ask(argv: list[str], *_: object) -> str:
        nonlocal num_configs
        if argv[2] == "config":
            num_configs += 1
            return f"Foo = x\nResvOverRun             = {over}\nBar = y"
        if argv[2] == "reservation":
            if until is None:
                raise client.SlurmError(argv, 1, "Reservation r1 not found")
            return f"ReservationName={argv[-1]} StartTime={now - 60:.0f} EndTime={now + until:.0f} Nodes=n1 Flags="
        return shown("01:00:00", now + 3600) + " Reservation=r1"

    for module in (client, time_limit):
        monkeypatch.setattr(module, "run_slurm", ask)
    one = controls(tmp_path, left_s=3600)
    limit = one._limit
    assert limit is not None

    def look() -> tuple[float | None, int]:
        limit.look()
        one._next_look = 0.0
        assert one.poll() is None and limit.ends_at is not None and limit.ends_at >= now + 3600, "the run goes on"
        return limit.reserved_until, one.num_saves

    assert look() == (now + 600, 0)
    over = "5 min"
    assert look() == (now + 900, 0), "the site lets jobs run on for 5 min"
    over = "UNLIMITED"
    assert look() == (None, 0)
    over, until = "0 min", 7200
    assert look() == (now + 7200, 0), "behind the time limit"
    until = 50
    assert look() == (now + 50, 1)
    assert look() == (now + 50, 1), "once"
    until = 55
    assert look() == (now + 55, 2), "extended"
    asked, over = num_configs, "10 min"
    monkeypatch.setattr(time_limit, "CONFIG_S", 3600.0)
    assert look() == (now + 55, 2) and num_configs == asked, "all of the site's configuration, for one line of it"
    until = None
    assert look() == (now + 55, 2), "what is not known now changes nothing"
    monkeypatch.setattr(stop_requests, "why_terminated", lambda *_: termination.Verdict("requeued", AT_LIMIT, False))
    one._saved_for = now  # it is over
    one._signals.append(signal.SIGTERM)
    request = one.poll()
    assert request is not None and (request.outcome, request.save) == ("requeued", True)
    assert request.reason == "its reservation ended before everything was saved"


def test_a_limit_that_changes_soon_after_the_start_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    now, first = float(int(time.time())), threading.Event()

    def ask(*_: object, **__: object) -> str:
        first.set()
        return shown("10:00:00", now + 36000)

    monkeypatch.setattr(client, "run_slurm", ask)
    monkeypatch.setattr(time_limit, "FIRST_LOOK_S", 0.1)
    limit = TimeLimit("7", now + 36000, look_s=1e6)
    limit.start()
    assert first.wait(200), "it is asked soon"
    assert limit._thread is not None
    limit.stop()
    limit._thread.join(200)
    limit.update(parse_shown(shown("00:30:00", now + 1800), "7"))
    assert limit.ends_at == now + 1800


def test_a_changed_limit_is_seen_while_the_attempt_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time_limit.TimeLimit.__init__, "__defaults__", (0.01,))
    one = controls(tmp_path, left_s=5000)

    def ask(*_: object, **__: object) -> str:  # a thread of another test may ask first
        has_looked = one._limit is not None and one._limit._stated is not None
        return shown("00:10:00" if has_looked else "02:00:00", time.time() + (20 if has_looked else 5000))

    monkeypatch.setattr(client, "run_slurm", ask)
    assert one.poll() is None
    one.install()
    try:
        deadline = time.monotonic() + 60
        while (request := one.poll()) is None:
            assert time.monotonic() < deadline
            one._next_look = 0.0
            time.sleep(0.01)
    finally:
        one.restore()
    assert "before the time limit" in request.reason


@pytest.mark.parametrize("before_s", [10_000, None])
def test_a_warning_asks_whether_the_limit_was_shortened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before_s: float | None
) -> None:
    """By `scontrol update`, after the last look: that is no preemption, and a save has to fit into what is left."""
    one = controls(tmp_path, left_s=10_000)
    assert one._limit is not None
    one._limit.ends_at = None if before_s is None else time.time() + before_s
    one._limit.update(parse_shown(shown("UNLIMITED" if before_s is None else "02:46:40", one._limit.ends_at), "7"))
    monkeypatch.setattr(client, "run_slurm", lambda *_, **__: shown("00:02:00", time.time() + 70))
    one._on_signal(signal.SIGUSR1, None)
    request = one.poll()
    assert request is not None and request.outcome == "requeued"
    assert "before the time limit" in request.reason and request.budget_s <= 60


def test_a_warning_asks_for_the_limit_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The supervisor polls five times a second while the run saves, and a silent controller takes long to answer."""
    one, asked = controls(tmp_path, left_s=10_000), list[object]()

    def answer(*arguments: object, **_: object) -> str:
        asked.append(arguments)
        return shown("02:46:40", time.time() + 10_000)

    monkeypatch.setattr(client, "run_slurm", answer)
    one._on_signal(signal.SIGUSR1, None)
    for _ in range(2):
        request = one.poll()
        assert request is not None and request.outcome == "preempted"
    assert len(asked) == 1


def test_signals(tmp_path: Path) -> None:
    one = controls(tmp_path, left_s=100)
    one._on_signal(signal.SIGUSR1, None)
    request = one.poll()
    assert request is not None and (request.outcome, request.save) == ("requeued", True)
    far, by_steps = controls(tmp_path, left_s=10_000), controls(tmp_path, left_s=10_000)
    far._on_signal(signal.SIGUSR1, None)
    by_steps.note_warning(signal.SIGUSR1)  # of each of its nodes
    by_steps.note_warning(signal.SIGUSR1)
    request = far.poll()
    assert request is not None and request.outcome == "preempted" and by_steps.poll() == request
    twice = controls(tmp_path)
    for number, is_forced in ((signal.SIGUSR1, False), (signal.SIGUSR1, False), (signal.SIGINT, True)):
        twice._on_signal(number, None)
        assert twice.force_requested is is_forced, "a warning that comes again is no Ctrl-C: the roles still save"
    local = controls(tmp_path)
    local._on_signal(signal.SIGTERM, None)
    request = local.poll()
    assert request is not None and (request.outcome, request.save, request.code) == ("interrupted", False, 143)
