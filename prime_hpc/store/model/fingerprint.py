"""Fingerprint of a model, to tell its checkpoints from another model's: its shape and its tokenizer.

The trainer writes `model_identity` into each checkpoint's manifest; `conflicts` compares it with the model that a run
is about to train, in the supervisor before anything starts and in the trainer before anything is loaded.
"""

import contextlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import xxhash

from prime_hpc.store.io.files import list_dir
from prime_hpc.store.model.files import read_config, weight_files

_SHAPE = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "tie_word_embeddings",
    "num_experts",
    "num_local_experts",
)
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "merges.txt")
"""Files that decide which text a token id stands for; the first one found of a kind is enough."""
_NUM_SAMPLES = 17
_SAMPLE_BYTES = 1 << 16


def model_identity(folder: Path) -> dict[str, Any]:
    """Architecture, shape and tokenizer sum of a Hugging Face model directory; {} where it has no readable config."""
    config = read_config(folder)
    if not config:
        return {}
    text = config.get("text_config") or config
    facts: dict[str, Any] = {"architecture": (config.get("architectures") or [config.get("model_type")])[0]}
    facts |= {key: text[key] for key in _SHAPE if text.get(key) is not None}
    tokenizer = _tokenizer_sum(folder)
    return facts | ({"tokenizer": tokenizer} if tokenizer else {})


def weights_fingerprint(folder: Path) -> str:
    """Sum over samples of a model's safetensors: sizes, headers and `_NUM_SAMPLES` places of each file.

    Tells two trainings of one architecture apart without reading gigabytes: a checkpoint of an adapter is worthless on
    another base model. Empty where there are no safetensors.
    """
    digest = xxhash.xxh3_64()
    files: list[Path] = []
    with contextlib.suppress(ValueError):  # an index that is none: who loads the model says so
        files = [path for path in weight_files(folder) if path.is_file()]
    if not files:  # of an adapter
        files = [folder / name for name in sorted(list_dir(folder)) if name.endswith(".safetensors")]
    for path in files:
        size = path.stat().st_size
        digest.update(f"{path.name} {size}".encode())
        with path.open("rb") as file:
            for i in range(_NUM_SAMPLES):
                file.seek(max(0, size - _SAMPLE_BYTES) * i // (_NUM_SAMPLES - 1))
                digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest() if files else ""


def _tokenizer_sum(folder: Path) -> str | None:
    """Sum of what maps text to ids. Chat templates and special-token texts may change between attempts."""
    whole = folder / "tokenizer.json"
    if whole.exists():
        try:
            content = json.loads(whole.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        kept = {key: content.get(key) for key in ("model", "added_tokens", "normalizer", "pre_tokenizer")}
        return xxhash.xxh3_64_hexdigest(json.dumps(kept, sort_keys=True).encode())
    parts = [folder / name for name in _TOKENIZER_FILES if (folder / name).exists()]
    if not parts:
        return None
    digest = xxhash.xxh3_64()
    for part in parts:
        digest.update(part.read_bytes())
    return digest.hexdigest()


def conflicts(saved: Mapping[str, Any], here: Mapping[str, Any]) -> list[str]:
    """In which respects two identities contradict each other; a fact that one of them lacks is no contradiction."""
    found = []
    for key in saved.keys() & here.keys():
        if saved[key] == here[key]:
            continue
        if key == "tokenizer":
            found.append("another tokenizer (its token ids mean other text)")
        else:
            found.append(f"{key} was {saved[key]}, is {here[key]}")
    return sorted(found)


def adapter_conflicts(saved: Mapping[str, Any] | None, here: Mapping[str, Any] | None) -> list[str]:
    """In which respects an adapter that was saved is not the one that is trained; None: the whole model is."""
    if (saved is None) != (here is None):
        return [
            "it holds a whole model, this run trains an adapter (model.lora)"
            if saved is None
            else "it holds an adapter, this run trains the whole model: state model.lora as then"
        ]
    then, now = saved or {}, here or {}
    return [f"model.lora: {key} was {then.get(key)}, is {now[key]}" for key in now if then.get(key) != now[key]]


def critic_conflicts(saved: Mapping[str, Any], has_critic: bool) -> list[str]:
    """Say that a checkpoint, by its manifest's `meta`, holds a critic and the run has none, or the reverse."""
    if bool(saved.get("critic")) == has_critic:
        return []
    then, now = ("no critic", "has one") if has_critic else ("a critic", "has none")
    return [f"it holds {then}, and this run {now}: state trainer.critic as then, or begin with its weights"]


def head_conflicts(saved: Mapping[str, Any], scores: bool) -> list[str]:
    """Say that a checkpoint, by its manifest's `meta`, is a reward model's and the run trains none, or the reverse."""
    if bool(saved.get("scores")) == scores:
        return []
    kinds = "a reward model (sft.preference.type = bradley_terry)", "a language model"
    then, now = reversed(kinds) if scores else kinds
    return [f"it is of {then}, and this run trains {now}: state sft.preference as then, or begin another run"]
