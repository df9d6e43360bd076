"""This rank's random generators as tensors and back, for checkpoints."""

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch


def random_state(rank: int) -> dict[str, torch.Tensor]:
    """States of torch, numpy, Python and CUDA as new byte tensors, under names of this rank's own."""
    state: Any = np.random.get_state()
    _, keys, position, has_gauss, gauss = state  # always MT19937
    version, internal, gauss_next = random.getstate()
    states = {
        "torch": torch.get_rng_state(),
        "numpy": _state_tensor(keys, position, has_gauss, gauss),
        "python": _state_tensor(internal, version, gauss_next is not None, gauss_next or 0.0),
    }
    if torch.cuda.is_initialized():  # else asking would make a context on the node's first GPU
        states["cuda"] = torch.cuda.get_rng_state()
    return {f"random_{rank}_{key}": value for key, value in states.items()}


def set_random_state(states: Mapping[str, torch.Tensor]) -> None:
    """Restore what `random_state` gave, any subset of it."""
    for key, value in states.items():
        kind = key.rsplit("_", 1)[1]
        if kind == "torch":
            torch.set_rng_state(value)
        elif kind == "cuda":
            torch.cuda.set_rng_state(value)
        else:
            raw = value.numpy()
            words = raw[:-24].view(np.uint32)
            first, flag, gauss = raw[-24:].view(np.float64)
            if kind == "numpy":
                np.random.set_state(("MT19937", words, int(first), int(flag), float(gauss)))
            else:
                random.setstate((int(first), tuple(int(w) for w in words), float(gauss) if flag else None))


def _state_tensor(words: Any, *numbers: float) -> torch.Tensor:
    """uint32 words, then three numbers as 24 bytes (whole numbers this small are exact in float64)."""
    tail = np.array(numbers, dtype=np.float64).view(np.uint8)
    return torch.from_numpy(np.concatenate([np.asarray(words, np.uint32).view(np.uint8), tail]))
