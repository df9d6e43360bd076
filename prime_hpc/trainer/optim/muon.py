"""Muon: momentum, orthogonalised, for the hidden matrices; AdamW for everything else. Built by `build.py`.

For a matrix W [rows, columns] with gradient G (Jordan et al. 2024; its scale and decay from arXiv 2502.16982, eq. 4):

    M <- momentum M + (1 - momentum) G;      N = (1 - momentum) G + momentum M        (Nesterov)
    O = U V^T of N = U S V^T, by five Newton-Schulz iterations
    W <- (1 - lr decay) W - lr 0.2 sqrt(max(rows, columns)) O

The factor gives updates AdamW's usual root mean square, so one learning rate serves both halves. A stack of matrices
[experts, rows, columns] is orthogonalised matrix by matrix, and a parameter that fuses several (`fused.py`) part by
part, each with its own factor.

Sharded parameters (FSDP2 DTensors): momentum stays sharded; orthogonalising needs whole matrices. As many matrices of
one shape as there are ranks are exchanged at a time (all-to-all), each rank orthogonalises its share and the results
go back: no work is done twice, and no more than one extra matrix of each is held. A stack that is sharded over its
experts needs no exchange. On a mesh of several dimensions every rank gathers and computes the whole matrix, and keeps
its part.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.optim.adamw import adamw

from prime_hpc.trainer.optim.fused import Fused

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Of the quintic iteration: steepest at 0, so that small singular values come up in few steps."""
ITERATIONS = 5
UPDATE_RMS = 0.2
_EPS = 1e-7


def orthogonalize(matrices: torch.Tensor) -> torch.Tensor:
    """About U V^T of every matrix U S V^T, in the input's dtype.

    Singular values end between 0.68 and 1.2, but those below a thousandth of the largest are not all the way up yet.
    Computed in bfloat16 on a GPU, where float32 products would be slow, in float32 elsewhere. Zero matrices stay zero.
    `matrices`: `[..., rows, columns]`.
    """
    a, b, c = COEFFICIENTS
    x = matrices.bfloat16() if matrices.is_cuda else matrices.float()
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    x = x / torch.linalg.matrix_norm(x, keepdim=True).clamp(min=_EPS)  # the largest singular value is at most 1
    for _ in range(ITERATIONS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * (gram @ gram)) @ x
    return (x.mT if tall else x).to(matrices.dtype)


