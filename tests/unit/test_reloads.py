"""What vLLM's reloads leave out: code that writes into parameters by itself, and layers that get nothing."""

import copy
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from torch import nn
from vllm.model_executor.model_loader.reload import (
    initialize_layerwise_reload,
    layerwise,
    record_metadata_for_reloading,
)

from prime_hpc.inference.vllm import cpu_corrections, reloads
from prime_hpc.inference.vllm.installed import load_libnuma


def fill(param: nn.Parameter, loaded: torch.Tensor) -> None:
    """A loader; vLLM looks for the name of its first argument."""
    param.data[: len(loaded)].copy_(loaded)


class Plain(nn.Module):
    """Loaded by its parameters' loaders, as most layers are."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4, 3), requires_grad=False)


class Experts(nn.Module):
    """Written to by the model."""

    def __init__(self) -> None:
        super().__init__()
        self.w13 = nn.Parameter(torch.zeros(2, 3, 4), requires_grad=False)
        self.sinks = nn.Parameter(torch.zeros(6), requires_grad=False)


class Rotary(nn.Module):
    """Has nothing to load."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.ones(5), persistent=False)


class Model(nn.Module):
    """All of these."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.experts, self.rotary, self.head = Plain(), Experts(), Rotary(), Plain()
        self.head.weight = self.embed.weight  # tied
        self.embed.weight.weight_loader = fill  # type: ignore[attr-defined]

    def load(self, value: float, names: tuple[str, ...] = ("embed", "w13", "sinks"), rows: int = 4) -> None:
        """Load a version; of the embeddings some rows alone, as where the others are padding."""
        if "embed" in names:
            weight: Any = self.embed.weight
            weight.weight_loader(weight, torch.full((rows, 3), value))
        if "w13" in names:  # expert by expert, turned
            for number in range(2):
                self.experts.w13[number].copy_(torch.full((4, 3), value + number).T)
        if "sinks" in names:
            self.experts.sinks.data[:2].copy_(torch.full((2,), value))
            self.experts.sinks.data[2:].copy_(torch.full((4,), value))


class GptOssForCausalLM(Model):
    """By its name one of those whose code does that."""


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    before = copy.copy(vars(layerwise))
    yield
    assert {name: value for name, value in vars(layerwise).items() if before.get(name) is not value} == {}


def reload(model: Model, value: float, names: tuple[str, ...] = ("embed", "w13", "sinks"), rows: int = 4) -> None:
    with torch.no_grad(), ExitStack() as stack:
        stack.enter_context(reloads.writes_arrive(model))
        initialize_layerwise_reload(model)
        model.load(value, names, rows)
        reloads.finish(model, None)


def test_what_a_model_writes_by_itself_arrives_where_it_was() -> None:
    model = GptOssForCausalLM()
    record_metadata_for_reloading(model)
    places = {name: parameter.data_ptr() for name, parameter in model.named_parameters()}
    for value in (5.0, 7.0):  # again: the second time loaders are those of the first
        reload(model, value)
        assert torch.equal(model.experts.w13, torch.stack([torch.full((3, 4), value), torch.full((3, 4), value + 1)]))
        assert torch.equal(model.experts.sinks, torch.full((6,), value))
        assert torch.equal(model.head.weight, torch.full((4, 3), value))
        assert {name: parameter.data_ptr() for name, parameter in model.named_parameters()} == places
        assert torch.equal(model.rotary.get_buffer("table"), torch.ones(5))


class Loaded(nn.Module):
    """Its parameters' loader is its own, as with vLLM's layers; `shared` calls another layer's."""

    def __init__(self, shared: "Loaded | None" = None) -> None:
        super().__init__()
        self.shared = [shared]  # no submodule
        self.weight = nn.Parameter(torch.zeros(4, 3), requires_grad=False)
        self.weight.weight_loader = self.load  # type: ignore[attr-defined]

    def load(self, param: nn.Parameter, loaded: torch.Tensor, shard: str | None = None) -> bool:
        if self.shared[0] is not None:
            weight: Any = self.shared[0].weight
            weight.weight_loader(weight, loaded, shard)
        rows = {"top": slice(0, 1), "rest": slice(1, 4), None: slice(None)}[shard]
        param.data[rows].copy_(loaded)
        return True


