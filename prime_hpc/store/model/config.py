"""Models by their names, without downloading anything: in their directories, or in the hub's cache."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from prime_hpc.config import Experiment
from prime_hpc.config.families import Rows, family_of

SAVE_TOKENIZER = "copy the files of its base model's tokenizer there (tokenizer.json, tokenizer_config.json, templates)"
"""The remedy for a directory of weights alone, which `save_pretrained` of a model leaves."""
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "tekken.json")


def is_local_path(name: str) -> bool:
    """Return whether a model name is meant as a directory rather than as `owner/model` of a hub."""
    return Path(name).exists() or name.startswith((".", "/", "~")) or name.count("/") > 1


def is_on(environ: Mapping[str, Any], name: str) -> bool:
    """Return whether a switch of the hub's libraries (HF_HUB_OFFLINE) is on, as they read it."""
    return str(environ.get(name, "")).lower() in ("1", "on", "yes", "true")


def hub_home(environ: Mapping[str, str]) -> Path:
    """Return the directory of all that the hub's clients keep (HF_HOME)."""
    default = Path(environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface"
    return Path(environ.get("HF_HOME") or default).expanduser()


def hub_cache(environ: Mapping[str, str]) -> Path:
    """Return the directory of downloaded models (HF_HUB_CACHE)."""
    stated = environ.get("HF_HUB_CACHE") or environ.get("HUGGINGFACE_HUB_CACHE")
    return Path(stated).expanduser() if stated else hub_home(environ) / "hub"


def hub_folder(name: str, cache: Path) -> Path:
    """Return where the hub's cache keeps a model: its versions below `snapshots`, files of all of them in `blobs`."""
    return cache / f"models--{name.replace('/', '--')}"


def hub_snapshot(name: str, cache: Path) -> Path | None:
    """Return the directory of the version that a model's name loads, that of its main branch; None: it is not there."""
    folder = hub_folder(name, cache)
    try:
        commit = (folder / "refs" / "main").read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return None
    snapshot = folder / "snapshots" / commit
    return snapshot if snapshot.is_dir() else None


def find_config(name: str, environ: Mapping[str, str] = os.environ) -> Path | None:
    """Return the model's config.json: in its directory, else in the hub's cache; None where neither is there."""
    local = Path(name).expanduser() / "config.json"
    if local.is_file():
        return local
    if is_local_path(name):
        return None
    cache = hub_cache(environ)
    main = hub_snapshot(name, cache)
    if main is not None and (main / "config.json").is_file():
        return main / "config.json"
    found = sorted((hub_folder(name, cache) / "snapshots").glob("*/config.json"))  # of pinned versions alone
    return max(found, key=lambda path: path.stat().st_mtime) if found else None


def has_tokenizer(folder: Path) -> bool:
    """Return whether a model's directory holds the vocabulary of a tokenizer, in one of its usual files."""
    names = {path.name for path in folder.iterdir() if path.is_file()}  # a broken link is no file
    return bool(names & {*_TOKENIZERS}) or any(name.endswith(".tiktoken") for name in names)


def read_config(name: str, environ: Mapping[str, str] = os.environ) -> dict[str, Any] | None:
    """Return the fields of a model's config.json; None where it cannot be found or read."""
    path = find_config(name, environ)
    if path is None:
        return None
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return config if isinstance(config, dict) else None


def rows_of(experiment: Experiment, environ: Mapping[str, str] = os.environ) -> Rows:
    """How the samples of a run are laid out: as `trainer.rows` says, else by the model's family; `packed` where its
    config is not here (the trainer, which loads the model, lays them out anew then)."""
    if experiment.trainer.rows != "auto":
        return experiment.trainer.rows
    config = read_config(experiment.model.name, environ)
    return "packed" if config is None else family_of(config).rows
