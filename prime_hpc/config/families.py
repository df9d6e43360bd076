"""How the model families train: packed, one sample a row, or not at all. Read off a config.json alone.

Lint (on a login node, without torch) and the trainer ask the same table, so that a family is refused before the queue
or not at all. `tools/proofs families` checks it against every causal language model of the installed transformers.

- `packed`: samples lie behind each other in one row, and attention keeps them apart; prompts of a group are computed
  once. For models in which attention alone mixes tokens, through transformers' `AttentionInterface`.
- `single`: every sample has a row of its own, padded at its end. For causal models with layers that would carry one
  sample into the next: convolutions, state spaces, linear and recurrent attention.
  Attention is the trainer's, or the model's own code where no kernel of ours does what it does.
- `refused`: not even a sample alone comes out as the model's own code computes it, or it is no causal language model.

A family that is not named here is taken for `packed`; the trainer's self-test at start finds out whether it is.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

Rows = Literal["packed", "single", "refused"]

_ENCODER = "it is an encoder, or a decoder that needs one, not a causal language model by itself"
_MEDIA = "it is a part of a model of other media and needs that model's inputs"
_HEAD = "its output head is more than one matrix, of which log-probabilities here would miss the rest"
_OWN = "its attention is code of its own, which no packed kernel replaces"
_MASKS = "its attention chooses keys through a mask of its own, which no packed kernel takes"
_MIXES = "convolutions, state spaces or linear attention would carry one sample into the next"
_BESIDE = "its experts answer otherwise beside other samples than alone"
_SHARES = "its layers share the weights of a block, of which every shard would need all"
_STORED = "its checkpoints hold tensors that are split while they are read, which the trainer's reader does not do"
_UNPROVEN = "nothing proves its log-probabilities here: no small model of it can be built and compared"

_REFUSED_GROUPS: dict[str, str] = {
    _ENCODER: """bart bert bert-generation big_bird bigbird_pegasus blenderbot blenderbot-small camembert data2vec-text
        electra ernie marian mbart megatron-bert mvp pegasus plbart prophetnet reformer rembert roberta
        roberta-prelayernorm roc_bert roformer whisper xlm xlm-roberta xlm-roberta-xl xlnet xmod""",
    _MEDIA: """emu3 fuyu git got_ocr2 mllama moshi musicgen musicgen_melody phi4_multimodal trocr gemma4_assistant
        gemma4_unified_assistant""",
    _HEAD: "dory inkling inkling_text modernbert-decoder",
    "its attention depends on segments of its input that the trainer does not have": "cpmant",
    _SHARES: "zamba zamba2",
    _STORED: "lara_mini sarvam_moe",
    _UNPROVEN: "blt cohere_compass_text cohere_compass dbrx qwen4_exp qwen4_exp_text xlstm",
}
REFUSED = {name: reason for reason, names in _REFUSED_GROUPS.items() for name in names.split()}
"""model_type -> reason."""

_SINGLE_GROUPS: dict[str, str] = {
    _MIXES: """bamba falcon_h1 falcon_mamba granitemoehybrid jamba kimi_linear lfm2 lfm2_moe mamba mamba2 minimax
        nemotron_h olmo_hybrid qwen3_5 qwen3_5_moe qwen3_5_moe_text qwen3_5_text qwen3_next recurrent_gemma rwkv
        zaya""",
    _OWN: "bloom codegen falcon gpt_neo gpt_neox_japanese gptj mpt openai-gpt xglm",
    _MASKS: "axk2 deepseek_v32 deepseek_v4 doge glm_moe_dsa hy_v4",
}
SINGLE = {name: reason for reason, names in _SINGLE_GROUPS.items() for name in names.split()}
"""model_type -> reason; besides those whose `layer_types` say it."""

_OWN_ATTENTION = frozenset(name for reason in (_OWN, _MASKS) for name in _SINGLE_GROUPS[reason].split())
_MIXING_LAYERS = frozenset({"linear_attention", "conv", "mamba", "mamba2", "recurrent", "hybrid"})
"""Entries of `layer_types` that mix tokens outside attention."""


_SPLIT = """
    arcee aria_text axk1 cohere cohere2 cohere2_moe cwm deepseek_v3 dots1 ernie4_5 ernie4_5_moe exaone4 exaone_moe
    glm4_moe gpt_neox granite helium hrm_text hy_v3 hyperclovax jais2 kimi_linear laguna llama mellum minimax ministral
    ministral3 mistral mixtral nanochat olmo phi qwen2 qwen2_moe qwen3 qwen3_moe seed_oss smollm3 solar_open starcoder2
    youtu"""
SPLIT = frozenset(_SPLIT.split())
"""Families whose tensor-parallel plan is proved: two ranks compute what one does (`tools/proofs tensor_parallel`)."""

_WHOLE = """
    afmoe apertus axk2 bamba biogpt bitnet bloom codegen ctrl deepseek_v2 deepseek_v32 deepseek_v4 diffllama doge falcon
    falcon_h1 falcon_mamba flex_olmo gemma gemma2 gemma3 gemma3_text gemma3n gemma3n_text gemma4 gemma4_text
    gemma4_unified gemma4_unified_text glm glm4 glm4_moe_lite glm_moe_dsa gpt-sw3 gpt2 gpt_bigcode gpt_neo
    gpt_neox_japanese gpt_oss gptj granite_swa granitemoe granitemoe_swa granitemoehybrid granitemoeshared
    hunyuan_v1_dense hunyuan_v1_moe hy_v4 jamba jetmoe lfm2 lfm2_moe llama4 llama4_text longcat_flash mamba mamba2
    mimo_v2_flash minicpm3 minimax_m2 minimax_m3_vl_text mpt nemotron nemotron_h olmo2 olmo3 olmo_hybrid olmoe
    openai-gpt opt persimmon phi3 phimoe qwen3_5 qwen3_5_moe qwen3_5_moe_text qwen3_5_text qwen3_next recurrent_gemma
    rwkv stablelm vaultgemma xglm zaya"""
WHOLE = frozenset(_WHOLE.split())
"""Families that the trainer refuses to split: transformers has no plan, or one that the trainer does not follow."""

OWN_EXPERTS = frozenset({"jetmoe", "llama4", "llama4_text", "longcat_flash"})
"""Families whose experts are code of their own, not the fused ones of transformers: ranks cannot split them, and their
routers follow nobody."""

STORED_AS: dict[str, dict[str, tuple[str, ...]]] = {
    "axk2": {"W_down": ("fc1",), "W_up": ("fc2",), "q_b_proj": ("q_gate_proj",)},
    "deepseek_v4": {"w1": ("gate_proj",), "w2": ("down_proj",), "w3": ("up_proj",), "wgate": ("gate_proj",)}
    | {"wkv": ("kv_proj",), "wq_a": ("q_a_proj",), "wq_b": ("q_b_proj",), "wo_a": (), "wo_b": ("o_b_proj",)},
    "gpt2": dict.fromkeys(("c_attn", "c_fc", "c_proj"), ()),
    "hrm_text": {"gqkv_proj": ("gate_proj", "q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")},
    "hy_v4": {"linear_gate": ("gate_proj",)},
    "openai-gpt": dict.fromkeys(("c_attn", "c_fc", "c_proj"), ()),
}
"""model_type -> last name of matrices in its checkpoints -> what transformers' code, whose names adapters' targets are,
calls the module, or the modules; () for those that are no plain linear map (`tests/unit/test_families.py` tries every
family)."""

_SCORED = """
    arcee axk1 axk2 biogpt bloom deepseek_v2 deepseek_v3 diffllama doge exaone4 falcon gemma gemma2 gemma3_text glm
    glm4 gpt-sw3 gpt2 gpt_bigcode gpt_neo gpt_neox gpt_oss gptj helium hunyuan_v1_dense hunyuan_v1_moe jamba jetmoe
    llama minicpm3 minimax ministral ministral3 mistral mixtral mpt nemotron olmo olmo2 olmo3 openai-gpt opt persimmon
    phi phi3 phimoe qwen2 qwen2_moe qwen3 qwen3_5_text qwen3_moe qwen3_next seed_oss smollm3 stablelm starcoder2"""
SCORED = frozenset(_SCORED.split())
"""model_type of language models, alone or within one that sees, of which transformers has reward models."""

VISION = frozenset({"qwen2_5_vl", "qwen2_vl", "qwen3_5", "qwen3_5_moe", "qwen3_vl", "qwen3_vl_moe"})
"""Families of which `model.vision` trains a model that sees images: causal language models, for which images are tokens
among others."""
VISION_ALONE = frozenset({"qwen2_5_vl", "qwen2_vl", "qwen3_vl", "qwen3_vl_moe"})
"""Of these, the ones of which transformers has no model of text alone."""
_BOTH_WAYS = frozenset({"gemma3", "gemma4", "paligemma"})
"""Families whose code lets the tokens of an image attend to later ones."""
IMAGE_SHARE = 0.5
"""Of their tokens, those that are taken to be images' where memory is foretold."""

