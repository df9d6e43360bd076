"""`plan --rehearse`: the train step on fake tensors, and what is said of memory."""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
import transformers  # noqa: E402
from torch._dynamo.exc import TorchDynamoException  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402

from prime_hpc.config import ConfigError, Experiment  # noqa: E402
from prime_hpc.config.memory_keys import advice, remedies  # noqa: E402
from prime_hpc.config.sections.sft import PreferenceConfig  # noqa: E402
from prime_hpc.config.shapes import SHAPES, shape_config  # noqa: E402
from prime_hpc.launch.estimate.model_facts import GIB, model_facts  # noqa: E402
from prime_hpc.launch.estimate.trainer_memory import trainer_gib  # noqa: E402
from prime_hpc.launch.rehearse import rehearsal_text  # noqa: E402
from prime_hpc.trainer.out_of_memory import explain, held_bytes  # noqa: E402
from prime_hpc.trainer.rehearsal.pretend import find_shape, flash_workspace, gloo_workspace  # noqa: E402
from prime_hpc.trainer.rehearsal.rehearse import rehearse  # noqa: E402
from prime_hpc.trainer.rehearsal.tracker import HOST, MemoryTracker  # noqa: E402
from tests.support.every_family import tiny_config  # noqa: E402
from tests.support.tiny_vision import make_vision_model  # noqa: E402

TINY = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 1024,
}
PARAMS = {  # published sizes, in billions
    "Qwen3-0.6B": 0.6, "Qwen3-1.7B": 1.7, "Qwen3-4B": 4.0, "Qwen3-8B": 8.2, "Qwen3-14B": 14.8, "Qwen3-32B": 32.8,
    "Qwen3-30B-A3B": 30.5, "Qwen3-235B-A22B": 235, "Llama-3.1-8B": 8.03, "Llama-3.1-70B": 70.6,
}  # fmt: skip


def exhaustive(*values: Any) -> Any:
    """Parameters of a test that only the exhaustive runs take."""
    return pytest.param(*values, marks=pytest.mark.exhaustive)


def experiment(folder: Path, name: str = "Qwen3-0.6B", *, kind: str = "rl", **sections: Any) -> Experiment:
    """A tiny model of the named one's kind, of which there is only the config."""
    config = {**SHAPES[name], **TINY}
    config |= (
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32} if "num_experts" in config else {}
    )
    config |= {key: sections[key] for key in ("vocab_size", "model_type") if key in sections}
    (folder / "config.json").write_text(json.dumps(config))
    tree: dict[str, Any] = {"kind": kind, "seq_len": sections.get("seq_len", 64)}
    tree["device"] = sections.get("device", "cuda")
    tree["orchestrator"] = {"env": [{"id": "reverse-text"}], "sampling": {"max_tokens": 16}}
    tree["model"] = {"name": str(folder)} | sections.get("model", {})
    trainer = sections.get("trainer", {})
    tree["trainer"] = trainer if "max_concurrent_runs" in trainer else {"data": {"fake": {}}} | trainer
    return Experiment.model_validate(tree)


def test_storages_count_once_and_until_the_last_view_has_gone():
    with MemoryTracker(granule=512) as tracker:
        a = torch.empty(1000)
        view = a[10:20]
        with tracker.kind("weights"):
            b = torch.empty(100)
        with tracker.kind(HOST):
            torch.empty(10**6)
        assert tracker.live["other"] == 4096 and tracker.live["weights"] == 512
        del a
        assert tracker.live["other"] == 4096
        del view
        assert tracker.live["other"] == 0
        b.untyped_storage().resize_(0)
        assert tracker.live["weights"] == 0
        b.untyped_storage().resize_(2048)
        tracker.is_kind(b, "gradients")
    assert tracker.live["gradients"] == 2048 and tracker.peak.total == 4096 + 512
    assert sum(tracker.peak.by_kind.values()) == tracker.peak.total


def test_fake_and_real_tensors_count_alike():
    def peak(tracker: MemoryTracker) -> int:
        a = torch.randn(64, 64, requires_grad=True)
        with tracker:
            (a @ a).relu().sum().backward()
        return tracker.peak.total

    with FakeTensorMode():
        fake = peak(MemoryTracker())
    assert fake == peak(MemoryTracker()) > 64 * 64 * 4


