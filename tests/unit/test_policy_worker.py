"""Our mixin in a vLLM worker: what it does before the worker builds its model."""

import errno
import logging
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from prime_hpc.inference.vllm import routing
from prime_hpc.inference.vllm.worker import PolicyWorker


def test_a_reload_warns_of_layers_whose_weights_did_not_come_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's logger and words: a rotary table has no weights."""
    from vllm.model_executor.model_loader.reload import layerwise
    from vllm.platforms import current_platform

    monkeypatch.setattr(current_platform, "is_cpu", lambda: False)
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    worker: Any = PolicyWorker.__new__(PolicyWorker)
    # experts that move: where a tensor goes is not remembered
    parallel = SimpleNamespace(enable_eplb=True)
    worker.vllm_config = SimpleNamespace(additional_config={}, quant_config=None, parallel_config=parallel)
    counted = layerwise.get_numel_loaded
    worker.policy_start()
    assert layerwise.get_numel_loaded is counted
    layerwise.logger.addHandler(handler)
    try:
        for layer in ("RotaryEmbedding", "YaRNScalingRotaryEmbedding", "QKVParallelLinear"):
            layerwise.logger.warning("%s: Failed to load weights", layer)
        layerwise.logger.warning("No layer is named")
    finally:
        layerwise.logger.removeHandler(handler)
        layerwise.logger.filters.clear()
    assert said == ["QKVParallelLinear: Failed to load weights", "No layer is named"]


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


@pytest.mark.parametrize(("number", "may_pass"), [(errno.EIO, True), (errno.ESTALE, True), (errno.ENOENT, False)])
def test_a_worker_says_whether_a_version_may_be_read_later(tmp_path: Path, number: int, may_pass: bool) -> None:
    """Of a group over nodes one may have lost the file system: a version that is refused ends the run."""

    def fetch(*_: Any) -> Path:
        raise OSError(number, os.strerror(number))

    worker: Any = PolicyWorker.__new__(PolicyWorker)
    worker.rank, worker._policy_reader = 3, SimpleNamespace(fetch=fetch)
    worker.vllm_config = SimpleNamespace(parallel_config=SimpleNamespace(data_parallel_index=1))
    row = worker.policy_open(str(tmp_path), "files")
    assert row["rank"] == "dp1/rank3" and row["may_pass"] == may_pass and os.strerror(number) in row["error"]
