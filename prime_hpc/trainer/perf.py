"""Tokens per second and model FLOPs utilisation (MFU) of a train step.

FLOPs are those the model needs (recomputation does not count): 6 per matrix parameter and token
for forward and backward (4 where the parameter is frozen and only passes gradients on, as under an adapter), the LM
head only where there are targets, plus causal attention's 6 x layers x heads x head_dim x length^2 of every sequence
(12 x length^2 without the causal half), of which a layer with a window, chunks or chosen tokens has a part, and one
that does not attend nothing. What it does instead (a convolution, a state) is not counted beyond its matrices.
"""

import re
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from prime_hpc.config.families import count_experts, experts_per_token
from prime_hpc.runtime import activity
from prime_hpc.trainer.ops.reach import Reach, layer_reach

PEAK_BF16_FLOPS = {
    # Dense tensor-core peaks of the makers' data sheets, by the words of torch's device name; first match wins.
    "GB300": 2500e12,
    "GB200": 2500e12,
    "B300": 2250e12,
    "B200": 2250e12,
    "GH200": 989e12,
    "H200 NVL": 835e12,
    "H200": 989e12,
    "H20": 148e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "H800": 989e12,
    "A100": 312e12,
    "A800": 312e12,
    "L40S": 362e12,
    "L40": 181e12,
    "L4": 121e12,
    "A40": 150e12,
    "A30": 165e12,
    "A10G": 70e12,
    "A10": 125e12,
    "RTX 5090": 210e12,
    "RTX 4090": 165e12,
    "RTX 3090": 71e12,
    "MI300X": 1307e12,
}
_OTHER_CHIP = re.compile(r"\b(MIG|Laptop|RTX 4090 D|RTX 5090 D|RTX 3090 Ti)\b")
"""A slice of a GPU, or a smaller or larger one of the same name: measured."""


def known_peak(name: str) -> float | None:
    """Dense bfloat16 FLOP/s of a device by torch's name of it; None: unknown."""
    if _OTHER_CHIP.search(name):
        return None
    return next((flops for words, flops in PEAK_BF16_FLOPS.items() if re.search(rf"\b{words}\b", name)), None)


@dataclass(frozen=True)
class FlopsModel:
    """FLOPs of one optimizer step from what was in its batch."""

    block_flops: float
    """FLOPs per token of the matrices that every token passes (experts counted by their active share)."""
    head_flops: float
    """FLOPs per target of the LM head."""
    attention: Mapping[Reach, float]
    """FLOPs per squared sequence length of the layers that attend so far."""

    @classmethod
    def of(cls, hf: Any, num_adapter_params: int = 0) -> "FlopsModel":
        """Count a Hugging Face causal LM.

        Args:
            hf: the model; frozen parameters are those that require no gradient.
            num_adapter_params: trained beside them, outside of the model's own parameters.
        """
        config = hf.config.get_text_config()
        embedding, head = hf.get_input_embeddings().weight, hf.get_output_embeddings().weight
        stated = config.to_dict()
        active = experts_per_token(stated) / num_experts if (num_experts := count_experts(stated)) else 1.0
        flops = 6.0 * num_adapter_params
        for name, parameter in hf.named_parameters():
            if ".visual." in name:  # passed by patches, of which nobody counts the FLOPs
                continue
            if parameter.ndim >= 2 and parameter is not embedding and parameter is not head:
                each = 2.0 * parameter.numel() if ".indexer." in name else _flops_of(parameter)
                flops += each * (active if ".experts." in name else 1.0)
        attention: dict[Reach, float] = {}
        for number, layer in enumerate(config.per_layer_config):
            for reach, per_pair in _attention(config, number, layer):
                attention[reach] = attention.get(reach, 0.0) + per_pair
        return cls(flops, _flops_of(head), attention)

    def attention_flops(self, lengths: NDArray[np.int64]) -> float:
        """FLOPs of attention in sequences of these lengths."""
        return sum(flops * reach.squared_lengths(lengths) for reach, flops in self.attention.items())

    def step_flops(self, num_tokens: float, num_targets: float, attention_flops: float) -> float:
        """FLOPs of a forward and backward pass over packed sequences."""
        return self.block_flops * num_tokens + self.head_flops * num_targets + attention_flops


def _attention(config: Any, number: int, layer: Any) -> Iterator[tuple[Reach, float]]:
    """Yield the reaches of a layer, with their FLOPs per squared length.

    One that attends to the `index_topk` tokens of the highest scores (arXiv 2512.02556) also scores all of them, in a
    forward pass alone; or takes the choice of the layer before.
    """
    kinds = getattr(config, "layer_types", None) or ()
    reach = layer_reach(config, number)
    if number < len(kinds) and kinds[number] == "indexed_attention":
        reach = Reach(window=config.index_topk)
        if (getattr(config, "indexer_types", None) or {number: "full"})[number] == "full":
            yield Reach(), float(config.index_n_heads * config.index_head_dim)
    if reach is not None:
        yield reach, 6.0 * _attention_width(layer)