def test_flash_attention_s_backward_pass_has_its_own_memory():
    from torch.nn.attention.varlen import varlen_attn  # noqa: F401  # registers the operator

    query, key, starts = torch.empty(100, 8, 64, dtype=torch.bfloat16), torch.empty(100, 2, 64), torch.empty(3)
    operator = torch.ops.torch_attn._varlen_attn_backward.default
    accumulated = (100 + 2 * 128) * 8 * 65 * 4
    args = (None, query, key, key, None, None, starts)
    assert flash_workspace(operator, args) == accumulated + 2 * 100 * 8 * 64 * 4
    assert flash_workspace(operator, (None, query, query, query, None, None, starts)) == accumulated
    assert flash_workspace(torch.ops.aten.mm.default, ()) == 0


def test_gloo_copies_what_it_gathers_and_what_it_adds_up():
    whole, part = torch.empty(8), torch.empty(4)
    collectives = torch.ops.c10d
    assert gloo_workspace(collectives._allgather_base_.default, (whole, part)) == whole.nbytes
    assert gloo_workspace(collectives._reduce_scatter_base_.default, (part, whole)) == whole.nbytes
    assert gloo_workspace(collectives.alltoall_base_.default, (whole, whole)) == 0
    assert gloo_workspace(collectives.allreduce_.default, ([whole],)) == 0


def test_known_shapes_have_the_published_sizes(tmp_path):
    assert SHAPES.keys() == PARAMS.keys()
    for name, config in SHAPES.items():
        facts = model_facts(config)
        assert facts is not None and facts.num_params == pytest.approx(PARAMS[name] * 1e9, rel=0.03), name
    assert shape_config("Qwen/Qwen3-4B-Instruct-2507") == SHAPES["Qwen3-4B"]
    assert shape_config("Qwen/Qwen3-8B-FP8") is None and shape_config("someone/other") is None
    found = json.loads((find_shape("Qwen/Qwen3-32B", tmp_path) / "config.json").read_text())
    assert found == SHAPES["Qwen3-32B"]
    with pytest.raises(ValueError, match=r"no directory with a config\.json.*shapes\.py"):
        find_shape("someone/other", tmp_path)


def test_weights_gradients_and_optimizer_are_shards(tmp_path):
    alone = rehearse(experiment(tmp_path, trainer={"no_sync": False, "num_ranks": 1}, device="cpu"), tmp_path)
    many = rehearse(experiment(tmp_path, trainer={"no_sync": False, "num_ranks": 8}, device="cpu"), tmp_path)
    whole = 4 * alone["num_params"]
    assert alone["by_kind"]["weights"] == pytest.approx(whole, rel=0.02)
    assert many["by_kind"]["weights"] == pytest.approx(whole / 8, rel=0.02)
    assert many["by_kind"]["optimizer"] == pytest.approx(2 * whole / 8, rel=0.02)
    assert many["device"] == "cpu" and many["world_size"] == 8 and not torch.distributed.is_initialized()
    assert sum(many["by_kind"].values()) == many["peak"]


def test_thousands_of_ranks(tmp_path):
    trainer = {"num_ranks": 4096, "no_sync": False, "parallel": {"dp_replicate": 8, "tp": 2, "cp": 2}}
    found = rehearse(experiment(tmp_path, trainer=trainer, device="cpu"), tmp_path)
    assert found["world_size"] == 4096 and 0 < found["by_kind"]["weights"] < 4 * found["num_params"] / 32


@pytest.mark.exhaustive
def test_a_reward_model_has_a_row_for_a_head(tmp_path):
    run = experiment(tmp_path, "Qwen3-8B", kind="sft", model={"lora": {}})
    facts = model_facts(json.loads((tmp_path / "config.json").read_text()))
    assert facts is not None and facts.num_params is not None and not facts.tied
    scores = run.sft.model_copy(update={"preference": PreferenceConfig(type="bradley_terry")})
    found = rehearse(run.model_copy(update={"sft": scores}), tmp_path)
    head = facts.vocab_size * facts.hidden
    assert found["num_params"] == pytest.approx(facts.num_params - head, abs=head / 100)


