"""Reward models: loss and gradients against the formula in float64, what is read, what transformers loads."""

import json
import re
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pytest
import torch
from pyarrow import parquet
from pydantic import ValidationError
from safetensors.torch import load_file, save_file
from torch.nn.functional import logsigmoid
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForSequenceClassification, AutoTokenizer, Gemma3Config, Gemma3ForConditionalGeneration
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
)

from prime_hpc.cli.verbs.run import export
from prime_hpc.config import ConfigError, Experiment
from prime_hpc.config.families import REFUSED, SCORED
from prime_hpc.config.sections.common import ModelConfig
from prime_hpc.config.sections.inference import InferenceConfig
from prime_hpc.config.sections.lora import LoraConfig
from prime_hpc.config.sections.parallel import ParallelDims
from prime_hpc.config.sections.sft import PreferenceConfig, SFTConfig
from prime_hpc.config.sections.slurm import SiteConfig
from prime_hpc.config.sections.trainer import FakeDataConfig, TrainerConfig
from prime_hpc.config.snapshot import write_snapshot
from prime_hpc.evals.versions import Version, check_published
from prime_hpc.inference.vllm.args import build_argv
from prime_hpc.launch.estimate.model_facts import read_model
from prime_hpc.launch.estimate.trainer_memory import checkpoint_gib, trainer_gib
from prime_hpc.launch.lint.lint import lint
from prime_hpc.launch.reward_models import reward_models
from prime_hpc.store.checkpoint.checkpoints import resolve_resume
from prime_hpc.store.model.files import stored_tensors
from prime_hpc.store.run_paths import RunPaths
from prime_hpc.supervisor.attempt.resume import mismatches
from prime_hpc.trainer.batching.micro_batches import as_pairs, batch_facts, build_rank_batch, fake_batch
from prime_hpc.trainer.data.messages import SFTDataError
from prime_hpc.trainer.data.pairs import parse_pair
from prime_hpc.trainer.data.samples import RowTokenizer
from prime_hpc.trainer.data.sources import ArrowRows
from prime_hpc.trainer.data.template import ChatTokenizer
from prime_hpc.trainer.lora.slots import PREFIX
from prime_hpc.trainer.model.load_policy import load_policy
from prime_hpc.trainer.model.policy import Policy
from prime_hpc.trainer.objectives import preference_loss
from prime_hpc.trainer.optim import build_optimizer
from prime_hpc.trainer.parallel import build_parallel
from prime_hpc.trainer.train_step import TrainStep
from prime_hpc.trainer.weights.publish import Publisher
from tests.support.checkpoints import make_checkpoint
from tests.support.every_family import tiny_config
from tests.support.lora import adapters_of, fill_randomly
from tests.support.tiny_checkpoints import make_checkpoint as make_model
from tests.support.tiny_families import make_family
from tests.support.tiny_model import make_tiny_model
from tests.support.tiny_vision import make_vision_model

CPU = torch.device("cpu")
CONFIG = PreferenceConfig(type="bradley_terry", margin=0.3, label_smoothing=0.1, centering_weight=0.05)


def loaded(folder: Path, seed: int | None = 7, **model: Any) -> Policy:
    return load_policy(
        ModelConfig(name=str(folder), **({"dtype": "float32"} | model)),
        folder,
        build_parallel(ParallelDims(), "cpu"),
        CPU,
        reshard_after_forward=True,
        chunk_tokens=64,
        new_head=seed,
    )


def published(policy: Policy, source: Path, folder: Path, dtype: torch.dtype = torch.float32) -> Path:
    paths = RunPaths(folder)
    Publisher(policy, source, paths, dtype=dtype, incarnation=0, model_name="reward").publish(1)
    return paths.weights_step(1)


def sides_of(num_pairs: int) -> list[np.ndarray[Any, Any]]:
    """Tokens of pairs whose sides begin alike, one of which is the beginning of the other."""
    rng = np.random.default_rng(5)
    sides = []
    for i in range(num_pairs):
        prompt = rng.integers(3, 90, 4 + i)
        sides += [np.concatenate([prompt, rng.integers(3, 90, n)]).astype(np.int32) for n in (3 + i, 6 - i)]
    sides[1] = np.concatenate([sides[0], sides[1][-2:]])
    return sides


