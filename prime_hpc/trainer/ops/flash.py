"""FlashAttention besides the one in torch: found by importing its kernels, not by a package's name.

`flash-attn-4` and others bring a package of the name `flash_attn` without the varlen kernel of FlashAttention 2.
"""

import functools
import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

import torch
from loguru import logger

HOPPER = 9
"""Major compute capability of the GPUs that FlashAttention 3 is for."""


@functools.cache
def flash_attn_2() -> Callable[..., Any] | None:
    """`flash_attn_varlen_func` of the package flash-attn; None where it is not there or does not load."""
    if importlib.util.find_spec("flash_attn") is None:
        return None
    try:
        return importlib.import_module("flash_attn").flash_attn_varlen_func
    except (ImportError, AttributeError) as error:  # another package of that name, or built for another torch
        logger.warning(f"flash_attn is installed, but has no varlen kernel that loads here: {error}")
        return None


@functools.cache
def activate_flash_attn_3(device_type: str) -> bool:
    """Have torch's flash attention (and so its varlen kernel) run FlashAttention 3, where that is installed and the GPU
    is a Hopper; whether it does from now on (Shah et al., arXiv 2407.08608)."""
    if device_type != "cuda" or importlib.util.find_spec("flash_attn_interface") is None:
        return False
    if torch.cuda.get_device_capability()[0] != HOPPER:
        return False
    from torch.nn.attention import activate_flash_attention_impl

    try:
        activate_flash_attention_impl("FA3")
    except (ImportError, RuntimeError, OSError, ValueError) as error:
        logger.warning(f"FlashAttention 3 is installed, but does not start here: {error}")
        return False
    return True


def fits_flash(query: torch.Tensor, value: torch.Tensor) -> bool:
    """Return whether any of its kernels takes heads of this width (Gemma 4's global layers have 512)."""
    width = max(query.shape[-1], value.shape[-1])
    return width <= 256 and width % 8 == 0
