"""Learning-rate schedules at their corners; which optimizer gets which parameter, and its state. Updates are proved
in `tests/proofs/prove_optimizers.py`, sharded ones in `tests/integration/test_trainer_objectives.py`."""

import itertools
from typing import Any

import pytest
import torch
import transformers
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from prime_hpc.config.sections.trainer import OptimConfig, SchedulerConfig
from prime_hpc.trainer.optim import Muon, build_optimizer, learning_rate_factor, orthogonalize, set_learning_rate
from prime_hpc.trainer.optim.fused import find_fused
from tests.support.every_family import tiny_config


def factors(max_steps: int, **config: object) -> list[float]:
    schedule = SchedulerConfig.model_validate(config)
    return [learning_rate_factor(schedule, n, max_steps) for n in range(1, max_steps + 1)]


def test_constant_with_warmup() -> None:
    assert factors(6, type="constant", warmup_steps=4) == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


def test_linear_ends_a_step_before_the_minimum() -> None:
    assert factors(6, type="linear", warmup_steps=2, min_lr_ratio=0.2) == pytest.approx([0.5, 1.0, 1.0, 0.8, 0.6, 0.4])
    assert factors(4, type="linear", decay_steps=2) == pytest.approx([1.0, 0.5, 0.0, 0.0])


@pytest.mark.parametrize("kind", ["constant", "linear", "cosine", "wsd"])
def test_every_step_learns_however_few_there_are(kind: str) -> None:
    for max_steps in range(1, 25):
        for warmup in range(max_steps + 1):
            values = factors(max_steps, type=kind, warmup_steps=warmup)
            assert min(values) > 0 and max(values) == 1.0, (max_steps, warmup, values)
            assert kind == "constant" or max_steps - warmup < 2 or values[-1] < 1.0


@pytest.mark.parametrize(
    ("kind", "theirs"), [("linear", "linear"), ("cosine", "cosine"), ("wsd", "warmup_stable_decay")]
)
def test_the_decay_is_that_of_hugging_face(kind: str, theirs: str) -> None:
    from transformers.optimization import get_scheduler

    options = {"num_decay_steps": 8, "min_lr_ratio": 0.1, "decay_type": "linear"} if kind == "wsd" else None
    ours = {"decay_steps": 8, "min_lr_ratio": 0.1} if kind == "wsd" else {}
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler = get_scheduler(
        theirs, optimizer, num_warmup_steps=4, num_training_steps=24, scheduler_specific_kwargs=options
    )
    wanted = []
    for _ in range(24):
        wanted.append(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()
    assert factors(24, type=kind, warmup_steps=4, **ours)[4:] == pytest.approx(wanted[4:])


def test_cosine_is_half_way_in_the_middle_and_never_rises_after_warmup() -> None:
    values = factors(12, type="cosine", warmup_steps=2)
    assert values[7] == pytest.approx(0.5) and 0.02 < values[-1] < 0.03
    assert all(a >= b for a, b in itertools.pairwise(values[1:]))


def test_wsd_is_constant_then_linear() -> None:
    assert factors(10, type="wsd", warmup_steps=2, decay_steps=4) == pytest.approx(
        [0.5, 1, 1, 1, 1, 1, 1.0, 0.75, 0.5, 0.25]
    )
    assert factors(20, type="wsd")[17:] == pytest.approx([1.0, 1.0, 0.5])
    assert factors(3, type="wsd") == pytest.approx([1.0, 1.0, 0.5])


def test_schedule_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="warmup_steps"):
        factors(10, type="wsd", warmup_steps=8, decay_steps=4)
    for warmup in (10, 100):  # no step comes after it: the last one is looked at before a run begins
        with pytest.raises(ValueError, match="together exceed"):
            learning_rate_factor(SchedulerConfig(type="wsd", warmup_steps=warmup, decay_steps=1), 10, 10)


