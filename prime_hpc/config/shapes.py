"""Published shapes of a few models, as their config.json has them: to plan for one that is not on this machine.

`shape_config("Qwen/Qwen3-32B")` is enough to build the model, and nothing of it is weights.
"""

from typing import Any

_SUFFIXES = ("", "-Base", "-Instruct", "-Instruct-2507", "-Thinking-2507")
"""Of names whose models have the same shape."""

_QWEN3: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_act": "silu",
    "head_dim": 128,
    "num_key_value_heads": 8,
    "vocab_size": 151_936,
    "max_position_embeddings": 40_960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1_000_000,
    "attention_bias": False,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
_QWEN3_MOE = _QWEN3 | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_key_value_heads": 4,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
_LLAMA3: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "head_dim": 128,
    "num_key_value_heads": 8,
    "vocab_size": 128_256,
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500_000,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "attention_bias": False,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}


def _sized(common: dict[str, Any], hidden: int, intermediate: int, layers: int, heads: int, **more: Any) -> Any:
    sizes = {"hidden_size": hidden, "intermediate_size": intermediate, "num_hidden_layers": layers}
    return common | sizes | {"num_attention_heads": heads} | more


SHAPES: dict[str, dict[str, Any]] = {
    "Qwen3-0.6B": _sized(_QWEN3, 1024, 3072, 28, 16, tie_word_embeddings=True),
    "Qwen3-1.7B": _sized(_QWEN3, 2048, 6144, 28, 16, tie_word_embeddings=True),
    "Qwen3-4B": _sized(_QWEN3, 2560, 9728, 36, 32, tie_word_embeddings=True),
    "Qwen3-8B": _sized(_QWEN3, 4096, 12_288, 36, 32),
    "Qwen3-14B": _sized(_QWEN3, 5120, 17_408, 40, 40),
    "Qwen3-32B": _sized(_QWEN3, 5120, 25_600, 64, 64),
    "Qwen3-30B-A3B": _sized(_QWEN3_MOE, 2048, 6144, 48, 32, moe_intermediate_size=768),
    "Qwen3-235B-A22B": _sized(_QWEN3_MOE, 4096, 12_288, 94, 64, moe_intermediate_size=1536),
    "Llama-3.1-8B": _sized(_LLAMA3, 4096, 14_336, 32, 32),
    "Llama-3.1-70B": _sized(_LLAMA3, 8192, 28_672, 80, 64),
}
"""Name without its owner -> config.json."""


def shape_config(name: str) -> dict[str, Any] | None:
    """config.json of a hub model, `owner/name`; None where its shape is not among `SHAPES`."""
    own = name.rpartition("/")[2]
    return next((dict(config) for known, config in SHAPES.items() if own.removeprefix(known) in _SUFFIXES), None)
