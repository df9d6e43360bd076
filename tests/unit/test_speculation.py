"""Speculative decoding: what each drafted token is sampled with, what is refused beside it, how much was accepted."""

import asyncio
from typing import Any

import pytest
import torch

from prime_hpc.client.figures import parse_figures
from prime_hpc.config import load_experiment
from prime_hpc.inference.backend import load_backend
from prime_hpc.inference.vllm.cpu_corrections import expand_batch_to_tokens
from prime_hpc.launch.fetch.needs import needs_of
from prime_hpc.orchestrator.rollouts.engine_figures import EngineFigures
from prime_hpc.orchestrator.rollouts.servers import ServerTable

NGRAM = "{'method': 'ngram', 'num_speculative_tokens': 3}"


def test_each_drafted_token_has_the_value_of_its_request() -> None:
    temperature, ends = torch.tensor([0.7, 0.0, 1.3, 0.2]), torch.tensor([2, 3, 3, 5], dtype=torch.int32)
    found = expand_batch_to_tokens(temperature, ends, 5, 0, 1)
    assert found.dtype == torch.float32 and torch.equal(found, torch.tensor([0.7, 0.7, 1.0, 0.2, 0.2]))
    top_k = torch.tensor([5, 9, 9, 7], dtype=torch.int32)
    assert torch.equal(expand_batch_to_tokens(top_k, ends, 5), torch.tensor([5, 5, 9, 7, 7], dtype=torch.int32))


def refused(*argv: str) -> list[str]:
    stated = ["--orchestrator.env.0.id", "wordle", "--device", "cpu", *argv]
    experiment = load_experiment(stated, "rl", {}).experiment
    return [refusal.key for refusal in load_backend("vllm").refusals(experiment)]


@pytest.mark.parametrize(
    "argv, key",
    [
        (["--orchestrator.sampling.min-p", "0.1"], "orchestrator.sampling.min_p"),
        (["--orchestrator.env.0.sampling.min-p", "0.1"], "orchestrator.env.0.sampling.min_p"),
        (["--orchestrator.eval.sampling.extra", "{'logit_bias': {'3': -5}}"], "orchestrator.eval.sampling.extra"),
    ],
)
def test_what_vllm_refuses_while_it_speculates(argv: list[str], key: str) -> None:
    assert refused(*argv) == []
    assert refused(*argv, "--inference.vllm.speculative_config", NGRAM) == [key]
    assert refused(*argv, "--inference.vllm.spec-method", "ngram") == [key]
    assert refused("--inference.vllm.speculative_config", NGRAM) == []


def test_a_draft_is_fetched_with_the_model_however_it_is_stated() -> None:
    whole = "{'method': 'draft_model', 'model': 'org/draft'}"
    for flag, value in (("speculative_config", whole), ("spec_model", "org/draft")):
        argv = ["--orchestrator.env.0.id", "wordle", f"--inference.vllm.{flag}", value]
        needs = needs_of(load_experiment(argv, "rl", {}).experiment)
        assert ("model", "org/draft") in [(need.kind, need.name) for need in needs]


class Server:
    def __init__(self) -> None:
        self.drafts = (0, 0)

    async def load(self) -> dict[str, float]:
        drafted, accepted = self.drafts
        return parse_figures(
            f"""vllm:num_requests_running{{engine="0"}} 3.0
vllm:num_requests_waiting{{engine="0"}} 0.0
vllm:spec_decode_num_draft_tokens_total{{engine="0"}} {drafted}.0
vllm:spec_decode_num_accepted_tokens_total{{engine="0"}} {accepted}.0
"""
        )


def test_the_accepted_share_is_of_what_was_drafted_since_the_last_row() -> None:
    servers: list[Any] = [Server(), Server()]
    table = ServerTable(["http://a", "http://b"], now=0.0)
    for index in range(2):
        table.mark_ready(index, 0)
    figures: Any = EngineFigures(table, servers, lambda _: False)

    def row(*drafts: tuple[int, int]) -> float | None:
        for index, (server, now) in enumerate(zip(servers, drafts, strict=True)):
            server.drafts = now
            asyncio.run(figures.look(index))
        return figures.drain().get("engines/draft_acceptance")

    assert row((1000, 900), (0, 0)) is None, "before the run"
    assert row((1100, 950), (300, 50)) == 0.25
    assert row((1100, 950), (300, 50)) is None
    assert row((40, 30), (300, 50)) == 0.75, "a server that was started again"