class Model(torch.nn.Module):
    """An embedding, a tied or own head, a hidden matrix, a norm's weight."""

    def __init__(self, *, tied: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = torch.nn.Embedding(6, 4)
        self.hidden = torch.nn.Linear(4, 4)
        self.norm = torch.nn.Parameter(torch.ones(4))
        self.head = torch.nn.Linear(4, 6, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def get_output_embeddings(self) -> torch.nn.Linear:
        return self.head


@pytest.mark.parametrize("kind", ["adamw", "muon", "signsgd"])
def test_norms_do_not_decay_and_zero_rate_changes_nothing(kind: str) -> None:
    model = Model()
    with torch.no_grad():
        model.hidden.weight.fill_(1.0)
    optimizer = build_optimizer(model, OptimConfig(type=kind, lr=0.1, weight_decay=0.5))
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    assert torch.allclose(model.hidden.weight, torch.full((4, 4), 0.95)) and torch.equal(model.norm, torch.ones(4))
    set_learning_rate(optimizer, 0.0)
    before = [p.detach().clone() for p in model.parameters()]
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_frozen_parameters_are_left_out() -> None:
    model = Model()
    model.hidden.requires_grad_(False)
    for kind in ("adamw", "muon", "signsgd"):
        groups = build_optimizer(model, OptimConfig(type=kind)).param_groups
        assert not {id(model.hidden.weight), id(model.hidden.bias)} & {id(p) for g in groups for p in g["params"]}


@pytest.mark.parametrize("tied", [False, True])
def test_muon_takes_hidden_matrices_and_nothing_with_a_row_per_token(tied: bool) -> None:
    model = Model(tied=tied)
    groups = build_optimizer(model, OptimConfig(type="muon")).param_groups
    by = {a: {id(p) for g in groups if g["algorithm"] == a for p in g["params"]} for a in ("muon", "adamw")}
    assert by["muon"] == {id(model.hidden.weight)}
    assert by["adamw"] == {id(p) for p in model.parameters()} - by["muon"]


@pytest.mark.parametrize(
    "family", ["falcon_mamba", "gpt_oss", "kimi_linear", "qwen2_moe", "recurrent_gemma", "rwkv", "zaya"]
)
def test_biases_and_states_are_vectors_whatever_their_shape(family: str) -> None:
    model = transformers.AutoModelForCausalLM.from_config(tiny_config(family))
    for kind in ("adamw", "muon", "signsgd"):
        groups = build_optimizer(model, OptimConfig(type=kind, weight_decay=0.1)).param_groups
        decays = {id(p): g["weight_decay"] > 0 for g in groups for p in g["params"]}
        half = {id(p): g.get("algorithm") for g in groups for p in g["params"]}
        for name, p in model.named_parameters():
            last = name.split(".")[-1]
            is_state = last in ("A_log", "D") or "time_" in last
            is_vector = p.ndim < 2 or last.endswith("bias") or is_state
            assert decays[id(p)] != is_vector, (kind, name)
            if kind == "muon":
                is_aside = is_vector or "conv" in name or "embed" in name or "head" in name
                assert half[id(p)] == ("adamw" if is_aside else "muon"), name


def test_muon_equals_torchs_own() -> None:
    ours, theirs = torch.nn.Linear(24, 16, bias=False), torch.nn.Linear(24, 16, bias=False)
    theirs.load_state_dict(ours.state_dict())
    group = {"params": [ours.weight], "algorithm": "muon", "weight_decay": 0.1}
    mine = Muon([group], lr=0.02)
    reference = torch.optim.Muon(theirs.parameters(), lr=0.02, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    start = ours.weight.detach().clone()
    for seed in range(4):
        grad = torch.randn(16, 24, generator=torch.Generator().manual_seed(seed))
        ours.weight.grad, theirs.weight.grad = grad.clone(), grad.clone()
        mine.step()
        reference.step()
    moved = (theirs.weight - start).norm()
    assert (ours.weight - theirs.weight).norm() < 0.01 * moved  # torch iterates in bfloat16


def test_orthogonalised_matrices_are_nearly_orthogonal_and_zero_stays_zero() -> None:
    for shape in [(64, 32), (32, 64), (3, 40, 10)]:
        values = torch.linalg.svdvals(orthogonalize(torch.randn(shape, generator=torch.Generator().manual_seed(0))))
        assert values.min() > 0.6 and values.max() < 1.25
    assert not orthogonalize(torch.zeros(4, 3)).any()


def test_sign_descent_moves_every_weight_by_the_rate_and_keeps_no_average_without_momentum() -> None:
    model = Model()
    before = model.hidden.weight.detach().clone()
    optimizer = build_optimizer(model, OptimConfig(type="signsgd", lr=0.1, weight_decay=0.0))
    model.hidden.weight.grad = torch.linspace(-3, 3, 16).reshape(4, 4)
    optimizer.step()
    torch.testing.assert_close(before - model.hidden.weight, 0.1 * model.hidden.weight.grad.sign())
    assert set(optimizer.state[model.hidden.weight]) == {"step"}


@pytest.mark.parametrize(("type", "momentum"), [("adamw", None), ("muon", None), ("signsgd", None), ("signsgd", 0.9)])
def test_a_loaded_state_goes_on_exactly(type: str, momentum: float | None) -> None:
    config = OptimConfig(type=type, lr=0.1, momentum=momentum)

    def run(model: Model, optimizer: torch.optim.Optimizer, steps: range) -> None:
        for step in steps:
            for i, p in enumerate(model.parameters()):
                p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(100 * step + i))
            optimizer.step()

    whole, first, second = Model(), Model(), Model()
    run(whole, build_optimizer(whole, config), range(4))
    early = build_optimizer(first, config)
    run(first, early, range(2))
    weights, state = get_state_dict(first, early)
    later = build_optimizer(second, config)
    set_state_dict(second, later, model_state_dict=weights, optim_state_dict=state)
    run(second, later, range(2, 4))
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), second.parameters(), strict=True))


