"""How many steps `sft.data.num_epochs` will come to, as far as can be told without a tokenizer: by the number of rows.

The trainer counts exactly, when it starts: rows that are too long or hold nothing to train make no sample.
"""

import importlib.util
import math
import sys
from functools import lru_cache
from pathlib import Path

from prime_hpc.config import Experiment
from prime_hpc.store.dataset.files import DataFiles, find_data, is_compressed

_BLOCK = 16 * 2**20
_MAX_BYTES = 2**30
"""Of JSON lines that are read through to count them."""


def with_expected_steps(experiment: Experiment) -> Experiment:
    """Return the experiment with the steps that are expected in the place of `max_steps`; more than any run has where
    nobody knows: no rule then takes a key to be longer than the run."""
    if experiment.num_steps is not None:
        return experiment
    return experiment.model_copy(update={"max_steps": expected_steps(experiment) or sys.maxsize})


def expected_steps(experiment: Experiment) -> int | None:
    """Return how many steps the run has at most; None: only the tokens will tell."""
    data, rows = experiment.sft.data, num_rows(experiment)
    if experiment.num_steps is not None or data.num_epochs is None:
        return experiment.max_steps
    if rows is None or data.batch_tokens is not None or data.split_turns or data.overlong == "split":
        return None
    return max(1, math.ceil(max(1, round(data.num_epochs * rows)) / data.batch_size))


def epochs_line(experiment: Experiment) -> str:
    """Say how far a run by epochs goes."""
    data, steps, rows = experiment.sft.data, expected_steps(experiment), num_rows(experiment)
    of = f"{data.num_epochs:g} epochs of {f'{rows:,}' if rows is not None else 'the'} rows"
    return f"at most {steps:,}: {of}; the trainer counts" if steps else f"{of}: the trainer counts their steps"


def num_rows(experiment: Experiment) -> int | None:
    """Return the rows of an epoch of the training data; None where that takes more than a look."""
    if experiment.sft.data.probabilities is not None:
        return None
    try:
        found = find_data(experiment.sft.data)
        looks = tuple((str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in found.files)
        return _num_rows(found.kind, looks)
    except (OSError, ValueError):  # said by the rules of data
        return None


@lru_cache(maxsize=8)
def _num_rows(kind: str, looks: tuple[tuple[str, int, int], ...]) -> int | None:
    found = DataFiles(kind, [Path(path) for path, *_ in looks])  # type: ignore[arg-type]
    if kind == "parquet" and importlib.util.find_spec("pyarrow") is not None:
        import pyarrow.parquet as pq

        return sum(pq.read_metadata(path).num_rows for path in found.files)
    if kind != "jsonl" or any(map(is_compressed, found.files)) or sum(size for _, size, _ in looks) > _MAX_BYTES:
        return None
    return sum(map(_num_lines, found.files))


def _num_lines(path: Path) -> int:
    """Count the lines that hold more than white space."""
    with path.open("rb", buffering=_BLOCK) as file:
        return sum(1 for line in file if not line.isspace())
