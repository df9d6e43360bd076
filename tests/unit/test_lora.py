"""Adapters in one process: the numbers against the merged model, slots, files, checkpoints, refusals."""

import errno
import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from safetensors.torch import load_file, save_file
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM

from prime_hpc.config.sections.common import ModelConfig
from prime_hpc.config.sections.lora import LoraConfig, select_modules
from prime_hpc.config.sections.trainer import LossConfig
from prime_hpc.store.batch.rank_files import write_batch
from prime_hpc.store.checkpoint.checkpoints import resolve_resume
from prime_hpc.store.errors import StoreError
from prime_hpc.store.io import files
from prime_hpc.store.io.disk import disk_errors
from prime_hpc.store.model.fingerprint import model_identity, weights_fingerprint
from prime_hpc.store.run_paths import RunPaths
from prime_hpc.trainer.batching.micro_batches import make_micro_batch
from prime_hpc.trainer.checkpointing import dcp_state
from prime_hpc.trainer.checkpointing.checkpointer import Checkpointer
from prime_hpc.trainer.lora.slots import _Piece
from prime_hpc.trainer.model.policy import Policy
from prime_hpc.trainer.objectives import rl_loss, sft_loss
from prime_hpc.trainer.perf import FlopsModel
from prime_hpc.trainer.weights import merge_lora
from prime_hpc.trainer.weights.lora_files import WEIGHTS_FILE, adapter_identity, read_adapter
from prime_hpc.trainer.weights.publish import build_publisher
from tests.support.lora import adapters_of, fill_randomly, lora_policy, lora_train_step, merged_model, objective
from tests.support.tiny_model import make_tiny_model, random_rank_batch


def test_flops_of_frozen_weights_lack_their_own_gradients(model: Path) -> None:
    whole = AutoModelForCausalLM.from_pretrained(model)
    policy = lora_policy(model, lora=LoraConfig(rank=4))
    assert policy.adapters is not None
    matrices = sum(m.weight.numel() for n, m in whole.named_modules() if "proj" in n and hasattr(m, "weight"))
    head, adapters = whole.lm_head.weight.numel(), policy.adapters.num_parameters
    tokens, targets = 100, 40
    trained = FlopsModel.of(whole).step_flops(tokens, targets, 0)
    assert trained == 6 * (matrices * tokens + head * targets)
    frozen = FlopsModel.of(policy.hf, adapters).step_flops(tokens, targets, 0)
    assert frozen == (4 * matrices + 6 * adapters) * tokens + 4 * head * targets


pytestmark = pytest.mark.usefixtures("group")

BATCH = random_rank_batch([[20, 9], [15, 30]], seed=3)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"))


def logprobs_of(policy: Policy) -> torch.Tensor:
    """Log-probabilities of the batch's first micro-batch, float32 [N]."""
    micro = make_micro_batch(BATCH, 0)
    with policy.packing(micro):
        return policy(micro)[0]


def reference_logprobs(call: Any) -> torch.Tensor:
    """The same from a transformers model (or a call of one), one sequence at a time."""
    micro, rows, first = make_micro_batch(BATCH, 0), [], 0
    for length in (20, 9):
        ids = micro.input_ids[:, first : first + length]
        rows.append(call(input_ids=ids).logits[0])
        first += length
    picked = torch.cat(rows)[micro.target_index] / micro.temperatures[:, None]
    return picked.log_softmax(-1).gather(1, micro.targets[:, None])[:, 0]


@pytest.mark.parametrize("rslora", [False, True])
def test_forward_equals_the_merged_model(model: Path, rslora: bool) -> None:
    config = LoraConfig(rank=4, alpha=8, rslora=rslora)
    assert config.scale == (4.0 if rslora else 2.0)
    policy = lora_policy(model, lora=config)
    tensors = fill_randomly(policy, 0, seed=1)
    with torch.no_grad():
        base = logprobs_of(policy)
        with adapters_of(policy).use(0):
            adapted = logprobs_of(policy)
            with adapters_of(policy).off():
                assert torch.equal(logprobs_of(policy), base)
        expected = reference_logprobs(merged_model(model, tensors, config.scale))
    torch.testing.assert_close(adapted, expected, rtol=0, atol=2e-5)
    assert (adapted - base).abs().max() > 0.05


