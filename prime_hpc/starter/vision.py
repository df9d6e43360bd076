"""The tiny starter policy that sees images: a Qwen3-VL with random weights, small enough for two CPU cores."""

import json
from pathlib import Path
from typing import Any

from prime_hpc.starter.model import save_readable
from prime_hpc.starter.tokenizer import build_tokenizer

MAX_LEN = 1024
"""Context of the model, tokens."""
VISION_TOKENS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
PATCH, MERGE = 8, 2
"""An embedding stands for 16 x 16 pixels: a picture of `shapes` of 32 x 32 is four tokens."""

CHAT_TEMPLATE = r"""
{%- for message in messages -%}
{{- '<|im_start|>' + message.role + '\n' -}}
{%- if message.content is string -%}{{- message.content -}}
{%- else -%}
{%- for part in message.content -%}
{%- if part.type in ('image', 'image_url') -%}{{- '<|vision_start|><|image_pad|><|vision_end|>' -}}
{%- else -%}{{- part.text -}}
{%- endif -%}
{%- endfor -%}
{%- endif -%}
{{- '<|im_end|>\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}
""".strip()
"""Of Qwen3-VL's Instruct models, without tools."""


def write_tiny_qwen3_vl(directory: Path, seed: int) -> int:
    """Write config, weights (float32), tokenizer and image processor of the tiny Qwen3-VL into `directory`; the same
    bytes for one seed. Returns the number of parameters."""
    import torch
    from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

    tokenizer = build_tokenizer(MAX_LEN)
    tokenizer.add_special_tokens({"additional_special_tokens": list(VISION_TOKENS)})
    tokenizer.chat_template = CHAT_TEMPLATE
    start, end, image, video = (len(tokenizer) - len(VISION_TOKENS) + place for place in range(len(VISION_TOKENS)))
    text: dict[str, Any] = {
        "vocab_size": len(tokenizer),
        "hidden_size": 128,
        "intermediate_size": 384,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": MAX_LEN,
        "initializer_range": 0.06,
        "tie_word_embeddings": False,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e4,
            "mrope_section": [6, 5, 5],
            "mrope_interleaved": True,
        },
    }
    vision: dict[str, Any] = {
        "depth": 2,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_heads": 4,
        "out_hidden_size": 128,
        "patch_size": PATCH,
        "spatial_merge_size": MERGE,
        "temporal_patch_size": 2,
        "num_position_embeddings": 64,
        "deepstack_visual_indexes": [0],
        "initializer_range": 0.06,
    }
    config = Qwen3VLConfig(
        text_config=text,
        vision_config=vision,
        tie_word_embeddings=False,
        image_token_id=image,
        video_token_id=video,
        vision_start_token_id=start,
        vision_end_token_id=end,
        dtype="float32",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3VLForConditionalGeneration(config)
    save_readable(model, directory)
    tokenizer.save_pretrained(directory)
    write_processors(directory)
    return sum(p.numel() for p in model.parameters())


def write_processors(directory: Path) -> None:
    """Write the processor of images, and that of videos, without which nobody loads the first."""
    stated: dict[str, Any] = {
        "processor_class": "Qwen3VLProcessor",
        "patch_size": PATCH,
        "merge_size": MERGE,
        "temporal_patch_size": 2,
        "size": {"shortest_edge": (PATCH * MERGE) ** 2, "longest_edge": 1 << 16},
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
    }
    for name, kind in (
        ("preprocessor_config.json", {"image_processor_type": "Qwen2VLImageProcessor"}),
        ("video_preprocessor_config.json", {"video_processor_type": "Qwen3VLVideoProcessor"}),
    ):
        (directory / name).write_text(json.dumps(stated | kind, indent=2) + "\n", encoding="utf-8")
