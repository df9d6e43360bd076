"""Tiny random models of every causal-LM family of the installed transformers, built from their configs alone."""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from prime_hpc.config.families import family_of

VOCAB = 96
MAX_PARAMETERS = 4_000_000
_SIZES: dict[str, Any] = {
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), VOCAB),
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "dim_model", "embedding_size", "word_embed_proj_dim"), 32),
    **dict.fromkeys(("lru_width", "attention_hidden_size", "hidden_dim"), 32),
    **dict.fromkeys(("intermediate_size", "n_inner", "d_ff", "dim_ff", "ffn_dim", "ffn_hidden_size"), 48),
    **dict.fromkeys(("decoder_ffn_dim", "encoder_ffn_dim", "intermediate_size_mlp", "dense_intermediate_size"), 48),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers"), 4),
    **dict.fromkeys(
        ("num_attention_heads", "n_head", "n_heads", "encoder_attention_heads", "swa_num_attention_heads"), 4
    ),
    **dict.fromkeys(("decoder_attention_heads", "num_mem_blocks_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "swa_num_key_value_heads", "num_attention_groups", "encoder_layers"), 2),
    **dict.fromkeys(("head_dim", "attention_head_dim", "dim_head", "d_kv", "swa_head_dim", "global_head_dim"), 8),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "max_sequence_length"), 128),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_k", "num_selected_experts", "moe_topk", "top_k_experts"), 2),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "shared_intermediate_size"), 24),
    **dict.fromkeys(("moe_shared_expert_intermediate_size", "expert_ffn_hidden_size", "expert_ffn_size"), 24),
    **dict.fromkeys(("n_shared_experts", "num_shared_experts", "n_group", "topk_group", "first_k_dense_replace"), 1),
    **dict.fromkeys(("n_groups", "mamba_n_groups", "mamba_ngroups"), 1),
    **dict.fromkeys(("kv_lora_rank", "q_lora_rank"), 16),
    **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim"), 8),
    "qk_head_dim": 16,
    "v_head_dim": 12,  # unlike the queries'
    **dict.fromkeys(("mamba_d_state", "state_size", "ssm_state_size", "mamba_d_head", "mamba_head_dim"), 8),
    **dict.fromkeys(("mamba_headdim", "mamba_n_heads", "mamba_num_heads", "mamba_chunk_size", "chunk_size"), 8),
    **dict.fromkeys(("num_heads", "linear_key_head_dim", "linear_value_head_dim"), 8),
    **dict.fromkeys(("time_step_rank", "mamba_dt_rank", "linear_num_value_heads"), 4),
    **dict.fromkeys(("mamba_expand", "expand", "linear_num_key_heads", "n_mamba_heads"), 2),
    **dict.fromkeys(("mamba_d_ssm", "d_inner"), 64),
    **dict.fromkeys(("sliding_window", "attention_window_size", "sliding_window_size", "attention_chunk_size"), 8),
    **dict.fromkeys(("index_head_dim", "indexer_head_dim", "keep_window_size", "window_size", "index_n_heads"), 8),
    **dict.fromkeys(("index_topk", "indexer_n_heads", "index_block_size", "d_rel"), 4),
    **dict.fromkeys(("index_topk_blocks", "num_kv_shared_layers", "max_window_layers", "hc_lowrank", "laurel_rank"), 2),
    **dict.fromkeys(("rotary_dim", "hc_mult", "hc_count", "rel_extent"), 4),
    "use_sliding_window": True,
    "hidden_size_per_layer_input": 8,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "decoder_start_token_id": 1,
    "type_vocab_size": 2,
    "tie_word_embeddings": False,
}
_WIDE = {
    key: {32: 128, 48: 192}.get(value, value) for key, value in _SIZES.items() if not isinstance(value, str | bool)
}
_WIDE |= dict.fromkeys(("head_dim", "attention_head_dim", "dim_head", "d_kv", "swa_head_dim", "global_head_dim"), 32)
_WIDE |= dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "shared_intermediate_size"), 64)
_WIDE |= dict.fromkeys(("moe_shared_expert_intermediate_size", "expert_ffn_hidden_size", "expert_ffn_size"), 64)
_WIDE |= dict.fromkeys(("kv_lora_rank", "q_lora_rank"), 64)
_WIDE |= dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"), 32) | {"qk_head_dim": 64}
_WIDE |= dict.fromkeys(("index_head_dim", "indexer_head_dim"), 64)
_WIDE |= {"mamba_d_head": 32}  # with 8 of them, twice the width
_WIDE |= {"max_window_layers": 4, "max_position_embeddings": 256, "n_positions": 256}
"""Sizes that vLLM's kernels take, too."""
_ONE_DENSE = {"mlp_layer_types": ["dense", "sparse", "sparse", "sparse"]}
_LATENT = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 64, "qk_head_dim": 128}
_LATENT |= {"head_dim": 64, "v_head_dim": 64}
"""The only ones for which vLLM has kernels on a CPU."""
_LLAMA4 = {"attention_chunk_size": 128, "num_experts_per_tok": 1}
_SERVED: dict[str, dict[str, Any]] = {
    "cohere2": {"sliding_window": 64},  # vLLM's reach one token further
    "cohere2_moe": {"sliding_window": 64},
    "deepseek_v2": _LATENT,
    "deepseek_v3": _LATENT,
    "falcon": {"ffn_hidden_size": 512},  # vLLM takes it for four times the width
    "falcon_h1": {"mamba_d_head": 8},  # its state space has a width of its own
    "gemma4": {"num_experts": None},  # not stated where they are switched off
    "gemma4_text": {"num_experts": None},
    "glm4_moe_lite": _LATENT | _ONE_DENSE,
    "gpt_bigcode": {"num_key_value_heads": 1},  # which its config says of itself
    "hy_v3": _ONE_DENSE,
    "llama4": _LLAMA4,
    "llama4_text": _LLAMA4,
    "qwen2_moe": {"use_sliding_window": False},  # vLLM has none for it
}
_MAMBA_MIX = ["linear_attention", "full_attention", "linear_attention", "linear_attention"]
_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_OWN_SIZES: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1]},
    "cohere_compass_text": {"layer_types": ["sliding_attention", "full_attention"] * 2}
    | {"rope_parameters": dict.fromkeys(("sliding_attention", "full_attention"), _ROPE)},
    "ctrl": {"dff": 48},
    "gemma3n_text": {"num_kv_shared_layers": 2, "layer_types": ["sliding_attention", "full_attention"] * 4}
    | {"num_hidden_layers": 8, "num_kv_shared_layers": 4, "activation_sparsity_pattern": [0.5] * 4 + [0.0] * 4},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]], "num_heads": 4},
    "granitemoehybrid": {"layer_types": _MAMBA_MIX},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "kimi_linear": {"layer_types": _MAMBA_MIX, "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"]}
    | {"linear_head_dim": 8, "linear_num_heads": 4},
    "lfm2": {"layer_types": ["conv", "full_attention", "conv", "conv"], "block_auto_adjust_ff_dim": False},
    "lfm2_moe": {"layer_types": ["conv", "full_attention", "conv", "conv"], "num_dense_layers": 1},
    "longcat_flash": {"zero_expert_num": 2},  # with its 256, whole micro-batches go to none of four real experts
    "moshi": {"ffn_dim": 64},
    "qwen4_exp_text": {"indexer_kv_heads": 1, "indexer_budget": 8, "indexer_compress_ratio": 2, "ple_embed_dim": 16}
    | {"ngram_vocab_size_base": 64, "make_ngram_vocab_size_divisible_by": 8, "split_ngram_parts": 4}
    | {"heads_per_ngram": 2, "ple_layer_ids": [1, 2]},
    "recurrent_gemma": {"block_types": ["recurrent", "attention"]},
    "rwkv": {"attention_hidden_size": 32},
    "xlstm": {"num_heads": 2},
    "zamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "attention_head_dim": 16, "mamba_dt_rank": 4}
    | {"attention_hidden_size": 64},
    "zamba2": {"layers_block_type": ["linear_attention", "hybrid"] * 2, "n_mamba_heads": 8}
    | {"attention_hidden_size": 64, "attention_head_dim": 16},
    "zaya": {"num_experts_per_tok": 1, "router_hidden_size": 16},
}
_OWN_SIZES |= {a: _OWN_SIZES[b] for a, b in (("gemma3n", "gemma3n_text"), ("qwen4_exp", "qwen4_exp_text"))}
"""model_type -> fields for which the general sizes do not fit."""


