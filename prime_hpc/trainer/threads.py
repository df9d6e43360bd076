"""Threads of a trainer rank that may touch CUDA."""

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch


def rank_thread(target: Callable[..., None], *, name: str, args: Sequence[Any] = ()) -> threading.Thread:
    """Return a daemon thread, not yet started, whose CUDA device is this rank's.

    A new thread begins on GPU 0. What it pins, or copies without naming a device, would make a context of every rank
    there: half a GiB each, on the fullest GPU.
    """
    device = torch.cuda.current_device() if torch.cuda.is_initialized() else None

    def run() -> None:
        if device is not None:
            torch.cuda.set_device(device)
        target(*args)

    return threading.Thread(target=run, name=name, daemon=True)
