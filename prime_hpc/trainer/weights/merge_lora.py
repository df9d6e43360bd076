"""The whole model of an adapter version: base weights with W + scale B A in the adapted modules, on the CPU.

    python -m prime_hpc.trainer.weights.merge_lora ADAPTER BASE OUT [--dtype bfloat16]

Started by `prime-hpc export RUN --merged STEP`. Reads and writes safetensors file by file: the host needs memory for
the largest file of the base model. The result loads in Hugging Face and vLLM like any model.

Exit codes: 0 written, 1 the disk is full, 2 the adapter and the base do not fit, or OUT exists.
"""

import argparse
import json
import math
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from prime_hpc.store.errors import StoreError
from prime_hpc.store.io import files as store_files
from prime_hpc.store.io.disk import disk_errors, is_full
from prime_hpc.store.model.files import CHAT_TEMPLATE, INDEX, weight_files
from prime_hpc.trainer.lora.slots import PREFIX
from prime_hpc.trainer.weights.lora_files import CONFIG_FILE, read_adapter
from prime_hpc.trainer.weights.safetensors_layout import write_tensors

_NOT_COPIED = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx")
_MORE = ("rank_pattern", "alpha_pattern", "use_dora", "fan_in_fan_out")
"""Of adapter_config.json: where one is set, W + scale B A is not what the adapter means."""
_OWN = {"manifest.json", ".gitattributes", "README.md"}


def adapter_scale(config: Mapping[str, Any]) -> float:
    """Factor of B A, from adapter_config.json."""
    rank, alpha = int(config["r"]), float(config["lora_alpha"])
    return alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)


def merged_weight(base: torch.Tensor, a: torch.Tensor, b: torch.Tensor, scale: float) -> torch.Tensor:
    """W + scale B A in float32. Raises ValueError: the shapes do not fit."""
    if base.shape != (b.shape[0], a.shape[1]):
        raise ValueError(f"the base is {list(base.shape)}, the adapter {[b.shape[0], a.shape[1]]}")
    return base.float() + scale * (b.float() @ a.float())


def merge(adapter: Path, base: Path, output: Path, dtype: torch.dtype | None = None) -> int:
    """Write the merged model into `output`, which appears whole or not at all.

    Args:
        adapter: PEFT directory, such as a weight version of a run with `model.lora`.
        base: directory of the base model, in safetensors.
        output: must not exist.
        dtype: of the floating-point weights; None: the base model's.

    Returns:
        the number of modules that were merged.

    Raises:
        ValueError: no adapter, or one of more than A and B; no safetensors or not all of them; modules that the base
            does not have.
        StoreError: `output` exists, disk full.
    """
    tensors = read_adapter(adapter)
    config = json.loads((adapter / CONFIG_FILE).read_text(encoding="utf-8"))
    scale = adapter_scale(config)
    modules = {n.removeprefix(PREFIX).removesuffix(".lora_A.weight") for n in tensors if n.endswith(".lora_A.weight")}
    pairs = {f"{PREFIX}{module}.lora_{kind}.weight" for module in modules for kind in "AB"}
    if more := [*sorted(tensors.keys() ^ pairs), *(key for key in _MORE if config.get(key))]:
        raise ValueError(f"{adapter} is not A and B of one scale alone ({more[0]}): peft's merge_and_unload merges it")
    sources = weight_files(base)
    if not sources:
        raise ValueError(f"{base} holds no safetensors to merge with")
    if absent := [source.name for source in sources if not source.is_file()]:
        raise ValueError(f"{base} lacks {absent[0]}, which its index names")
    if output.exists():
        raise StoreError(f"{output} exists: name another directory")
    stage = output.with_name(f".tmp-{output.name}-{store_files.unique_suffix()}")
    store_files.make_dir(stage)
    left = set(modules)
    try:
        with disk_errors(output):
            for source in sources:
                whole = {}
                with safe_open(source, framework="pt") as handle:
                    for name in handle.keys():  # noqa: SIM118 - a safetensors handle is no mapping
                        tensor, module = handle.get_tensor(name), name.removesuffix(".weight")
                        wanted = dtype if dtype and tensor.is_floating_point() else tensor.dtype
                        if module in modules:
                            key = f"{PREFIX}{module}.lora_"
                            tensor = merged_weight(tensor, tensors[f"{key}A.weight"], tensors[f"{key}B.weight"], scale)
                            left.discard(module)
                        whole[name] = tensor.to(wanted)  # rounded once
                write_tensors(stage / source.name, whole)
            if left:
                raise ValueError(f"{base} is not this adapter's base model: it has no {sorted(left)[0]}.weight")
            _copy_rest(base, stage, dtype)
            if (adapter / CHAT_TEMPLATE).is_file():  # what it was trained with, which need not be the base model's
                shutil.copyfile(adapter / CHAT_TEMPLATE, stage / CHAT_TEMPLATE)
            store_files.rename(stage, output)
    except BaseException:
        store_files.clear_away(stage)
        raise
    return len(modules)


def _copy_rest(base: Path, stage: Path, dtype: torch.dtype | None) -> None:
    """config.json, tokenizer, index, remote code; no index of weights in another form, which are not there any more."""
    for path in sorted(base.iterdir()):
        is_left_out = path.suffix in _NOT_COPIED or path.name in _OWN
        is_other_index = path.name.endswith(".index.json") and path.name != INDEX
        if path.is_file() and not is_left_out and not is_other_index:
            shutil.copyfile(path, stage / path.name)
    if dtype is not None:
        config = json.loads((stage / "config.json").read_text(encoding="utf-8"))
        config.pop("torch_dtype", None)
        config["dtype"] = str(dtype).removeprefix("torch.")
        (stage / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def main(arguments: list[str] | None = None) -> int:
    """Merge; prints what was written."""
    from prime_hpc.trainer.model.load_policy import resolve_source

    parser = argparse.ArgumentParser(
        prog="python -m prime_hpc.trainer.weights.merge_lora", description=__doc__.split("\n")[0]
    )
    parser.add_argument("adapter", type=Path, help="directory of an adapter")
    parser.add_argument("base", help="directory or hub name of the base model")
    parser.add_argument("output", type=Path, help="directory to write")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), help="default: the base model's")
    options = parser.parse_args(arguments)
    dtype = getattr(torch, options.dtype) if options.dtype else None
    try:
        count = merge(options.adapter, resolve_source(options.base), options.output, dtype)
    except (ValueError, StoreError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1 if is_full(error) else 2
    print(f"{options.output}: {count} modules merged into {options.base}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
