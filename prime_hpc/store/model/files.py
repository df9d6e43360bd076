"""A Hugging Face model directory as its files say it, without torch: names, types and shapes of the stored tensors,
whether they are quantised, and whether they are what config.json describes.

Reads config.json and the headers of the safetensors alone. Used on login nodes (`launch`) and by the trainer before it
loads anything.
"""

import json
import os
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
CHAT_TEMPLATE = "chat_template.jinja"
"""Goes before what the tokenizer's own config says, as Hugging Face reads a model."""
_MAX_HEADER = 100_000_000  # the format's own limit
_LFS = b"version https://git-lfs"
_QUANTISED_CONFIG = ("quantization_config", "compression_config")
_QUANTISED_NAMES = (
    ".weight_scale_inv",
    ".weight_scale",
    ".input_scale",
    ".qweight",
    ".qzeros",
    ".g_idx",
    ".weight_packed",
    ".weight_scales",
    ".weight_zero_point",
    ".absmax",
    ".SCB",
    "_proj_blocks",
)
"""Ends of names: scales, packed values, indices of FP8, GPTQ, AWQ, compressed-tensors, bitsandbytes, MXFP4."""
_OTHER_WEIGHTS = re.compile(r"(pytorch_model|model|consolidated).*\.(bin|pt|pth)|.*\.gguf")
_FLOATS = {"F64", "F32", "F16", "BF16"}
_TOKEN_TABLES = (
    "embed_tokens.weight",
    "wte.weight",
    "word_embeddings.weight",
    "embed_in.weight",
    "tok_embeddings.weight",
)
SCORE = "score.weight"
"""Name of a reward model's head."""
_LM_HEADS = ("lm_head.", "embed_out.", "output_projection.")
"""Beginnings of the names of a language model's head: its weight, of some families a bias."""
_WITHIN = re.compile(r"(model\.language_model|language_model\.model)\.")
"""Beginnings of the names of a language model's tensors within a model that sees."""
_HEAD = re.compile(r"(^|\.)(lm_head|embed_out|head|output|output_projection)\.")
"""Of an output head, in the families whose table of tokens is called `embed_tokens`."""


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a safetensors file."""

    file: Path
    dtype: str
    """As the format writes it: F32, BF16, I64, F8_E4M3, ..."""
    shape: tuple[int, ...]
    name: str | None = None
    """In the file, where it is known by another."""


def _weight_map(folder: Path) -> dict[str, Path] | None:
    """Name -> file as a directory's index has it; None without an index."""
    index = folder / INDEX
    if not index.is_file():
        return None
    try:
        return {name: folder / file for name, file in json.loads(index.read_text("utf-8"))["weight_map"].items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{index} is no index of safetensors files ({type(error).__name__}: {error})") from error


def read_header(path: Path) -> dict[str, StoredTensor]:
    """Return the tensors of one safetensors file.
    Raises ValueError: it cannot be read, is no safetensors file, or ends before its tensors do."""
    try:
        with path.open("rb") as file:
            start = file.read(8)
            if start == _LFS[:8] and start + file.read(len(_LFS) - 8) == _LFS:
                raise ValueError("a pointer of Git LFS, not the file: git lfs pull fetches it")
            (size,) = struct.unpack("<Q", start)
            if size > _MAX_HEADER:
                raise ValueError(f"a header of {size} bytes")
            header = json.loads(file.read(size))
            there = os.fstat(file.fileno()).st_size
        entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
        needed = 8 + size + max((int(entry["data_offsets"][1]) for entry in entries.values()), default=0)
        if there < needed:
            raise ValueError(f"it ends after {there} of {needed} bytes; did its download break off? Fetch it again")
        return {name: StoredTensor(path, str(e["dtype"]), tuple(map(int, e["shape"]))) for name, e in entries.items()}
    except (OSError, ValueError, LookupError, TypeError, AttributeError, struct.error) as error:
        said = str(error) if type(error) is ValueError else f"{type(error).__name__}: {error}"
        raise ValueError(f"{path} is no readable safetensors file ({said})") from error


def weight_files(folder: Path) -> list[Path]:
    """Return the safetensors files that make up a model, in the order of their names; [] where it has none.

    Others may lie beside them: some repositories hold the weights a second time under other names (`consolidated*`).
    Raises ValueError: its index is none.
    """
    weight_map = _weight_map(folder)
    if weight_map is not None:
        return sorted(set(weight_map.values()))
    return [folder / SINGLE] if (folder / SINGLE).is_file() else []


def stored_tensors(folder: Path) -> dict[str, StoredTensor]:
    """Name -> tensor of all safetensors of a model directory; {} where it has none.
    Raises ValueError: a file is missing or cannot be read, or does not hold what the index says."""
    weight_map = _weight_map(folder)
    if weight_map is None:
        return read_header(folder / SINGLE) if (folder / SINGLE).is_file() else {}
    headers = {path: read_header(path) for path in sorted(set(weight_map.values()))}
    absent = next((name for name, path in weight_map.items() if name not in headers[path]), None)
    if absent is not None:
        raise ValueError(f"{folder / INDEX} says that {weight_map[absent].name} holds {absent}, which it does not")
    return {name: headers[path][name] for name, path in weight_map.items()}


def read_config(folder: Path) -> dict[str, Any]:
    """config.json, {} where there is none that is readable."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return config if isinstance(config, dict) else {}


def chat_template(folder: Path) -> bytes:
    """Return the chat template of a model directory, a file of its own or what the tokenizer's config says; empty where
    none can be read."""
    try:
        if (folder / CHAT_TEMPLATE).is_file():
            return (folder / CHAT_TEMPLATE).read_bytes()
        config = json.loads((folder / "tokenizer_config.json").read_bytes())
    except (OSError, ValueError):
        return b""
    stated = config.get("chat_template") if isinstance(config, dict) else None
    return json.dumps(stated).encode() if stated else b""


def quantised(folder: Path, tensors: Mapping[str, StoredTensor]) -> str | None:
    """Why a model is a quantised one, which cannot be trained: a sentence with the file and what to do; else None.
    `tensors`: from `stored_tensors`; {} judges config.json alone."""
    where = _quantised_config(folder) or _quantised_tensor(tensors)
    if where is None:
        return None
    return (
        f"{where}: a quantised checkpoint cannot be trained (its scales are no parameters). Name the bfloat16 "
        "original, or write a dequantised copy with transformers first"
    )


def _quantised_config(folder: Path) -> str | None:
    config = read_config(folder)
    for tree in (config, config.get("text_config")):
        for key in _QUANTISED_CONFIG:
            if isinstance(tree, dict) and tree.get(key):
                method = tree[key].get("quant_method") if isinstance(tree[key], dict) else None
                return f"{folder / 'config.json'} has {key}" + (f" (quant_method {method})" if method else "")
    return None


def _quantised_tensor(tensors: Mapping[str, StoredTensor]) -> str | None:
    for name, tensor in tensors.items():
        if name.endswith(_QUANTISED_NAMES):
            return f"{tensor.file} holds {name}"
        small_float = tensor.dtype.startswith("F") and tensor.dtype not in _FLOATS
        packed = tensor.dtype in ("I8", "U8", "I16", "U16", "I32", "U32") and len(tensor.shape) > 1
        if small_float or (packed and not name.endswith("bias")):  # old GPTs keep a mask of bytes as `attn.bias`
            return f"{tensor.file} holds {name} as {tensor.dtype}"
    return None


def other_format(folder: Path) -> str | None:
    """Say where a model's directory holds weights, but none as safetensors, which alone are read here; else None."""
    others = sorted(path.name for path in folder.iterdir() if _OTHER_WEIGHTS.fullmatch(path.name))
    if not others or weight_files(folder):
        return None
    return (
        f"{folder} holds {others[0]} and no safetensors, which alone the trainer reads; load it with transformers, "
        "whose `save_pretrained` writes them"
    )


def other_vocabulary(folder: Path, tensors: Mapping[str, StoredTensor]) -> str | None:
    """Say where config.json names another number of tokens than the stored embedding has rows; else None."""
    config = read_config(folder)
    text = config.get("text_config")
    wanted = (text if isinstance(text, dict) and "vocab_size" in text else config).get("vocab_size")
    for name, tensor in tensors.items():
        is_table = name.endswith(_TOKEN_TABLES) and "visual" not in name and len(tensor.shape) == 2
        if is_table and isinstance(wanted, int) and tensor.shape[0] != wanted:
            return (
                f"{folder / 'config.json'} says vocab_size = {wanted}, but {name} in {tensor.file.name} has "
                f"{tensor.shape[0]} rows: config and weights are of different models; set vocab_size to "
                f"{tensor.shape[0]} if only the config is wrong, or fetch the model again"
            )
    return None


def is_classifier(config: Mapping[str, Any]) -> bool:
    """Return whether config.json is that of a model that scores what it reads, such as a reward model."""
    return any(str(name).endswith("ForSequenceClassification") for name in config.get("architectures") or ())


def headless(tensors: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """Return the tensors of a model's text part without the language model's head, and with that of a reward model, by
    the names that they have where it is alone: what a reward model begins with."""
    within = {_WITHIN.sub("model.", n): replace(t, name=n) for n, t in tensors.items() if _WITHIN.match(n)}
    if within and SCORE in tensors:
        within[SCORE] = tensors[SCORE]
    return {name: tensor for name, tensor in (within or tensors).items() if not name.startswith(_LM_HEADS)}


def without_head(folder: Path, tensors: Mapping[str, StoredTensor]) -> str | None:
    """Say where config.json states an output head of its own, and the weights, tied ones, hold none; else None. vLLM
    serves such a model, from a head of whatever was in memory."""
    config = read_config(folder)
    table = next((name for name in tensors if name.endswith(_TOKEN_TABLES[0])), None)
    stated = config.get("tie_word_embeddings") is False and "text_config" not in config  # two may say two things
    stated = stated and not is_classifier(config)
    if table is None or not stated or any(_HEAD.search(name) for name in tensors):
        return None
    return (
        f"{folder / 'config.json'} says tie_word_embeddings = false, and no file holds an output head beside {table}: "
        "set it to true if the model was trained so, or fetch the model again"
    )