@pytest.mark.parametrize("layout", ["packed", "packed, no shared prompt", "a pair a micro-batch", "a row a side"])
def test_a_model_learns_what_the_formula_says(group: None, tmp_path: Path, layout: str) -> None:
    source, sides = make_tiny_model(tmp_path / "model"), sides_of(4)
    policy = loaded(source)
    hf = AutoModelForSequenceClassification.from_pretrained(
        published(policy, source, tmp_path / "run"), dtype=torch.float64
    ).eval()
    scores = torch.cat([hf(torch.from_numpy(ids.astype(np.int64))[None]).logits[0] for ids in sides]).view(4, 2)
    margins = torch.tensor([0.0, 0.5, 1.0, -0.25], dtype=torch.float64)  # the rows' own
    d = scores[:, 0] - scores[:, 1] - CONFIG.margin - margins
    loss = (-0.9 * logsigmoid(d) - 0.1 * logsigmoid(-d) + CONFIG.centering_weight * scores.sum(1).square()).mean()
    loss.backward()

    policy.single_rows = layout == "a row a side"
    step = step_of(policy, share_prefixes=layout == "packed")
    micros = [[2 * i, 2 * i + 1] for i in range(4)] if layout == "a pair a micro-batch" else [list(range(8))]
    padded = [np.append(ids, np.zeros(i % 3, np.int32)) for i, ids in enumerate(sides)]  # `pad_multiple` fills up
    masks = [np.arange(len(row)) == len(ids) - 1 for row, ids in zip(padded, sides, strict=True)]
    rows = np.repeat(np.arange(4), 2)
    batch = replace(build_rank_batch(micros, padded, masks), sample_ids=rows, group_ids=rows.copy())
    batch = replace(batch, reference_sums=np.column_stack([margins.numpy(), np.zeros(4)]).ravel())
    stats, num_shared = step.accumulate(step.lay_out(batch), partial(preference_loss, CONFIG), batch_facts(batch, 1))

    assert (num_shared > 0) is (layout == "packed")
    shown = {name: float(value) for name, value in stats.totals.items()}
    assert shown == pytest.approx(
        {
            "loss": float(loss.detach()),
            "rewards/chosen": float(scores[:, 0].mean()),
            "rewards/rejected": float(scores[:, 1].mean()),
            "rewards/margins": float((scores[:, 0] - scores[:, 1]).mean()),
            "rewards/accuracies": float((scores[:, 0] > scores[:, 1]).double().mean()),
        },
        rel=1e-4,
        abs=1e-5,
    )
    theirs = dict(hf.named_parameters())
    mine: dict[str, Any] = {name: p.grad.full_tensor().double() for name, p in policy.hf.named_parameters()}
    assert mine.keys() == theirs.keys() and mine["score.weight"].abs().sum() > 0
    for name, grad in mine.items():
        torch.testing.assert_close(grad, theirs[name].grad, rtol=2e-3, atol=2e-6)


def step_of(policy: Policy, **changes: Any) -> TrainStep:
    config = TrainerConfig(no_sync=False, **changes)
    adapter = None if policy.adapters is None else policy.adapters.parameters(0)
    return TrainStep(
        policy, build_optimizer(policy, config.optim, adapter), config, max_steps=9, normalize="sequence", device=CPU,
        peak_flops=1.0, with_entropy=False, together=2, row_tokens=40,
    )  # fmt: skip


