"""Tensor parallel: heads, feed-forward channels and the vocabulary split over the ranks of `tp`.

What is split how is the model's own plan (transformers' `base_model_tp_plan`):

- `colwise` (q, k, v, gate, up): each rank has some rows of the weight, so some of the outputs; inputs are whole;
- `rowwise` (o, down): each rank has the columns for its part of the inputs; outputs are summed over ranks;
- `replicated_with_grad_allreduce` (Qwen3's q_norm and k_norm): whole on every rank, but each uses it for its own heads
  alone: `train_step.py` sums the gradients (`partly_used`);
- embedding and output head: each rank has some rows of the vocabulary (Megatron-LM, arXiv 1909.08053, section 3). The
  head's logits are never gathered: `logprobs.py` reduces maxima and sums.

Weights become DTensors on the `tp` mesh, which FSDP2 shards further; in the forward pass each rank computes with its
local part. Activations between blocks are whole on every rank. Experts are not split here, see `expert.py`.
"""

import re
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from prime_hpc.moe.routers import expert_modules
from prime_hpc.trainer.ops.collectives import enter_parallel, leave_parallel
from prime_hpc.trainer.ops.cpu_matmul import linear
from prime_hpc.trainer.parallel.mesh import Parallel

COLUMN, ROW, PARTLY_USED = "colwise", "rowwise", "replicated_with_grad_allreduce"


def local(parameter: torch.Tensor | None) -> Any:
    """Return this rank's part of a parameter, differentiable; of what is not sharded, all."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


class ColumnLinear(nn.Linear):
    """`[.., in] -> [.., out / ranks]`; the module around it lets the inputs in (`_enter`)."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute this rank's outputs."""
        return linear(x, local(self.weight), local(self.bias))


class RowLinear(nn.Linear):
    """`[.., in / ranks] -> [.., out]`, summed over ranks; the bias is added once."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the whole outputs."""
        assert isinstance(self.weight, DTensor)
        y = leave_parallel(linear(x, local(self.weight)), self.weight.device_mesh)
        return y if self.bias is None else y + self.bias


class VocabEmbedding(nn.Embedding):
    """Each rank looks up the tokens whose rows it has; the sum over ranks has them all."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """`[..] -> [.., hidden]`."""
        assert isinstance(self.weight, DTensor)
        mesh, weight = self.weight.device_mesh, local(self.weight)
        first = mesh.get_local_rank() * weight.shape[0]
        own = (ids >= first) & (ids < first + weight.shape[0])
        pad = None if self.padding_idx is None else self.padding_idx - first
        in_range = pad is not None and 0 <= pad < weight.shape[0]
        rows = F.embedding(torch.where(own, ids - first, 0), weight, padding_idx=pad if in_range else None)
        return leave_parallel(torch.where(own[..., None], rows, 0), mesh)


def split_tensors(hf: Any, parallel: Parallel) -> list[nn.Module]:
    """Split a causal LM over `parallel.tp`.
    Returns modules whose parameters are whole on every rank and whose gradients are to be summed over `tp`.
    Raises ValueError: sizes that the ranks do not divide, or a model whose plan is missing or unknown."""
    mesh = parallel.tp
    assert mesh is not None
    _check_sizes(hf, mesh.size())
    columns, partly_used = [], []
    for name, module, style in _planned(hf):
        if style == PARTLY_USED:
            partly_used.append(module)
            continue
        if type(module) is not nn.Linear or style not in (COLUMN, ROW):
            raise ValueError(_refusal(hf, f"{name} is a {type(module).__name__} to be split {style}"))
        if style == COLUMN:
            columns.append(name)
        module.__class__ = ColumnLinear if style == COLUMN else RowLinear
        _split(module, "weight", mesh, 0 if style == COLUMN else 1)
        if style == COLUMN and module.bias is not None:
            _split(module, "bias", mesh, 0)
    if not columns:
        raise ValueError(_refusal(hf, "transformers' plan names none of its matrices"))
    for parent in dict.fromkeys(name.rpartition(".")[0] for name in columns):
        _let_in(hf, parent, mesh)
    _split_vocabulary(hf, mesh)
    return partly_used


def _planned(hf: Any) -> Iterator[tuple[str, nn.Module, str]]:
    """Modules that the model's plan names, experts and token tables left out."""
    plan = getattr(hf.config.get_text_config(), "base_model_tp_plan", None)
    if not plan:
        raise ValueError(_refusal(hf, "transformers has no plan for it"))
    others = [*expert_modules(hf), hf.get_input_embeddings(), hf.get_output_embeddings()]
    for name, module in hf.base_model.named_modules():
        style = plan.get(re.sub(r"\.\d+(?=\.|$)", ".*", name))
        if style is not None and module not in others:
            yield name, module, style


