"""libnuma, which vLLM's CPU kernels are linked with: the system's, or the environment's own, or an error in words."""

import ctypes
from pathlib import Path

import pytest

from prime_hpc.inference.vllm.installed import load_libnuma


@pytest.fixture
def no_system_library(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A machine whose linker finds no libnuma; returns the paths that were loaded."""
    loaded: list[str] = []

    def load(name: str, mode: int = 0) -> None:
        if not Path(name).is_file():
            raise OSError(f"{name}: cannot open shared object file: No such file or directory")
        loaded.append(name)

    monkeypatch.setattr(ctypes, "CDLL", load)
    return loaded


def test_the_environments_own_is_taken_where_the_system_has_none(no_system_library: list[str], tmp_path: Path) -> None:
    own = tmp_path / "lib" / "libnuma.so.1"
    own.parent.mkdir()
    own.touch()
    load_libnuma(tmp_path)
    assert no_system_library == [str(own)]


def test_without_any_the_package_is_named(no_system_library: list[str], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="apt-get install libnuma1"):
        load_libnuma(tmp_path)
