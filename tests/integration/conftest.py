"""What several integration tests share: a small tokenizer, and scripted servers that answer with its tokens."""

import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from tests.support.env_world import World
    from tests.support.scripted_server import AdminServer


@pytest.fixture(scope="session")
def tokenizer_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.support.tiny_tokenizer import make_tokenizer

    folder = tmp_path_factory.mktemp("tokenizer")
    make_tokenizer(folder)
    return folder


@pytest.fixture(scope="session")
def tokenizer(tokenizer_dir: Path) -> Any:
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast.from_pretrained(tokenizer_dir)


@pytest.fixture
def forked_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hosts of environments' workers are forks that have imported everything, which costs a host of its own 3 s of CPU;
    workers find the tests' own environments, wherever pytest was started."""
    from prime_hpc.envs.workers import host_link
    from tests.support import forked

    forked.start_server()  # before an event loop would stand still meanwhile
    monkeypatch.setenv("PYTHONPATH", str(forked.ROOT))
    started = SimpleNamespace(**{**vars(subprocess), "Popen": forked.HostProcess})
    monkeypatch.setattr(host_link, "subprocess", started)


@pytest.fixture
def world(tokenizer: Any, tokenizer_dir: Path) -> "Iterator[World]":
    """Environments and their server."""
    from tests.support.env_world import World

    made = World(tokenizer, tokenizer_dir)
    with made.server:
        yield made


@pytest.fixture
def server(tokenizer: Any) -> "Iterator[AdminServer]":
    """A server of the orchestrator's."""
    from tests.support.orchestrator_world import varied_reply
    from tests.support.scripted_server import AdminServer

    with AdminServer(tokenizer, varied_reply(1)) as running:
        yield running