@pytest.mark.exhaustive
def test_a_critic_takes_a_policys_room_again_and_its_estimate_says_so(tmp_path):
    def found(**changes: Any) -> tuple[dict[str, int], float]:
        trainer = {"num_ranks": 4, "no_sync": False, "micro_batch_tokens": 4096} | changes
        run = experiment(tmp_path, "Qwen3-0.6B", trainer=trainer)
        return rehearse(run, tmp_path)["by_kind"], estimated(run, tmp_path)["state"]

    (plain, state), (both, of_both) = found(), found(critic={})
    assert both["weights"] == pytest.approx(2 * plain["weights"], rel=0.01)
    assert both["optimizer"] == pytest.approx(2 * plain["optimizer"], rel=0.01)
    assert both["activations"] < 1.2 * plain["activations"]  # each at its turn
    assert of_both == pytest.approx(2 * state, rel=0.01)


@pytest.mark.exhaustive
def test_what_saves_memory_does(tmp_path):
    def of(model: dict[str, Any], trainer: dict[str, Any] | None = None) -> dict[str, int]:
        sections: dict[str, Any] = {
            "model": model,
            "trainer": {"num_ranks": 4, "micro_batch_tokens": 4096} | (trainer or {}),
        }
        by_kind: dict[str, int] = rehearse(experiment(tmp_path, **sections), tmp_path)["by_kind"]
        return by_kind

    plain, recomputed = of({}), of({"ac": {}}, {"optim": {"offload": True}})
    assert recomputed["activations"] < plain["activations"] and recomputed["optimizer"] < plain["optimizer"]
    offloaded = of({"ac": {"offload": True}})
    assert offloaded["activations"] < recomputed["activations"]


def estimated(run: Experiment, folder: Path) -> dict[str, float]:
    """GiB of the plan's estimate, by what they are for."""
    facts = model_facts(json.loads((folder / "config.json").read_text()))
    assert facts is not None
    parts = trainer_gib(run, facts)
    assert parts is not None
    return parts


@pytest.mark.parametrize(
    ("model", "chunk"),
    [
        ({"dtype": "bfloat16"}, 256),
        ({"dtype": "bfloat16", "lora": {}}, 256),
        ({"dtype": "bfloat16"}, 2048),
        exhaustive({"dtype": "float32"}, 256),
    ],
)
def test_the_plan_counts_the_logits_as_the_rehearsal_does(tmp_path, model, chunk):
    trainer = {"micro_batch_tokens": 1024, "logits_chunk_tokens": chunk, "no_sync": False}
    run = experiment(tmp_path, model=model, trainer=trainer, vocab_size=65536)
    planned, head = estimated(run, tmp_path)["logits"], rehearse(run, tmp_path)["by_kind"]["head"]
    assert planned == pytest.approx(head / GIB, rel=0.1)


@pytest.mark.exhaustive
def test_the_plan_counts_scores_that_no_kernel_does_without(tmp_path):
    """Quadratic in a sample's length; recomputation keeps one layer's."""

    for model in ({"dtype": "bfloat16"}, {"dtype": "bfloat16", "ac": {"freq": 1}}):
        run = experiment(tmp_path, model=model, seq_len=2048, model_type="doge")
        parts = estimated(run, tmp_path)
        found = rehearse(run, tmp_path)["by_kind"]["activations"] / GIB - parts["activations"]
        assert 0.6 * found < parts["scores"] < 1.6 * found, model
    assert "scores" not in estimated(experiment(tmp_path), tmp_path)


@pytest.mark.parametrize(
    ("name", "compiled"),
    [
        ("Qwen3-0.6B", False),
        ("Qwen3-30B-A3B", False),
        *map(exhaustive, ["Llama-3.1-8B", "Llama-3.1-8B", "Qwen3-0.6B", "Qwen3-30B-A3B"], [True, False, True, True]),
    ],
)
def test_the_estimate_of_activations_is_near_the_rehearsal(tmp_path, name, compiled):
    run = experiment(tmp_path, name, seq_len=4096, model={"compile": compiled})
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 8}))  # beside one block's own work
    found = rehearse(run, tmp_path)["by_kind"]["activations"] / GIB
    assert 0.8 < estimated(run, tmp_path)["activations"] / found < 1.2


