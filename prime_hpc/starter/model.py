"""The tiny starter policy: a Qwen3 with random weights, small enough for two CPU cores."""

from collections.abc import Iterable
from pathlib import Path

from prime_hpc.starter.tokenizer import build_tokenizer

MAX_LEN = 4096
"""Context of the model, tokens."""


def write_tiny_qwen3(directory: Path, seed: int, phrases: Iterable[str] = ()) -> int:
    """Write config, weights (float32) and tokenizer of the tiny Qwen3 into `directory`; the same bytes for one seed.
    `phrases`: texts that are one token each, see `tokenizer.find_phrases`.
    Returns the number of parameters."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    tokenizer = build_tokenizer(MAX_LEN, phrases)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=MAX_LEN,
        initializer_range=0.06,  # about 0.7 / sqrt(hidden): the usual 0.02 suits wide models and learns slower here
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(config)
    save_readable(model, directory)
    tokenizer.save_pretrained(directory)
    return sum(p.numel() for p in model.parameters())


def save_readable(model: object, directory: Path) -> None:
    """`save_pretrained`, but readable by all who may read the directory (transformers writes weights as 0600)."""
    model.save_pretrained(directory)  # type: ignore[attr-defined]
    for path in directory.glob("*.safetensors"):
        path.chmod(0o644)