def test_an_adapter_trains_the_head_too_and_is_published_merged(group: None, tmp_path: Path) -> None:
    source, sides, lora = make_tiny_model(tmp_path / "model"), sides_of(3), LoraConfig(rank=4, alpha=8)
    policy = loaded(source, lora=lora)
    tensors = fill_randomly(policy, 0, seed=3)
    hf = AutoModelForSequenceClassification.from_pretrained(
        published(policy, source, tmp_path / "run"), dtype=torch.float64
    ).eval()
    scores = torch.cat([hf(torch.from_numpy(ids.astype(np.int64))[None]).logits[0] for ids in sides]).view(3, 2)
    loss = -logsigmoid(scores[:, 0] - scores[:, 1]).mean()
    loss.backward()
    masks = [np.arange(len(ids)) == len(ids) - 1 for ids in sides]
    batch = build_rank_batch([[0, 1, 2, 3], [4, 5]], sides, masks)
    step, config = step_of(policy), PreferenceConfig(type="bradley_terry")
    with step.adapted():
        stats, _ = step.accumulate(batch, partial(preference_loss, config), batch_facts(batch, 1))
    assert float(stats.totals["loss"]) == pytest.approx(float(loss.detach()), rel=1e-5)
    theirs = dict(hf.named_parameters())
    adapters = adapters_of(policy)
    assert "score" in adapters.modules
    for name, parameter in adapters.named_parameters(0).items():
        module, _, kind = name.rpartition(".")
        a, b = (tensors[f"{PREFIX}{module}.lora_{k}.weight"].double() for k in "AB")
        slope: Any = theirs[f"{module}.weight"].grad
        expected = 2.0 * (b.T @ slope if kind == "lora_A" else slope @ a.T)
        found: Any = parameter.grad
        torch.testing.assert_close(found.full_tensor().double(), expected, rtol=2e-3, atol=2e-6)


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe", "llama"])
def test_a_version_is_what_transformers_loads_and_what_training_goes_on_from(
    group: None, tmp_path: Path, family: str
) -> None:
    source = make_family(tmp_path / "model", family)
    make_tiny_model(tmp_path / "tokenizer")
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (source / file).write_bytes((tmp_path / "tokenizer" / file).read_bytes())
    first = published(loaded(source), source, tmp_path / "run")
    hf, found = AutoModelForSequenceClassification.from_pretrained(first, output_loading_info=True)
    assert not any(found.values())
    assert hf.config.num_labels == 1 and type(hf).__name__.endswith("ForSequenceClassification")
    assert hf.config.pad_token_id == AutoTokenizer.from_pretrained(first).pad_token_id
    second = published(loaded(first, seed=8), first, tmp_path / "again")  # its own head, whatever the seed
    assert (second / "model.safetensors").read_bytes() == (first / "model.safetensors").read_bytes()
    assert json.loads((second / "config.json").read_text()) == json.loads((first / "config.json").read_text())
    assert "lm_head.weight" not in stored_tensors(first)


@pytest.mark.parametrize("family", ["gpt_neox", "phi"])
def test_a_head_of_another_name_or_with_a_bias_is_left_out(group: None, tmp_path: Path, family: str) -> None:
    source = make_model(tmp_path / family, family)
    AutoTokenizer.from_pretrained(make_tiny_model(tmp_path / "tokenizer")).save_pretrained(source)
    policy = loaded(source)
    labelled = published(policy, source, tmp_path / "run")
    hf = AutoModelForSequenceClassification.from_pretrained(labelled)
    assert torch.equal(hf.score.weight, policy.hf.score.weight.full_tensor()) and hf.config.num_labels == 1


def test_a_new_head_is_the_seeds_and_half_precision_scores_in_float32(group: None, tmp_path: Path) -> None:
    source = make_tiny_model(tmp_path / "model")
    heads = [loaded(source, seed).hf.score.weight.full_tensor() for seed in (1, 1, 2)]
    assert torch.equal(heads[0], heads[1]) and not torch.equal(heads[0], heads[2])
    assert 0.1 < float(heads[0].std()) < 0.4  # the config's initializer_range
    policy = loaded(source, dtype="bfloat16")
    batch = as_pairs(fake_batch(FakeDataConfig(batch_size=2, seq_len=8), 90, 0, 0, 0, 1), scores=True)
    micro = step_of(policy).micro_batch(batch, 0)
    with torch.no_grad(), policy.packing(micro):
        scores, entropy = policy(micro)
    assert scores.shape == (2,) and scores.dtype == torch.float32 and not len(entropy)
    assert not torch.equal(scores, scores.bfloat16().float())


