"""The machine: driver, torch, and whether a product in bfloat16 is one."""

import warnings
from typing import Any

from _setting import Outcome, Setting, passed

from prime_hpc.runtime.gpus import build_problem, driver_problem, driver_version, visible_gpus


def usable_gpus() -> int:
    """GPUs that torch can use, asked without a context on any of them."""
    import torch

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.cuda.device_count() if torch.cuda.is_available() else 0


def why_no_gpu() -> str:
    """Why torch sees none."""
    import torch

    if problem := build_problem():
        return problem
    driver = driver_version()
    if torch.version.cuda and (problem := driver_problem(torch.version.cuda, driver)):
        return problem
    return f"{len(visible_gpus())} to be seen, driver {driver}, torch {torch.__version__} (CUDA {torch.version.cuda})"


def machine(setting: Setting) -> Outcome:
    """Facts, and one product against float64."""
    import torch

    torch.manual_seed(0)
    a, b = torch.randn(512, 2048), torch.randn(2048, 512)
    exact = (a.bfloat16().double() @ b.bfloat16().double()).float()
    found = (a.bfloat16().to(setting.device) @ b.bfloat16().to(setting.device)).float().cpu()
    error = float((found - exact).norm() / exact.norm())
    figures: dict[str, Any] = {
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "driver": driver_version(),
        "product_error": error,
        "gpus": [],
    }
    if setting.on_gpu:
        names = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
        figures["gpus"] = [f"{p.name} ({p.total_memory / 2**30:.0f} GiB, {p.major}.{p.minor})" for p in names]
        figures["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
        figures["bfloat16"] = torch.cuda.is_bf16_supported(including_emulation=False)
    kind = "; ".join(figures["gpus"]) or "CPU"
    holds = error < 4e-3 and figures.get("bfloat16", True)  # half a unit in the last place is 2e-3
    return passed(holds, f"{kind}; torch {torch.__version__}, bfloat16 product off by {error:.1e}", figures)
