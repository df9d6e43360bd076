"""Which families' routers follow recorded experts: each of the installed transformers that has fused experts."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from prime_hpc.config.families import OWN_EXPERTS, family_of
from prime_hpc.launch.lint.model_rules import OTHER_ROUTERS
from prime_hpc.moe import replay
from prime_hpc.moe.routers import moe_layers, use_float32_routers
from tests.support.every_family import CannotBuildError, family_names, tiny_config, tiny_model

pytestmark = [pytest.mark.slow, pytest.mark.exhaustive]
IDS = torch.arange(1, 13)[None]


def mixtures() -> Iterator[tuple[str, Any]]:
    """Tiny models of all families that train and have fused experts."""
    for name in family_names():
        try:
            config = tiny_config(name)
            trains = not family_of(config.to_dict()).refused
            model = tiny_model(config) if trains else None
        except CannotBuildError:
            continue
        if model is not None and moe_layers(model):
            yield name, model


def logits(model: Any, routed: torch.Tensor | None) -> torch.Tensor:
    with torch.no_grad(), replay.replaying(routed):
        found: torch.Tensor = model(input_ids=IDS, use_cache=False).logits
    return found


def judge(model: Any) -> str:
    """`follows`; else the reason."""
    layers, seen = moe_layers(model), dict[int, torch.Tensor]()
    for layer in layers:
        layer.experts.register_forward_pre_hook(lambda _, args, i=layer.number: seen.__setitem__(i, args[1].clone()))
    want = logits(model, None)
    k = next(iter(seen.values())).shape[-1]
    count, num_experts = layers[-1].number + 1, min(int(getattr(m.experts, "num_experts", 0)) for m in layers)
    live = torch.full((IDS.numel(), count, k), -1, dtype=torch.int16)
    for index, chosen in seen.items():
        live[:, index] = chosen
    try:
        use_float32_routers(model)
        replay.install(model)
        same = logits(model, live)
    except ValueError as error:
        return str(error)
    noise = torch.rand((IDS.numel(), count, num_experts), generator=torch.Generator().manual_seed(0))
    other = noise.argsort(-1)[..., :k].to(torch.int16)
    moved = logits(model, other)
    assert (same - want).abs().max() < 1e-5 and (moved - want).abs().max() > 1e-2
    for index, chosen in seen.items():
        assert torch.equal(chosen.sort(-1).values, other[:, index].long().sort(-1).values)
    return "follows"


def test_lint_knows_who_has_experts_of_its_own() -> None:
    """A mixture by its config, whose modules have none that are fused."""
    own = set()
    for name in family_names():
        try:
            config = tiny_config(name)
            has_experts = (
                int(getattr(config, "num_local_experts", None) or getattr(config, "n_routed_experts", 0) or 0) > 1
            )
            trains = has_experts and not family_of(config.to_dict()).refused
            model = tiny_model(config) if trains else None
        except CannotBuildError:
            continue
        if model is not None and not moe_layers(model):
            own.add(name)
    assert own == OWN_EXPERTS


def test_all_follow_but_those_that_lint_refuses() -> None:
    found = {name: judge(model) for name, model in mixtures()}
    assert len(found) > 40
    refused = {name: reason for name, reason in found.items() if reason != "follows"}
    assert set(refused) == set(OTHER_ROUTERS), refused
    assert all("router" in reason for reason in refused.values())