def test_a_model_without_such_a_head_is_refused(group: None, tmp_path: Path) -> None:
    source = make_tiny_model(tmp_path / "model")
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | {"model_type": "granite"}))
    with pytest.raises(ValueError, match=r"model\.name = .*transformers has no granite with a head for labels"):
        loaded(source)
    labelled = dict(config) | {"architectures": ["Qwen3ForSequenceClassification"], "num_labels": 2}
    (source / "config.json").write_text(json.dumps(labelled))
    tensors = load_file(source / "model.safetensors") | {"score.weight": torch.zeros(2, config["hidden_size"])}
    save_file(tensors, source / "model.safetensors")
    with pytest.raises(ValueError, match=r"is a classifier of 2 labels, and a reward model has one"):
        loaded(source)
    with pytest.raises(ValueError, match=r"no tokenizer in"):
        loaded(make_family(tmp_path / "bare", "llama"))


@pytest.mark.parametrize("family", ["gemma3", "qwen3_5"])
def test_the_language_model_of_one_that_sees_becomes_a_reward_model(group: None, tmp_path: Path, family: str) -> None:
    source = make_seeing_gemma(tmp_path / "model") if family == "gemma3" else make_vision_model(tmp_path / "m", family)
    policy = loaded(source)
    first = published(policy, source, tmp_path / "run")
    sides = [ids + 3 for ids in sides_of(2)]
    batch = build_rank_batch([[0, 1, 2, 3]], sides, [np.arange(len(ids)) == len(ids) - 1 for ids in sides])
    micro = step_of(policy).micro_batch(batch, 0)
    with torch.no_grad(), policy.packing(micro):
        mine, _ = policy(micro)
    hf, found = AutoModelForSequenceClassification.from_pretrained(first, output_loading_info=True, dtype=torch.float32)
    rows = pad_sequence([torch.from_numpy(ids.astype(np.int64)) for ids in sides], True, hf.config.pad_token_id)
    with torch.no_grad():
        theirs = hf.eval()(input_ids=rows, attention_mask=(rows != hf.config.pad_token_id).long()).logits[:, 0]
    assert not any(found.values()) and hf.config.model_type == f"{family}_text"
    torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)
    assert not [name for name in stored_tensors(first) if "vi" in name]  # vision_tower, visual
    second = published(loaded(first, seed=8), first, tmp_path / "again")
    assert (second / "model.safetensors").read_bytes() == (first / "model.safetensors").read_bytes()


def test_a_tokenizer_without_a_padding_token_is_published_with_one(group: None, tmp_path: Path) -> None:
    source = make_tiny_model(tmp_path / "model")
    stated = json.loads((source / "tokenizer_config.json").read_text())
    del stated["pad_token"]
    (source / "tokenizer_config.json").write_text(json.dumps(stated))
    first = published(loaded(source), source, tmp_path / "run")
    hf, tokenizer = AutoModelForSequenceClassification.from_pretrained(first), AutoTokenizer.from_pretrained(first)
    assert tokenizer.pad_token == tokenizer.eos_token and tokenizer.pad_token_id == hf.config.pad_token_id
    texts = ["say", "say yes or no"]
    with torch.no_grad():
        both = hf(**tokenizer(texts, padding=True, return_tensors="pt")).logits
        alone = [hf(**tokenizer(text, return_tensors="pt")).logits for text in texts]
    torch.testing.assert_close(both, torch.cat(alone))
    (source / "tokenizer_config.json").write_text(json.dumps(stated | {"eos_token": None}))
    with pytest.raises(ValueError, match=r"has none of the special tokens.* state pad_token in its tokenizer_config"):
        loaded(source)


def test_a_padding_token_that_the_model_has_no_embedding_of_is_replaced(group: None, tmp_path: Path) -> None:
    source = make_tiny_model(tmp_path / "model")
    size, tokenizer = loaded(source).hf.config.vocab_size, AutoTokenizer.from_pretrained(source)
    tokenizer.add_tokens([f"<extra {n}>" for n in range(size - len(tokenizer))])
    tokenizer.add_special_tokens({"pad_token": "[PAD]"})
    tokenizer.save_pretrained(source)
    assert tokenizer.pad_token_id == size
    first = published(loaded(source), source, tmp_path / "run")
    theirs = AutoTokenizer.from_pretrained(first)
    assert theirs.pad_token_id == json.loads((first / "config.json").read_text())["pad_token_id"] < size
    assert theirs.pad_token == tokenizer.eos_token
    assert ChatTokenizer(tokenizer).fingerprint == ChatTokenizer(theirs).fingerprint  # of the tokens of conversations


