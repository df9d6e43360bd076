"""What lies in a folder that cannot be listed is not taken for missing, on whichever version of Python."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from loguru import logger

from prime_hpc.config.sections.sft import SFTSourceConfig
from prime_hpc.launch.archive.archive import read_folder
from prime_hpc.store import code
from prime_hpc.store.dataset.files import find_data
from prime_hpc.store.io.tree import list_tree
from prime_hpc.store.model.fingerprint import weights_fingerprint
from prime_hpc.supervisor.attempt.bad_nodes import bad_nodes, record

NOBODY = 65534


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that another user finds as well, as pytest's own is not."""
    folder = Path(tempfile.mkdtemp(prefix="listings-", dir="/tmp"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


@contextmanager
def unlisted(folder: Path) -> Iterator[None]:
    """Its names can be looked up, not listed; root, whom no mode stops, is somebody else meanwhile."""
    folder.chmod(0o311)
    is_root = os.geteuid() == 0
    if is_root:
        os.seteuid(NOBODY)
    try:
        yield
    finally:
        if is_root:
            os.seteuid(0)
        folder.chmod(0o755)


def test_a_tree_is_listed_as_a_whole(open_folder: Path) -> None:
    (open_folder / "b" / "inner").mkdir(parents=True)
    (open_folder / "b" / "inner" / "file").write_text("1")
    (open_folder / "a").symlink_to(open_folder / "b")
    names = ["a", "b", "b/inner", "b/inner/file"]
    assert [str(path.relative_to(open_folder)) for path in list_tree(open_folder)] == names
    with pytest.raises(FileNotFoundError):
        list_tree(open_folder / "c")


def test_rows_that_cannot_be_seen_are_not_left_out(open_folder: Path) -> None:
    for part in ("a", "b"):
        (open_folder / part).mkdir()
        (open_folder / part / "rows.jsonl").write_text('{"prompt": "p", "completion": "c"}\n')
    source = SFTSourceConfig(path=[str(open_folder)])
    assert len(find_data(source).files) == 2
    with unlisted(open_folder / "b"), pytest.raises(ValueError, match=r"/b cannot be read \(Permission denied\)"):
        find_data(source)


@pytest.mark.parametrize("name", [".snapshot", ".Trash-0", "lost+found"])
def test_a_folder_of_the_file_system_s_own_holds_no_rows(open_folder: Path, name: str) -> None:
    """At the top of a mount, where root alone may list it."""
    for folder in (open_folder, open_folder / name):
        folder.mkdir(exist_ok=True)
        (folder / "rows.jsonl").write_text('{"prompt": "p", "completion": "c"}\n')
    source = SFTSourceConfig(path=[str(open_folder)])
    with unlisted(open_folder / name):
        assert find_data(source).files == [open_folder / "rows.jsonl"]
    assert find_data(source).files == [open_folder / "rows.jsonl"]


def test_an_archive_of_which_a_folder_cannot_be_listed_is_not_taken_for_damaged(open_folder: Path) -> None:
    (open_folder / "logs").mkdir()
    (open_folder / "logs" / "a.log").write_text("1")
    assert list(read_folder(open_folder)) == ["logs/a.log"]
    with unlisted(open_folder / "logs"), pytest.raises(PermissionError):
        read_folder(open_folder)


def test_a_model_whose_folder_cannot_be_listed_is_not_one_without_weights(open_folder: Path) -> None:
    (open_folder / "adapter_model.safetensors").write_bytes(bytes(100))
    assert weights_fingerprint(open_folder)
    with unlisted(open_folder), pytest.raises(PermissionError):
        weights_fingerprint(open_folder)


def test_bad_nodes_that_were_set_aside_are_not_silently_forgotten(open_folder: Path) -> None:
    ledger = open_folder / "bad_nodes.jsonl"
    record(ledger, "n1", "its GPU fell off the bus", "run")
    ledger.rename(open_folder / f"{ledger.name}.aside-1-0a")
    assert list(bad_nodes(ledger, 1.0)) == ["n1"]
    said: list[str] = []
    sink = logger.add(said.append, level="WARNING")
    with unlisted(open_folder):
        assert bad_nodes(ledger, 1.0) == {}
    logger.remove(sink)
    assert len(said) == 1 and "the ledger of bad nodes could not be read" in said[0]


def test_code_of_which_a_room_cannot_be_listed_is_not_taken_for_another_version(
    open_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Workers that start again later would be refused."""
    for room in ("envs/workers", "client", "config", "runtime"):
        (open_folder / room).mkdir(parents=True)
        (open_folder / room / "code.py").write_text("1\n")
    monkeypatch.setattr(code, "__file__", str(open_folder / "store" / "code.py"))
    digest = code.package_digest.__wrapped__  # as in a process of its own
    before = digest()
    with unlisted(open_folder / "envs" / "workers"), pytest.raises(PermissionError):
        digest()
    assert digest() == before
    (open_folder / "envs" / "workers" / "code.py").write_text("2\n")
    assert digest() != before
