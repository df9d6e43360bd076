"""Tiny random checkpoints of any causal language model that transformers knows, saved by transformers."""

from pathlib import Path
from typing import Any

import torch

SMALL: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_experts": 6,
    "num_local_experts": 6,
    "n_routed_experts": 6,
    "moe_num_experts": 6,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 8,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def make_checkpoint(folder: Path, model_type: str, dtype: torch.dtype = torch.float32, **fields: Any) -> Path:
    """Config and weights of a tiny model. Buffers that are stored keep float32, and have values of their own.

    Args:
        folder: to write.
        model_type: of transformers.
        dtype: of the parameters.
        fields: of the config, beyond what is small already.
    """
    from transformers import AutoModelForCausalLM
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    config_class = CONFIG_MAPPING[model_type]
    known = vars(config_class()).keys() | getattr(config_class, "attribute_map", {}).keys()
    config = config_class(**{key: value for key, value in SMALL.items() if key in known} | fields)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape) * 0.1)
            parameter.data = parameter.data.to(dtype)
        for name, buffer in model.named_buffers():
            if name in model.state_dict() and buffer.is_floating_point():
                buffer.copy_(torch.randn(buffer.shape))
    model.config.dtype = dtype
    model.save_pretrained(folder)
    return folder