SIZES: dict[str, dict[str, Any]] = {
    "gpt_neox": {"hidden_size": 6144, "num_attention_heads": 64, "intermediate_size": 24576},
    "qwen2_moe": {
        "hidden_size": 3584, "num_attention_heads": 28, "num_key_value_heads": 4, "num_experts": 64,
        "num_experts_per_tok": 8, "moe_intermediate_size": 2560, "shared_expert_intermediate_size": 20480,
    },
    "glm4_moe": {
        "hidden_size": 4096, "num_attention_heads": 96, "num_key_value_heads": 8, "head_dim": 128, "use_qk_norm": True,
        "n_routed_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 1408, "n_shared_experts": 1,
        "first_k_dense_replace": 0, "n_group": 1, "topk_group": 1,
    },
    "deepseek_v3": {
        "hidden_size": 7168, "num_attention_heads": 128, "num_key_value_heads": 128, "q_lora_rank": 1536,
        "kv_lora_rank": 512, "n_routed_experts": 64, "num_experts_per_tok": 8, "moe_intermediate_size": 2048,
        "n_shared_experts": 1, "first_k_dense_replace": 0, "n_group": 8, "topk_group": 4,
    },
    "gpt_oss": {
        "hidden_size": 2880, "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64,
        "intermediate_size": 2880, "num_local_experts": 32, "num_experts_per_tok": 4,
    },
    "llama4_text": {
        "hidden_size": 5120, "num_attention_heads": 40, "num_key_value_heads": 8, "head_dim": 128,
        "intermediate_size": 8192, "num_local_experts": 16, "num_experts_per_tok": 1, "interleave_moe_layer_step": 1,
    },
}  # fmt: skip
"""Published ones, of fewer layers and experts."""


@pytest.mark.exhaustive
@pytest.mark.parametrize("family", ["gpt_neox", *map(exhaustive, [name for name in SIZES if name != "gpt_neox"])])
def test_the_estimate_knows_other_blocks(tmp_path, family):
    """Without gates, with experts that all tokens go through, with latent attention, with all scores."""
    run = experiment(tmp_path, seq_len=4096, trainer={"num_ranks": 8})
    rest = {"num_hidden_layers": 6, "vocab_size": 32000, "pad_token_id": 0}
    transformers.AutoConfig.for_model(family, **SIZES[family], **rest).save_pretrained(tmp_path)
    report = rehearse(run, tmp_path)
    facts = model_facts(json.loads((tmp_path / "config.json").read_text()), report["num_params"])
    assert facts is not None
    parts = trainer_gib(run, facts) or {}
    planned = parts["activations"] + parts.get("scores", 0.0)
    assert 0.8 < planned / (report["by_kind"]["activations"] / GIB) < 1.2


@pytest.mark.exhaustive
@pytest.mark.parametrize("sections", [{}, exhaustive({"ac": {}}), exhaustive({"dtype": "float32"})])
def test_the_estimate_knows_layers_of_a_gated_delta_rule(tmp_path, sections):
    """Three in four blocks of Qwen3.5 keep ten times what attention keeps, where no kernel stands in."""
    # so many that the peak is where activations are, not where gradients are, whose blocks are few here
    run = experiment(tmp_path, seq_len=256, trainer={"micro_batch_tokens": 4096}, model=sections)
    widths = {"hidden_size": 2560, "intermediate_size": 9216, "num_attention_heads": 16, "num_key_value_heads": 4}
    heads = {"head_dim": 256, "linear_num_value_heads": 32, "linear_num_key_heads": 16}
    transformers.AutoConfig.for_model(
        "qwen3_5_text", **widths, **heads, num_hidden_layers=4, vocab_size=32000, pad_token_id=0
    ).save_pretrained(tmp_path)
    found = rehearse(run, tmp_path)["by_kind"]["activations"] / GIB
    assert 0.9 < estimated(run, tmp_path)["activations"] / found < 1.1