class Muon(torch.optim.Optimizer):
    """Parameter groups say which half they belong to: `algorithm` is `muon` (2 or 3 dimensions) or `adamw`."""

    def __init__(
        self,
        groups: list[dict[str, Any]],
        *,
        lr: float,
        momentum: float = 0.95,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        fused: Mapping[int, Fused] | None = None,
    ) -> None:
        """Args:
        groups: dictionaries with `params`, `algorithm`, `weight_decay`.
        lr: of both halves.
        fused: id of a parameter that holds several matrices -> how (`find_fused`).
        """
        self._fused = dict(fused or {})
        super().__init__(groups, {"lr": lr, "momentum": momentum, "betas": betas, "eps": eps, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """One update from the parameters' gradients. Collective where parameters are sharded."""
        assert closure is None, "no closure: the engine computes gradients"
        for group in self.param_groups:
            parameters = [p for p in group["params"] if p.grad is not None]
            if group["algorithm"] == "muon":
                self._step_muon(parameters, group)
            else:
                self._step_adamw(parameters, group)

    def _step_muon(self, parameters: list[torch.Tensor], group: dict[str, Any]) -> None:
        for same in _by_layout(parameters, self._fused):
            direction = _direction(self._fused.get(id(same[0])))
            for chunk in _chunks(same):
                updates = _orthogonalize_all([self._momentum(p, group["momentum"]) for p in chunk], direction)
                for parameter, update in zip(chunk, updates, strict=True):
                    scale = UPDATE_RMS * max(parameter.shape[-2:]) ** 0.5
                    parameter.mul_(1 - group["lr"] * group["weight_decay"])
                    parameter.sub_(update, alpha=group["lr"] * scale)

    def _momentum(self, parameter: torch.Tensor, momentum: float) -> torch.Tensor:
        state, grad = self.state[parameter], parameter.grad
        assert grad is not None
        if not state:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        average = state["momentum_buffer"].lerp_(grad, 1 - momentum)
        return grad.lerp(average, momentum)

    def _step_adamw(self, parameters: list[torch.Tensor], group: dict[str, Any]) -> None:
        for parameter in parameters:
            state = self.state[parameter]
            if not state:
                state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
                state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
        states = [self.state[p] for p in parameters]
        adamw(
            parameters,
            [p.grad for p in parameters if p.grad is not None],
            [s["exp_avg"] for s in states],
            [s["exp_avg_sq"] for s in states],
            [],
            [s["step"] for s in states],
            fused=True,
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )


def _direction(fused: Fused | None) -> Callable[[torch.Tensor], torch.Tensor]:
    """`orthogonalize`, or the same part by part, each scaled so that the whole's factor becomes the part's own."""
    if fused is None:
        return orthogonalize

    def by_parts(matrices: torch.Tensor) -> torch.Tensor:
        whole = max(matrices.shape[-2:])
        parts = fused.split(matrices)
        return fused.join([orthogonalize(part) * (max(part.shape[-2:]) / whole) ** 0.5 for part in parts])

    return by_parts


def _by_layout(parameters: list[torch.Tensor], fused: Mapping[int, Fused]) -> list[list[torch.Tensor]]:
    """Parameters of one shape, one sharding and the same parts together, in an order that every rank shares."""
    found: dict[Any, list[torch.Tensor]] = {}
    for p in parameters:
        sharding = (p.device_mesh, p.placements) if isinstance(p, DTensor) else ()
        found.setdefault((tuple(p.shape), p.dtype, sharding, fused.get(id(p))), []).append(p)
    return list(found.values())


def _chunks(parameters: list[torch.Tensor]) -> list[list[torch.Tensor]]:
    """As many at a time as there are ranks to share them."""
    first = parameters[0]
    size = first.device_mesh.size() if isinstance(first, DTensor) and first.device_mesh.ndim == 1 else 1
    return [parameters[i : i + size] for i in range(0, len(parameters), size)]


def _orthogonalize_all(
    matrices: list[torch.Tensor], direction: Callable[[torch.Tensor], torch.Tensor]
) -> list[torch.Tensor]:
    """`direction` of each; sharded ones (all sharded alike) come back with the sharding that they had."""
    first = matrices[0]
    if not isinstance(first, DTensor):
        return [direction(m) for m in matrices]
    if first.ndim == 3 and all(p.is_replicate() or p.is_shard(0) for p in first.placements):
        return [_local(m, direction) for m in matrices]
    if first.device_mesh.ndim > 1:
        return [_local_part(direction(m.full_tensor()), m) for m in matrices]  # type: ignore[attr-defined]
    stacked = torch.stack(matrices)
    kept = stacked.placements  # type: ignore[attr-defined]
    whole = _local(stacked.redistribute(placements=[Shard(0)]), direction)  # type: ignore[attr-defined]
    return list(whole.redistribute(placements=kept).unbind(0))


def _local_part(whole: torch.Tensor, sharded: Any) -> torch.Tensor:
    """`whole`, sharded like `sharded`: no communication."""
    mesh, placements = sharded.device_mesh, sharded.placements
    shape, offset = compute_local_shape_and_global_offset(sharded.shape, mesh, placements)
    part = whole[tuple(slice(o, o + s) for o, s in zip(offset, shape, strict=True))]
    return _sharded_like(sharded, part.reshape(shape).contiguous())


def _local(sharded: Any, direction: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """`direction` of a stack of which every rank holds some whole matrices."""
    return _sharded_like(sharded, direction(sharded.to_local()))


def _sharded_like(sharded: Any, part: torch.Tensor) -> DTensor:
    """Return what this rank's part belongs to, sharded as another tensor is."""
    mesh, placements = sharded.device_mesh, sharded.placements
    return DTensor.from_local(part, mesh, placements, run_check=False, shape=sharded.shape, stride=sharded.stride())