def test_what_a_loader_fills_is_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """At the first reload: each shard has its count, and of a loader that calls another one nothing is remembered."""
    counted: list[tuple[int, object]] = []

    def count(*args: Any) -> tuple[int, object]:
        counted.append(vllms(*args))
        return counted[-1]

    vllms = layerwise.get_numel_loaded
    monkeypatch.setitem(vars(layerwise), "get_numel_loaded", reloads.remembering(count))
    plain, other = Loaded(), Loaded()
    model = nn.ModuleList([plain, other, Loaded(shared=other)])
    record_metadata_for_reloading(model)
    for value, expected in ((2.0, [3, 9, 12, 12]), (5.0, [12])):
        counted.clear()
        initialize_layerwise_reload(model)
        for layer, rows, shard in ((plain, 1, "top"), (plain, 3, "rest"), (model[2], 4, None)):
            weight: Any = layer.weight
            assert weight.weight_loader(weight, torch.full((rows, 3), value), shard) is True
        reloads.finish(model, None)
        assert [number for number, _ in counted] == expected
        assert all(torch.equal(parameter, torch.full((4, 3), value)) for parameter in model.parameters())


def test_a_layer_that_got_nothing_is_named() -> None:
    model = Model()
    record_metadata_for_reloading(model)
    with pytest.raises(
        reloads.NotLoadedError, match=r"2 parameters of Model got nothing \(experts\.w13, experts\.sinks"
    ):
        reload(model, 5.0)


def test_half_a_layer_is_named() -> None:
    model = GptOssForCausalLM()
    record_metadata_for_reloading(model)
    with pytest.raises(
        reloads.NotLoadedError, match=r"1 parameters of GptOssForCausalLM got nothing \(experts\.sinks\)"
    ):
        reload(model, 5.0, ("embed", "w13"))


def test_padding_and_tied_heads_need_nothing() -> None:
    model = GptOssForCausalLM()
    record_metadata_for_reloading(model)
    reload(model, 5.0, rows=3)
    assert torch.equal(model.head.weight[:3], torch.full((3, 3), 5.0))


def test_heads_of_their_own_dimension_are_all_rotated() -> None:
    from vllm import _custom_ops as ops
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding
    from vllm.platforms import current_platform

    load_libnuma()
    current_platform.import_kernels()  # as vLLM was imported, before that, it may have had none
    before = RotaryEmbedding.forward_cpu
    try:
        cpu_corrections.rotate_heads()
        cpu_corrections.rotate_heads()
        layer: Any = RotaryEmbedding.__new__(RotaryEmbedding)
        nn.Module.__init__(layer)
        layer.head_size, layer.is_neox_style, layer.cos_sin_cache = 32, True, torch.randn(64, 32)
        positions, query, key = torch.arange(7), torch.randn(7, 4 * 32), torch.randn(7, 2 * 32)
        expected = query.clone(), key.clone()
        ops.rotary_embedding(positions, *expected, 32, layer.cos_sin_cache, True)
        strided = torch.randn(7, 6 * 32)[:, : 4 * 32].copy_(query).view(7, 4, 32)  # as split from all three
        for rotated in (
            layer.forward_cpu(positions, query.clone(), key.clone()),
            layer.forward_cpu(positions, query.clone().view(7, 4, 32), key.clone().view(7, 2, 32)),
            layer.forward_cpu(positions, strided, key.clone().view(7, 2, 32)),
        ):
            assert all(torch.equal(a.reshape(7, -1), b) for a, b in zip(rotated, expected, strict=True))
        assert layer.forward_cpu(positions, query.clone().view(7, 4, 32))[1] is None
    finally:
        RotaryEmbedding.forward_cpu = before


def test_routers_heed_their_bias() -> None:
    from vllm.model_executor.layers.fused_moe.router.cpu_router import CPURouter

    logits, bias = torch.randn(5, 6), torch.randn(6) / 4
    router = CPURouter(2, 6, renormalize=True, scoring_func="softmax", e_score_correction_bias=bias)
    model = nn.Module()
    vars(model)["router"] = router
    cpu_corrections.heed_bias(model)
    weights, ids = router._compute_routing(torch.zeros(5, 1), logits, None)
    scores = logits.softmax(-1)
    chosen = (scores + bias).topk(2).indices
    assert [set(row) for row in ids.tolist()] == [set(row) for row in chosen.tolist()]
    expected = scores.gather(1, ids.long())
    torch.testing.assert_close(weights, expected / expected.sum(-1, keepdim=True))
