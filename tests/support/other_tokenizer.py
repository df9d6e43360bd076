"""Tokenizers unlike `tiny_tokenizer`'s: other merges, another chat template, and one of SentencePiece's kind."""

from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

SPECIAL = ("<s>", "</s>", "<|header|>", "<|eot|>")
TEMPLATE = """
{{- '<s>' -}}
{%- for message in messages -%}
{{- '<|header|>' + message.role + '\\n\\n' + (message.content or '') + '<|eot|>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|header|>assistant\\n\\n' -}}{%- endif -%}
"""
"""As Llama 3 writes a conversation."""
BRACKETS = """
{{- '<s>' -}}
{%- for message in messages -%}
{%- if message.role == 'system' -%}{{- raise_exception('no system messages') -}}{%- endif -%}
{%- if message.role == 'user' -%}{{- '[INST] ' + message.content + ' [/INST]' -}}
{%- else -%}{{- ' ' + message.content + '</s>' -}}{%- endif -%}
{%- endfor -%}
"""
"""As Mistral's first template does: it knows no system message."""
TEXT = "say hello again hello there the ther cafe wie geht es dir 12 34 1234 reply hi hi. what is it? " * 3


def _saved(tokenizer: Tokenizer, folder: Path, eos: str, template: str) -> PreTrainedTokenizerFast:
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=eos)
    fast.chat_template = template
    fast.save_pretrained(folder)
    return fast


def byte_level(folder: Path, *, nfc: bool = False) -> PreTrainedTokenizerFast:
    """Byte-level BPE with merges of its own; `nfc`: it normalises text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    if nfc:
        tokenizer.normalizer = normalizers.NFC()
    trainer = trainers.BpeTrainer(
        vocab_size=330,
        special_tokens=list(SPECIAL),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator([TEXT], trainer)
    return _saved(tokenizer, folder, "<|eot|>", TEMPLATE)


def sentencepiece(folder: Path) -> PreTrainedTokenizerFast:
    """BPE over characters with a blank before the first word and bytes for unknown ones."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    letters = sorted(set(TEXT.replace(" ", "▁")) | set("H,+I[]NST/S.0"))
    vocabulary: dict[str, int] = {piece: i for i, piece in enumerate([*pieces, *letters])}
    merges: list[tuple[str, str]] = []
    for word in ("▁h", "▁he", "ll", "▁hell", "▁hello", "th", "the"):
        left = next(n for n in range(len(word) - 1, 0, -1) if word[:n] in vocabulary and word[n:] in vocabulary)
        merges.append((word[:left], word[left:]))
        vocabulary[word] = len(vocabulary)
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, unk_token="<unk>", byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    parts: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(parts)
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in pieces[:3]])
    return _saved(tokenizer, folder, "</s>", BRACKETS)
