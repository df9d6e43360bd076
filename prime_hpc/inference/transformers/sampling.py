"""Drawing of tokens.

The distribution is that of `trainer/ops/truncation`, in vLLM's order: temperature, min-p, top-k, top-p. The
log-probability of a token is that of the distribution from which it was drawn. At temperature 0 the likeliest token is
taken, and its log-probability is that at temperature 1.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from prime_hpc.config.sections.sampling import LEAST_TEMPERATURE
from prime_hpc.inference.transformers.parameters import SamplingParams


@dataclass(frozen=True)
class Drawn:
    """One token."""

    token_id: int
    logprob: float
    rank: int
    """1: the likeliest."""
    top: list[tuple[int, float, int]]
    """Candidates (token id, log-probability, rank), the likeliest first."""


class Sampler:
    """Draws one token for each of several sequences."""

    def __init__(self, seed: int, device: torch.device) -> None:
        """`seed`: of requests that state none."""
        self._device = device
        self._shared = self.generator(seed)

    def generator(self, seed: int) -> torch.Generator:
        """Make the source of randomness of one completion."""
        return torch.Generator(self._device).manual_seed(seed % (1 << 63))

    def draw(
        self,
        logits: torch.Tensor,
        params: Sequence[SamplingParams],
        generators: Sequence[torch.Generator | None],
    ) -> list[Drawn]:
        """Draw a token from each row.

        Args:
            logits: float32 [N, V]; overwritten.
            generators: of each row; None: the shared one.
        """
        temperatures = [1.0 if p.is_greedy else max(p.temperature, LEAST_TEMPERATURE) for p in params]
        if any(t != 1.0 for t in temperatures):
            logits.div_(torch.tensor(temperatures, dtype=torch.float32, device=logits.device)[:, None])
        _truncate(logits, params)
        logprobs = logits.log_softmax(-1)
        chosen = self._choose(logprobs, params, generators)
        picked = logprobs.gather(1, chosen[:, None])
        ranks = (logprobs > picked).sum(1) + 1
        rows = zip(chosen.tolist(), picked[:, 0].tolist(), ranks.tolist(), strict=True)
        most = max((p.logprobs or 0 for p in params), default=0)
        tops = candidates(logprobs, most) if most else [[] for _ in params]
        return [
            Drawn(token, logprob, rank, top[: p.logprobs or 0])
            for (token, logprob, rank), top, p in zip(rows, tops, params, strict=True)
        ]

    def _choose(
        self,
        logprobs: torch.Tensor,
        params: Sequence[SamplingParams],
        generators: Sequence[torch.Generator | None],
    ) -> torch.Tensor:
        """Sample tokens, int64 [N], by exponential races: the token with the smallest E / p wins with probability p
        (E exponential with mean 1). A row with a seed uses its own noise, whatever else is in the batch."""
        greedy = torch.tensor([p.is_greedy for p in params], device=logprobs.device)
        if all(p.is_greedy for p in params):
            return logprobs.argmax(-1)
        noise = torch.empty_like(logprobs).exponential_(generator=self._shared)
        for i, generator in enumerate(generators):
            if generator is not None:
                noise[i].exponential_(generator=generator)
        raced = logprobs - noise.clamp_(min=torch.finfo(torch.float32).tiny).log_()
        return torch.where(greedy, logprobs.argmax(-1), raced.argmax(-1))


def candidates(logprobs: torch.Tensor, count: int) -> list[list[tuple[int, float, int]]]:
    """Return the `count` likeliest tokens of each row of [N, V]: (token id, log-probability, rank)."""
    values, ids = logprobs.topk(min(count, logprobs.shape[1]), dim=1)
    return [
        [(token, value, place + 1) for place, (token, value) in enumerate(zip(*row, strict=True))]
        for row in zip(ids.tolist(), values.tolist(), strict=True)
    ]


def _truncate(logits: torch.Tensor, params: Sequence[SamplingParams]) -> None:
    """Set the logits of tokens that are not to be sampled to -inf, in place, rows with such parameters alone."""
    for i, p in enumerate(params):
        if p.is_greedy or (p.top_p >= 1 and p.top_k <= 0 and p.min_p <= 0):
            continue
        row = logits[i]
        if p.min_p > 0:  # p(v) >= min_p * max p
            likely = row.softmax(-1)
            row.masked_fill_(likely < p.min_p * likely.max(), -torch.inf)
        if 0 < p.top_k < len(row):
            kept = row.topk(p.top_k)
            if row.device.type == "cpu":  # tokens that tie for the last place stay, as in vLLM's sampler on CPU
                row.masked_fill_(row < kept.values[-1], -torch.inf)
            else:
                only = torch.full_like(row, -torch.inf).scatter_(0, kept.indices, kept.values)
                row.copy_(only)
        if p.top_p < 1:  # the tokens before it have less than top_p
            ordered, order = row.sort(descending=True, stable=True)
            likely = ordered.softmax(-1)
            cut = likely.cumsum(-1) - likely >= p.top_p
            cut[0] = False
            row[order[cut]] = -torch.inf
