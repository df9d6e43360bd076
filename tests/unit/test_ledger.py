"""The ledger of bad nodes: many writers, torn lines, odd clocks, forgetting, compaction that loses nothing."""

import json
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from prime_hpc.supervisor.attempt import bad_nodes as ledger
from prime_hpc.supervisor.attempt.bad_nodes import DAY_S, bad_nodes, compact, ledger_path, record

NOW = 1_800_000_000.0


def test_newest_cause_wins(tmp_path: Path) -> None:
    path = ledger_path(tmp_path)
    assert path == tmp_path / ".prime-hpc" / "bad_nodes.jsonl"
    assert record(path, "n2", "new", "run", NOW - 10) and record(path, "n2", "old\nand long", "run", NOW - 100)
    assert record(path, "n3", "silent", "other", NOW - 50)
    assert bad_nodes(path, 7, NOW) == {"n2": "new", "n3": "silent"}
    assert all(json.loads(line)["cause"] for line in path.read_text().splitlines())


def test_no_ledger_knows_nobody(tmp_path: Path) -> None:
    assert bad_nodes(ledger_path(tmp_path), 7) == {}
    assert compact(ledger_path(tmp_path)) == 0


def test_it_forgets(tmp_path: Path) -> None:
    path = tmp_path / "ledger"
    record(path, "n1", "x", "run", NOW)
    assert bad_nodes(path, 7, NOW + 6.9 * DAY_S) == {"n1": "x"}
    assert bad_nodes(path, 7, NOW + 7.1 * DAY_S) == {}


def test_a_clock_set_back_neither_loses_nor_keeps_for_ever(tmp_path: Path) -> None:
    path = tmp_path / "ledger"
    record(path, "n1", "x", "run", NOW + 3 * DAY_S)
    record(path, "n2", "a clock of the year 2100", "run", NOW + 30_000 * DAY_S)
    assert bad_nodes(path, 7, NOW) == {"n1": "x"}


def test_torn_and_foreign_lines_are_skipped(tmp_path: Path) -> None:
    path = tmp_path / "ledger"
    record(path, "n1", "x", "run", NOW)
    with path.open("ab") as file:
        file.write(b'\xff\xfe{"node": 3}\n[1, 2]\n{"node": "n9"}\n{"node": "n8", "time": true}\n{"time": 1, "node": "n')
    assert record(path, "n2", "after a torn line", "run", NOW)
    path.write_bytes(path.read_bytes() + b'{"node": "n3", "time": %d}\n' % int(NOW))
    assert bad_nodes(path, 7, NOW) == {"n1": "x", "n2": "after a torn line", "n3": ""}


def test_many_runs_append_at_once(tmp_path: Path) -> None:
    path = tmp_path / "ledger"
    code = (
        "import sys; from pathlib import Path; from prime_hpc.supervisor.attempt.bad_nodes import record\n"
        "for i in range(40): assert record(Path(sys.argv[1]), f'n{sys.argv[2]}-{i}', 'cause ' * 20, 'run')"
    )
    runs = [subprocess.Popen([sys.executable, "-c", code, str(path), str(k)]) for k in range(4)]
    assert [run.wait(timeout=280) for run in runs] == [0] * 4
    assert set(bad_nodes(path, 7)) == {f"n{k}-{i}" for k in range(4) for i in range(40)}


def test_a_line_lost_to_another_writer_is_written_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """NFS clients append at the end that they last saw: the later one overwrites the earlier one's line."""
    path = tmp_path / "ledger"
    append = ledger._append
    lost: list[bytes] = []

    def overwritten_once(target: Path, rows: list[dict[str, object]]) -> None:
        append(target, rows)
        if not lost:
            lost.append(target.read_bytes())
            target.write_bytes(b'{"node": "other", "time": %d}\n' % int(NOW))

    monkeypatch.setattr(ledger, "_append", overwritten_once)
    assert record(path, "n1", "x", "run", NOW)
    assert bad_nodes(path, 7, NOW) == {"other": "", "n1": "x"}


def test_a_place_that_refuses_never_raises(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert record(tmp_path / "file" / "ledger", "n1", "x", "run") is False
    (tmp_path / "folder").mkdir()
    assert bad_nodes(tmp_path / "folder", 7) == {}


def test_compaction_in_two_steps_drops_the_old_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "ledger"
    record(path, "ancient", "x", "run", NOW - 400 * DAY_S)
    record(path, "young", "y", "run", NOW)
    monkeypatch.setattr(ledger, "COMPACT_BYTES", 100)
    compact(path, now=NOW)
    monkeypatch.setattr(ledger, "COMPACT_BYTES", 1 << 20)
    assert list(tmp_path.glob("ledger.aside-*")) and bad_nodes(path, 7, NOW) == {"young": "y"}
    record(path, "n3", "written meanwhile", "run", NOW)
    assert compact(path, now=NOW) == 0, "what was set aside a moment ago rests first"
    for old in tmp_path.glob("ledger.aside-*"):
        with old.open("a") as file:  # a writer that had opened it before it was set aside
            file.write(json.dumps({"id": "late", "time": NOW, "node": "late", "cause": "z", "run": "r"}) + "\n")

    assert compact(path, now=NOW + 2 * 3600) == 1
    assert not list(tmp_path.glob("ledger.aside-*"))
    assert bad_nodes(path, 7, NOW) == {"young": "y", "late": "z", "n3": "written meanwhile"}


@pytest.mark.parametrize("at", range(6))
def test_a_reader_misses_nothing_that_is_merged_and_set_aside_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    """`compact` before each of the reader's files: what was set aside goes into the ledger, and with it aside again."""
    path = tmp_path / "ledger"
    record(path, "first", "x", "run", NOW)
    monkeypatch.setattr(ledger, "COMPACT_BYTES", 0)
    assert compact(path, now=NOW) == 0
    record(path, "second", "x", "run", NOW)
    read, files = ledger._read, 0

    def read_late(file: Path) -> list[dict[str, Any]]:
        nonlocal files
        files += 1
        if files == at + 1:
            monkeypatch.setattr(ledger, "_read", read)
            compact(path, now=NOW + 2 * 3600)
            monkeypatch.setattr(ledger, "_read", read_late)
        return read(file)

    monkeypatch.setattr(ledger, "_read", read_late)
    assert set(bad_nodes(path, 7, NOW)) == {"first", "second"}


def test_readers_and_writers_lose_nothing_while_it_is_compacted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ledger, "COMPACT_BYTES", 2000)
    path = tmp_path / "ledger"
    record(path, "first", "x", "run", NOW)
    over, blind = threading.Event(), []

    def compacting() -> None:
        while not over.is_set():
            compact(path)  # sets aside; what rests is merged an hour later

    def reading() -> None:
        while not over.is_set():
            if "first" not in bad_nodes(path, 7, NOW):
                blind.append(1)

    threads = [threading.Thread(target=work) for work in (compacting, reading)]
    for thread in threads:
        thread.start()
    try:
        kept = [record(path, f"n{i}", "cause", "run", NOW) for i in range(150)]
    finally:
        over.set()
        for thread in threads:
            thread.join()
    assert all(kept) and not blind
    assert set(bad_nodes(path, 7, NOW)) == {"first", *(f"n{i}" for i in range(150))}
