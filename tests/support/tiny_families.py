"""Tiny models of three families, random, without tokenizers: what the layout proofs split over ranks."""

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

VOCAB = 132
_SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,  # 4 ranks divide it, into 33 rows each, which FSDP cannot divide evenly
    "hidden_size": 40,
    "intermediate_size": 72,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "initializer_range": 0.15,
}


def random_routing(num_tokens: int, seed: int) -> npt.NDArray[np.uint8]:
    """Two experts a token in each layer of `qwen3_moe`, uint8 [tokens, layers, 2]; none known for a tenth of them."""
    rng = np.random.default_rng([7, seed])
    routed = rng.permuted(np.tile(np.arange(8, dtype=np.uint8), (num_tokens, 3, 1)), axis=-1)[..., :2]
    routed[rng.random(num_tokens) < 0.1] = 255
    return np.ascontiguousarray(routed)


def make_family(folder: Path, family: str) -> Path:
    """Write config and weights of `qwen3` (tied, 4 key-value heads, norms of a head), `llama` (untied, 2 key-value
    heads, biases) or `qwen3_moe` (6 experts, 2 a token, one layer without experts)."""
    import transformers as hf

    torch.manual_seed(0)
    config: hf.PreTrainedConfig
    if family == "qwen3":
        config = hf.Qwen3Config(**_SHAPE, num_key_value_heads=4, tie_word_embeddings=True, pad_token_id=5)
    elif family == "llama":
        config = hf.LlamaConfig(
            **_SHAPE, num_key_value_heads=2, tie_word_embeddings=False, attention_bias=True, mlp_bias=True
        )
    else:
        assert family == "qwen3_moe", family
        config = hf.Qwen3MoeConfig(
            **(_SHAPE | {"num_hidden_layers": 3}),
            num_key_value_heads=4,
            moe_intermediate_size=24,
            num_experts=8,
            num_experts_per_tok=2,
            norm_topk_prob=True,
            mlp_only_layers=[1],
        )
    model = hf.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(".bias") or "norm" in name:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(folder)
    return folder
