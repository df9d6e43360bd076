"""Shape of a model, from its config.json alone.

Neither torch nor transformers is loaded, and nothing is downloaded: a hub model counts as known where the hub's cache
has its config.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from prime_hpc.config.families import count_experts, experts_per_token, family_of, first_number, with_text_part
from prime_hpc.launch.estimate.vision import VisionFacts, vision_facts
from prime_hpc.store.model.config import find_config, read_config
from prime_hpc.store.model.files import StoredTensor, headless, is_classifier, stored_tensors

GIB = 2**30
WIDTH = {"float32": 4, "bfloat16": 2, "float16": 2}
"""Bytes of a number of a dtype."""
_NORMED_HEADS = frozenset({
    "afmoe", "apertus", "dots1", "exaone4", "exaone_moe", "flex_olmo", "gemma3", "gemma3n", "gemma4",
    "hunyuan_v1_dense", "hunyuan_v1_moe", "lfm2", "lfm2_moe", "minimax_m2", "nanochat", "olmo2", "olmo3", "olmoe",
    "qwen3", "qwen3_5", "qwen3_5_moe", "qwen3_moe", "qwen3_next", "qwen3_omni_moe", "qwen3_vl", "qwen3_vl_moe",
})  # fmt: skip
"""Values of `model_type` whose code in transformers norms each head's queries and keys, whatever the config says."""
_UNGATED_ROOT_NORMED = frozenset({"apertus", "arcee", "nanochat"})
_UNGATED = _UNGATED_ROOT_NORMED | {
    "biogpt", "gpt2", "gpt_neox", "gpt_neox_japanese", "jais2", "nemotron", "persimmon", "phi", "starcoder2"
}  # fmt: skip
"""Values of `model_type` whose feed-forward blocks are two matrices, most of them behind norms that keep no float32."""
_SINKS = frozenset({"gpt_oss", "granite_swa", "granitemoe_swa", "mimo_v2_flash"})
"""Values of `model_type` whose attention has sinks, which no kernel here takes: all scores are made."""


@dataclass(frozen=True)
class DeltaLayers:
    """Layers of a gated delta rule (linear attention) among the others, whose queries have a gate then: Qwen3-Next,
    Qwen3.5."""

    num_layers: int
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int

    @property
    def keys(self) -> int:
        """Width of the queries, and of the keys."""
        return self.key_heads * self.key_dim

    @property
    def values(self) -> int:
        """Width of the values, of their gate, and of what comes out."""
        return self.value_heads * self.value_dim


@dataclass(frozen=True)
class ModelFacts:
    """Shape of a causal language model."""

    num_params: int | None
    """None: an architecture that this file cannot count, and no weights to read it from."""
    hidden: int
    intermediate: int
    """Width of the feed-forward block that one token goes through."""
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    context: int | None
    """Longest position that the model was made for."""
    kv_values: int
    """Numbers in the KV cache for one token of one layer."""
    tied: bool
    """True if the embedding is the only table of tokens: it is the output head, or that is a reward model's row."""
    num_experts: int = 0
    """0: a dense model."""
    keeps_scores: bool = False
    """True if attention keeps all its scores: by code of its own (`config.families`), or of sinks, which the kernels do
    not take (`trainer.ops.attention`)."""
    caps_logits: bool = False
    """True if its logits are capped."""
    active_experts: int = 0
    """Through which one token goes."""
    norms_heads: bool = False
    """True if each head's queries and keys are normed."""
    shared: int = 0
    """Width of the experts that every token goes through, beside those that its router chooses."""
    is_gated: bool = True
    """True if feed-forward blocks have a gate: three matrices, not two."""
    root_norms: bool = True
    """True if blocks have RMS norms, which compute in float32."""
    caps_scores: bool = False
    """True if attention caps its scores, which flash-attn alone can do without keeping them."""
    vision: VisionFacts | None = None
    """Its part that sees images, whose parameters are among `num_params`."""
    delta: DeltaLayers | None = None
    """Those of its layers that keep a state in place of keys and values."""
    headless_params: int | None = None
    """Parameters of its text part without an output head, where they were counted: what a reward model keeps."""

    @property
    def num_caches(self) -> int:
        """Layers that cache keys and values."""
        return self.num_layers - (self.delta.num_layers if self.delta is not None else 0)

    def trained_params(self, vision: str | None) -> int | None:
        """Return how many parameters train with a `model.vision`, of a model without adapters."""
        if self.num_params is None or self.vision is None or vision == "trained":
            return self.num_params
        return self.num_params - self.vision.num_params


def read_model(name: str) -> ModelFacts | None:
    """Shape of a model; None where its config cannot be found or is of a kind that this file does not know."""
    path, config = find_config(name), read_config(name)
    if path is None or config is None:
        return None
    stored = _stored(path.parent)
    facts = model_facts(config, _count(stored))
    return facts and replace(facts, headless_params=_count(headless(stored)))


