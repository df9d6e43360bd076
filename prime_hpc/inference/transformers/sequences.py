"""One completion on its way: its tokens, when it ends, and what is answered."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch

from prime_hpc.inference.transformers.parameters import SamplingParams
from prime_hpc.inference.transformers.sampling import Drawn

FinishReason = Literal["stop", "length", "abort"]
TOKENS_BEHIND = 6
"""Tokens before the newest that decide how it is written: a character may be made of several."""


@dataclass(eq=False)
class Running:
    """State of one completion; owned by the engine's thread once it is submitted."""

    prompt: list[int]
    params: SamplingParams
    max_tokens: int
    generator: torch.Generator | None
    on_done: Callable[["Running"], None]
    """Called once, from the engine's thread."""
    prompt_scores: list[dict[int, tuple[float, int]] | None] | None = None
    """Of each prompt token but the first: token id -> (log-probability, rank); None: not asked for."""
    text: "StopText | None" = None
    """Watches for stop strings; None: there are none."""
    drawn: list[Drawn] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    """Of the completion, a final end-of-sequence token included."""
    spans: list[dict[str, Any]] = field(default_factory=list)
    """Policy versions, as vLLM states them: half-open spans over the tokens."""
    num_cached: int = 0
    """Tokens of prompt and completion whose keys and values are in the cache."""
    finish_reason: FinishReason | None = None
    """None: it goes on."""
    stop_reason: int | str | None = None
    """The string or token id of the request that ended it."""
    error: str | None = None
    """The reason that it failed; it is not answered then."""
    routed: list[np.ndarray] = field(default_factory=list)
    """Experts of the tokens from the prompt's first on, each [tokens, layers, k]; empty: not recorded."""
    num_routed: int = 0
    """Tokens in `routed`."""

    @property
    def num_tokens(self) -> int:
        """Prompt and completion so far."""
        return len(self.prompt) + len(self.token_ids)

    @property
    def num_left(self) -> int:
        """Tokens to compute before the next one can be drawn."""
        return self.num_tokens - self.num_cached

    def tokens(self, first: int, count: int) -> list[int]:
        """Tokens of prompt and completion from a position on."""
        split = len(self.prompt)
        if first >= split:
            return self.token_ids[first - split : first - split + count]
        found = self.prompt[first : first + count]
        return found + self.token_ids[: count - len(found)]

    def keep_experts(self, start: int, chosen: np.ndarray) -> None:
        """Note the experts [tokens, layers, k] of tokens from a position on; of those that are known, the first count:
        with them the next token was drawn."""
        new = chosen[self.num_routed - start :]
        if len(new):
            self.routed.append(new)
            self.num_routed += len(new)

    def append(self, drawn: Drawn, version: int, eos: frozenset[int]) -> None:
        """Take a drawn token; sets `finish_reason` where it is the last."""
        position = len(self.token_ids)
        self.token_ids.append(drawn.token_id)
        self.drawn.append(drawn)
        if self.spans and self.spans[-1]["version"] == str(version):
            self.spans[-1]["end"] = position + 1
        else:
            self.spans.append({"version": str(version), "start": position, "end": position + 1})
        if drawn.token_id in eos and not self.params.ignore_eos:
            self.finish_reason = "stop"
        elif drawn.token_id in self.params.stop_token_ids:
            self.finish_reason, self.stop_reason = "stop", drawn.token_id
        elif self.text is not None and (found := self.text.look(self.token_ids)) is not None:
            self.finish_reason, self.stop_reason = "stop", found
        elif len(self.token_ids) >= self.max_tokens:
            self.finish_reason = "length"


class StopText:
    """The text of a completion as it grows, and the first stop string in it."""

    def __init__(self, decode: Callable[[Sequence[int]], str], stop: Sequence[str], include: bool) -> None:
        """`decode` makes text of token ids; `include`: the stop string is a part of the answer."""
        self._decode, self._stop, self._include = decode, stop, include
        self._longest = max(map(len, stop))
        self.text = ""
        """All of it so far."""
        self._num_read = 0
        self.end: int | None = None

    def look(self, token_ids: Sequence[int]) -> str | None:
        """Read the newest tokens; the stop string that the text now holds."""
        behind = max(0, self._num_read - TOKENS_BEHIND)
        before = self._decode(token_ids[behind : self._num_read])
        now = self._decode(token_ids[behind:])
        if now.endswith("\N{REPLACEMENT CHARACTER}"):  # the rest of a character is still to come
            return None
        first = max(0, len(self.text) - self._longest + 1)
        self.text += now[len(before) :]
        self._num_read = len(token_ids)
        found = [(at, word) for word in self._stop if (at := self.text.find(word, first)) >= 0]
        if not found:
            return None
        at, word = min(found)
        self.end = at + (len(word) if self._include else 0)
        return word