def make_seeing_gemma(folder: Path) -> Path:
    tokenizer = AutoTokenizer.from_pretrained(make_tiny_model(folder / "tokenizer"))
    text = tiny_config("gemma3", vocab_size=384, pad_token_id=tokenizer.pad_token_id).to_dict()
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision = sizes | {"image_size": 32, "patch_size": 8}
    sees: dict[str, Any] = {"vision_config": vision, "mm_tokens_per_image": 4, "image_token_id": 380}
    config = Gemma3Config(text_config=text, **sees)
    Gemma3ForConditionalGeneration(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def test_families_without_reward_models_are_known_before_anything_starts(tmp_path: Path) -> None:
    """A family with a head of another name (ctrl) is none."""
    causal = set(MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES) & set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) - set(
        REFUSED
    )
    assert causal - {"ctrl", "gemma3", "qwen3_5"} == SCORED  # these two's language models
    for kind, refused in (("granite", True), ("qwen3", False), ("of_tomorrow", False)):
        folder = tmp_path / kind
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps({"model_type": kind}))
        found = list(reward_models(Experiment.model_validate(tree(str(folder)))))
        assert [problem.key for problem in found] == ["model.name"] * refused
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen3_vl", "text_config": {}}))
    (problem,) = reward_models(Experiment.model_validate(tree(str(folder))))
    assert "transformers has no reward models of model_type qwen3_vl_text" in problem.message


def tokenised(folder: Path, row: dict[str, Any]) -> Any:
    sft = SFTConfig.model_validate({"preference": {"type": "bradley_terry"}, "data": {"path": "x.jsonl"}})
    tokenizer = ChatTokenizer(AutoTokenizer.from_pretrained(folder))
    return RowTokenizer(tokenizer, sft.data, sft.data, 64, 400).row(row)


def test_each_side_is_read_at_the_last_token_of_the_whole_conversation(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "model")
    row = {"prompt": "say", "chosen": "yes", "rejected": "no"}
    (pair,) = tokenised(folder, row).samples
    tokenizer = AutoTokenizer.from_pretrained(folder)
    for side, reply in zip(pair.sides(), ("yes", "no"), strict=True):
        talk = [{"role": "user", "content": "say"}, {"role": "assistant", "content": reply}]
        text = tokenizer.apply_chat_template(talk, tokenize=False)
        assert side.token_ids.tolist() == tokenizer(text, add_special_tokens=False)["input_ids"]
        assert np.flatnonzero(side.loss_mask).tolist() == [len(side.token_ids) - 1]
    assert pair.margin == 0 and tokenised(folder, row | {"margin": 2}).samples[0].margin == 2
    assert "expected `margin` as a number, got 'much'" in str(tokenised(folder, row | {"margin": "much"}).error)
    tokenizer.pad_token = tokenizer.eos_token
    tokenizer.chat_template = tokenizer.chat_template.replace("'<|im_end|>\\n'", f"'{tokenizer.eos_token}'")
    tokenizer.save_pretrained(folder)
    with pytest.raises(SFTDataError, match=r"ends with the tokenizer's padding token .* state another pad_token"):
        raise SFTDataError(str(tokenised(folder, row).error))


def tree(name: str, **changes: Any) -> dict[str, Any]:
    preference = {"type": "bradley_terry"} | changes.pop("preference", {})
    data = {"path": "x.jsonl"}
    return {"kind": "sft", "model": {"name": name}, "sft": {"data": data, "preference": preference}, **changes}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"preference": {"beta": 0.2}}, "beta is of log-probabilities"),
        ({"preference": {"nll_weight": 1}}, "nll_weight is of log-probabilities"),
        ({"model": {"name": "m", "vision": "frozen"}}, "leave model.vision and"),
        (
            {"inference": {}, "orchestrator": {"eval": {"env": [{"id": "x"}]}}},
            "leave model.vision and",
        ),
    ],
)
def test_what_a_reward_model_has_not_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        Experiment.model_validate(tree("m", **changes))


