"""Rows that are tokenised already: `input_ids`, and which of them are trained."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from prime_hpc.config.sections.sft import TOKEN_COLUMNS, SFTSourceConfig

_IGNORED = -100
"""Label of a token that does not train: transformers' and torch's."""


@dataclass(frozen=True)
class TokenRow:
    """One sequence, trained as it is."""

    token_ids: NDArray[np.int32]
    """[L]"""
    loss_mask: NDArray[np.bool_]
    """[L]"""

    def beyond(self, vocab_size: int) -> str | None:
        """Return which token the model has no embedding of; None: it has all."""
        largest = int(self.token_ids.max(initial=-1))
        if largest < vocab_size:
            return None
        return f"token {largest} is beyond the model's vocabulary of {vocab_size}: another model's tokenizer made it"


def token_row(row: Mapping[str, Any], source: SFTSourceConfig) -> TokenRow:
    """Return a row's tokens: without those that `attention_mask` leaves out, which only filled it up.
    `row`: with `input_ids`, and `loss_mask` or `labels` where not all of them are trained.
    Raises ValueError: a column is not what it must be."""
    input_ids, loss_mask, labels, attention_mask = (source.columns.get(column, column) for column in TOKEN_COLUMNS)
    ids = _integers(row, input_ids)
    if ids.size and not 0 <= ids.min() <= ids.max() < 2**31:
        raise ValueError(f"`{input_ids}` holds {ids.min() if ids.min() < 0 else ids.max()}, which is no token")
    is_masked, is_labelled = row.get(loss_mask) is not None, row.get(labels) is not None
    if is_masked and is_labelled:
        raise ValueError(
            f"`{loss_mask}` and `{labels}` both say what is trained: one of them is enough "
            f'({source.key}.columns = {{"labels": "none"}} leaves it out)'
        )
    mask: NDArray[np.bool_] = np.ones(len(ids), bool)
    if is_masked:
        mask = _flags(row, loss_mask, len(ids))
    elif is_labelled:
        wanted = _integers(row, labels, len(ids))
        mask = wanted != _IGNORED
        if len(wrong := np.flatnonzero(mask & (wanted != ids))):
            at = int(wrong[0])
            raise ValueError(
                f"`{labels}` has {wanted[at]} at place {at}, where the token is {ids[at]}: a label is its "
                f"own token (the trainer moves them by one itself), or {_IGNORED}, which does not train"
            )
    if row.get(attention_mask) is not None:
        is_there = _flags(row, attention_mask, len(ids))
        ids, mask = ids[is_there], mask[is_there]
    return TokenRow(ids.astype(np.int32), mask)


def _integers(row: Mapping[str, Any], name: str, length: int | None = None) -> NDArray[np.int64]:
    """Return a column's numbers; `length`: as many as there are tokens."""
    try:
        values = np.asarray(row[name])
    except (ValueError, OverflowError):  # lists in it, not all of one length
        values = np.array(None)
    if values.ndim != 1 or (values.size and values.dtype.kind not in "biu"):
        raise ValueError(f"expected `{name}` as a list of integers, got {row[name]!r:.120}")
    if length is not None and len(values) != length:
        raise ValueError(f"`{name}` has {len(values)} entries, and the row {length} tokens")
    return values.astype(np.int64)


def _flags(row: Mapping[str, Any], name: str, length: int) -> NDArray[np.bool_]:
    values = _integers(row, name, length)
    if len(wrong := values[(values != 0) & (values != 1)]):
        raise ValueError(f"`{name}` holds {wrong[0]}: only true, false, 0 and 1 are known")
    return values.astype(bool)
