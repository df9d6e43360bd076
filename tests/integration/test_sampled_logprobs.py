"""With a real vLLM server: the trainer's log-probabilities are of the distribution that the engine samples from."""

import importlib.util
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.exhaustive]
TOOL = Path(__file__).resolve().parents[2] / "tools" / "benchmarks" / "sampling.py"
SAMPLINGS = (
    {"temperature": 1.0},
    {"temperature": 0.7},
    {"temperature": 1.0, "top_p": 0.95},
    {"temperature": 0.7, "top_p": 0.9, "top_k": 20, "min_p": 0.02},
)


def test_in_bfloat16_every_ratio_is_1_but_for_rounding(tmp_path: Path) -> None:
    spec = importlib.util.spec_from_file_location("benchmark_sampling", TOOL)
    assert spec is not None and spec.loader is not None
    module = sys.modules["benchmark_sampling"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    figures = module.measure(tmp_path, "bfloat16", SAMPLINGS, num_prompts=32, num_tokens=32)
    for sampling, row in zip(SAMPLINGS, figures, strict=True):
        print(sampling, row)
        deviation = 4 * 1.25 * row["error"] / row["tokens"] ** 0.5
        assert row["tokens"] == 1024 and row["error"] < 0.2
        assert abs(row["bias"]) < deviation + row["error"] ** 2, sampling  # a difference's mean has its variance
        assert row["ratio"] == pytest.approx(1, abs=deviation + 1e-3), sampling
    assert figures[2]["untruncated"] < 0.97 and figures[3]["untruncated"] < 0.95
