"""With a real vLLM server: the trainer's log-probabilities are of the distribution that the engine samples from."""

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from prime_hpc.trainer.ops.truncation import Truncation, apply_cut, find_cut

pytestmark = [pytest.mark.slow, pytest.mark.exhaustive]
SPECULATED: tuple[dict[str, Any], ...] = (
    {"temperature": 0.7},
    {"temperature": 1.3, "top_p": 0.9, "top_k": 50},
    {"temperature": 1.0},
)
TOOL = Path(__file__).resolve().parents[2] / "tools" / "benchmarks" / "sampling.py"
SAMPLINGS = (
    {"temperature": 1.0},
    {"temperature": 0.7},
    {"temperature": 1.0, "top_p": 0.95},
    {"temperature": 0.7, "top_p": 0.9, "top_k": 20, "min_p": 0.02},
)


def benchmark() -> Any:
    spec = importlib.util.spec_from_file_location("benchmark_sampling", TOOL)
    assert spec is not None and spec.loader is not None
    module = sys.modules["benchmark_sampling"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_speculation_changes_no_log_probability(tmp_path: Path) -> None:
    draft = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2, "prompt_lookup_min": 1}
    figures = benchmark().measure(
        tmp_path,
        "float32",
        SPECULATED,
        num_prompts=16,
        num_tokens=32,
        inference={"vllm": {"speculative_config": draft}},
        vocab_size=256,  # so that pairs of tokens come again, and are drafted
    )
    for sampling, row in zip(SPECULATED, figures, strict=True):
        print(sampling, row)
        assert row["tokens"] == 512 and row["max"] < 1e-3, sampling


def test_in_bfloat16_every_ratio_is_1_but_for_rounding(tmp_path: Path) -> None:
    figures = benchmark().measure(tmp_path, "bfloat16", SAMPLINGS, num_prompts=32, num_tokens=32)
    for sampling, row in zip(SAMPLINGS, figures, strict=True):
        print(sampling, row)
        deviation = 4 * 1.25 * row["error"] / row["tokens"] ** 0.5
        assert row["tokens"] == 1024 and row["error"] < 0.2
        assert abs(row["bias"]) < deviation + row["error"] ** 2, sampling  # a difference's mean has its variance
        assert row["ratio"] == pytest.approx(1, abs=deviation + 1e-3), sampling
    assert figures[2]["untruncated"] < 0.97 and figures[3]["untruncated"] < 0.95


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("scale", [2.0, 5.0])
def test_the_trainer_keeps_what_vllms_sampler_keeps(scale: float, temperature: float) -> None:
    """On logits that were rounded to bfloat16, many of which tie where the cut is."""
    from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p_pytorch

    torch.manual_seed(0)
    num, vocab = 100, 5000
    logits = (torch.randn(num, vocab) * scale).bfloat16().float() / temperature
    for top_p, top_k, min_p in ((0.95, 0, 0.0), (0.5, 0, 0.0), (1.0, 20, 0.0), (0.95, 20, 0.0), (0.9, 50, 0.02)):
        kept = logits.clone()
        likely = kept.softmax(-1)
        kept.masked_fill_(likely < likely.amax(-1, keepdim=True) * min_p, -torch.inf)
        k = torch.full((num,), top_k) if top_k else None
        kept = apply_top_k_top_p_pytorch(kept, k, torch.full((num,), top_p) if top_p < 1 else None, allow_cpu_sync=True)
        p, q = torch.full((num,), top_p), torch.full((num,), min_p)
        found = logits.clone()
        cut = find_cut(found, Truncation(p, torch.full((num,), top_k), q, top_k, top_k > 0), None)
        apply_cut(found, cut, logits.argmax(-1), None)
        torch.testing.assert_close(found.logsumexp(-1), kept.logsumexp(-1), rtol=0, atol=1e-5)
