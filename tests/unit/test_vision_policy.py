"""Models that see images: log-probabilities are those of transformers' own code, however samples lie."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from prime_hpc.runtime.failures import is_permanent
from prime_hpc.store.batch.images import image_runs
from prime_hpc.trainer.batching.image_inputs import ImageError
from prime_hpc.trainer.model import vision
from prime_hpc.trainer.model.policy import Policy
from prime_hpc.trainer.model.self_test import SelfTestError, self_test
from tests.support.images import OTHER, TALL, WIDE, Shown, batch_of, logprobs, sample, text, vision_policy
from tests.support.tiny_vision import make_image, make_vision_model

FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe")
NEAR = 1e-5


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {family: make_vision_model(tmp_path_factory.mktemp(family), family) for family in FAMILIES}


@pytest.fixture(params=[*FAMILIES[:5], pytest.param(FAMILIES[5], marks=pytest.mark.exhaustive)])
def policy(request: pytest.FixtureRequest, models: dict[str, Path], group: None) -> Iterator[Policy]:
    yield vision_policy(models[request.param])


def samples_of(policy: Policy) -> list[Shown]:
    """Two samples that begin alike with an image, one without any, and one that begins with one."""
    prompt: list[Any] = [text(4, 1), WIDE, text(3, 2)]
    return [
        sample(policy, text(5, 3), TALL, text(4, 4)),
        sample(policy, *prompt, text(6, 5)),
        sample(policy, *prompt, text(5, 6), OTHER, text(3, 7)),
        sample(policy, text(10, 8)),
        sample(policy, WIDE, text(4, 9), WIDE, TALL, text(2, 10)),
    ]


def upstream(policy: Policy, shown: Shown) -> torch.Tensor:
    """Log-probabilities by the model's own code, which finds images and places by itself."""
    assert policy.image_inputs is not None
    ids = torch.from_numpy(shown.ids.astype(np.int64))[None]
    pixels = [policy.image_inputs.pixels(shown.images[n - 1]) for _, _, n in image_runs(shown.numbers).tolist()]
    more: dict[str, torch.Tensor] = {}
    if pixels:
        more["pixel_values"] = torch.from_numpy(np.concatenate([p.values for p in pixels]))
        more["image_grid_thw"] = torch.tensor([p.grid for p in pixels])
        more["mm_token_type_ids"] = torch.from_numpy((shown.numbers > 0).astype(np.int64))[None]
    policy.unshard()  # type: ignore[operator]
    policy.hf.set_attn_implementation("eager")
    logits = policy.hf(input_ids=ids, use_cache=False, **more).logits[0]
    return logits.log_softmax(-1)[:-1].gather(1, ids[0, 1:, None])[:, 0]


@torch.no_grad()
def test_samples_come_out_as_the_models_own_code_has_them(policy: Policy) -> None:
    samples = samples_of(policy)
    batch = batch_of(samples, [[0, 1, 2, 3, 4], *([i] for i in range(5))])
    batch = replace(batch, group_ids=np.array([0, 1, 1, 2, 3] * 2))
    alone = [logprobs(policy, batch, i) for i in range(1, 6)]
    for share in (False, True):
        torch.testing.assert_close(logprobs(policy, batch, 0, share=share), torch.cat(alone), rtol=0, atol=NEAR)
    for one, mine in zip(samples, alone, strict=True):
        torch.testing.assert_close(mine, upstream(policy, one), rtol=0, atol=NEAR)


@torch.no_grad()
def test_what_an_image_shows_matters(policy: Policy) -> None:
    one, other = sample(policy, text(5, 3), WIDE, text(4, 4)), sample(policy, text(5, 3), OTHER, text(4, 4))
    found = [logprobs(policy, batch_of([shown], [[0]]), 0) for shown in (one, other)]
    first = 5 + 1 + 6
    assert (found[0] - found[1])[first:].abs().max() > 0.01
    torch.testing.assert_close(found[0][:4], found[1][:4], rtol=0, atol=0)


@torch.no_grad()
def test_an_images_token_that_was_sampled_as_text_is_text(policy: Policy) -> None:
    token = [policy.hf.config.image_token_id]
    stray = sample(policy, text(3, 1), token, text(2, 2), WIDE, token, text(3, 3), token)
    plain = sample(policy, text(3, 1), [7], text(2, 2), WIDE, [7], text(3, 3), [7])
    table = policy.hf.get_input_embeddings()
    policy.unshard()  # type: ignore[operator]
    table.weight[7] = table.weight[token[0]]
    found = [logprobs(policy, batch_of([shown], [[0]]), 0) for shown in (stray, plain)]
    same = np.flatnonzero(stray.ids[1:] == plain.ids[1:])
    torch.testing.assert_close(found[0][same], found[1][same], rtol=0, atol=NEAR)


def test_an_image_of_another_size_than_its_tokens_is_refused(policy: Policy) -> None:
    shown = sample(policy, text(3, 1), (make_image(1), 5), text(3, 2))
    with pytest.raises(ImageError, match=r"has 5 tokens in the batch, and 6 by its size.*preprocessor_config.json"):
        logprobs(policy, batch_of([shown], [[0]]), 0)
    broken = sample(policy, text(3, 1), (b"no image", 6), text(3, 2))
    with pytest.raises(ImageError, match="an image of 8 bytes cannot be read") as found:
        logprobs(policy, batch_of([broken], [[0]]), 0)
    assert is_permanent(found.value)  # it would be so again after a restart


def test_a_frozen_tower_gets_no_gradient_and_a_trained_one_gets_one_without_images(
    models: dict[str, Path], group: None
) -> None:
    for kind, trains in (("frozen", False), ("trained", True)):
        policy = vision_policy(models["qwen3_vl"], kind)
        logprobs(policy, batch_of([sample(policy, text(6, 1))], [[0]]), 0).sum().backward()
        tower = {name: p.grad for name, p in policy.named_parameters() if ".visual." in name}
        assert len(tower) > 40 and all((grad is not None) == trains for grad in tower.values())
        if trains:
            assert all(not grad.to_local().any() for grad in tower.values())  # type: ignore[union-attr]
            shown = sample(policy, text(3, 1), WIDE, text(3, 2))
            logprobs(policy, batch_of([shown], [[0]]), 0).sum().backward()
            assert all(grad.to_local().any() for name, grad in tower.items() if "qkv.bias" not in name)  # type: ignore[union-attr]


def test_the_self_test_finds_images_in_other_places(policy: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    found = self_test(policy, torch.device("cpu"), 2.0**-24)
    assert found.upstream is not None and found.rounding > 0
    forward = vision.forward_with_images

    def misplaced(body: Any, ids: torch.Tensor, places: torch.Tensor, images: Any) -> torch.Tensor:
        return forward(body, ids, places[:1].expand_as(places), images)

    monkeypatch.setattr("prime_hpc.trainer.model.policy.forward_with_images", misplaced)
    with pytest.raises(SelfTestError, match="the model's own code differs"):
        self_test(policy, torch.device("cpu"), 2.0**-24)
