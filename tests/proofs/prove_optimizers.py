"""Optimizer x claim: several updates against float64 numpy written from the papers.

`value`: parameters after every step, relative to how far they moved. Ours compute in float32.
"""

from collections.abc import Iterable
from types import SimpleNamespace

import numpy as np
import torch
from torch import nn

from prime_hpc.config.sections.trainer import OptimConfig
from prime_hpc.trainer.optim import build_optimizer, set_learning_rate
from tests.proofs import Proof

STEPS = 6
BOUND = 2e-5
"""Float32 over six updates; Newton-Schulz multiplies by up to 3.4 an iteration."""


class Experts(nn.Module):
    """A stack of gate and up projections in one, and the down projection that tells their width."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.randn(2, 6, 4))
        self.down_proj = nn.Parameter(torch.randn(2, 4, 3))


class Attention(nn.Module):
    """Two heads of queries and one of keys and values in one projection; or three matrices head by head."""

    def __init__(self, model_type: str, name: str, rows: int, num_key_value_heads: int) -> None:
        super().__init__()
        self.config = SimpleNamespace(
            model_type=model_type,
            hidden_size=4,
            num_attention_heads=2,
            num_key_value_heads=num_key_value_heads,
            head_dim=3,
        )
        setattr(self, name, nn.Linear(4, rows, bias=False))


PARTS = {
    "experts.gate_up_proj": [[0, 1, 2], [3, 4, 5]],
    "phi.qkv_proj.weight": [[0, 1, 2, 3, 4, 5], [6, 7, 8], [9, 10, 11]],
    "neox.query_key_value.weight": [[0, 1, 2, 9, 10, 11], [3, 4, 5, 12, 13, 14], [6, 7, 8, 15, 16, 17]],
}
"""Rows of each matrix in a fused parameter."""


class Toy(nn.Module):
    """An embedding, a matrix each way round, a stack of matrices, fused matrices and a vector."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(7, 4)
        self.wide = nn.Linear(6, 4, bias=False)
        self.tall = nn.Linear(4, 9, bias=True)
        self.stack = nn.Parameter(torch.randn(3, 5, 4))
        self.experts = Experts()
        self.phi = Attention("phi3", "qkv_proj", 12, 1)
        self.neox = Attention("gpt_neox", "query_key_value", 18, 2)


def newton_schulz(x: np.ndarray) -> np.ndarray:
    """Five quintic steps towards U V^T."""
    x = x / max(np.linalg.norm(x), 1e-7)
    for _ in range(5):
        g = x @ x.T
        x = 3.4445 * x + (-4.7750 * g + 2.0315 * g @ g) @ x
    return x


def muon(w: np.ndarray, grads: list[np.ndarray], lrs: list[float], decay: float, momentum: float) -> np.ndarray:
    """arXiv 2502.16982, eq. 4, with Nesterov momentum."""
    m = np.zeros_like(w)
    for g, lr in zip(grads, lrs, strict=True):
        m = momentum * m + (1 - momentum) * g
        n = (1 - momentum) * g + momentum * m
        wide = n if n.shape[0] <= n.shape[1] else n.T
        o = newton_schulz(wide)
        o = o if n.shape[0] <= n.shape[1] else o.T
        w = (1 - lr * decay) * w - lr * 0.2 * np.sqrt(max(w.shape)) * o
    return w


def adamw(
    w: np.ndarray, grads: list[np.ndarray], lrs: list[float], decay: float, betas: tuple[float, float], eps: float
) -> np.ndarray:
    """arXiv 1711.05101, algorithm 2."""
    m, v = np.zeros_like(w), np.zeros_like(w)
    for t, (g, lr) in enumerate(zip(grads, lrs, strict=True), 1):
        m, v = betas[0] * m + (1 - betas[0]) * g, betas[1] * v + (1 - betas[1]) * g * g
        w = (1 - lr * decay) * w
        w = w - lr * (m / (1 - betas[0] ** t)) / (np.sqrt(v / (1 - betas[1] ** t)) + eps)
    return w


def signum(w: np.ndarray, grads: list[np.ndarray], lrs: list[float], decay: float, momentum: float) -> np.ndarray:
    """arXiv 1802.04434, algorithms 1 (momentum 0) and 2."""
    m = np.zeros_like(w)
    for g, lr in zip(grads, lrs, strict=True):
        m = momentum * m + (1 - momentum) * g
        w = (1 - lr * decay) * w - lr * np.sign(m)
    return w


CONFIGS = {
    "adamw": OptimConfig(type="adamw", lr=0.1, weight_decay=0.2),
    "muon": OptimConfig(type="muon", lr=0.1, weight_decay=0.2),
    "signsgd": OptimConfig(type="signsgd", lr=0.1, weight_decay=0.2),
    "signum": OptimConfig(type="signsgd", lr=0.1, weight_decay=0.2, momentum=0.9),
}


def expected(
    name: str,
    config: OptimConfig,
    key: str,
    w: np.ndarray,
    grads: list[np.ndarray],
    lrs: list[float],
    *,
    fused: bool = False,
) -> np.ndarray:
    """Where the reference ends; vectors do not decay, Muon's embedding and vector are AdamW's, and every matrix in a
    fused parameter is one of its own (`fused`: it is such a part)."""
    decay = config.weight_decay if w.ndim >= 2 else 0.0
    if name in ("signsgd", "signum"):
        return signum(w, grads, lrs, decay, config.momentum or 0.0)
    if name == "muon" and key in PARTS and not fused:
        moved = np.empty_like(w)
        for rows in PARTS[key]:
            part, own = w[..., rows, :], [g[..., rows, :] for g in grads]
            moved[..., rows, :] = expected(name, config, key, part, own, lrs, fused=True)
        return moved
    if name == "muon" and w.ndim == 2 and not key.startswith("embed"):
        return muon(w, grads, lrs, decay, 0.95)
    if name == "muon" and w.ndim == 3:
        return np.stack([muon(w[i], [g[i] for g in grads], lrs, decay, 0.95) for i in range(len(w))])
    return adamw(w, grads, lrs, decay, config.betas, config.eps)


def value_error(name: str, seed: int) -> float:
    """The greatest error of any parameter after `STEPS` updates, relative to its own movement."""
    config, model, rng = CONFIGS[name], Toy(seed), np.random.default_rng(seed)
    optimizer = build_optimizer(model, config)
    before = {k: p.detach().double().numpy().copy() for k, p in model.named_parameters()}
    grads: dict[str, list[np.ndarray]] = {k: [] for k in before}
    lrs = [float(0.1 * (i + 1) / STEPS) for i in range(STEPS)]
    for lr in lrs:
        for k, p in model.named_parameters():
            p.grad = torch.from_numpy(rng.standard_normal(p.shape).astype(np.float32))
            grads[k].append(p.grad.double().numpy())
        set_learning_rate(optimizer, lr)
        optimizer.step()
    worst = 0.0
    for k, p in model.named_parameters():
        wanted = expected(name, config, k, before[k], grads[k], lrs)
        worst = max(worst, float(np.abs(p.detach().double().numpy() - wanted).max() / np.abs(wanted - before[k]).max()))
    return worst


def prove(trials: int) -> Iterable[Proof]:
    """Every optimizer, `trials` random models each."""
    for name in CONFIGS:
        errors = [value_error(name, seed) for seed in range(trials)]
        yield Proof(name, "value", trials, float(np.max(errors)), BOUND)