@pytest.mark.parametrize(
    ("name", "kind", "sections"),
    [
        ("Qwen3-30B-A3B", "rl", {"trainer": {"num_ranks": 4, "parallel": {"ep": 2}}}),
        exhaustive(
            "Llama-3.1-8B", "rl", {"model": {"lora": {}}, "trainer": {"num_ranks": 2, "max_concurrent_runs": 4}}
        ),
        exhaustive("Qwen3-30B-A3B", "sft", {"trainer": {"num_ranks": 2}}),
        exhaustive("Llama-3.1-8B", "rl", {"model": {"dtype": "float32"}, "trainer": {"loss": {"kl": {}}}}),
        exhaustive(
            "Qwen3-8B", "rl", {"model": {"compile": True}, "trainer": {"optim": {"type": "muon"}, "num_ranks": 2}}
        ),
    ],
)
def test_what_can_be_trained_can_be_rehearsed(tmp_path, name, kind, sections):
    found = rehearse(experiment(tmp_path, name, kind=kind, **sections), tmp_path)
    assert found["peak"] > 0 and found["by_kind"]["activations"] + found["by_kind"]["head"] > 0
    assert bool(found["notes"]) == (not sections["trainer"].keys().isdisjoint({"parallel", "max_concurrent_runs"}))
    if "lora" in sections.get("model", {}):
        assert found["notes"] == ["of one run's adapter: those of 3 more take up to 0.00 GiB a rank besides"]


@pytest.mark.exhaustive
@pytest.mark.parametrize("family", ["qwen3_vl", *map(exhaustive, ["qwen2_5_vl", "qwen3_vl_moe", "qwen3_5"])])
def test_images_are_rehearsed(tmp_path, family):
    """Of the largest size that the model's processor makes: 256 tokens of 4 patches."""
    found = {}
    make_vision_model(tmp_path / "model", family)
    for vision in ("frozen", "trained"):
        run = experiment(tmp_path, seq_len=512, model={"name": str(tmp_path / "model"), "vision": vision})
        found[vision] = rehearse(run, tmp_path)
        assert found[vision]["notes"][0].startswith("a sample of 512 tokens holds 1 image(s) of 256 tokens (as prepro")
    frozen, trained = (found[vision]["by_kind"] for vision in ("frozen", "trained"))
    depth, patches, width = 3, 1024, 64
    assert trained["activations"] - frozen["activations"] > depth * patches * 8 * width * 2
    assert trained["optimizer"] > frozen["optimizer"] and trained["gradients"] > frozen["gradients"]
    (tmp_path / "model" / "preprocessor_config.json").unlink()
    assert "1 image(s) of 256 tokens (no preprocessor_config.json" in rehearse(run, tmp_path)["notes"][0]


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["Qwen3-0.6B", exhaustive("Qwen3-30B-A3B")])
def test_compiled_blocks_keep_less(tmp_path, name):
    found = [
        rehearse(experiment(tmp_path, name, seq_len=1024, model={"compile": on, "ac": ac}), tmp_path)["by_kind"]
        for on, ac in ((False, None), (True, None), (True, {}))
    ]
    eager, compiled, recomputed = (kinds["activations"] for kinds in found)
    assert 0 < compiled < 0.8 * eager and recomputed < eager
    assert found[0]["weights"] == found[1]["weights"] and found[0]["optimizer"] == found[1]["optimizer"]


@pytest.mark.exhaustive
def test_a_block_that_is_not_compiled_without_values_is_rehearsed_eagerly(tmp_path, monkeypatch):
    def fails(forward: Any, **_: Any) -> Any:
        def run(*args: Any, **kwargs: Any) -> Any:
            raise TorchDynamoException("no such fake\n" + "and a long explanation " * 20)

        return run

    eager = rehearse(experiment(tmp_path), tmp_path)
    monkeypatch.setattr(torch, "compile", fails)
    found = rehearse(experiment(tmp_path, model={"compile": True}), tmp_path)
    assert found["by_kind"] == eager["by_kind"]
    (note,) = found["notes"]
    words = "Qwen3DecoderLayer cannot be compiled on tensors without values (TorchDynamoException: no such fake and a"
    assert note.startswith(words) and "the figures without model.compile" in note and len(note) < 500


