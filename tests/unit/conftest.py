"""For the unit tests: the process group of one rank, in which policies and engines of one process live; a run that
waits to be submitted to a Slurm that fails as it is told to; the config of a published model; a bus; a tokenizer.
"""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch.distributed as dist

from prime_hpc.slurm import sbatch_errors
from prime_hpc.store.messaging.bus import BusClient, BusServer
from tests.support.fake_slurm import FakeSlurm
from tests.support.lint import LLAMA_8B
from tests.support.submissions import use_fake_slurm, write_config

if TYPE_CHECKING:
    from prime_hpc.trainer.data.template import ChatTokenizer


@pytest.fixture(scope="module")
def group() -> Iterator[None]:
    """One gloo rank, without a port."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def hub() -> Iterator[BusServer]:
    hub = BusServer()
    yield hub
    hub.close()


@pytest.fixture
def bus() -> Iterator[Callable[..., BusClient]]:
    """Opens clients, which end with the test."""
    opened: list[BusClient] = []

    def make(address: str, role: str = "trainer", **options: Any) -> BusClient:
        opened.append(BusClient(address, role, **options))
        return opened[-1]

    yield make
    for one in opened:
        one.close()


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    return use_fake_slurm(tmp_path, monkeypatch)


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    """A Slurm for sweeps, in whose queue a lost job is looked for once."""
    fake = FakeSlurm(tmp_path)
    fake.use(monkeypatch)
    monkeypatch.setattr(sbatch_errors, "QUEUE_ANSWER_S", 0.0)
    return fake


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


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A small one; its chat template is what the test sets."""
    from tests.support.tiny_tokenizer import make_tokenizer

    return make_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture
def chat(tokenizer: Any) -> "ChatTokenizer":
    """That tokenizer, for rows of supervised data, with a template of plain turns."""
    from prime_hpc.trainer.data.template import ChatTokenizer
    from tests.support.tiny_model import CHATML

    tokenizer.chat_template = CHATML
    return ChatTokenizer(tokenizer)
