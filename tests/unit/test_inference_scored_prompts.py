"""Memory of the transformers backend's batch: logits of prompts whose tokens are all scored, and a GPU's share."""

import os
import sys
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import Qwen3Config, Qwen3ForCausalLM
from transformers.integrations import sdpa_attention

from prime_hpc.config.experiment import Experiment
from prime_hpc.inference.backend import Start
from prime_hpc.inference.transformers import backend
from prime_hpc.inference.transformers import engine as module
from prime_hpc.inference.transformers.backend import TransformersBackend
from prime_hpc.inference.transformers.engine import Engine
from prime_hpc.inference.transformers.model import GIB, BatchModel, bytes_of_step
from prime_hpc.inference.transformers.parameters import SamplingParams
from prime_hpc.inference.transformers.sequences import Running
from prime_hpc.launch.estimate.engine_memory import engine_memory
from prime_hpc.launch.estimate.model_facts import read_model
from prime_hpc.runtime.device import Device
from tests.support.host_waits import host_waits
from tests.support.tiny_model import make_tiny_model

LENGTH = 90
MOST = 16


def sequence(is_scored: bool) -> Running:
    params = SamplingParams(max_tokens=1, prompt_logprobs=0 if is_scored else None)
    scores: Any = [None] if is_scored else None
    return Running(
        prompt=list(range(5, 5 + LENGTH)),
        params=params,
        max_tokens=1,
        generator=None,
        on_done=lambda _: None,
        prompt_scores=scores,
    )


