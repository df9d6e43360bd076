"""Prompts whose tokens are all scored, in the batch of the transformers backend: so many rows of logits at once."""

from pathlib import Path
from typing import Any

import pytest
import torch

from prime_hpc.inference.transformers import engine as module
from prime_hpc.inference.transformers.engine import Engine
from prime_hpc.inference.transformers.model import BatchModel
from prime_hpc.inference.transformers.parameters import SamplingParams
from prime_hpc.inference.transformers.sequences import Running
from tests.support.tiny_model import make_tiny_model

LENGTH = 90
MOST = 16


def sequence(is_scored: bool) -> Running:
    params = SamplingParams(max_tokens=1, prompt_logprobs=0 if is_scored else None)
    scores: Any = [None] if is_scored else None
    return Running(
        prompt=list(range(5, 5 + LENGTH)),
        params=params,
        max_tokens=1,
        generator=None,
        on_done=lambda _: None,
        prompt_scores=scores,
    )


@pytest.mark.parametrize("kinds", [[True], [False, True, True], [True, False, True]])
def test_logits_of_scored_prompts_are_bounded_wherever_these_stand(
    kinds: list[bool], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_tiny_model(tmp_path / "model")
    options: dict[str, Any] = {"max_len": 128, "cache_gib": 0.05, "max_rows": 4}
    model = BatchModel(str(folder), dtype=torch.float32, device=torch.device("cpu"), **options)
    monkeypatch.setattr(module, "LOGITS", MOST * model.vocab_size)
    forward, rows = model.forward, []

    def watched(first: int, ids: Any, starts: Any, width: int, picks: Any) -> torch.Tensor:
        rows.append(len(picks))
        return forward(first, ids, starts, width, picks)

    monkeypatch.setattr(model, "forward", watched)
    engine, sequences = Engine(model, seed=0), [sequence(is_scored) for is_scored in kinds]
    engine._waiting.extend(sequences)
    while engine._rows or engine._waiting:
        engine.step()
    assert max(rows) <= MOST + len(kinds)  # beside them the tokens that are drawn
    found = [one.prompt_scores for one in sequences if one.prompt_scores is not None]
    assert all(len(scores) == LENGTH for scores in found)
    for scores in found[1:]:
        for one, other in zip(scores[1:], found[0][1:], strict=True):
            assert one is not None and other is not None and one.keys() == other.keys()