@pytest.mark.parametrize("ac", [None, {"freq": 1}])
def test_gradients_equal_autograd_of_the_merged_weights(model: Path, ac: Any) -> None:
    policy = lora_policy(model, num_slots=2, ac=ac)
    tensors = {name: t.requires_grad_() for name, t in fill_randomly(policy, 1, seed=2).items()}
    micro = make_micro_batch(BATCH, 0)
    with adapters_of(policy).use(1), policy.packing(micro):
        policy(micro)[0].sum().backward()
    call = merged_model(model, tensors, 2.0, grad=True)
    reference_logprobs(lambda **given: call((), given)).sum().backward()
    for name, parameter in adapters_of(policy).named_parameters(1).items():
        expected = tensors[f"base_model.model.{name}.weight"].grad
        assert expected is not None and expected.abs().max() > 1e-3
        torch.testing.assert_close(parameter.grad.full_tensor(), expected, rtol=1e-4, atol=2e-5)  # type: ignore[union-attr]
    assert all(p.grad is None for p in (*adapters_of(policy).parameters(0), *policy.parameters()))


def full_tensor(parameter: torch.Tensor) -> torch.Tensor:
    assert isinstance(parameter, DTensor)
    return parameter.full_tensor()


def test_slots_do_not_touch_each_other(model: Path) -> None:
    policy = lora_policy(model, num_slots=3)
    for slot in range(3):
        adapters_of(policy).reset(slot, seed=7)
    frozen = {name: full_tensor(p).clone() for name, p in policy.named_parameters()}
    before = adapters_of(policy).weights(2)
    train_steps = [lora_train_step(policy, slot) for slot in (0, 1)]
    for step in (1, 2):
        for slot in (0, 1):
            batch = random_rank_batch([[20, 9], [15]], seed=10 * slot + step, step=step)
            train_steps[slot].run(step, batch, objective)
    alone = lora_policy(model)
    adapters_of(alone).reset(0, seed=7)
    train_step = lora_train_step(alone)
    for step in (1, 2):
        train_step.run(step, random_rank_batch([[20, 9], [15]], seed=10 + step, step=step), objective)
    assert all(torch.equal(t, adapters_of(policy).weights(1)[n]) for n, t in adapters_of(alone).weights(0).items())
    assert any(not torch.equal(t, adapters_of(policy).weights(0)[n]) for n, t in adapters_of(alone).weights(0).items())
    assert all(torch.equal(t, adapters_of(policy).weights(2)[n]) for n, t in before.items())
    assert all(torch.equal(full_tensor(p), frozen[n]) for n, p in policy.named_parameters())


def test_a_fresh_slot_is_the_base_model(model: Path) -> None:
    policy = lora_policy(model)
    adapters_of(policy).reset(0, seed=1)
    first = adapters_of(policy).weights(0)
    adapters_of(policy).reset(0, seed=2)
    second = adapters_of(policy).weights(0)
    for name, tensor in first.items():
        if "lora_B" in name:
            assert not tensor.any()
        else:
            bound = tensor.shape[1] ** -0.5
            assert 0.8 * bound < tensor.abs().max() <= bound and not torch.equal(tensor, second[name])
    with torch.no_grad(), adapters_of(policy).use(0):
        adapted = logprobs_of(policy)
    with torch.no_grad():
        assert torch.equal(logprobs_of(policy), adapted)