@pytest.mark.parametrize("kinds", [[True], [False, True, True], [True, False, True]])
def test_logits_of_scored_prompts_are_bounded_wherever_these_stand(
    kinds: list[bool], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_tiny_model(tmp_path / "model")
    options: dict[str, Any] = {"max_len": 128, "cache_gib": 0.05, "max_rows": 4}
    model = BatchModel(str(folder), dtype=torch.float32, device=torch.device("cpu"), **options)
    monkeypatch.setattr(module, "LOGITS", MOST * model.vocab_size)
    forward, rows = model.forward, []

    def watched(first: int, ids: Any, starts: Any, width: int, picks: Any) -> torch.Tensor:
        rows.append(len(picks))
        return forward(first, ids, starts, width, picks)

    monkeypatch.setattr(model, "forward", watched)
    engine, sequences = Engine(model, seed=0), [sequence(is_scored) for is_scored in kinds]
    engine._waiting.extend(sequences)
    while engine._rows or engine._waiting:
        engine.step()
    assert max(rows) <= MOST + len(kinds)  # beside them the tokens that are drawn
    found = [one.prompt_scores for one in sequences if one.prompt_scores is not None]
    assert all(len(scores) == LENGTH for scores in found)
    for scores in found[1:]:
        for one, other in zip(scores[1:], found[0][1:], strict=True):
            assert one is not None and other is not None and one.keys() == other.keys()


class Living(TorchDispatchMode):
    """Counts the bytes of the storages that are made, and of those that live at once."""

    def __init__(self) -> None:
        super().__init__()
        self.known: set[int] = set()
        self.now = self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            storage = tensor.untyped_storage() if isinstance(tensor, torch.Tensor) else None
            if storage is not None and storage._cdata not in given | self.known:
                self.known.add(storage._cdata)
                self.now += storage.nbytes()
                self.most = max(self.most, self.now)
                weakref.finalize(storage, self._forget, storage._cdata, storage.nbytes())
        return out

    def _forget(self, key: int, size: int) -> None:
        self.known.discard(key)
        self.now -= size


@pytest.mark.parametrize(("heads", "kv_heads", "vocab"), [(16, 2, 64), (4, 4, 20_000)])
def test_a_step_takes_beside_the_cache_what_is_counted_for_it(
    heads: int, kv_heads: int, vocab: int, tmp_path: Path
) -> None:
    sizes: dict[str, Any] = {
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "head_dim": 16,
        "vocab_size": vocab,
    }
    config = Qwen3Config(num_attention_heads=heads, num_key_value_heads=kv_heads, **sizes)
    Qwen3ForCausalLM(config).save_pretrained(tmp_path)
    cpu, dtype, rows, length = torch.device("cpu"), torch.bfloat16, 4, 512
    model = BatchModel(str(tmp_path), dtype=dtype, device=cpu, max_len=length, cache_gib=0.1, max_rows=rows)
    engine, params = Engine(model, seed=0), SamplingParams(max_tokens=4)
    for _ in range(rows):
        prompt = [5] * (length - 4)
        engine._waiting.append(Running(prompt, params, max_tokens=4, generator=None, on_done=lambda _: None))
    engine.step()
    assert len(engine._rows) == rows and all(sequence.num_left == 1 for sequence in engine._rows)
    with Living() as living:
        engine.step()
    # transformers 5.24 does not repeat keys and values for a single query: less than what is counted, never more
    is_repeated = heads == kv_heads or not hasattr(sdpa_attention, "pack_gqa")
    least = 0.9 if is_repeated else 0.0
    assert least < living.most / (rows * bytes_of_step(config, model._shapes(), length, dtype)) < 1.1


def test_a_gpus_share_holds_the_cache_and_what_a_step_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's word on the GPU is scripted."""
    folder, free, fractions = make_tiny_model(tmp_path / "model"), [79 * GIB], list[float]()
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (free[0], 80 * GIB))
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda share, _: fractions.append(share))
    for name in ("memory_reserved", "memory_allocated"):
        monkeypatch.setattr(torch.cuda, name, lambda _: 0)
    options: dict[str, Any] = {"dtype": torch.float32, "device": torch.device("cpu"), "max_len": 1 << 22}

    def build(share: float) -> BatchModel:
        monkeypatch.setattr("prime_hpc.inference.transformers.model.RowCache", lambda *_: None)
        return BatchModel(str(folder), cache_gib=None, max_rows=None, gpu_share=share, **options)

    model = build(0.5)
    row, step = 4 * GIB, 4 * GIB  # 2 layers of 2 heads of 64 in float32, and one of 4
    assert (model.token_bytes * (1 << 22), fractions) == (row, [0.5])
    assert model.num_rows == 39 * GIB // (row + step) < 39 * GIB // row
    assert build(1.0).num_rows == 79 * GIB // (row + step)
    for backend_name, num_rows in (("transformers", model.num_rows), ("vllm", 36 * GIB // row)):  # by the plan
        servers = {"backend": backend_name, "max_model_len": 1 << 22, "gpu_memory_utilization": 0.5}
        tree = {"model": {"name": str(folder), "dtype": "float32"}, "inference": servers}
        facts = read_model(str(folder))
        memory = None if facts is None else engine_memory(Experiment.model_validate(tree), facts, 80.0)
        assert memory is not None and (memory.max_tokens or 0) >> 22 == num_rows
    with pytest.raises(ValueError, match=r"7 GiB hold not one .* \(4 GiB of keys and values and 4 to compute with\)"):
        build(0.1)
    free[0] = 30 * GIB  # a trainer has the rest
    with pytest.raises(ValueError, match=r"inference.gpu_memory_utilization: 0.5 of this GPU are 40.0 GiB, .* 30.0"):
        build(0.5)
    assert build(0.35).num_rows == 27 * GIB // (row + step)


def test_no_layer_waits_for_a_gpu_to_know_where_a_piece_of_a_prompt_goes(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "model")
    options: dict[str, Any] = {"max_len": 32, "cache_gib": 0.01, "max_rows": 2}
    model = BatchModel(str(folder), dtype=torch.float32, device=torch.device("cpu"), **options)
    for start, width in ((0, 5), (5, 3), (8, 1)):
        with host_waits() as waits, torch.no_grad():  # in inference mode it would not see all
            model.forward(0, [[7] * width] * 2, [start] * 2, width, [(0, width - 1)])
        assert not [place for place in waits.found if "cache.py" in place]


@pytest.mark.parametrize("stated", [None, "max_split_size_mb:64"])
def test_a_gpus_memory_grows_in_place(stated: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless somebody states how torch is to take it."""
    experiment = Experiment.model_validate({"model": {"name": "m"}, "inference": {"backend": "transformers"}})
    monkeypatch.setattr(os, "environ", {"PYTORCH_CUDA_ALLOC_CONF": stated} if stated else {})
    monkeypatch.setattr(backend, "require_gpus", lambda *_, **__: sys.exit("no GPU here"))
    start = Start(experiment, "inference", 0, Device("cuda", 1), tmp_path, None, "key", lambda _: None)
    with pytest.raises(SystemExit, match="no GPU here"):
        TransformersBackend().serve(start)
    assert os.environ.get("PYTORCH_ALLOC_CONF") == (None if stated else "expandable_segments:True")
