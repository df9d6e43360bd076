"""Small files are replaced whole: readers see one content or the other; a failure leaves the old one, and no litter."""

import errno
import os
import threading
from dataclasses import fields
from pathlib import Path
from typing import get_type_hints

import pytest

from prime_hpc.observe import logs
from prime_hpc.runtime.atomic_write import write_atomic
from prime_hpc.store.attempts import Attempt
from prime_hpc.store.run_dirs import AttemptRow
from prime_hpc.supervisor.attempt import bad_nodes


def test_readers_see_one_content_or_the_other(tmp_path: Path) -> None:
    path, contents = tmp_path / "a.json", [letter * 200_000 for letter in "ab"]
    write_atomic(path, contents[0], sync=False)
    over = threading.Event()

    def write(content: str) -> None:
        while not over.is_set():
            write_atomic(path, content, sync=False)

    writers = [threading.Thread(target=write, args=(content,)) for content in contents]
    for writer in writers:
        writer.start()
    try:
        seen = {path.read_text() for _ in range(200)}
    finally:
        over.set()
        for writer in writers:
            writer.join()
    assert seen <= set(contents) and [p.name for p in tmp_path.iterdir()] == ["a.json"]


@pytest.mark.parametrize("failing", ["fsync", "replace"])
def test_a_failure_leaves_the_old_content_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    path = tmp_path / "a.json"
    write_atomic(path, b"old", sync_name=True)
    monkeypatch.setattr(*((os, "fsync", full) if failing == "fsync" else (Path, "replace", full)))
    with pytest.raises(OSError, match="No space left"):
        write_atomic(path, "new")
    assert path.read_bytes() == b"old" and len(list(tmp_path.iterdir())) == 1


def test_what_cannot_be_written_says_so(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        write_atomic(tmp_path / "absent" / "a.json", "x")
    (tmp_path / "folder").mkdir()
    with pytest.raises(OSError, match="folder"):
        write_atomic(tmp_path / "folder", "x")
    assert [p.name for p in tmp_path.iterdir()] == ["folder"]


def test_the_umask_holds(tmp_path: Path) -> None:
    before = os.umask(0o077)
    try:
        write_atomic(tmp_path / "a", "x")
    finally:
        os.umask(before)
    assert (tmp_path / "a").stat().st_mode & 0o777 == 0o600


def test_what_is_written_on_can_be_by_a_colleague_where_the_umask_says_so(tmp_path: Path) -> None:
    """In a project's folder: `resume` of a run that another of the group began."""
    before = os.umask(0o002)
    try:
        logs._file_sink(tmp_path / "supervisor.log").stop()
        bad_nodes._append(tmp_path / "bad_nodes.jsonl", [{"id": "1"}])
    finally:
        os.umask(before)
    assert {path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == {0o664}


def test_a_row_of_attempts_has_the_fields_of_its_writer() -> None:
    assert get_type_hints(AttemptRow) == {f.name: get_type_hints(Attempt)[f.name] for f in fields(Attempt)}