def model_facts(config: Mapping[str, Any], num_params: int | None = None) -> ModelFacts | None:
    """Shape from the fields of a config.json.

    Args:
        config: its fields, or those below `text_config`.
        num_params: where they were counted; else they are computed.

    Returns:
        None where a field is missing that every llama-like model has.
    """
    config = with_text_part(config)
    if config.get("model_type") == "gpt2":
        config = _as_others_name_it(config)
    try:
        hidden, layers, heads = (int(config[k]) for k in ("hidden_size", "num_hidden_layers", "num_attention_heads"))
        vocab = int(config["vocab_size"])
        kv_heads = int(config.get("num_key_value_heads") or heads)
        head_dim = int(config.get("head_dim") or hidden // heads)
        kind = str(config.get("model_type", "")).removesuffix("_text")
        experts = count_experts(config)
        width = first_number(config, "moe_intermediate_size") if experts else 0
        width = width or first_number(config, "intermediate_size")
        # Llama 4's code in transformers has every expert compute every token, and adds one that all go through
        active = experts if kind == "llama4" else experts_per_token(config)
        active = active if experts else 1
        context = config.get("max_position_embeddings")
        latent = int(config.get("kv_lora_rank") or 0)
        if latent:
            head_dim = first_number(config, "qk_nope_head_dim") + first_number(config, "qk_rope_head_dim") or head_dim
        shared = first_number(config, "shared_expert_intermediate_size", "shared_intermediate_size")
        shared = shared or first_number(config, "n_shared_experts", "num_shared_experts", "num_shared_expert") * width
        shared = (width if kind == "llama4" else shared) if experts else 0
        kv_values = latent + int(config.get("qk_rope_head_dim") or 0) if latent else 2 * kv_heads * head_dim
    except (KeyError, TypeError, ValueError, ZeroDivisionError):
        return None
    tied = bool(config.get("tie_word_embeddings", False)) or is_classifier(config)
    vision, delta = vision_facts(config), _delta_layers(config)
    if num_params is None and width and not latent and not config.get("shared_expert_intermediate_size"):
        attention = hidden * head_dim * (2 * heads + 2 * kv_heads)
        if delta is not None:  # of the mean layer
            linear = hidden * (2 * delta.keys + 3 * delta.values + 2 * delta.value_heads)
            attention += hidden * head_dim * heads
            attention = (attention * (layers - delta.num_layers) + linear * delta.num_layers) // layers
        mlp = (2 if kind in _UNGATED else 3) * hidden * width * max(1, experts) + 3 * hidden * shared + hidden * experts
        num_params = layers * (attention + mlp + 2 * hidden) + hidden + vocab * hidden * (1 if tied else 2)
        num_params += vision.num_params if vision is not None else 0
    return ModelFacts(
        num_params, hidden, width * active, layers, heads, kv_heads, head_dim, vocab,
        context if isinstance(context, int) else None, kv_values, tied, experts,
        family_of(config).custom_attention or kind in _SINKS,
        bool(config.get("final_logit_softcapping") or config.get("logits_soft_cap")), active if experts else 0,
        kind in _NORMED_HEADS or bool(config.get("use_qk_norm")), shared, kind not in _UNGATED,
        kind not in _UNGATED - _UNGATED_ROOT_NORMED, bool(config.get("attn_logit_softcapping")), vision, delta,
    )  # fmt: skip


def _delta_layers(config: Mapping[str, Any]) -> DeltaLayers | None:
    """None where the model has none."""
    names = "linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim"
    if not all(isinstance(config.get(name), int) for name in names):
        return None
    layers = int(config["num_hidden_layers"])
    types = config.get("layer_types")
    full = layers // int(config.get("full_attention_interval") or 4)
    count = types.count("linear_attention") if isinstance(types, list) else layers - full
    return DeltaLayers(count, *(config[name] for name in names)) if count else None


def _as_others_name_it(gpt2: Mapping[str, Any]) -> dict[str, Any]:
    """Return GPT-2's config by the names that later models have."""
    found = {"tie_word_embeddings": True, **gpt2}
    found |= {"hidden_size": gpt2.get("n_embd"), "num_hidden_layers": gpt2.get("n_layer")}
    found |= {"num_attention_heads": gpt2.get("n_head"), "max_position_embeddings": gpt2.get("n_positions")}
    return found | {"intermediate_size": gpt2.get("n_inner") or 4 * (gpt2.get("n_embd") or 0)}


def stored_shapes(folder: Path) -> dict[str, tuple[int, ...]] | None:
    """Name -> shape of the tensors in a directory's safetensors files; None where they cannot be read, or are none."""
    return {name: tensor.shape for name, tensor in _stored(folder).items()} or None


def _stored(folder: Path) -> Mapping[str, StoredTensor]:
    try:
        return stored_tensors(folder)
    except ValueError:  # half-written
        return {}


def _count(tensors: Mapping[str, StoredTensor]) -> int | None:
    return sum(math.prod(tensor.shape) for tensor in tensors.values()) or None