@pytest.mark.parametrize("text", ["1e-5", 1e-5, "0.00001"])
def test_a_rate_written_as_text_is_a_number(text: object) -> None:
    assert OptimConfig.model_validate({"lr": text}).lr == 1e-5


@pytest.mark.parametrize(
    ("tree", "reason"),
    [
        ({"lr": "fast"}, "number"),
        ({"lr": -1}, "greater than or equal to 0"),
        ({"type": "adam"}, "'muon'"),
        ({"momentum": 1.0}, "less than 1"),
        ({"betas": [0.9, 1.0]}, r"\[0, 1\)"),
    ],
)
def test_settings_that_cannot_work_are_refused(tree: dict, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        OptimConfig.model_validate(tree)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ("Phi3Config", {"qkv_proj.weight": (-2, (16, 8, 8), 1), "gate_up_proj.weight": (-2, (24, 24), 1)}),
        ("Qwen3MoeConfig", {"experts.gate_up_proj": (-2, (20, 20), 1)}),
        ("GPT2Config", {"c_attn.weight": (-1, (16, 16, 16), 1)}),
        ("GPTNeoXConfig", {"query_key_value.weight": (-2, (4, 4, 4), 4)}),
        ("LlamaConfig", {}),
        ("Gemma4TextConfig", {}),  # whose layers' heads differ
    ],
)
def test_fused_matrices_of_real_models_are_known(config: str, expected: dict[str, tuple]) -> None:
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 4, "vocab_size": 32, "pad_token_id": 0}
    sizes |= {"intermediate_size": 24, "num_key_value_heads": 2, "moe_intermediate_size": 20, "num_experts": 2}
    if config in ("GPT2Config", "GPTNeoXConfig"):
        del sizes["num_key_value_heads"]
    own: dict[str, Any] = {"head_dim": 4} if config == "Qwen3MoeConfig" else {}
    if config == "Gemma4TextConfig":
        own = {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"], "head_dim": 4}
        own |= {"hidden_size_per_layer_input": 0, "num_experts": None}
    model = transformers.AutoModelForCausalLM.from_config(getattr(transformers, config)(**(sizes | own)))
    fused = find_fused(model)
    found = {n: fused[id(p)] for n, p in model.named_parameters() if id(p) in fused}
    assert len(found) == len(fused)
    assert {".".join(n.split(".")[-2:]): (f.dim, f.sizes, f.groups) for n, f in found.items()} == expected
    for name, f in found.items():
        whole = model.get_parameter(name).detach()
        assert torch.equal(f.join(f.split(whole)), whole)
