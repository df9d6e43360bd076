"""Make a starter directory: `model/` (Hugging Face), `sft.jsonl` (warm-up data), `starter.json` (what it is), and of
reverse-text `pairs.jsonl` and `pairs_held.jsonl` (preferences; the latter of the texts that evaluations use).
"""

import json
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from prime_hpc.starter.data import TASKS, demonstrations, preferences, write_demonstrations
from prime_hpc.starter.model import write_tiny_qwen3
from prime_hpc.starter.tokenizer import find_phrases

NAMES = ("qwen3-tiny", "qwen3-vl-tiny", "smollm2-135m")
RECORD = "starter.json"
PARTS = ("model/config.json", "model/model.safetensors", "model/tokenizer.json", "sft.jsonl")
"""Files without which a starter is not there."""
RECIPE = 4
"""Raised whenever the same arguments would give other bytes, so that what an older checkout made is made again."""
NUM_PAIRS, NUM_HELD_PAIRS = 2048, 256
PHRASE_ROWS = 500
"""Demonstrations that are looked through for phrases: plenty for what a tenth of them repeat."""


@dataclass(frozen=True)
class Starter:
    """Sources of a starter directory."""

    name: str
    seed: int
    task: str = "reverse-text"
    recipe: int = RECIPE


def make_starter(directory: Path, *, name: str = "qwen3-tiny", seed: int = 0, task: str = "reverse-text") -> str:
    """Make the starter in `directory` unless the same one is there already; returns one line that says which.

    Args:
        directory: created with its parents; another starter in it is replaced, other files are left alone.
        seed: of the weights (qwen3-tiny, qwen3-vl-tiny) and of the demonstrations.
        task: what the demonstrations show, one of `data.TASKS`.

    Raises:
        ValueError: an unknown name or task, or a package that the named starter needs is missing.
    """
    if name not in NAMES:
        raise ValueError(f"unknown starter {name!r}; it is one of {', '.join(NAMES)}")
    if task not in TASKS:
        raise ValueError(f"unknown task {task!r}; it is one of {', '.join(TASKS)}")
    starter = Starter(name, seed, task)
    record = directory / RECORD
    if _read(record) == asdict(starter) and all((directory / part).exists() for part in PARTS):
        return f"{directory}: {name}, seed {seed}, {task}, is there already"
    directory.mkdir(parents=True, exist_ok=True)
    record.unlink(missing_ok=True)
    model = directory / "model"
    if model.exists():
        shutil.rmtree(model)
    rows = demonstrations(seed, task=task)
    if name == "qwen3-tiny":
        phrases = find_phrases(rows[:PHRASE_ROWS]) if "tools" in rows[0] else ()
        num_parameters = write_tiny_qwen3(model, seed, phrases)
    elif name == "qwen3-vl-tiny":
        from prime_hpc.starter.vision import write_tiny_qwen3_vl

        num_parameters = write_tiny_qwen3_vl(model, seed)
    else:
        from prime_hpc.starter.smollm2 import write_smollm2

        num_parameters = write_smollm2(model)
    write_demonstrations(directory / "sft.jsonl", rows)
    if task == "reverse-text":
        write_demonstrations(directory / "pairs.jsonl", list(preferences(seed, NUM_PAIRS, "train")))
        write_demonstrations(directory / "pairs_held.jsonl", list(preferences(seed, NUM_HELD_PAIRS, "eval")))
    record.write_text(json.dumps(asdict(starter), indent=2) + "\n", encoding="utf-8")
    model_size = f"{num_parameters / 1e6:.2f}M parameters"
    return f"{directory}: {name}, {model_size}; {len(rows)} demonstrations of {task}; seed {seed}"


def _read(record: Path) -> Any:
    """Return the record's content; None where there is none or it is no JSON (then the starter is made again)."""
    try:
        return json.loads(record.read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return None