@pytest.mark.parametrize("kind", ["adamw", "muon", "signsgd"])
def test_every_optimizer_trains_an_adapter(model: Path, kind: str) -> None:
    policy = lora_policy(model)
    adapters_of(policy).reset(0, seed=1)
    train_step = lora_train_step(policy, kind=kind)
    before = adapters_of(policy).weights(0)
    metrics = [train_step.run(step, BATCH, sft_loss) for step in (1, 2, 3)]
    assert metrics[2]["loss"] < metrics[0]["loss"] and metrics[0]["grad_norm"] > 0
    changed = {n.split(".")[-2] for n, t in adapters_of(policy).weights(0).items() if not torch.equal(t, before[n])}
    assert changed == {"lora_A", "lora_B"}


def test_the_kl_reference_is_the_model_without_its_adapter(model: Path) -> None:
    policy = lora_policy(model)
    fill_randomly(policy, 0, seed=4)
    config = LossConfig.model_validate({"kl": {"coef": 0.1, "estimator": "k1"}})
    metrics = lora_train_step(policy, reference=policy).run(1, BATCH, partial(rl_loss, config))
    base = lora_policy(model)
    other = lora_policy(model)
    fill_randomly(other, 0, seed=4)
    twice = lora_train_step(other, reference=base).run(1, BATCH, partial(rl_loss, config))
    assert metrics == twice


def test_bfloat16_freezes_the_base_in_bfloat16(model: Path) -> None:
    policy = lora_policy(model, dtype="bfloat16")
    adapters_of(policy).reset(0, seed=1)
    assert {p.dtype for p in policy.parameters()} == {torch.bfloat16}
    assert {p.dtype for p in adapters_of(policy).parameters(0)} == {torch.float32}
    train_step = lora_train_step(policy)
    losses = [train_step.run(step, BATCH, sft_loss)["loss"] for step in (1, 2)]
    assert losses[1] < losses[0]


def checkpointer(policy: Policy, train_step: Any, root: Path, model: Path, slot: int = 0) -> Checkpointer:
    assert policy.adapters is not None
    meta = {"kind": "rl", "identity": model_identity(model), "adapter": adapter_identity(policy.adapters.config, model)}
    return Checkpointer(policy, train_step.optimizer, RunPaths(root), incarnation=0, meta=meta, slot=slot)


