"""A benchmark's rows: from its file, from an installed package, or, where a hub can be reached, fetched once."""

import gzip
import importlib.util
import json
import os
import re
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from prime_hpc.envs.benchmarks.registry import BENCHMARKS, Benchmark, fetch_command, file_of
from prime_hpc.envs.errors import EnvError
from prime_hpc.store.model.config import is_on

Row = dict[str, Any]


def read_rows(name: str, data: str | None = None) -> list[Row]:
    """All rows of a benchmark.
    Raises EnvError: its data is not there or cannot be read; names the file and the command that fetches it."""
    benchmark, path = BENCHMARKS[name], file_of(name, data)
    if not path.is_file() and data is None and benchmark.source.startswith("package:"):
        path = _file_of_package(benchmark) or path
    reason = ""
    if not path.is_file() and data is None and _hub_is_wanted(benchmark):
        from prime_hpc.envs.benchmarks.fetch import fetch

        try:
            fetch(name, path.parent)
        except EnvError as error:
            reason = f"; it was tried here: {error}"
    if not path.is_file():
        raise EnvError(
            f"benchmark {name!r}: its data is not there: {path} is no file. Fetch it on a machine with a network: "
            f"`{fetch_command(name, data)}`"
            + (f" ({benchmark.note})" if benchmark.note else "")
            + f", or state another file or folder in `args.data`{reason}"
        )
    return list(_lines(path))


def _hub_is_wanted(benchmark: Benchmark) -> bool:
    """Return whether the data may be fetched by the run itself."""
    return not is_on(os.environ, "HF_HUB_OFFLINE") and not benchmark.source.startswith("package:")


def _file_of_package(benchmark: Benchmark) -> Path | None:
    spec = importlib.util.find_spec(benchmark.source.removeprefix("package:"))
    if spec is None or spec.origin is None:
        return None
    return Path(spec.origin).parent / "data" / "HumanEval.jsonl.gz"


def _lines(path: Path) -> Iterator[Row]:
    """Rows of a JSONL file, compressed or not. Raises EnvError: a line is no JSON object; names it."""
    number = 1
    with path.open("rb") as raw, gzip.open(raw) if path.suffix == ".gz" else raw as file:
        try:
            for line in file:
                if line.strip():
                    row = json.loads(line)
                    if not isinstance(row, dict):
                        raise ValueError(f"a {type(row).__name__}, not an object")
                    yield row
                number += 1
        except (ValueError, OSError, EOFError, zlib.error) as error:
            raise EnvError(f"{path}, line {number}: {error}: fetch it again") from error


def question_of(benchmark: Benchmark, row: Row) -> str:
    """Return the question of a row. Raises EnvError: it has none; names the fields that it has."""
    return str(_field(benchmark, row, benchmark.question))


def answer_of(benchmark: Benchmark, row: Row) -> str:
    """Return the answer of a row: of worked solutions the last box, or what follows `####`; no commas in whole numbers.
    Raises EnvError: it has none; names the fields that it has."""
    text = str(_field(benchmark, row, benchmark.answer))
    if benchmark.boxed:
        answer = last_box(text)
        if not answer:
            raise EnvError(
                f"benchmark {benchmark.name!r}: {benchmark.answer!r} of a row has no \\boxed{{}}: {text[-80:]!r}"
            )
        return answer
    answer = text.rpartition("####")[2].strip()
    return re.sub(r"(?<=\d),(?=\d)", "", answer) if benchmark.integer else answer


def last_box(text: str) -> str:
    r"""Return what the last `\boxed{}` of a solution holds, braces balanced (`\boxed 7`: the word); else nothing."""
    at = max(text.rfind(r"\boxed"), text.rfind(r"\fbox"))
    rest = text[at:].partition("boxed" if text.startswith(r"\boxed", at) else "fbox")[2].lstrip() if at >= 0 else ""
    if not rest.startswith("{"):
        return re.split(r"[\s$]", rest, maxsplit=1)[0]
    depth = 0
    for i, char in enumerate(rest):
        depth += (char == "{") - (char == "}")
        if not depth:
            return rest[1:i].strip()
    return ""


def _field(benchmark: Benchmark, row: Row, field: str) -> Any:
    first, _, inner = field.partition(".")
    if first not in row:
        raise EnvError(f"benchmark {benchmark.name!r}: a row has no {first!r}, but {', '.join(row)}")
    if not inner:
        return row[first]
    try:
        return json.loads(row[first])[inner] if isinstance(row[first], str) else row[first][inner]
    except (ValueError, KeyError, TypeError) as error:
        raise EnvError(
            f"benchmark {benchmark.name!r}: {first!r} of a row holds no {inner!r}: {row[first]!r:.80}"
        ) from error


def load_example_dataset(name: str = "gsm8k", split: str | None = None, n: int | None = None, seed: int = 0) -> Any:
    """Return the older verifiers interface's data sets by name, as `datasets.Dataset` with `question` and `answer`.
    Raises EnvError: of no benchmark that is known here, or its data is not there."""
    from datasets import Dataset

    known = {"gpqa_diamond": "gpqa"}.get(name, name)
    if known == "gsm8k" and split == "train":
        known = "gsm8k-train"
    benchmark = BENCHMARKS.get(known)
    if benchmark is None or benchmark.kind != "math":
        have = ", ".join(key for key, item in BENCHMARKS.items() if item.kind == "math")
        raise EnvError(f"load_example_dataset({name!r}) is not known here; known: {have}")
    rows = [{"question": question_of(benchmark, row), "answer": answer_of(benchmark, row)} for row in read_rows(known)]
    dataset = Dataset.from_list(rows)
    return dataset.shuffle(seed=seed).select(range(min(n, len(rows)))) if n is not None and n > 0 else dataset
