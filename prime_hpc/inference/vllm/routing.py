"""Routers of vLLM's mixture-of-experts models: the experts that they choose, recorded, and their logits in float32.

vLLM 0.32 records choices by itself (`--enable-return-routed-experts`: its auxiliary outputs, kept beside the blocks of
the prefix cache) where its second model runner runs, which needs Triton, so on GPUs. On a CPU the first one runs.
`record` gives that one the same three calls a step: the capture, the store and the scheduler's part are vLLM's.
"""

import functools
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F

if TYPE_CHECKING:
    from vllm.config import VllmConfig

ROUTER_DTYPE = "router_dtype"
"""Key of vLLM's `additional_config` that holds `model.router_dtype`."""


def allow_first_runner() -> None:
    """Let vLLM's config ask for recorded choices without its second model runner; all else is checked as ever."""
    from vllm.config import VllmConfig
    from vllm.platforms import current_platform

    owner: Any = VllmConfig
    checks = owner._verify_aux_output_compatibility

    def check(config: Any) -> None:
        # Platforms of others "bring their own model runners": so do we.
        platform: Any = current_platform
        platform.is_out_of_tree = lambda: True
        try:
            checks(config)
        finally:
            del platform.is_out_of_tree

    owner._verify_aux_output_compatibility = check


def record(runner: Any, config: "VllmConfig") -> None:
    """Make vLLM's first model runner hand on the experts that each step chose.
    `runner`: with its model and cache; not asynchronous, as on a CPU."""
    from vllm.distributed.aux_output_connector.worker import PendingAuxOutput, get_aux_output_connector

    connector = get_aux_output_connector(runner.get_model(), config, runner.kv_cache_config)
    execute, sample = runner.execute_model, runner.sample_tokens
    under_way: list[PendingAuxOutput] = []

    def execute_model(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        connector.begin_step(scheduler_output.aux_output_connector_metadata)
        result = execute(scheduler_output, *args, **kwargs)
        if result is None:  # computed; its tokens are still to be sampled
            pending = connector.prepare_output(_rows_of(runner, scheduler_output))
            under_way[:] = [] if pending is None else [pending]
        return result

    def sample_tokens(*args: Any, **kwargs: Any) -> Any:
        output = sample(*args, **kwargs)
        if under_way:
            pending = under_way.pop()
            places = (output.req_id_to_index[request] for request in pending.request_ids)
            counts = np.array([len(output.sampled_token_ids[place]) for place in places])
            pending.enqueue_cpu_copy(counts, np.zeros_like(counts))
            output.aux_output_connector_output = pending.process_output()
        return output

    runner.execute_model, runner.sample_tokens = execute_model, sample_tokens


def _rows_of(runner: Any, scheduler_output: Any) -> Any:
    """Say which token of which request each row of the step was, by the second runner's names."""
    batch, counts = runner.input_batch, scheduler_output.num_scheduled_tokens
    requests = list(batch.req_ids)
    ends = np.cumsum([counts[request] for request in requests])
    return SimpleNamespace(
        req_ids=requests,
        query_start_loc_np=np.concatenate([[0], ends]).astype(np.int64),
        num_computed_tokens_np=batch.num_computed_tokens_cpu[: len(requests)].copy(),
    )


@functools.cache
def use_float32_gates() -> None:
    """Make every router that is built from now on keep its logits in float32, products of what its model computes in.

    Does nothing a second time.
    """
    from vllm.model_executor.layers.fused_moe.router.gate_linear import GateLinear

    gate: Any = GateLinear
    build, state, forward = gate.__init__, gate.set_out_dtype, gate.forward

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        build(self, *args, **kwargs)
        self._cpu_skip_gemm_dispatch = True  # on a CPU: keep the plain weight
        if self.out_dtype is None:
            state(self, torch.float32)

    def set_out_dtype(self: Any, dtype: torch.dtype) -> None:
        if dtype != self.out_dtype:
            state(self, dtype)

    def in_float32(self: Any, x: torch.Tensor) -> Any:
        if x.dtype == torch.float32 or not self.is_unquantized or self.allow_cublas_router_gemm:
            return forward(self, x)
        bias = None if self.bias is None else self.bias.float()
        return self._return(F.linear(x.float(), self.weight.float(), bias))

    gate.__init__, gate.set_out_dtype, gate.forward = init, set_out_dtype, in_float32


def check_gates(model: torch.nn.Module) -> None:
    """Raise a ValueError where a model's routers are none that `use_float32_gates` reaches."""
    from vllm.model_executor.layers.fused_moe.router.gate_linear import GateLinear

    if not any(isinstance(module, GateLinear) for module in model.modules()):
        raise ValueError(
            f"model.router_dtype = float32: {type(model).__name__} has no router of vLLM's kind; leave it out"
        )
