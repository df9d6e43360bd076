"""What several integration tests share: a small tokenizer, and scripted servers that answer with its tokens."""

from collections.abc import Iterator
from pathlib import Path
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
