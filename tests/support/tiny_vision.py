"""Tiny models that see images, with tokenizer and image processor beside them: random weights, made on the spot."""

import json
from pathlib import Path
from typing import Any

import torch

from prime_hpc.starter.vision import CHAT_TEMPLATE, MERGE, PATCH, VISION_TOKENS, write_processors
from prime_hpc.trainer.batching.image_inputs import random_image
from tests.support.tiny_tokenizer import make_tokenizer

_HEADS: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
_ROPE: dict[str, Any] = {
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e4,
        "mrope_section": [6, 5, 5],
        "mrope_interleaved": True,
    }
}


def make_vision_tokenizer(folder: Path) -> Any:
    """Save to `folder` and return the tiny tokenizer with Qwen3-VL's tokens of images, and its way to write them."""
    tokenizer = make_tokenizer(folder)
    tokenizer.add_special_tokens({"additional_special_tokens": list(VISION_TOKENS)})
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(folder)
    stated = folder / "tokenizer_config.json"  # Qwen3.5's class would take <|endoftext|> for what is unknown
    stated.write_text(json.dumps(json.loads(stated.read_text()) | {"unk_token": None}))
    return tokenizer


def make_vision_model(folder: Path, family: str = "qwen3_vl", seed: int = 0, vocab_size: int = 384) -> Path:
    """Write a model of one of `families.VISION` of less than a million parameters; return its folder.

    An embedding stands for 16 x 16 pixels, and images of multiples of that are not resized.
    """
    import transformers as hf

    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = make_vision_tokenizer(folder)
    start, end, image, video = (tokenizer.convert_tokens_to_ids(token) for token in VISION_TOKENS)
    ids = {"vision_start_token_id": start, "vision_end_token_id": end, "image_token_id": image, "video_token_id": video}
    text: dict[str, Any] = {
        "vocab_size": vocab_size,
        "hidden_size": 64,
        "intermediate_size": 128,
        "max_position_embeddings": 2048,
    }
    text |= (
        {"num_hidden_layers": 4, "tie_word_embeddings": True, "eos_token_id": tokenizer.eos_token_id} | _HEADS | _ROPE
    )
    vision: dict[str, Any] = {
        "depth": 3,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_heads": 4,
        "out_hidden_size": 64,
    }
    vision |= {
        "patch_size": PATCH,
        "spatial_merge_size": MERGE,
        "temporal_patch_size": 2,
        "num_position_embeddings": 64,
    }
    if family.startswith("qwen2"):
        del text["head_dim"], vision["num_position_embeddings"]
        text |= {"num_attention_heads": 2, "num_key_value_heads": 1, "bos_token_id": None}
        text["rope_parameters"] = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [6, 5, 5]}
    if family == "qwen2_5_vl":  # windows of 2 x 2 embeddings in the first and the last block
        vision |= {"window_size": 4 * PATCH, "fullatt_block_indexes": [1]}
    if family == "qwen2_vl":  # which has other names: its hidden_size is the language model's
        del vision["intermediate_size"], vision["out_hidden_size"]
        vision |= {"embed_dim": 64, "hidden_size": 64, "mlp_ratio": 2}
    if family.startswith("qwen3_vl"):
        vision["deepstack_visual_indexes"] = [0, 1]
    kinds: dict[str, tuple[Any, Any]] = {
        "qwen2_vl": (hf.Qwen2VLConfig, hf.Qwen2VLForConditionalGeneration),
        "qwen2_5_vl": (hf.Qwen2_5_VLConfig, hf.Qwen2_5_VLForConditionalGeneration),
        "qwen3_vl": (hf.Qwen3VLConfig, hf.Qwen3VLForConditionalGeneration),
        "qwen3_vl_moe": (hf.Qwen3VLMoeConfig, hf.Qwen3VLMoeForConditionalGeneration),
        "qwen3_5": (hf.Qwen3_5Config, hf.Qwen3_5ForConditionalGeneration),
        "qwen3_5_moe": (hf.Qwen3_5MoeConfig, hf.Qwen3_5MoeForConditionalGeneration),
    }
    if family.endswith("moe"):
        text |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
        text |= {"shared_expert_intermediate_size": 64}
    if family.startswith("qwen3_5"):
        text |= {"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 16}
        text |= {"linear_value_head_dim": 16, "layer_types": ["linear_attention", "full_attention"] * 2}
        text["rope_parameters"] = {**_ROPE["rope_parameters"], "partial_rotary_factor": 1.0}
    config_type, model_type = kinds[family]
    torch.manual_seed(seed)
    config = config_type(text_config=text, vision_config=vision, tie_word_embeddings=True, **ids)
    model = model_type(config)
    with torch.no_grad():  # of the size that trained models have: what an image changes is not lost in rounding
        for name, parameter in model.named_parameters():
            if ".visual." in name and parameter.ndim > 1:
                parameter.mul_(3.0)
    model.save_pretrained(folder)
    write_processors(folder)
    return folder


def make_image(seed: int, width: int = 48, height: int = 32) -> bytes:
    """Return a PNG of random pixels; of these measures it stands for 6 tokens."""
    return random_image(seed, width, height)
