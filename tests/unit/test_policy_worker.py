"""Our mixin in a vLLM worker: what it does before the worker builds its model."""

from types import SimpleNamespace
from typing import Any

import pytest

from prime_hpc.inference.vllm import routing
from prime_hpc.inference.vllm.worker import PolicyWorker


@pytest.mark.parametrize(
    ("additional", "wanted"), [({"router_dtype": "float32"}, 1), ({"router_dtype": "model"}, 0), ({}, 0), (None, 0)]
)
def test_routers_are_in_float32_before_there_is_a_model(
    monkeypatch: pytest.MonkeyPatch, additional: Any, wanted: int
) -> None:
    calls: list[str] = []
    monkeypatch.setattr(routing, "use_float32_gates", lambda: calls.append("gates"))

    class Base:
        def __init__(self, vllm_config: Any, rank: int) -> None:
            calls.append("built")

    class Worker(Base):
        def __init__(self, vllm_config: Any, rank: int) -> None:
            super().__init__(vllm_config, rank)

    # As vLLM mixes an extension into its class, which exists by then.
    Worker.__bases__ = (*Worker.__bases__, PolicyWorker)
    made = Worker(vllm_config=SimpleNamespace(additional_config=additional), rank=0)
    assert isinstance(made, PolicyWorker) and calls == ["gates"] * wanted + ["built"]
