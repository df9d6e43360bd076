"""Echo: the short form of `prove_echo`, which tokens count, the wire."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from prime_hpc.config.sections.teacher import EchoConfig
from prime_hpc.envs.samples import TOOL, USER, Sample, trace_samples
from prime_hpc.orchestrator.algorithms.echo import Echo
from prime_hpc.orchestrator.errors import OrchestratorError
from prime_hpc.store.batch.rank_batch import RankBatch, encode_rank
from prime_hpc.store.batch.rank_files import read_rank_batch, write_batch
from prime_hpc.store.run_paths import RunPaths
from tests.proofs import objective_cases, prove_echo
from tests.support.tiny_model import random_rank_batch

BOUND = 1e-6
VOCABULARY = 300


def with_echo(lengths_of_micro: list[list[int]], seed: int) -> RankBatch:
    """A random batch whose tokens that no policy sampled have a weight now and then."""
    batch, rng = random_rank_batch(lengths_of_micro, seed=seed, vocab_size=VOCABULARY), np.random.default_rng(seed)
    chosen = ~batch.loss_mask & (rng.random(batch.num_tokens) < 0.6)
    return replace(batch, ce_weights=np.where(chosen, rng.uniform(0.1, 2, batch.num_tokens), 0).astype(np.float32))


def test_value_and_gradient_beside_any_objective_under_any_split() -> None:
    assert [p for p in prove_echo.prove(2) if not p.holds] == []


def test_a_local_denominator_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    local = lambda m, lp, n: -(m.ce_weights * lp).sum() / (m.ce_weights > 0).sum().clamp(min=1)  # noqa: E731
    monkeypatch.setattr(objective_cases, "echo_loss", local)
    broken = {p.claim for p in prove_echo.prove(2) if not p.holds}
    assert broken == {"split", "padding", "ranks"}  # of one micro-batch it is the whole batch's


def test_a_batch_without_echo_costs_nothing_and_one_with_it_survives_the_store(tmp_path: Path) -> None:
    heard = with_echo([[9, 4, 7], [12]], 0)
    plain = replace(heard, ce_weights=None)
    size = [sum(len(bytes(part)) for part in encode_rank(b)) for b in (plain, heard)]
    assert 4 * heard.num_tokens <= size[1] - size[0] <= 4 * heard.num_tokens + 80
    assert heard.ce_weights is not None
    paths = RunPaths(tmp_path)
    write_batch(paths, 1, [plain], state={})
    write_batch(paths, 2, [heard], state={})
    assert read_rank_batch(paths.rollouts_step(1), 0).ce_weights is None
    np.testing.assert_array_equal(read_rank_batch(paths.rollouts_step(2), 0).ce_weights, heard.ce_weights)
    with pytest.raises(ValueError, match="ce_weights: holds values below 0"):
        replace(heard, ce_weights=-heard.ce_weights).check()


def node(role: str, ids: list[int], *, sampled: bool = False) -> SimpleNamespace:
    logprobs, versions = [-1.0] * len(ids), np.zeros(len(ids), np.int32)
    return SimpleNamespace(
        sampled=sampled,
        token_ids=ids,
        mask=[sampled] * len(ids),
        logprobs=logprobs,
        versions=versions,
        message=SimpleNamespace(role=role),
    )


def two_branches() -> list[Sample]:
    """user, reply, tool, then a reply and a user's turn, or another reply."""
    first, tool = [node("user", [1, 2]), node("assistant", [3], sampled=True)], node("tool", [4, 5])
    one = [*first, tool, node("assistant", [6], sampled=True), node("user", [7]), node("assistant", [8], sampled=True)]
    two = [*first, tool, node("assistant", [9], sampled=True)]
    branches = [SimpleNamespace(nodes=nodes, trainable=True) for nodes in (one, two)]
    agent = SimpleNamespace(trainable=True, name="agent")
    said = {"reward": 1.0, "rewards": {}, "is_truncated": False, "mm_token_type_id_map": {}}
    trace = SimpleNamespace(agent=agent, branches=branches, **said)
    return trace_samples(trace, lambda n: n.versions)


def only_first(sample: Sample) -> np.ndarray:
    """A user's filter: the first token of the tool's result, twice."""
    return 2.0 * (np.arange(sample.num_tokens) == 3)


def broken_filter(sample: Sample) -> np.ndarray:
    return np.zeros(3)


def undefined_filter(sample: Sample) -> np.ndarray:
    return np.where(np.arange(sample.num_tokens) == 3, np.nan, 1.0)


def negative_filter(sample: Sample) -> np.ndarray:
    return 1.0 - 2.0 * (np.arange(sample.num_tokens) == 3)


def failing_filter(sample: Sample) -> np.ndarray:
    raise KeyError("tool")


def test_what_the_environment_said_after_the_first_reply_counts_once() -> None:
    one, two = two_branches()
    assert one.roles is not None and two.roles is not None
    assert one.roles.tolist() == [0, 0, 0, TOOL, TOOL, 0, USER, 0] and not two.roles.any()
    assert Echo(EchoConfig(weight=0.5)).weights(one).tolist() == [0, 0, 0, 0.5, 0.5, 0, 0.5, 0]
    assert Echo(EchoConfig(weight=0.5, roles=["user"])).weights(one).tolist() == [0, 0, 0, 0, 0, 0, 0.5, 0]
    mine = EchoConfig(weight=0.5, filter=f"{__name__}:only_first")
    assert Echo(mine).weights(one).tolist() == [0, 0, 0, 1, 0, 0, 0, 0]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("broken_filter", "broken_filter returned shape .3. for a sample of 8 tokens"),
        ("undefined_filter", "undefined_filter returned .* factors that are negative or not finite"),
        ("negative_filter", "negative_filter returned .* factors that are negative or not finite"),
        ("failing_filter", "failing_filter failed: KeyError: 'tool'"),
    ],
)
def test_a_filter_of_the_users_own_that_fails_is_named(name: str, words: str) -> None:
    with pytest.raises(OrchestratorError, match=words):
        Echo(EchoConfig(filter=f"{__name__}:{name}")).weights(two_branches()[0])
