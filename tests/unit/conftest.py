"""For the unit tests: the process group of one rank, in which policies and engines of one process live; a run that
waits to be submitted to a Slurm that fails as it is told to; the config of a published model.
"""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.support.fake_slurm import FakeSlurm
from tests.support.lint import LLAMA_8B
from tests.support.submissions import use_fake_slurm, write_config


@pytest.fixture(scope="module")
def group() -> Iterator[None]:
    """One gloo rank, without a port."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    return use_fake_slurm(tmp_path, monkeypatch)


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """Of a small run."""
    return write_config(tmp_path)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A directory with the config of a model that has been published, and no weights."""
    folder = tmp_path / "llama-8b"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA_8B))
    return folder
