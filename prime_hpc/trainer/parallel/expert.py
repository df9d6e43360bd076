"""Expert parallel: the experts of a mixture-of-experts model split over the ranks of `ep`.

Each rank holds `num_experts / ep` experts and has tokens of its own. A token's hidden state goes to the ranks that hold
its chosen experts (all-to-all), is computed there beside everybody else's, comes back, and is weighed and summed where
it came from (GShard, arXiv 2006.16668, without capacity: no token is ever dropped). What the experts compute is the
model's own code, given the local experts as if there were no others; the router is untouched.

Under tensor parallelism all ranks of a `tp` group have the same tokens: each takes a share of them, and the results are
joined again, so that here they are ranks like any other.

Experts are what transformers fuses into `[experts, ..]` parameters (`use_experts_implementation`): Qwen3-MoE, Mixtral,
DeepSeek-V3 and their like.
"""

import functools
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from prime_hpc.moe.routers import expert_modules
from prime_hpc.trainer.ops.collectives import all_to_all, exchange, join_rows, split_rows
from prime_hpc.trainer.ops.transfer import HostRead
from prime_hpc.trainer.parallel.mesh import Parallel
from prime_hpc.trainer.parallel.tensor import local, shard


def split_experts(hf: Any, parallel: Parallel) -> list[nn.Module]:
    """Split the experts over `parallel.ep`, and their tokens over `parallel.tp`.
    Returns the modules that FSDP must shard over `parallel.expert_fsdp`.
    Raises ValueError: a dense model, or a number of experts that the ranks do not divide."""
    modules, width = expert_modules(hf), parallel.dims.ep
    if width > 1 and not modules:
        raise ValueError(f"trainer.parallel.ep = {width}: {type(hf).__name__} has no experts to split; set it to 1")
    for module in modules:
        num_experts: Any = module.num_experts
        if num_experts % width:
            raise ValueError(f"trainer.parallel.ep = {width} does not divide the model's {num_experts} experts")
        if parallel.ep is not None:
            for name, parameter in list(module.named_parameters(recurse=False)):
                own = shard(parameter, parallel.ep, 0)
                setattr(module, name, nn.Parameter(own, requires_grad=parameter.requires_grad))
        module.forward = functools.partial(_forward, module, parallel.ep, parallel.tp)
    return modules


class LocalExperts:
    """Looks like the experts' module with no other experts than this rank's."""

    def __init__(self, module: nn.Module, num_experts: int) -> None:
        self._module = module
        self.num_experts = num_experts
        for name, parameter in module.named_parameters(recurse=False):
            setattr(self, name, local(parameter))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


@torch.compiler.disable  # sizes differ with every row's routing
def _forward(
    module: nn.Module,
    ep: DeviceMesh | None,
    tp: DeviceMesh | None,
    hidden: torch.Tensor,
    chosen: torch.Tensor,
    weights: torch.Tensor,
) -> torch.Tensor:
    """In the place of the module's own forward.

    Args:
        hidden: `[tokens, D]`.
        chosen: int64 `[tokens, k]`, experts of each token.
        weights: `[tokens, k]`.

    Returns:
        `[tokens, D]`.
    """
    if tp is not None:
        hidden, chosen, weights = split_rows(hidden, tp), split_rows(chosen, tp), split_rows(weights, tp)
    if ep is None:
        output = _compute(module, LocalExperts(module, _num_experts(module)), hidden, chosen, weights)
    else:
        output = _dispatch(module, ep, hidden, chosen, weights)
    return output if tp is None else join_rows(output, tp)


def _num_experts(module: nn.Module) -> int:
    found: Any = module.num_experts
    return int(found)


def _compute(module: nn.Module, experts: LocalExperts, *inputs: torch.Tensor) -> torch.Tensor:
    """Run the model's own code over `experts`."""
    return type(module).forward(experts, *inputs)


def _dispatch(
    module: nn.Module, ep: DeviceMesh, hidden: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """Tokens to their experts and back.

    A collective of uneven parts needs their sizes on the host: one wait for the device a layer, while it gathers the
    rows that are to travel. That is the only one in a step.
    """
    tokens, k = chosen.shape
    num_local = _num_experts(module) // ep.size()
    flat = chosen.reshape(-1)
    order = torch.argsort(flat, stable=True)  # pairs of token and choice, by expert
    edges = torch.searchsorted(flat[order], torch.arange(num_local * ep.size() + 1, device=flat.device))
    sent_of = edges.diff().view(ep.size(), num_local)
    received_of = exchange(sent_of, ep)  # [ranks, local experts], rows that each rank sends for each of ours
    sizes = HostRead(torch.stack([sent_of.sum(1), received_of.sum(1)]))
    leaving = hidden[order // k]
    sent, received = sizes.rows()
    num_arrived = sum(received)
    arrived = all_to_all(leaving, ep, sent, received)
    local = torch.arange(num_local, device=hidden.device).repeat(ep.size())
    expert = local.repeat_interleave(received_of.reshape(-1), output_size=num_arrived)
    if num_arrived == 0:
        # One row of zeros beside the none that came, so that every rank has gradients of all its experts, and of what
        # came: their backward passes communicate.
        arrived, expert = torch.cat([arrived, hidden.new_zeros((1, hidden.shape[1]))]), expert.new_zeros(1)
    ones = torch.ones((len(expert), 1), dtype=weights.dtype, device=weights.device)
    computed = _compute(module, LocalExperts(module, num_local), arrived, expert[:, None], ones)
    returned = all_to_all(computed[:num_arrived], ep, received, sent)
    back = torch.empty_like(order)
    back[order] = torch.arange(len(order), device=order.device)
    return (returned[back].view(tokens, k, -1) * weights[..., None]).sum(dim=1).to(hidden.dtype)
