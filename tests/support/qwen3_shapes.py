"""The published configs of Qwen3 models, as files of a hub cache: what plan, lint and a rehearsal need, no download."""

import json
from pathlib import Path
from typing import Any

_DENSE: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "head_dim": 128,
    "num_key_value_heads": 8,
    "vocab_size": 151_936,
    "max_position_embeddings": 40_960,
    "rope_theta": 1_000_000,
    "rms_norm_eps": 1e-6,
    "attention_bias": False,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
SHAPES: dict[str, dict[str, Any]] = {
    "Qwen/Qwen3-0.6B": _DENSE
    | {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16}
    | {"tie_word_embeddings": True},
    "Qwen/Qwen3-4B": _DENSE
    | {"hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36, "num_attention_heads": 32}
    | {"tie_word_embeddings": True},
    "Qwen/Qwen3-8B": _DENSE
    | {"hidden_size": 4096, "intermediate_size": 12_288, "num_hidden_layers": 36, "num_attention_heads": 32},
    "Qwen/Qwen3-30B-A3B": _DENSE
    | {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_key_value_heads": 4}
    | {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 48, "num_attention_heads": 32}
    | {"moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True}
    | {"decoder_sparse_step": 1, "mlp_only_layers": [], "router_aux_loss_coef": 0.001},
}
"""By hub name; the `-Base` models have the same."""
SHAPES["Qwen/Qwen3-VL-4B-Instruct"] = {
    "model_type": "qwen3_vl",
    "text_config": {**SHAPES["Qwen/Qwen3-4B"], "model_type": "qwen3_vl_text", "max_position_embeddings": 262_144},
    "tie_word_embeddings": True,
    "vision_config": {"model_type": "qwen3_vl", "depth": 24, "hidden_size": 1024, "intermediate_size": 4096}
    | {"num_heads": 16, "out_hidden_size": 2560, "num_position_embeddings": 2304, "patch_size": 16}
    | {"temporal_patch_size": 2, "spatial_merge_size": 2, "deepstack_visual_indexes": [5, 11, 17]},
}


def fake_hub(cache: Path) -> Path:
    """Write each model's config.json where HF_HUB_CACHE would have it; returns `cache`."""
    for name, shape in SHAPES.items():
        for full in (name, f"{name}-Base"):
            folder = cache / f"models--{full.replace('/', '--')}" / "snapshots" / "0"
            folder.mkdir(parents=True)
            (folder / "config.json").write_text(json.dumps(shape))
    return cache