def test_a_reward_model_replies_nowhere_and_a_judge_is_of_its_runners_kind(group: None, tmp_path: Path) -> None:
    source = make_tiny_model(tmp_path / "model", tied=False)
    reward = published(loaded(source), source, tmp_path / "run")

    def problems(**values: Any) -> list[str | None]:
        return [problem.key for problem in reward_models(Experiment.model_validate(values))]

    assert problems(**tree(str(reward))) == []
    assert problems(kind="eval", model={"name": str(reward)}) == ["model.name"]
    alone = Experiment.model_validate({"kind": "eval", "model": {"name": str(reward)}, "inference": {}})
    found = lint(alone, SiteConfig(name="here"))
    assert ("PH131", "model.name") in {(one.code, one.key) for one in found}
    judged = {"model": {"name": str(source)}, "inference": {}, "orchestrator": {"env": [{"id": "rows"}]}}
    for judge, runner, expected in (
        (reward, "pooling", []),
        (reward, "generate", ["judge_inference.runner"]),
        (source, "pooling", ["judge_inference.runner"]),
        (source, "generate", []),
    ):
        assert problems(**judged, judge_inference={"model": str(judge), "runner": runner}) == expected
    by_hand = Experiment.model_validate({"model": {"name": str(reward)}, "inference": {}})
    assert list(reward_models(by_hand, "inference")) == []
    assert {"--runner", "pooling"} <= set(build_argv(by_hand, device="cpu", replica=0, port=0))
    (problem,) = reward_models(
        by_hand.model_copy(update={"inference": InferenceConfig(backend="transformers")}), "inference"
    )
    assert problem.key == "inference.backend" and "which vLLM alone serves" in problem.message
    embeds = {"model": str(source), "runner": "pooling", "vllm": {"convert": "embed"}}
    assert problems(**judged, judge_inference=embeds) == []
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | {"architectures": ["Qwen2ForRewardModel"]}))
    assert problems(**judged, judge_inference={"model": str(source), "runner": "pooling"}) == []
    taught = {"env": [{"id": "rows"}], "teacher": {"model": str(reward)}, "advantage": {"type": "opd"}}
    loss = {"loss": {"kl": {"model": str(reward)}}}
    assert problems(**judged | {"orchestrator": taught, "teacher_inference": {}, "trainer": loss}) == [
        "trainer.loss.kl.model",
        "orchestrator.teacher.model",
    ]
    with pytest.raises(ConfigError, match=r"step_000001 is a reward model: .* no reply to evaluate"):
        check_published([Version(1, reward)])


@pytest.mark.parametrize("lora", [None, {}])
def test_a_version_is_whole_and_a_checkpoint_is_of_one_kind(tmp_path: Path, lora: dict[str, Any] | None) -> None:
    paths, model = RunPaths(tmp_path / "run"), {"name": "m", "lora": lora}
    scores, replies = (
        Experiment.model_validate(tree("m", model=model, preference={"type": kind}))
        for kind in ("bradley_terry", "dpo")
    )
    write_snapshot(scores, paths.root, ["test"])
    paths.weights_step(1).mkdir(parents=True)
    with pytest.raises(ConfigError, match=r"step_000001 is a model directory as it is"):
        export.run([str(paths.root), "--merged", "1"], "prime-hpc")
    of_adapter = {} if scores.model.lora is None else {"adapter": scores.model.lora.model_dump(mode="json")}
    for step, meta in enumerate(({"scores": True}, {"scores": False}, {}), 1):
        make_checkpoint(paths, step, kind="sft", meta=meta | of_adapter)
        checkpoint = resolve_resume(paths.checkpoints, step, deep=False)
        same, other = (scores, replies) if meta.get("scores") else (replies, scores)
        then, now = ("a reward", "a language") if meta.get("scores") else ("a language", "a reward")
        assert mismatches(same, checkpoint) == []
        (wrong,) = mismatches(other, checkpoint)
        assert wrong.startswith(f"it is of {then} model") and f"and this run trains {now} model" in wrong


