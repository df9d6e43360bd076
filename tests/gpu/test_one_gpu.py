"""The checks of tools/gpu-check, one test each, on the GPUs that are here; see there what each holds against what."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

TOOLS = Path(__file__).resolve().parents[2] / "tools"
NAMES = (
    *("machine", "kernels", "head", "combinations", "families", "syncs", "resume", "agreement", "sharing", "replay"),
    *("restart", "mfu", "memory", "ranks", "layouts", "apart"),
)
"""The last three want several GPUs. `sharing` and `replay` look at the run of `agreement`, `memory` at the figures of
`mfu`."""


@pytest.fixture(scope="module")
def runner() -> Iterator[Any]:
    before = list(sys.path)
    sys.path[:0] = [str(TOOLS / "gpu_checks"), str(TOOLS / "benchmarks")]
    import _runner

    yield _runner
    sys.path[:] = before


@pytest.fixture(scope="module")
def setting(runner: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return runner.Setting("cuda", str(tmp_path_factory.mktemp("checks")), os.environ.get("PRIME_HPC_GPU_MODEL"))


@pytest.mark.parametrize("name", NAMES)
def test_check(name: str, runner: Any, setting: Any) -> None:
    check = next(check for check in runner.CHECKS if check.name == name)
    outcome = runner.in_child(check, setting, check.deadline_s)
    print(outcome.figures)
    if outcome.verdict == "skipped":
        pytest.skip(outcome.summary)
    assert outcome.verdict == "pass", outcome.summary


def test_every_check_is_a_test(runner: Any) -> None:
    assert set(NAMES) == {check.name for check in runner.CHECKS}


def test_an_optimizer_whose_state_goes_to_and_fro_updates_as_one_whose_state_stays() -> None:
    import torch

    from prime_hpc.trainer.optim.offload import keep_in_host_memory

    def updated(offload: bool) -> tuple[list[torch.Tensor], list[torch.Tensor], int]:
        parameters = [torch.nn.Parameter(torch.full((1 << 22,), float(i), device="cuda")) for i in range(8)]
        optimizer = torch.optim.AdamW(parameters, lr=0.1, fused=True)
        if offload:
            keep_in_host_memory(optimizer, bucket_bytes=8 << 22)  # one parameter each
        noise = torch.Generator("cuda").manual_seed(0)
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        for _ in range(3):
            for parameter in parameters:
                parameter.grad = torch.randn(parameter.shape, device="cuda", generator=noise)
            optimizer.step()
        peak = torch.cuda.max_memory_allocated() - before
        state = [value for p in parameters for value in optimizer.state[p].values() if value.dim()]
        return [p.detach().cpu() for p in parameters], state, peak

    expected, kept, peak = updated(offload=False)
    found, offloaded, less = updated(offload=True)
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
    assert all(torch.equal(a.cpu(), b) for a, b in zip(kept, offloaded, strict=True))
    assert all(b.is_pinned() and b.untyped_storage().nbytes() == b.nbytes for b in offloaded)
    assert less <= peak - (8 - 3) * (8 << 22)  # two visit at a time; a third is on its way out of the allocator
