"""Samples that a row of supervised data makes, or why it makes none."""

from typing import Any

import numpy as np

from prime_hpc.config.sections.sft import SFTDataConfig
from prime_hpc.trainer.data.samples import RowResult, RowTokenizer, SFTSample
from prime_hpc.trainer.data.template import ChatTokenizer


def result(row: Any, chat: ChatTokenizer, seq_len: int = 4096, vocab_size: int = 10**6, **config: Any) -> RowResult:
    data = SFTDataConfig(path="rows.jsonl", **config)
    return RowTokenizer(chat, data, data, seq_len, vocab_size).row(row)


def samples(row: Any, chat: ChatTokenizer, **config: Any) -> list[SFTSample]:
    made = result(row, chat, **config)
    assert made.error is None, made.error
    return made.samples


def sample(row: Any, chat: ChatTokenizer, **config: Any) -> SFTSample:
    [one] = samples(row, chat, **config)
    return one


def refusal(row: Any, chat: ChatTokenizer, **config: Any) -> str:
    error = result(row, chat, **config).error
    assert error is not None
    return error


def trained_text(sample: SFTSample, tokenizer: Any) -> list[str]:
    """The runs of trained tokens, decoded."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], sample.loss_mask, [False]])))
    return [tokenizer.decode(sample.token_ids[a:b]) for a, b in edges.reshape(-1, 2)]
