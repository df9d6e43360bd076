"""What MFU is made of: a device's peak by its name, and seconds that a GPU has worked."""

import numpy as np
import pytest
import torch

from prime_hpc.trainer import perf
from prime_hpc.trainer.ops.reach import Reach
from prime_hpc.trainer.perf import FlopsModel, PhaseTimer, known_peak
from tests.support.every_family import tiny_config, tiny_model


@pytest.mark.parametrize(
    ("name", "teraflops"),
    [
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H100 NVL", 835),
        ("NVIDIA H200", 989),
        ("NVIDIA GH200 480GB", 989),
        ("NVIDIA H20", 148),
        ("NVIDIA H20-3e", 148),
        ("NVIDIA B200", 2250),
        ("NVIDIA GB200", 2500),
        ("NVIDIA B300 SXM6 AC", 2250),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA L40S", 362),
        ("NVIDIA L40", 181),
        ("NVIDIA L4", 121),
        ("NVIDIA A10", 125),
        ("NVIDIA A10G", 70),
        ("NVIDIA GeForce RTX 4090", 165),
        ("AMD Instinct MI300X", 1307),
    ],
)
def test_peaks_by_name(name: str, teraflops: int) -> None:
    assert known_peak(name) == teraflops * 1e12


@pytest.mark.parametrize(
    "name",
    [
        "NVIDIA RTX A1000",
        "NVIDIA RTX A1000 6GB Laptop GPU",
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "NVIDIA GeForce RTX 4090 D",
        "NVIDIA A100-SXM4-40GB MIG 1g.5gb",
        "NVIDIA RTX A4000",
        "Quadro T1000",
    ],
)
def test_other_devices_are_measured(name: str) -> None:
    assert known_peak(name) is None


@pytest.mark.parametrize(
    ("family", "changes", "widths", "active"),
    [
        ("qwen3", {"use_sliding_window": False, "layer_types": None}, {Reach(): 4 * 32}, 1.0),
        ("gemma4_text", {}, {Reach(window=8): 2 * 32, Reach(): 2 * 4 * 512}, 1.0),  # layers of two head sizes
        ("gemma4_text", {"enable_moe_block": True}, {Reach(window=8): 2 * 32, Reach(): 2 * 4 * 512}, 0.5),
        ("mistral", {}, {Reach(window=8): 4 * 32}, 1.0),  # which has no `layer_types`
        ("mamba", {}, {}, 1.0),  # nothing attends
        ("lfm2", {}, {Reach(): 32}, 1.0),  # one layer of four does
        ("qwen3_5_text", {}, {Reach(): 2 * 32}, 1.0),  # two of four do
        ("deepseek_v3", {}, {Reach(): 4 * 4 * (16 + 12) / 2}, 0.5),  # keys and values differ
        # chosen tokens: scores of all of them, forward alone, in each layer or in two of four
        ("deepseek_v32", {}, {Reach(window=4): 4 * 4 * (16 + 12) / 2, Reach(): 4 * 8 * 8 / 6}, 0.5),
        ("hy_v4", {}, {Reach(window=4): 4 * 4 * (16 + 12) / 2, Reach(): 2 * 8 * 8 / 6}, 0.5),
        ("hunyuan_v1_moe", {}, {Reach(): 4 * 32}, 0.5),
        ("aria_text", {}, {Reach(): 4 * 32}, 0.5),
    ],
)
def test_flops_of_a_family_by_its_config(
    family: str, changes: dict[str, bool], widths: dict[Reach, float], active: float
) -> None:
    hf = tiny_model(tiny_config(family, **changes))
    found = FlopsModel.of(hf)
    assert found.attention == {reach: 6 * width for reach, width in widths.items()}
    tables = {id(hf.get_input_embeddings().weight), id(hf.get_output_embeddings().weight)}
    matrices = {n: p.numel() for n, p in hf.named_parameters() if p.ndim >= 2 and id(p) not in tables}
    experts = sum(size for name, size in matrices.items() if ".experts." in name)
    choosing = sum(size for name, size in matrices.items() if ".indexer." in name)
    trained = sum(matrices.values()) - (1 - active) * experts - choosing
    assert bool(experts) == (active < 1) and found.block_flops == 6 * trained + 2 * choosing


@pytest.mark.parametrize("reach", [Reach(), Reach(window=3), Reach(chunk=4)])
def test_pairs_that_attend_are_those_of_a_causal_mask(reach: Reach) -> None:
    lengths = np.array([1, 3, 4, 9, 0])
    squares = 0.0
    for length in lengths.tolist():
        q, k = np.indices((length, length))
        window, chunk = reach.window or length + 1, reach.chunk or length + 1
        seen = (q - k < window) & (q // chunk == k // chunk)
        squares += (seen & (k <= q)).sum() + (seen & (k < q)).sum()
    assert reach.squared_lengths(lengths) == squares


def test_a_device_s_phases_are_timed_by_its_events_and_read_at_the_end() -> None:
    class Event:
        def __init__(self, at_ms: float) -> None:
            self.at_ms, self.waited = at_ms, False

        def synchronize(self) -> None:
            self.waited = True

        def elapsed_time(self, last: "Event") -> float:
            assert last.waited
            return last.at_ms - self.at_ms

    # The host leaves "optim" at once; the device is done with it 250 ms after it began.
    made = [Event(at) for at in (0.0, 1000.0, 1000.0, 1250.0)]
    events = iter(made)
    timer = PhaseTimer(lambda: next(events))
    with timer("forward_backward", on_device=True):
        pass
    with timer("optim", on_device=True):
        assert not any(event.waited for event in made)
    with timer("publish"):
        pass
    taken = timer.take()
    assert (taken["time/forward_backward"], taken["time/optim"]) == (1.0, 0.25) and taken["time/publish"] < 1
    assert timer.take() == {}


def test_without_a_device_all_phases_are_the_host_s() -> None:
    timer = PhaseTimer()
    with timer("optim", on_device=True):
        pass
    assert set(timer.take()) == {"time/optim"}


def test_the_peak_of_a_cpu_without_a_unit_for_bfloat16_is_that_of_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    rates = {torch.bfloat16: 2e8, torch.float32: 9e9}
    monkeypatch.setattr(perf, "measure_matmul_flops", lambda device, dtype: rates[dtype])
    assert perf.measured_peak_flops(torch.device("cpu"), torch.bfloat16) == 9e9
    assert perf.measured_peak_flops(torch.device("cpu"), torch.float32) == 9e9
