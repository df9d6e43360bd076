"""The rank of a sampled token on CPU, counted without a compiler: as vLLM's own function has it."""

import pytest
import torch

from prime_hpc.inference.vllm.cpu_corrections import count_at_least


@pytest.mark.parametrize("shape", [(1, 7), (5, 260), (3, 400_000), (4, 300_000)])
def test_a_rank_counts_what_is_not_less_likely(shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    logprobs = torch.randn(shape).mul(4).round()  # many tie
    logprobs[:, -1] = -torch.inf
    for chosen in (torch.zeros(shape[0], 1, dtype=torch.int64), logprobs.argmax(-1, keepdim=True)):
        values = logprobs.gather(-1, chosen)
        found = count_at_least(logprobs, values)
        assert found.dtype == torch.int64 and torch.equal(found, (logprobs >= values).sum(-1))
    assert torch.equal(count_at_least(logprobs, logprobs[:, -1:]), torch.full((shape[0],), shape[1]))