class CannotBuildError(Exception):
    """No tiny model of this family can be made from its config alone; says why."""


def family_names() -> list[str]:
    """model_type of every family with a causal language model."""
    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def served_config(model_type: str) -> Any:
    """As `tiny_config`, with heads and matrices as wide as vLLM's kernels want them, and tied as the family is."""
    changes = _SERVED.get(model_type, {}) | {"tie_word_embeddings": is_tied(model_type)}
    return tiny_config(model_type, _SIZES | _WIDE, **changes)


def is_tied(model_type: str) -> bool:
    """Return whether a family's models share weights, as embeddings and head, unless they say otherwise."""
    try:
        text = CONFIG_MAPPING[model_type]().get_text_config(decoder=True)
    except Exception as error:
        raise CannotBuildError(f"config: {type(error).__name__}: {str(error)[:120]}") from error
    return bool(getattr(text, "tie_word_embeddings", False))


def tiny_config(model_type: str, sizes: Mapping[str, Any] = _SIZES, /, **changes: Any) -> Any:
    """The family's text config with small sizes; every kind of layer that its default has occurs.

    Raises:
        CannotBuildError: not from sizes alone.
    """
    try:
        default = CONFIG_MAPPING[model_type]()
        text = default.get_text_config(decoder=True)
        aliases = getattr(text, "attribute_map", {})
        known = set(text.to_dict()) | set(aliases)
        sizes = {k: v for k, v in sizes.items() if k in known}
        for alias, real in aliases.items():
            if alias in sizes and real in sizes:
                del sizes[alias]
        sizes |= _layers(text, sizes)
        if "kv_lora_rank" in known:  # latent attention has a key of its own for every query head
            sizes["num_key_value_heads"] = sizes["num_attention_heads"]
        sizes |= _OWN_SIZES.get(model_type, {}) | changes
        return type(text)(**sizes)
    except Exception as error:  # configs check themselves with errors of any class
        raise CannotBuildError(f"config: {type(error).__name__}: {str(error)[:120]}") from error


