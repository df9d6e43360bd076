"""The self-test at start: it finds models that mix samples, passes those that do not, and leaves no trace."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from prime_hpc.trainer.model import self_test as module
from prime_hpc.trainer.model.policy import Policy
from prime_hpc.trainer.model.self_test import SelfTestError, self_test
from prime_hpc.trainer.ops import attention
from tests.support.every_family import tiny_config, tiny_model
from tests.unit.test_attention import ALONE

CPU, ROUNDING = torch.device("cpu"), {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8}


def policy_of(family: str, *, single_rows: bool = False, dtype: torch.dtype = torch.float32, **changes: Any) -> Policy:
    """A tiny model of a family as a policy that attends by the trainer's kernel."""
    model = tiny_model(tiny_config(family, **changes)).to(dtype)
    model.set_attn_implementation(attention.register())
    return Policy(model, "sdpa", 512, ALONE, single_rows=single_rows).eval()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe", "gemma2"])
def test_families_that_can_be_packed_pass(family: str, dtype: torch.dtype) -> None:
    found = self_test(policy_of(family, dtype=dtype), CPU, ROUNDING[dtype])
    assert found.rounding > 0 and found.again == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["lfm2", "mamba", "qwen3_5_text"])
def test_families_that_cannot_are_found(family: str, dtype: torch.dtype) -> None:
    with pytest.raises(SelfTestError, match=rf"model_type {family}\).*neighbours' tokens change.*gradients"):
        self_test(policy_of(family, dtype=dtype), CPU, ROUNDING[dtype])
    self_test(policy_of(family, dtype=dtype, single_rows=True), CPU, ROUNDING[dtype])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_leak_near_rounding_is_found(dtype: torch.dtype) -> None:
    policy = policy_of("lfm2", dtype=dtype)
    with torch.no_grad():
        for name, parameter in policy.named_parameters():
            if ".conv." in name:
                parameter.mul_(0.03 if dtype == torch.float32 else 0.3)
    with pytest.raises(SelfTestError, match="neighbours' tokens change"):
        self_test(policy, CPU, ROUNDING[dtype])


def test_a_token_that_goes_to_another_expert_for_a_rounding_error_is_no_leak(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first disturbance may leave it where it was: whether a start was refused hung on the CPU's kernels."""
    seeds: list[int] = []
    logprobs = module._Prober.logprobs

    @contextlib.contextmanager
    def disturbed(blocks: Any, unit: float, seed: int) -> Iterator[None]:
        seeds.append(seed)
        yield
        seeds.append(0)

    def moved(self: Any, which: int, index: int, *, share: bool = False) -> torch.Tensor:
        values = logprobs(self, which, index, share=share)
        if index == 0 or seeds[-1:] == [3]:  # with others; or alone, for the third of the disturbances to come
            values[-1] += 0.3
        return values

    monkeypatch.setattr(module, "_disturbed", disturbed)
    monkeypatch.setattr(module._Prober, "logprobs", moved)
    with pytest.raises(SelfTestError, match="samples differ by 0.3 nats from each alone"):
        self_test(policy_of("qwen3"), CPU, 2.0**-24)
    seeds.clear()
    found = self_test(policy_of("qwen3_moe"), CPU, 2.0**-24)
    assert seeds == [0, 0, 1, 0, 2, 0, 3, 0] and found.rounding < 0.2 < found.widest


def test_log_probabilities_that_are_not_finite_are_found() -> None:
    policy = policy_of("qwen3")
    with torch.no_grad():
        next(iter(policy.hf.model.layers[0].mlp.parameters()))[0, 0] = torch.nan
    with pytest.raises(SelfTestError, match=r"qwen3\) are not finite: are its weights"):
        self_test(policy, CPU, 2.0**-24)


def test_an_output_head_of_more_than_a_matrix_is_found() -> None:
    policy = policy_of("qwen3")
    forward = policy.hf.lm_head.forward
    policy.hf.lm_head.forward = lambda x: 1.01 * forward(x)  # the policy multiplies by the weight itself
    with pytest.raises(SelfTestError, match="the model's own code differs"):
        self_test(policy, CPU, 2.0**-24)


def test_it_leaves_no_trace() -> None:
    policy = policy_of("gpt2")
    states = torch.get_rng_state(), {n: m.training for n, m in policy.named_modules()}
    values = {n: p.clone() for n, p in policy.named_parameters()}
    self_test(policy, CPU, 2.0**-24)
    assert torch.equal(torch.get_rng_state(), states[0])
    assert {n: m.training for n, m in policy.named_modules()} == states[1]
    assert all(p.grad is None and torch.equal(p, values[n]) for n, p in policy.named_parameters())
    assert policy.hf.config._attn_implementation == attention.IMPLEMENTATION
    assert not any(m._forward_hooks for m in policy.modules())


def _kernel(lacks: str) -> Callable[..., torch.Tensor]:
    def kernel(q: Any, k: Any, v: Any, plan: Any, scale: Any, window: Any = None, softcap: Any = None) -> torch.Tensor:
        window, softcap = (None if lacks == name else value for name, value in (("window", window), ("cap", softcap)))
        return attention.padded_attention(q, k, v, plan, scale, window, softcap)

    return kernel


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("family", "lacks"), [("gemma2", "cap"), ("gemma2", "window"), ("mistral", "window"), ("gemma2", "nothing")]
)
def test_a_kernel_that_leaves_out_what_a_layer_asks_for_is_found(
    family: str, lacks: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = _kernel(lacks)
    monkeypatch.setattr(
        attention, "select_kernel", lambda choice, *_: attention.padded_attention if choice == "sdpa" else kernel
    )
    policy = policy_of(family, dtype=dtype)
    policy.attn = "auto"
    if lacks == "nothing":
        self_test(policy, CPU, ROUNDING[dtype])
        return
    with pytest.raises(SelfTestError, match=rf"attention kernel .*{'softcap' if lacks == 'cap' else 'sliding_window'}"):
        self_test(policy, CPU, ROUNDING[dtype])


def test_sinks_are_kept_for_the_kernels_test_when_fsdp_gives_their_memory_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        attention, "select_kernel", lambda choice, *_: attention.padded_attention if choice == "sdpa" else _kernel("")
    )
    policy = policy_of("gpt_oss")
    policy.attn = "auto"
    measured = module.measure

    def measure_and_reshard(*arguments: Any) -> module.Found:
        found = measured(*arguments)
        for name, parameter in policy.named_parameters():
            if name.endswith("sinks"):
                parameter.untyped_storage().resize_(0)
        return found

    monkeypatch.setattr(module, "measure", measure_and_reshard)
    self_test(policy, CPU, ROUNDING[torch.float32])