def test_a_model_that_computes_nothing_without_values_is_named(tmp_path):
    """Its experts split rows by what its router chose."""
    run = experiment(tmp_path)
    tiny_config("jetmoe").save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"JetMoeForCausalLM computes nothing without values \(RuntimeError: split"):
        rehearse(run, tmp_path)
    assert not torch.distributed.is_initialized()


def test_a_layout_that_cannot_work_is_refused_as_by_the_trainer(tmp_path):
    with pytest.raises(ValueError, match=r"trainer\.parallel\.tp = 8 does not divide the model's 4 attention heads"):
        rehearse(experiment(tmp_path, trainer={"num_ranks": 8, "parallel": {"tp": 8}}), tmp_path)


def test_remedies_leave_out_what_is_set(tmp_path):
    plain = experiment(tmp_path)
    assert remedies(plain, "activations")[0] == "--model.ac (recompute)"
    saving = experiment(
        tmp_path, model={"ac": {"offload": True}}, trainer={"no_sync": False, "optim": {"offload": True}}
    )
    assert not any("ac" in key.split(".") for key in remedies(saving, "activations"))
    assert remedies(saving, "optimizer") == ["more trainer.num_ranks"] and remedies(plain, "other") == []
    text = advice(plain, {"other": 9.0, "head": 3.0, "weights": 2.0, "activations": 1.0})
    assert text.startswith("head 3.0 GiB: a smaller trainer.logits_chunk_tokens") and "activations" not in text


def test_out_of_memory_says_what_was_held_and_what_helps(tmp_path):
    model = torch.nn.Linear(1024, 1024, bias=False)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 1024)).sum().backward()
    optimizer.step()
    step: Any = SimpleNamespace(policy=model, optimizer=optimizer, critic=None)
    held = held_bytes(step, torch.device("cpu"))
    assert held["weights"] == held["gradients"] == 2**22 and held["optimizer"] == pytest.approx(2**23, abs=8)
    error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity ...")
    words = explain(error, experiment(tmp_path), held, 3 * 2**30, rank=5, step=7)
    assert words.startswith(
        "rank 5 ran out of memory in step 7: CUDA out of memory. It held, in GiB: activations 2.98, "
    )
    assert "--model.ac" in words and "plan --rehearse" in words


def test_the_report_says_whether_it_fits(tmp_path):
    found: dict[str, Any] = {
        "num_params": 6e8, "world_size": 4, "device": "cuda", "no_sync": False, "notes": ["n"], "seconds": 3.0,
        "phase": "step 2", "peak_gib": 70.0, "by_kind_gib": {"weights": 70.0}, "context_gib": 1.0,
    }  # fmt: skip
    text = rehearsal_text(experiment(tmp_path), found | {"gpu_gib": 80.0, "fits": True, "advice": None})
    assert "fits: 71.0 of 80 GiB" in text and "note: n" in text
    text = rehearsal_text(experiment(tmp_path), found | {"gpu_gib": None, "fits": None, "advice": None})
    assert "--gpu-memory-gib" in text


def test_bad_values_and_a_machine_without_torch(tmp_path, monkeypatch):
    from prime_hpc.cli.verbs.experiment.plan import run
    from prime_hpc.launch import rehearse as launch

    for argv, words in (
        (["--gpu-memory-gib", "80"], "belongs to --rehearse"),
        (["--rehearse", "--gpu-memory-gib", "x"], "GiB"),
    ):
        with pytest.raises(ConfigError, match=words):
            run([*argv, "exp.yaml"], "prime-hpc plan")
    monkeypatch.setattr(launch.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(ConfigError, match=r"needs torch and transformers \(no GPU\)"):
        launch.rehearse(experiment(tmp_path), None)


def test_the_verb_rehearses_in_a_process_of_its_own(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    experiment(folder)
    command = [sys.executable, "-m", "prime_hpc.cli", "plan", "--rehearse", "--gpu-memory-gib", "80", "--json"]
    command += ["--launch", "local", "--model.name", str(folder), "--seq-len", "64", "--trainer.data.fake", "{}"]
    command += ["--orchestrator.env", '[{"id": "reverse-text"}]', "--orchestrator.sampling.max-tokens", "16"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2], check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)["rehearsal"]
    assert found["fits"] is True and found["peak_gib"] > 0 and found["world_size"] == 1