def _refusal(hf: Any, reason: str) -> str:
    return f"{type(hf).__name__} cannot be split over tensor-parallel ranks: {reason}; set trainer.parallel.tp = 1"


def _check_sizes(hf: Any, width: int) -> None:
    config = hf.config.get_text_config()
    heads = getattr(config, "num_attention_heads", None)
    if heads is None:
        raise ValueError(_refusal(hf, "it has no attention heads to deal out"))
    sizes = {
        "attention heads": heads,
        "key-value heads": getattr(config, "num_key_value_heads", None) or heads,
        "tokens of the vocabulary": hf.get_input_embeddings().weight.shape[0],
    }
    for what, size in sizes.items():
        if size % width:
            raise ValueError(f"trainer.parallel.tp = {width} does not divide the model's {size} {what}")


def _split(module: nn.Module, name: str, mesh: DeviceMesh, dim: int) -> nn.Parameter:
    """Replace a parameter by this rank's part of it. Raises ValueError: the ranks do not divide it."""
    whole = getattr(module, name)
    if whole.shape[dim] % mesh.size():
        shape = list(whole.shape)
        raise ValueError(f"trainer.parallel.tp = {mesh.size()} does not divide dimension {dim} of a matrix {shape}")
    part = nn.Parameter(shard(whole, mesh, dim), requires_grad=whole.requires_grad)
    setattr(module, name, part)
    return part


@torch.no_grad()
def shard(whole: torch.Tensor, mesh: DeviceMesh, dim: int) -> DTensor:
    """Return a DTensor of a tensor that every rank of a one-dimensional mesh holds, without communication."""
    part = whole.detach().chunk(mesh.size(), dim)[mesh.get_local_rank()].contiguous().clone()
    return DTensor.from_local(
        part, mesh, [Shard(dim)], run_check=False, shape=whole.shape, stride=whole.contiguous().stride()
    )


def _let_in(hf: Any, name: str, mesh: DeviceMesh) -> None:
    """Sum the gradients of whole activations that enter a module of split matrices: once, for all of them.
    Raises ValueError: the module has whole matrices, too, which would see those sums before they are due."""
    parent, plan = hf.base_model.get_submodule(name), hf.config.get_text_config().base_model_tp_plan
    for child, module in parent.named_children():
        path = re.sub(r"\.\d+(?=\.|$)", ".*", f"{name}.{child}")
        if path not in plan and any(True for _ in module.parameters()):
            raise ValueError(_refusal(hf, f"{path} is whole beside matrices that are split"))

    def enter(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        def let_in(x: Any) -> Any:
            floating = isinstance(x, torch.Tensor) and x.is_floating_point()
            return enter_parallel(x, mesh) if floating else x

        return tuple(map(let_in, args)), {k: let_in(v) for k, v in kwargs.items()}

    parent.register_forward_pre_hook(enter, with_kwargs=True)


def _split_vocabulary(hf: Any, mesh: DeviceMesh) -> None:
    """Embedding and output head by rows; tied ones stay tied. A scalar head stays whole, as norms do."""
    embedding, head = hf.get_input_embeddings(), hf.get_output_embeddings()
    if type(embedding) is not nn.Embedding or type(head) is not nn.Linear:
        raise ValueError(_refusal(hf, f"{type(embedding).__name__} and {type(head).__name__} are its token tables"))
    tied = head.weight is embedding.weight
    embedding.__class__ = VocabEmbedding
    rows = _split(embedding, "weight", mesh, 0)
    if head.out_features == 1:
        return
    if tied:
        head.weight = rows
    else:
        _split(head, "weight", mesh, 0)
    if head.bias is not None:
        _split(head, "bias", mesh, 0)
