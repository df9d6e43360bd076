"""Files that are the same in every version: written once, linked after that, written again where that cannot be."""

import errno
import os
from pathlib import Path

import pytest

from prime_hpc.store.errors import StoreError
from prime_hpc.store.io import files
from prime_hpc.trainer.weights.aux_files import AuxFiles

CONTENT = {"config.json": b"{}\n", "tokenizer.json": b"[1, 2]\n"}


class Versions:
    """Stages that get their name as soon as the companions are in."""

    def __init__(self, root: Path) -> None:
        self.root = root
        (root / "tokenizer.json").write_bytes(CONTENT["tokenizer.json"])
        self.companions = AuxFiles({"config.json": CONTENT["config.json"], "tokenizer.json": root / "tokenizer.json"})

    def put(self, number: int) -> tuple[Path, list[str]]:
        """Makes a version; its folder and the operations that this took."""
        stage, final = self.root / f".stage-{number}", self.root / f"step_{number}"
        stage.mkdir()
        done: list[str] = []
        with files.observe_operations(lambda operation, path: done.append(f"{operation} {path.name}")):
            entries = self.companions.put(stage)
        stage.rename(final)
        self.companions.committed(final)
        assert {name: (final / name).read_bytes() for name in entries} == CONTENT
        assert entries == {name: files.hash_file(final / name) for name in CONTENT}
        return final, done


@pytest.fixture
def versions(tmp_path: Path) -> Versions:
    return Versions(tmp_path)


def test_written_once_then_linked(versions: Versions) -> None:
    first, done = versions.put(1)
    assert "fsync config.json" in done and "fsync tokenizer.json" in done
    second, done = versions.put(2)
    assert done == ["link config.json", "link tokenizer.json"]
    assert (first / "config.json").samefile(second / "config.json")


def test_a_version_that_was_pruned_or_damaged_is_not_linked(versions: Versions) -> None:
    first, _ = versions.put(1)
    (first / "config.json").unlink()
    (first / "tokenizer.json").write_bytes(b"[1")
    _, done = versions.put(2)
    assert "fsync config.json" in done and "fsync tokenizer.json" in done
    assert versions.put(3)[1] == ["link config.json", "link tokenizer.json"]


def test_without_links_and_with_a_broken_disk(versions: Versions, monkeypatch: pytest.MonkeyPatch) -> None:
    versions.put(1)

    def refuse(number: int) -> None:
        def link(*_: object) -> None:
            raise OSError(number, os.strerror(number))

        monkeypatch.setattr(os, "link", link)

    refuse(errno.EPERM)
    assert "fsync config.json" in versions.put(2)[1]
    refuse(errno.ENOSPC)
    with pytest.raises(StoreError, match="disk full"):
        versions.put(3)
