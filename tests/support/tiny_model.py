"""A tiny Qwen3 (about 60k parameters) with a tokenizer, and batches for it, made on the spot."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from prime_hpc.store.batch.rank_batch import RankBatch
from tests.support.tiny_tokenizer import make_tokenizer

CHATML = """
{%- for message in messages -%}
{{- '<|im_start|>' + message.role + '\\n' + (message.content or '') + '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""
"""Has the prefix property."""

QWEN3 = """
{%- set ns = namespace(last_query=messages|length - 1, open=true) -%}
{%- for message in messages[::-1] -%}
{%- if ns.open and message.role == 'user' -%}
{%- set ns.open = false -%}{%- set ns.last_query = messages|length - 1 - loop.index0 -%}
{%- endif -%}
{%- endfor -%}
{%- for message in messages -%}
{%- set content = message.content -%}
{%- set thought = message.reasoning_content or '' -%}
{%- if '</think>' in content -%}
{%- set thought = content.split('</think>')[0].split('<think>')[-1].strip('\\n') -%}
{%- set content = content.split('</think>')[-1].lstrip('\\n') -%}
{%- endif -%}
{{- '<|im_start|>' + message.role + '\\n' -}}
{%- if message.role == 'assistant' and loop.index0 > ns.last_query and (loop.last or thought) -%}
{{- '<think>\\n' + thought + '\\n</think>\\n\\n' -}}
{%- endif -%}
{{- content -}}
{%- for call in message.tool_calls or [] -%}
{{- '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' -}}
{{- (call.function.arguments if call.function.arguments is string else call.function.arguments | tojson) -}}
{{- '}\\n</tool_call>' -}}
{%- endfor -%}
{{- '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|im_start|>assistant\\n' -}}
{%- if enable_thinking is false -%}{{- '<think>\\n\\n</think>\\n\\n' -}}{%- endif -%}
{%- endif -%}
"""
"""What Qwen3's template does to think sections: kept after the last user message, added to the last turn, else cut."""
STRIPPING = """
{%- for message in messages -%}
{%- set content = message.content -%}
{%- if message.role == 'assistant' and not loop.last and '</think>' in content -%}
{%- set content = content.split('</think>')[-1].lstrip('\\n') -%}
{%- endif -%}
{{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""
"""Takes the think sections out of earlier turns, as Qwen3's template does: no prefix property."""


def make_tiny_model(
    folder: Path, *, tied: bool = True, seed: int = 0, experts: int = 0, expert_width: int = 16
) -> Path:
    """Write config, random weights and tokenizer; 2 layers, 4 query and 2 key-value heads; with `experts` a Qwen3-MoE
    whose vocabulary two ranks can split (vLLM on a CPU loads versions of experts as wide as a multiple of 32 only)."""
    tokenizer = make_tokenizer(folder)
    tokenizer.chat_template = CHATML
    tokenizer.save_pretrained(folder)
    torch.manual_seed(seed)
    shape: dict[str, Any] = {
        "vocab_size": len(tokenizer),
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,  # for smaller ones vLLM has no kernels on a CPU
        "max_position_embeddings": 512,
        "tie_word_embeddings": tied,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "initializer_range": 0.2,  # peaked distributions: ratios and entropies that differ
    }
    if experts:
        from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

        shape["vocab_size"] += shape["vocab_size"] % 2
        shape |= {
            "num_experts": experts,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": expert_width,
            "norm_topk_prob": True,
        }
        Qwen3MoeForCausalLM(Qwen3MoeConfig(**shape)).save_pretrained(folder)
    else:
        Qwen3ForCausalLM(Qwen3Config(**shape)).save_pretrained(folder)
    return folder


def random_rank_batch(
    lengths_of_micro: list[list[int]], *, seed: int, vocab_size: int = 300, step: int = 1
) -> RankBatch:
    """A scripted RL batch of one rank: random tokens, a prompt of about a third of each sequence."""
    rng = np.random.default_rng(seed)
    lengths = np.array([n for micro in lengths_of_micro for n in micro], dtype=np.int64)
    total, num = int(lengths.sum()), len(lengths)
    mask = np.concatenate([np.zeros(0, bool), *(np.arange(n) >= max(1, n // 3) for n in lengths)])
    return RankBatch(
        token_ids=rng.integers(0, vocab_size, total).astype(np.int32),
        loss_mask=mask,
        logprobs=np.where(mask, rng.normal(-6, 2, total), 0).astype(np.float32),
        versions=np.where(mask, step - 1, -1).astype(np.int32),
        advantages=np.repeat(rng.standard_normal(num), lengths).astype(np.float32),
        seq_offsets=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        micro_offsets=np.concatenate([[0], np.cumsum([len(m) for m in lengths_of_micro])]).astype(np.int64),
        temperatures=rng.choice([0.7, 1.0], num).astype(np.float32),
        rewards=rng.random(num).astype(np.float32),
        sample_ids=np.arange(num, dtype=np.int64),
        group_ids=np.arange(num, dtype=np.int64) // 2,
        env_ids=np.zeros(num, np.int32),
    )
