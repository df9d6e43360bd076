"""SignSGD and Signum (arXiv 1802.04434, algorithms 1 and 2), with decoupled weight decay. Built by `build.py`.

    m <- momentum m + (1 - momentum) g            (momentum 0: m = g, and no state of the parameter's size)
    w <- (1 - lr decay) w - lr sign(m)

Elementwise, so sharded parameters need no communication. Every weight with a gradient moves by lr: rates are those of
Adam (whose steps are about as large) or smaller. Clipping the gradient's norm changes nothing without momentum.
"""

from collections.abc import Callable
from typing import Any

import torch


class SignSGD(torch.optim.Optimizer):
    """Moves every weight by the learning rate against the sign of its (averaged) gradient."""

    def __init__(self, params: Any, *, lr: float, momentum: float = 0.0, weight_decay: float = 0.0) -> None:
        """Args:
        lr: step of every weight.
        momentum: of the gradient's average, in [0, 1); 0 keeps no average.
        weight_decay: decoupled.
        """
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """One update from the parameters' gradients."""
        assert closure is None, "no closure: the engine computes gradients"
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group)

    def _update(self, parameter: torch.Tensor, group: dict[str, Any]) -> None:
        state, momentum, grad = self.state[parameter], group["momentum"], parameter.grad
        assert grad is not None
        if not state:
            # A count even without momentum: distributed checkpoints expect some state of every trained parameter.
            state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
        state["step"] += 1
        if momentum > 0:
            if "momentum_buffer" not in state:
                state["momentum_buffer"] = torch.zeros_like(parameter)
            grad = state["momentum_buffer"].lerp_(grad, 1 - momentum)
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        parameter.sub_(grad.sign(), alpha=group["lr"])