FLOAT32_ALONE = frozenset({"minimax", "openai-gpt"})
"""Families whose own code multiplies the compute dtype's matrices by buffers of float32, which PyTorch refuses."""

_SAME = 1e-6
"""Scales closer than this are one."""


@dataclass(frozen=True)
class Family:
    """How a model trains."""

    model_type: str
    rows: Rows
    reason: str = ""
    """Why not packed."""
    custom_attention: bool = False
    """True if it attends by its own code, with all scores in memory, rather than by the trainer's kernels."""

    @property
    def splits(self) -> bool | None:
        """True if tensor-parallel ranks can share it; None: nothing proves it."""
        return True if self.model_type in SPLIT else False if self.model_type in WHOLE else None

    @property
    def known(self) -> bool:
        """True if it is one of the causal language models of the transformers that these tables were made with."""
        return any(self.model_type in names for names in (SPLIT, WHOLE, REFUSED, SINGLE))

    @property
    def refusal(self) -> str:
        """Why it is refused, as a sentence; empty: it is not."""
        return f"models of model_type {self.model_type} cannot be trained: {self.reason}" if self.refused else ""

    @property
    def refused(self) -> bool:
        """True if it cannot be trained at all."""
        return self.rows == "refused"

    def dtype_problem(self, dtype: str) -> str:
        """Why it does not train with a `model.dtype`, as a sentence; empty: it does."""
        if self.model_type not in FLOAT32_ALONE or dtype == "float32":
            return ""
        return f"models of model_type {self.model_type} train in float32 alone: their code mixes it with {dtype}"

    def rows_as(self, choice: Literal["auto", "packed", "single"]) -> Rows:
        """How it trains with `trainer.rows`. Raises ValueError: packed rows of a family that cannot be packed."""
        if choice == "packed" and self.rows == "single":
            raise ValueError(
                f"trainer.rows = packed: models of model_type {self.model_type} train one sample a row only "
                f"({self.reason}); leave trainer.rows out"
            )
        return self.rows if choice == "auto" or self.refused else choice