def test_a_margin_of_rows_that_the_loss_does_not_take_is_told() -> None:
    def said(kind: str) -> list[str | None]:
        values = tree("o/m", preference={"type": kind})
        values["sft"]["data"]["columns"] = {"margin": "gap"}
        found = lint(Experiment.model_validate(values), SiteConfig(name="here"))
        return [one.key for one in found if one.code == "PH241"]

    assert said("bradley_terry") == [] and said("dpo") == said("ipo") == said("hinge") == ["sft.data.columns"]


def test_margins_of_a_column_that_no_row_has_are_refused(tmp_path: Path) -> None:
    rows, words = tmp_path / "rows.jsonl", r"takes margins from `gap`; the columns are: chosen, .*margin, prompt"
    row = {"prompt": "say", "chosen": "yes", "rejected": "no", "margin": 2}
    rows.write_text(json.dumps(row) + "\n")
    values = tree("o/m")
    values["sft"]["data"] = {"path": str(rows), "columns": {"margin": "gap"}}
    experiment = Experiment.model_validate(values)
    (found,) = [one for one in lint(experiment, SiteConfig(name="here")) if one.code == "PH207"]
    assert found.severity == "error" and re.search(words, found.message) and "Mend the name" in found.remedy
    (source,) = experiment.sft.sources.values()
    with pytest.raises(SFTDataError, match=words):
        parse_pair(row, source, experiment.sft.data, has_template=True)
    parse_pair(row | {"gap": 0}, source, experiment.sft.data, has_template=True)
    parquet.write_table(pyarrow.Table.from_pylist([row]), tmp_path / "rows.parquet")
    with pytest.raises(SFTDataError, match=words):
        ArrowRows(tmp_path / "rows.parquet", tmp_path, source)


def test_a_reward_model_that_no_engine_will_serve_is_warned_of(tmp_path: Path) -> None:
    for kind, expected in (("gpt_neo", ["warning"]), ("qwen3", []), ("granite", ["error"])):
        (tmp_path / "config.json").write_text(json.dumps({"model_type": kind}))
        found = lint(Experiment.model_validate(tree(str(tmp_path))), SiteConfig(name="here"))
        assert [one.severity for one in found if one.code == "PH131"] == expected


def test_the_plan_counts_one_row_for_the_head(tmp_path: Path) -> None:
    facts = read_model(str(make_tiny_model(tmp_path / "model", tied=False)))
    assert facts is not None and facts.num_params is not None
    scored = trainer_gib(Experiment.model_validate(tree("m")), facts)
    pairs = trainer_gib(Experiment.model_validate(tree("m", preference={"type": "dpo"})), facts)
    assert scored is not None and pairs is not None and scored["logits"] == 0 < pairs["logits"]
    head = facts.vocab_size * facts.hidden
    assert scored["state"] / pairs["state"] == pytest.approx((facts.num_params - head) / facts.num_params)
    kept = checkpoint_gib(Experiment.model_validate(tree("m")), facts)
    assert kept is not None and kept * 2**30 == (facts.num_params - head) * 12


@pytest.mark.parametrize("family", ["gemma3", "qwen3_5"])
def test_the_plan_counts_the_language_model_alone(group: None, tmp_path: Path, family: str) -> None:
    source = make_seeing_gemma(tmp_path / "model") if family == "gemma3" else make_vision_model(tmp_path / "m", family)
    facts, experiment = read_model(str(source)), Experiment.model_validate(tree(str(source)))
    assert facts is not None and facts.num_params is not None
    trained = sum(p.numel() for p in loaded(source).hf.parameters())
    assert facts.num_params > trained == (facts.headless_params or 0) + facts.hidden  # the head
    kept = checkpoint_gib(experiment, facts)
    assert kept is not None and kept * 2**30 == pytest.approx(trained * 12, rel=1e-2)
