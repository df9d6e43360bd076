"""`trainer.deterministic` reaches torch, cuBLAS, NCCL and flash-attn, and nothing that the trainer does is refused."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from prime_hpc.config import Experiment
from prime_hpc.trainer import determinism
from prime_hpc.trainer.batching.micro_batches import make_micro_batch
from prime_hpc.trainer.main import start_process_group
from prime_hpc.trainer.model.policy import Policy
from prime_hpc.trainer.ops import attention
from tests.unit.test_attention import ALONE
from tests.unit.test_prefixes import group_batch


@pytest.fixture
def switched_back() -> Iterator[None]:
    yield
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]


def test_the_environment_is_set_and_a_users_own_nccl_choice_stays(switched_back: None) -> None:
    environ = {"NCCL_ALGO": "Tree"}
    determinism.make_deterministic(environ)
    assert environ == {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "NCCL_ALGO": "Tree", "NCCL_PROTO": "Simple"}
    assert torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled()
    with pytest.raises(ValueError, match="CUBLAS_WORKSPACE_CONFIG = :0:0"):
        determinism.make_deterministic({"CUBLAS_WORKSPACE_CONFIG": ":0:0"})


@pytest.mark.parametrize("wanted", [False, True])
def test_a_rank_switches_before_its_process_group(
    wanted: bool, switched_back: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("CUBLAS_WORKSPACE_CONFIG", "NCCL_ALGO", "NCCL_PROTO"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.delenv("RANK", raising=False)
    seen: list[bool] = []
    begin = dist.init_process_group

    def note(*args: Any, **kwargs: Any) -> None:
        seen.append(torch.are_deterministic_algorithms_enabled())
        begin(*args, **kwargs)

    monkeypatch.setattr(dist, "init_process_group", note)
    tree = {"backend": "gloo", "threads_per_rank": torch.get_num_threads(), "deterministic": wanted}
    start_process_group(Experiment.model_validate({"model": {"name": "m"}, "trainer": tree}))
    dist.destroy_process_group()
    assert seen == [wanted]


@pytest.mark.parametrize("kind", ["dense", "experts"])
def test_no_operation_of_a_micro_batch_is_refused(kind: str, switched_back: None) -> None:
    from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3MoeConfig

    shape: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 300}
    shape |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "tie_word_embeddings": True}
    shape["attn_implementation"] = attention.register()
    experts: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    config = Qwen3Config(**shape) if kind == "dense" else Qwen3MoeConfig(**shape, **experts)
    torch.manual_seed(0)
    policy = Policy(AutoModelForCausalLM.from_config(config), "sdpa", chunk_tokens=16, parallel=ALONE)
    micro = make_micro_batch(group_batch(), 0)
    found = []
    for deterministic in (False, True):
        if deterministic:
            determinism.make_deterministic({})
        with policy.packing(micro):
            policy(micro)[0].sum().backward()
        found.append([p.grad for p in policy.parameters() if p.grad is not None])
        policy.zero_grad()
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("wanted", [False, True])
def test_flash_attention_is_told(wanted: bool, switched_back: None, monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, Any] = {}

    def kernel(q: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        given.update(kwargs)
        return q

    monkeypatch.setattr(attention, "flash_attn_2", lambda: kernel)
    if wanted:
        determinism.make_deterministic({})
    q = torch.zeros(5, 2, 8)
    attention.flash_attention(q, q, q, attention.plan_packing(np.array([2, 3])))
    assert given["deterministic"] is wanted
