"""The process that fetches, in the environment of the job's roles: one need from standard input, one answer.

    python -m prime_hpc.launch.fetch.download < NEED.json

The hub's clients read where their caches are when they are imported: hence a process. Answers one JSON object on
standard output: {"problem": ""} or what went wrong. A download that was broken off goes on where it was.
"""

import json
import os
import shutil
import sys
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from prime_hpc.store.io.disk import size_text

HUB_TIMEOUT_S = 30.0
LOADED = ("*.safetensors", "*.json", "*.jinja", "*.model", "*.txt", "*.tiktoken", "*.py")
"""Files of a model that trainer and engines read: weights, config, tokenizer, templates, code."""
NOT_LOADED = ("*/*", "consolidated*")
"""Of those: what lies in folders (other formats), and weights a second time."""
WEIGHTS = ("*.safetensors", "*.safetensors.index.json")
_SPARE_BYTES = 2**30


def is_loaded(name: str) -> bool:
    """Return whether a file of a model's repository is fetched."""
    return any(fnmatch(name, p) for p in LOADED) and not any(fnmatch(name, p) for p in NOT_LOADED)


def fetch_model(name: str, cache: Path, revision: str | None, *, only_tokenizer: bool = False) -> None:
    """Bring a model's files into the hub's cache, without its weights if `only_tokenizer`.
    `revision`: commit that is there already, of which what is missing is fetched; None: the newest.
    Raises OSError: the disk has no room for them; others as the hub's client raises them."""
    from huggingface_hub import HfApi, snapshot_download

    passed_over = (*NOT_LOADED, *(WEIGHTS if only_tokenizer else ()))
    info = HfApi().model_info(name, revision=revision, files_metadata=True, timeout=HUB_TIMEOUT_S)
    snapshot = cache / f"models--{name.replace('/', '--')}" / "snapshots" / str(info.sha)
    files = {file.rfilename: file.size or 0 for file in info.siblings or [] if is_loaded(file.rfilename)}
    wanted = {file: size for file, size in files.items() if not any(fnmatch(file, p) for p in passed_over)}
    missing = {file: size for file, size in wanted.items() if not (snapshot / file).exists()}
    if missing:
        cache.mkdir(parents=True, exist_ok=True)
        need, free = sum(missing.values()), shutil.disk_usage(cache).free
        print(f"{name}: {len(missing)} files, {size_text(need)}, into {cache}", file=sys.stderr, flush=True)
        if need + _SPARE_BYTES > free:
            raise OSError(f"{size_text(need)} are to come, and {cache} has {size_text(free)} free")
    snapshot_download(
        name, revision=revision, cache_dir=cache, allow_patterns=list(LOADED), ignore_patterns=list(passed_over)
    )


def fetch_dataset(name: str, subset: str | None, split: str | None) -> None:
    """Have `datasets` fetch and prepare a data set in its cache. Raises what it raises."""
    import datasets

    datasets.load_dataset(name, subset, split=split)


def fetch(order: dict[str, Any]) -> None:
    """Fetch one need: the fields of `Need`, with `cache` and `revision` of a model, `to` of a benchmark."""
    if order["kind"] == "model":
        own = order["only_tokenizer"]
        fetch_model(order["name"], Path(order["cache"]), order["revision"], only_tokenizer=own)
    elif order["kind"] == "benchmark":
        from prime_hpc.envs.benchmarks.fetch import fetch as fetch_benchmark

        fetch_benchmark(order["name"], Path(order["to"]))
    else:
        fetch_dataset(order["name"], order["subset"], order["split"])


def main() -> int:
    """Answer one order."""
    answer, out = {"problem": ""}, os.dup(1)
    os.dup2(2, 1)  # what libraries print goes where progress goes
    try:
        fetch(json.load(sys.stdin))
    except ModuleNotFoundError as error:
        extra = " (pip install 'prime-hpc[data]')" if error.name == "datasets" else ""
        answer = {"problem": f"needs the Python module {error.name!r}{extra}"}
    except Exception as error:  # noqa: BLE001 - the hub's clients raise dozens of unrelated classes
        answer = {"problem": f"{type(error).__name__}: {' '.join(str(error).split())[:400]}"}
    with os.fdopen(out, "w", encoding="utf-8") as file:
        json.dump(answer, file)
    return 1 if answer["problem"] else 0


if __name__ == "__main__":
    raise SystemExit(main())