def test_a_checkpoint_holds_the_adapter_alone_and_resumes_exactly(model: Path, tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    policy = lora_policy(model, num_slots=2)
    adapters_of(policy).reset(1, seed=1)
    train_step = lora_train_step(policy, 1)
    train_step.run(1, BATCH, objective)
    write_batch(paths, 1, [BATCH], state={})
    saver = checkpointer(policy, train_step, tmp_path, model, slot=1)
    saver.save(1, progress={"num_samples": 4}, batch_dir=paths.rollouts_step(1))
    info = resolve_resume(paths.checkpoints, "latest")
    names = dcp_state.read_metadata(info.trainer_dir).state_dict_metadata
    assert not [n for n in names if "hf." in n] and len([n for n in names if n.startswith("model.")]) == 2 * 14
    other = lora_policy(model)  # in another slot
    again = lora_train_step(other)
    assert checkpointer(other, again, tmp_path, model).load(info) == {"step": 1, "num_samples": 4}
    for train in (train_step, again):
        train.run(2, random_rank_batch([[30]], seed=2, step=2), objective)
    assert all(torch.equal(t, adapters_of(other).weights(0)[n]) for n, t in adapters_of(policy).weights(1).items())


def test_a_checkpoint_of_something_else_is_refused(model: Path, tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    policy = lora_policy(model)
    train_step = lora_train_step(policy)
    write_batch(paths, 1, [BATCH], state={})
    checkpointer(policy, train_step, tmp_path, model).save(1, progress={}, batch_dir=paths.rollouts_step(1))
    info = resolve_resume(paths.checkpoints, "latest")
    wider = lora_policy(model, lora=LoraConfig(rank=8))
    with pytest.raises(StoreError, match="model.lora: rank was 4, is 8"):
        checkpointer(wider, lora_train_step(wider), tmp_path, model).load(info)
    cousin = make_tiny_model(tmp_path / "cousin", seed=1)
    assert model_identity(cousin) == model_identity(model)
    stranger = lora_policy(cousin)
    with pytest.raises(StoreError, match="base weights was"):
        checkpointer(stranger, lora_train_step(stranger), tmp_path, cousin).load(info)
    plain = Checkpointer(policy, train_step.optimizer, paths, incarnation=0, meta={"kind": "rl"})
    with pytest.raises(StoreError, match="it holds an adapter"):
        plain.load(info)


def test_a_version_is_a_peft_directory(model: Path, tmp_path: Path) -> None:
    config = LoraConfig(rank=4, target_modules=["q_proj", r".*layers\.1\.mlp\..*"])
    policy = lora_policy(model, lora=config)
    tensors = fill_randomly(policy, 0, seed=5)
    paths = RunPaths(tmp_path)
    publisher = build_publisher(policy, model, paths, dtype=torch.float32, incarnation=0, model_name=str(model))
    manifest = publisher.publish(3)
    assert manifest is not None and manifest.version == 3 and manifest.meta["format"] == "lora"
    folder = paths.weights_step(3)
    written = json.loads((folder / "adapter_config.json").read_text())
    assert written["r"] == 4 and written["base_model_name_or_path"] == str(model)
    assert "model.layers.1.mlp.down_proj" in written["target_modules"] and len(written["target_modules"]) == 5
    assert (folder / "tokenizer.json").exists() and not (folder / "config.json").exists()
    stored = read_adapter(folder)
    assert stored.keys() == tensors.keys() and all(torch.equal(stored[n], t) for n, t in tensors.items())
    adapters_of(policy).load(0, {n: torch.zeros_like(t) for n, t in stored.items()})
    adapters_of(policy).load(0, stored)
    assert all(torch.equal(t, adapters_of(policy).weights(0)[n]) for n, t in stored.items())
    with pytest.raises(ValueError, match=r"another adapter: it lacks base_model\.model\..*q_proj\.lora_A"):
        adapters_of(policy).load(0, {n: t for n, t in stored.items() if "q_proj.lora_A" not in n})
    with pytest.raises(ValueError, match="holds no adapter"):
        read_adapter(model)


def test_a_full_disk_is_said_of_a_version_and_nothing_of_it_stays(model: Path, tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    publisher = build_publisher(
        lora_policy(model), model, paths, dtype=torch.float32, incarnation=0, model_name=str(model)
    )

    def full(operation: str, path: Path) -> None:
        if operation == "write" and path.name == "adapter_model.safetensors":
            raise OSError(28, "No space left on device", str(path))

    with files.observe_operations(full), pytest.raises(StoreError, match="disk full"):
        publisher.publish(1)
    assert list(paths.weights.iterdir()) == []
    assert publisher.publish(1) is not None  # the disk has room again


def test_peft_itself_agrees(model: Path, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    policy = lora_policy(
        model, lora=LoraConfig(rank=4, rslora=True, target_modules=["q_proj", r".*layers\.1\.mlp\..*"])
    )
    fill_randomly(policy, 0, seed=6)
    paths = RunPaths(tmp_path)
    build_publisher(policy, model, paths, dtype=torch.float32, incarnation=0, model_name=str(model)).publish(1)
    loaded = peft.AutoPeftModelForCausalLM.from_pretrained(paths.weights_step(1)).eval()
    with torch.no_grad(), adapters_of(policy).use(0):
        torch.testing.assert_close(logprobs_of(policy), reference_logprobs(loaded), rtol=0, atol=2e-5)


NAMES = ["model.layers.0.self_attn.q_proj", "model.layers.1.self_attn.q_proj", "model.layers.0.mlp.c_fc", "lm_head"]


def test_targets_by_name_and_by_expression() -> None:
    assert select_modules(LoraConfig(target_modules=["q_proj"]), NAMES) == NAMES[:2]
    assert select_modules(LoraConfig(target_modules=[r".*layers\.0\..*"]), NAMES) == [NAMES[0], NAMES[2]]
    assert select_modules(LoraConfig(), NAMES) == NAMES[:2]  # the usual ones as far as there are any


@pytest.mark.parametrize(
    ("targets", "words"),
    [
        (["query"], r"query matches no linear module of the model; there are q_proj, c_fc$"),
        (["q_proj", "query"], "query matches no linear module"),
        ([".*"], "lm_head cannot have an adapter"),
    ],
)
def test_targets_that_cannot_be(targets: list[str], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        select_modules(LoraConfig(target_modules=targets), NAMES)


@pytest.mark.parametrize(
    ("lora", "words"),
    [
        ({"target_modules": []}, "name at least one module"),
        ({"target_modules": ["lm_head"]}, "lm_head cannot have an adapter"),
        ({"target_modules": ["embed_tokens"]}, "embed_tokens cannot have an adapter"),
        ({"target_modules": ["q_(proj"]}, "neither a module's name nor a regular expression"),
        ({"rank": 0}, "greater than or equal to 1"),
        ({"alpha": 0}, "greater than 0"),
    ],
)
def test_config_refuses(lora: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        ModelConfig.model_validate({"lora": lora})


def test_a_rank_beyond_the_dimensions_is_refused(model: Path) -> None:
    with pytest.raises(ValueError, match=r"model.lora.rank \(40\) exceeds model.layers.0.self_attn.q_proj"):
        lora_policy(model, lora=LoraConfig(rank=40))


def test_the_fingerprint_tells_weights_apart(model: Path, tmp_path: Path) -> None:
    same, other = make_tiny_model(tmp_path / "same"), make_tiny_model(tmp_path / "other", seed=1)
    assert weights_fingerprint(same) == weights_fingerprint(model) != weights_fingerprint(other)
    assert weights_fingerprint(tmp_path) == ""
    save_file({"a": torch.ones(2)}, same / "consolidated.safetensors")  # a download may have it or not
    assert weights_fingerprint(same) == weights_fingerprint(model)


def test_weights_that_the_base_holds_a_second_time_are_left_out(model: Path, tmp_path: Path) -> None:
    """Engines prefer `consolidated*` where it is there, and would serve the base model."""
    policy = lora_policy(model)
    tensors = fill_randomly(policy, 0, seed=8)
    paths = RunPaths(tmp_path)
    options: dict[str, Any] = {"incarnation": 0, "model_name": str(model), "chat_template": "own"}
    build_publisher(policy, model, paths, dtype=torch.float32, **options).publish(1)
    base, output = tmp_path / "base", tmp_path / "merged"
    shutil.copytree(model, base)
    weights = load_file(model / "model.safetensors")
    (base / "model.safetensors").unlink()
    save_file(weights, base / "model-00001-of-00001.safetensors")
    index = {"metadata": {}, "weight_map": dict.fromkeys(weights, "model-00001-of-00001.safetensors")}
    (base / "model.safetensors.index.json").write_text(json.dumps(index))
    save_file({"layers.0.attention.wq.weight": torch.ones(2)}, base / "consolidated-00001-of-00001.safetensors")
    (base / "consolidated.safetensors.index.json").write_text("{}")
    assert merge_lora.merge(paths.weights_step(1), base, output) == 14
    assert (output / "chat_template.jinja").read_text() == "own" != (base / "chat_template.jinja").read_text()
    assert sorted(path.name for path in output.iterdir() if "safetensors" in path.name) == [
        "model-00001-of-00001.safetensors",
        "model.safetensors.index.json",
    ]
    expected = merged_model(model, tensors, 2.0).state_dict()
    for name, tensor in load_file(output / "model-00001-of-00001.safetensors").items():
        torch.testing.assert_close(tensor, expected[name], rtol=0, atol=1e-6)
    (base / "model-00001-of-00001.safetensors").unlink()
    with pytest.raises(ValueError, match="lacks model-00001-of-00001.safetensors, which its index names"):
        merge_lora.merge(paths.weights_step(1), base, tmp_path / "no")


def test_the_merged_model(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = lora_policy(model)
    tensors = fill_randomly(policy, 0, seed=8)
    paths = RunPaths(tmp_path)
    build_publisher(policy, model, paths, dtype=torch.float32, incarnation=0, model_name=str(model)).publish(1)
    adapter, output = paths.weights_step(1), tmp_path / "merged"
    assert merge_lora.main([str(adapter), str(model), str(output)]) == 0
    loaded = AutoModelForCausalLM.from_pretrained(output)
    expected = merged_model(model, tensors, 2.0).state_dict()
    for name, tensor in loaded.state_dict().items():
        torch.testing.assert_close(tensor, expected[name], rtol=0, atol=1e-6)
    assert (output / "tokenizer.json").exists() and not (output / "adapter_config.json").exists()
    assert merge_lora.main([str(adapter), str(model), str(output)]) == 2  # it exists

    def full(path: Path, tensors: object) -> None:
        with disk_errors(path):
            raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(merge_lora, "write_tensors", full)
        assert merge_lora.main([str(adapter), str(model), str(tmp_path / "no")]) == 1
    assert merge_lora.merge(adapter, model, tmp_path / "half", torch.bfloat16) == 14
    merge_lora.merge(adapter, tmp_path / "half", tmp_path / "exact", torch.float32)
    expected = merged_model(tmp_path / "half", tensors, 2.0).state_dict()
    for name, tensor in load_file(tmp_path / "exact" / "model.safetensors").items():
        torch.testing.assert_close(tensor, expected[name].float(), rtol=0, atol=1e-6)
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "half", dtype="auto").dtype == torch.bfloat16
    shallow = tmp_path / "shallow"
    shutil.copytree(model, shallow)
    kept = {n: t for n, t in load_file(model / "model.safetensors").items() if "layers.1." not in n}
    save_file(kept, shallow / "model.safetensors")
    with pytest.raises(ValueError, match=r"is not this adapter's base model: it has no model\.layers\.1\."):
        merge_lora.merge(adapter, shallow, tmp_path / "no")
    assert not (tmp_path / "no").exists() and not list(tmp_path.glob(".tmp-*"))
    config, held = json.loads((adapter / "adapter_config.json").read_text()), load_file(adapter / WEIGHTS_FILE)
    trained, first = "base_model.model.lm_head.weight", next(name for name in held if "lora_B" in name)
    foreign = tmp_path / "foreign"  # of another trainer: what is more than A and B would be left out without a word
    shutil.copytree(adapter, foreign)
    for stated, tensors, said in (
        ({"alpha_pattern": {"q_proj": 64}}, held, "alpha_pattern"),
        ({"use_dora": True}, held, "use_dora"),
        ({}, held | {trained: torch.ones(2)}, trained),
        ({}, {name: tensor for name, tensor in held.items() if name != first}, first),
    ):
        (foreign / "adapter_config.json").write_text(json.dumps(config | stated))
        save_file(tensors, foreign / WEIGHTS_FILE)
        with pytest.raises(ValueError, match=rf"not A and B of one scale alone \({said}\)"):
            merge_lora.merge(foreign, model, tmp_path / "no")


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7, 12])
@pytest.mark.parametrize("dim", [0, 1])
def test_a_gradient_is_dealt_out_to_all_ranks_in_two_copies(ranks: int, dim: int) -> None:
    piece = _Piece("x.lora_A", (10, 3) if dim == 0 else (3, 10), dim, 5, ranks)
    whole = torch.randn(piece.shape)
    table = torch.zeros(ranks, 5 + piece.size)
    with CountCopies() as counted:
        piece.split(table, whole)
    assert counted.copies <= 2
    assert torch.equal(piece.whole(table), whole)
    shards = [piece.take(table[rank], rank) for rank in range(ranks)]
    assert torch.equal(torch.cat(shards, dim), whole)


class CountCopies(TorchDispatchMode):
    """Counts what writes into a tensor."""

    copies = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.copies += func is torch.ops.aten.copy_.default
        return func(*args, **(kwargs or {}))
