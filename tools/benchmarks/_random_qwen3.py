"""Qwen3 models with random weights, each of a benchmark's own size."""

from pathlib import Path
from typing import Any


def save_qwen3(folder: Path, *, vocab: int, hidden: int, layers: int, head_dim: int, context: int, **more: Any) -> int:
    """Write a float32 model with tied embeddings, in the proportions of real small ones; returns its parameters.

    Args:
        context: longest sequence in tokens.
        more: of `Qwen3Config`.
    """
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // head_dim,
        num_key_value_heads=hidden // head_dim // 2,
        head_dim=head_dim,
        max_position_embeddings=context,
        tie_word_embeddings=True,
        **more,
    )
    model = Qwen3ForCausalLM(config)
    model.save_pretrained(folder)
    return model.num_parameters()
