"""What vLLM needs on a CPU, libnuma, torchvision and paths that g++ takes: they are there, or an error in words says
what to do."""

import ctypes
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from prime_hpc.config.sections.common import ModelConfig
from prime_hpc.inference.vllm import installed
from prime_hpc.inference.vllm.installed import load_libnuma, require_plain_paths, require_torchvision


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


def test_a_space_in_the_path_of_what_compiles_is_said_before_an_engine_dies_of_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    require_plain_paths({"TORCHINDUCTOR_CACHE_DIR": "/tmp/cache"})
    with pytest.raises(ValueError, match="its cache is in /tmp/a b, whose name holds a space"):
        require_plain_paths({"TORCHINDUCTOR_CACHE_DIR": "/tmp/a b"})
    package = tmp_path / "my project" / "torch" / "__init__.py"
    package.parent.mkdir(parents=True)
    package.touch()
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    monkeypatch.syspath_prepend(package.parents[1])
    with pytest.raises(ValueError, match="torch is in .*my project.*PRIME_HPC_VENV"):
        require_plain_paths({})


@pytest.mark.parametrize(
    ("architecture", "vision", "needed"),
    [
        ("Qwen3_5ForCausalLM", None, True),  # engines for its text alone died of the import
        ("Gemma3ForConditionalGeneration", None, True),
        ("Qwen3ForCausalLM", None, False),
        ("Qwen3VLForConditionalGeneration", "frozen", True),
    ],
)
def test_models_that_import_torchvision_are_refused_without_it(
    architecture: str, vision: Any, needed: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": [architecture]}))
    model = ModelConfig(name=str(tmp_path), vision=vision)
    monkeypatch.setattr(installed, "find_spec", lambda name: None)
    if needed:
        with pytest.raises(ValueError, match="vLLM needs torchvision for models that see images, also where"):
            require_torchvision(model)
    monkeypatch.setattr(installed, "find_spec", lambda name: sys)
    require_torchvision(model)
    if not needed:
        monkeypatch.setattr(installed, "find_spec", lambda name: None)
        require_torchvision(model)
