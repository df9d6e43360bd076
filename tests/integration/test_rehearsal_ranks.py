"""The rehearsal's peak of memory against the real trainer's, over gloo ranks; all cases: `tools/bench rehearse`."""

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

FILE = Path(__file__).parents[2] / "tools" / "benchmarks" / "rehearse.py"
NAMES = ("rl, gradients in shards", "rl, compile", "sft, LoRA, ac", "rl, cp 2 x tp 2")


@pytest.mark.exhaustive
def test_the_rehearsal_predicts_what_the_trainer_takes(tmp_path: Path) -> None:
    spec = importlib.util.spec_from_file_location("benchmark_rehearse", FILE)
    assert spec is not None and spec.loader is not None
    benchmark: Any = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = benchmark
    spec.loader.exec_module(benchmark)
    rows = benchmark.compare([case for case in benchmark.CASES if case["name"] in NAMES], tmp_path)
    assert len(rows) == len(NAMES)
    for row in rows:
        assert row["predicted"] == pytest.approx(row["measured"], rel=0.1), row
