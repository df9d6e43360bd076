"""A folder that an archive fills, on file systems that keep less of a time than ours."""

import os
from pathlib import Path

import pytest

from prime_hpc.launch.archive import folder_copy
from prime_hpc.store.io.files import FileEntry, hash_file


def test_on_a_file_system_of_whole_seconds_nothing_is_copied_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, copied, copy, utime = tmp_path / "source", list[Path](), folder_copy._copy, os.utime

    def counted(source: Path, target: Path) -> FileEntry:
        copied.append(target)
        return copy(source, target)

    def rounded(path: Path, ns: tuple[int, int]) -> None:
        utime(path, ns=(ns[0] // 10**9 * 10**9, ns[1] // 10**9 * 10**9))

    monkeypatch.setattr(folder_copy, "_copy", counted)
    monkeypatch.setattr(folder_copy.os, "utime", rounded)
    source.write_bytes(b"one")
    utime(source, ns=(0, 1_700_000_000_999_999_999))
    for _ in range(2):
        entry = folder_copy.FolderCopy(tmp_path / "part").write({"a": source}, {})["a"]
    assert len(copied) == 1 and entry == hash_file(source)
    source.write_bytes(b"two")  # later
    assert folder_copy.FolderCopy(tmp_path / "part").write({"a": source}, {})["a"] == hash_file(source) != entry
