"""Rotary frequencies that depend on the context: fixed once, as the engines fix them, whatever lies in a row."""

from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Phi3Config, PhimoeConfig

from prime_hpc.trainer.batching.micro_batches import build_rank_batch, make_micro_batch
from prime_hpc.trainer.model.policy import Policy
from prime_hpc.trainer.model.rotary import pin_rotary
from prime_hpc.trainer.ops import attention
from tests.unit.test_attention import ALONE

SHAPE: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 100}
SHAPE |= {"num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.3, "pad_token_id": 0}
WIDTH, THETA, ORIGINAL, LIMIT = 8, 10000.0, 16, 128
SHORT, LONG = [1.0, 1.1, 1.2, 1.5], [1.0, 2.0, 4.0, 8.0]
LONGROPE = {"rope_type": "longrope", "rope_theta": THETA, "short_factor": SHORT, "long_factor": LONG}
LONGROPE |= {"original_max_position_embeddings": ORIGINAL}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": THETA, "factor": 4.0}


def built(kind: str, **rope: Any) -> Any:
    """A tiny model with longrope or dynamic embeddings."""
    classes = {"longrope": Phi3Config, "dynamic": LlamaConfig, "phimoe": PhimoeConfig}
    own = {"longrope": LONGROPE, "dynamic": DYNAMIC, "phimoe": LONGROPE}[kind] | rope
    more = {"longrope": {"original_max_position_embeddings": ORIGINAL}, "phimoe": {"num_local_experts": 2}}.get(
        kind, {}
    )
    config = classes[kind](**SHAPE, **more, max_position_embeddings=LIMIT, rope_parameters=own)
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, attn_implementation=attention.register()).eval()


def rotary_of(model: Any) -> Any:
    """Its rotary embedding."""
    return next(m for m in model.modules() if hasattr(m, "inv_freq"))


def expected(factors: list[float] | None, scale: float, base: float = THETA) -> tuple[np.ndarray, np.ndarray]:
    """float64 cosines and sines of all positions, `[LIMIT, WIDTH]`, from the papers' formula."""
    frequencies = 1 / (np.array(factors or [1.0] * 4) * base ** (np.arange(0, WIDTH, 2) / WIDTH))
    angles = np.tile(np.arange(LIMIT)[:, None] * frequencies, (1, 2))
    return np.cos(angles) * scale, np.sin(angles) * scale


def angles_of(model: Any, positions: int) -> list[np.ndarray]:
    """What its embedding gives for so many positions."""
    found = rotary_of(model)(torch.zeros(1, 1, dtype=torch.float32), torch.arange(positions)[None])
    return [x[0].double().numpy() for x in found]


@pytest.mark.parametrize("kind", ["longrope", "phimoe"])
@pytest.mark.parametrize(("context", "factors"), [(ORIGINAL, SHORT), (ORIGINAL + 1, LONG), (None, LONG)])
def test_longrope_is_decided_by_the_context(kind: str, context: int | None, factors: list[float]) -> None:
    stated = {"short_mscale": 1.25, "long_mscale": 1.5} if kind == "phimoe" else {}
    model = built(kind, **stated)
    scale = np.sqrt(1 + np.log(LIMIT / ORIGINAL) / np.log(ORIGINAL))
    if stated:
        scale = 1.25 if factors is SHORT else 1.5
    (said,) = pin_rotary(model, context)
    assert ("long factors" in said) == (factors is LONG)
    for positions in (5, 100, 5):  # what came before does not matter either
        for got, wanted in zip(angles_of(model, positions), expected(factors, scale), strict=True):
            np.testing.assert_allclose(got, wanted[:positions], atol=2e-5)


@pytest.mark.parametrize(("trained", "base"), [(None, THETA), (32, THETA * (4.0 * 4 - 3) ** (8 / 6))])
def test_dynamic_is_decided_by_the_config(trained: int | None, base: float) -> None:
    model = built("dynamic", **({"max_trained_positions": trained} if trained else {}))
    pin_rotary(model, LIMIT)
    for positions in (5, LIMIT, 5):
        for got, wanted in zip(angles_of(model, positions), expected(None, 1.0, base), strict=True):
            np.testing.assert_allclose(got, wanted[:positions], atol=2e-5)


@pytest.mark.parametrize("kind", ["longrope", "dynamic"])
def test_a_sample_does_not_depend_on_its_neighbours(kind: str) -> None:
    model = built(kind)
    pin_rotary(model, LIMIT)
    policy = Policy(model, "sdpa", 512, ALONE)
    rng = np.random.default_rng(0)
    ids = [rng.integers(1, 100, n).astype(np.int32) for n in (60, 12)]
    batch = build_rank_batch([[0, 1], [1]], ids, [np.ones(len(i), bool) for i in ids])
    found = []
    for index in (0, 1):
        micro = make_micro_batch(batch, index)
        with torch.no_grad(), policy.packing(micro):
            found.append(policy(micro)[0])
    torch.testing.assert_close(found[0][-11:], found[1], rtol=0, atol=2e-6)


def test_what_cannot_be_fixed_is_refused() -> None:
    with pytest.raises(ValueError, match="no positions beyond max_position_embeddings = 128"):
        pin_rotary(built("dynamic"), LIMIT + 1)
    with pytest.raises(ValueError, match="states an attention scale of 3"):
        pin_rotary(built("longrope", attention_factor=3.0), LIMIT)
    assert pin_rotary(AutoModelForCausalLM.from_config(LlamaConfig(**SHAPE)), None) == []