def _layers(text: Any, sizes: dict[str, Any]) -> dict[str, Any]:
    """Four layers or more, with each kind that the default has."""
    changed: dict[str, Any] = {}
    for field in ("layer_types", "mlp_layer_types", "layers_block_type"):
        kinds = getattr(text, field, None)
        real = getattr(text, "attribute_map", {}).get(field, field)
        computed = isinstance(getattr(type(text), real, None), property)
        uniform = isinstance(kinds, list | tuple) and len(set(kinds)) == 1
        if computed or real != field or (field == "layer_types" and uniform and "use_sliding_window" in sizes):
            continue
        if isinstance(kinds, list | tuple) and kinds:
            found = list(dict.fromkeys(kinds))
            count = max(4, len(found))
            changed[field] = (found * count)[:count]
            changed["num_hidden_layers"] = count
    return changed


def tiny_model(config: Any, seed: int = 0) -> Any:
    """A causal LM of a config with weights large enough that every path through it shows, in float32.

    Raises:
        CannotBuildError: it does not build, or is not tiny.
    """
    from transformers import AutoModelForCausalLM

    try:
        with torch.device("meta"):
            count = sum(p.numel() for p in AutoModelForCausalLM.from_config(config).parameters())
        if count > MAX_PARAMETERS:
            raise CannotBuildError(f"{count:,} parameters with the small sizes")
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    except CannotBuildError:
        raise
    except Exception as error:  # modelling code fails with errors of any class on sizes that do not fit together
        raise CannotBuildError(f"model: {type(error).__name__}: {str(error)[:120]}") from error
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim >= 2 and "conv" not in name and "A_log" not in name:
                width = parameter.shape[-1]
                parameter.normal_(0.0, 1.2 / width**0.5)
            else:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def saved_families(families: Iterable[str], folder: Path) -> Iterator[str]:
    """Write a tiny model of each family that is not refused and can be built, into a folder of its name; yields it."""
    for family in families:
        if family_of({"model_type": family}).refused:
            continue
        try:
            model = tiny_model(tiny_config(family))
        except CannotBuildError:
            continue
        model.save_pretrained(folder / family)
        yield family