def with_text_part(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a config.json; of a model that sees images those of its text part count."""
    text = config.get("text_config")
    return {**config, **text} if isinstance(text, Mapping) else dict(config)


def reward_problem(config: Mapping[str, Any]) -> str:
    """Why there is no reward model of a config.json's family, as a sentence; empty: there is, or nobody knows."""
    kind, text = str(config.get("model_type") or ""), config.get("text_config")
    inner = str(text.get("model_type") or f"{kind}_text") if isinstance(text, Mapping) else kind
    if inner in SCORED or not (family_of(config).known or kind in VISION):
        return ""
    return f"transformers has no reward models of model_type {inner} (none with a head for labels)"


def family_of(config: Mapping[str, Any]) -> Family:
    """How the model of a config trains.
    `config`: the fields of a config.json, or those of a transformers config (`to_dict`)."""
    kind = str(config.get("model_type") or "")
    own = with_text_part(config)
    kinds = [kind, str(own.get("model_type") or "")]
    for name in kinds:
        if name in REFUSED:
            return Family(name, "refused", REFUSED[name])
    if "doge" in kinds and own.get("is_moe"):
        return Family("doge", "refused", _BESIDE)
    if own.get("is_encoder_decoder"):
        return Family(kind, "refused", _ENCODER)
    for name in kinds:
        if name in SINGLE:
            return Family(name, "single", SINGLE[name], name in _OWN_ATTENTION)
    layers = own.get("layer_types") or own.get("layers_block_type") or ()
    if isinstance(layers, list | tuple) and any(str(layer) in _MIXING_LAYERS for layer in layers):
        return Family(kind, "single", _MIXES)
    return Family(kind, "packed")


def vision_problem(config: Mapping[str, Any], vision: str | None) -> str:
    """Why a model does not train with a `model.vision`, as a sentence; empty: it does."""
    kind = str(config.get("model_type") or "")
    if vision is None and kind in VISION_ALONE:
        return f"models of model_type {kind} see images: set model.vision to frozen (or trained)"
    if vision is not None and kind not in VISION:
        why = " (an image's tokens attend to each other both ways, which no packed kernel does)" * (kind in _BOTH_WAYS)
        return (
            f"model.vision = {vision}: models of model_type {kind} do not train with images here{why}; those that do: "
            f"{', '.join(sorted(VISION))}. Leave it out to train on text alone"
        )
    return ""


def first_number(config: Mapping[str, Any], *names: str) -> int:
    """Return the first of these keys that says a number; 0 where none does. Of a list, with a number for each layer
    (Hunyuan) or for text and images (ERNIE), its first."""
    for name in names:
        value = config.get(name)
        if isinstance(value, list | tuple):
            value = value[0] if value else None
        if value:
            return int(value)
    return 0


def count_experts(config: Mapping[str, Any]) -> int:
    """Return the number of experts by a config.json, or by what is below its `text_config`; 0 of a dense model."""
    own = with_text_part(config)
    if own.get("enable_moe_block") is False or own.get("is_moe") is False:  # Gemma 4 and Doge without their experts
        return 0
    return first_number(own, "num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")


def experts_per_token(config: Mapping[str, Any]) -> int:
    """Return through how many of its experts a token goes; `config`: as `count_experts` takes it."""
    own = with_text_part(config)
    return first_number(own, "num_experts_per_tok", "moe_k", "moe_topk", "top_k_experts") or 1


def rotary_problem(config: Mapping[str, Any], context: int) -> str:
    """Why trainer and engines cannot have the same rotary embedding; empty: they can.
    `context`: tokens of the longest sample."""
    own = with_text_part(config)
    rope = own.get("rope_parameters") or own.get("rope_scaling")
    if not isinstance(rope, Mapping):
        return ""
    kind, limit = rope.get("rope_type") or rope.get("type"), own.get("max_position_embeddings")
    if not isinstance(limit, int):
        return ""
    if kind == "dynamic" and context > limit:
        return (
            f"its rotary embedding (dynamic) has no positions beyond max_position_embeddings = {limit} in the engines, "
            f"and the context is {context}"
        )
    original = own.get("original_max_position_embeddings") or rope.get("original_max_position_embeddings")
    if kind == "yarn" and isinstance(original, int) and context > (reach := original * float(rope.get("factor") or 1)):
        return (
            f"its rotary embedding (yarn) has no positions beyond {reach:g} in the engines "
            f"(original_max_position_embeddings * factor), and the context is {context}"
        )
    if kind == "longrope" and isinstance(original, int):
        stated = rope.get("attention_factor")
        if stated is None and rope.get("factor") is not None:
            stated = longrope_scale(float(rope["factor"]), original)
        if stated is not None and abs(float(stated) - longrope_scale(limit / original, original)) > _SAME:
            return (
                f"its longrope embedding states an attention scale of {float(stated):g}, where the engines compute "
                f"{longrope_scale(limit / original, original):g} from max_position_embeddings"
            )
    return ""


def longrope_scale(stretch: float, original: int) -> float:
    """sqrt(1 + ln(stretch) / ln(original)), 1 where nothing is stretched (LongRoPE, arXiv 2402.13753)."""
    return 1.0 if stretch <= 1 else math.sqrt(1 + math.log(stretch) / math.log(original))