def _attention_width(layer: Any) -> float:
    """Heads times the mean size of their keys and values by a layer's config (Gemma 4's layers differ, and so do keys
    and values of latent attention); 0 where it has no heads (Mamba)."""
    heads = getattr(layer, "num_attention_heads", None) or 0
    if not heads:
        return 0.0
    size = getattr(layer, "head_dim", None) or layer.hidden_size // heads
    latent, rotary = (getattr(layer, f"qk_{part}_head_dim", None) for part in ("nope", "rope"))
    keys = latent + rotary if latent and rotary else size
    return heads * (keys + (getattr(layer, "v_head_dim", None) or size)) / 2


def _flops_of(parameter: torch.Tensor) -> float:
    """2 FLOPs a weight and token for the outputs, 2 for the inputs' gradient, 2 for its own where it has one."""
    return (6.0 if parameter.requires_grad else 4.0) * parameter.numel()


def measure_matmul_flops(device: torch.device, dtype: torch.dtype, size: int = 512) -> float:
    """FLOP/s of a square matmul on this device as it is now, with the threads that this process has."""
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    torch.mm(a, b)
    best, end = 0.0, time.perf_counter() + 0.2
    while time.perf_counter() < end:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        start = time.perf_counter()
        torch.mm(a, b)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best = max(best, 2.0 * size**3 / (time.perf_counter() - start))
    return best


def peak_flops(device: torch.device, dtype: torch.dtype) -> float:
    """Peak FLOP/s of one rank's device: the maker's figure where known, else a measured matmul."""
    if device.type == "cuda" and dtype in (torch.bfloat16, torch.float16):
        known = known_peak(torch.cuda.get_device_name(device))
        if known is not None:
            return known
    return measured_peak_flops(device, dtype)


def measured_peak_flops(device: torch.device, dtype: torch.dtype) -> float:
    """FLOP/s of a matrix product of a size that suits the device."""
    if device.type != "cpu":
        return measure_matmul_flops(device, dtype, size=8192)
    # many have no unit for bfloat16: float32's is their peak
    return max(measure_matmul_flops(device, each) for each in {dtype, torch.float32})


class PhaseTimer:
    """Seconds of a step's phases.

    with timer("publish"): ...
    with timer("optim", on_device=True): ...

    Of a phase `on_device` they are the GPU's: from where its stream came to the phase's first kernel to where it had
    done the last, whenever the host had launched them. They are read when all of them are over, in `take`.
    """

    def __init__(self, mark: Callable[[], Any] | None = None) -> None:
        """Args:
        mark: records an event on the device's stream, with `synchronize` and `elapsed_time` (milliseconds) as
            `torch.cuda.Event` has them; None: all phases are the host's.
        """
        self.seconds: dict[str, float] = {}
        self._mark = mark
        self._started: list[tuple[str, float, Any]] = []
        self._marks: list[tuple[str, Any, Any]] = []

    @classmethod
    def of(cls, device: torch.device) -> "PhaseTimer":
        """Return a device's."""
        if device.type != "cuda":
            return cls()
        return cls(lambda: torch.cuda.current_stream(device).record_event(torch.cuda.Event(enable_timing=True)))

    def __call__(self, phase: str, *, on_device: bool = False) -> "PhaseTimer":
        """Name the phase that the coming `with` block measures."""
        activity.doing(phase)
        mark = self._mark() if on_device and self._mark is not None else None
        self._started.append((phase, time.perf_counter(), mark))
        return self

    def __enter__(self) -> "PhaseTimer":
        return self

    def __exit__(self, *_: object) -> None:
        phase, start, mark = self._started.pop()
        activity.doing(self._started[-1][0] if self._started else "between phases")
        if mark is not None and self._mark is not None:
            self._marks.append((phase, mark, self._mark()))
            return
        self.seconds[phase] = self.seconds.get(phase, 0.0) + time.perf_counter() - start

    def take(self) -> dict[str, float]:
        """Return the seconds so far, as `time/<phase>`; starts anew. Waits until the device has done the measured
        phases."""
        for phase, first, last in self._marks:
            last.synchronize()
            self.seconds[phase] = self.seconds.get(phase, 0.0) + first.elapsed_time(last) / 1000
        taken = {f"time/{phase}": round(seconds, 4) for phase, seconds in self.seconds.items()}
        self.seconds, self._marks = {}, []
        return taken
