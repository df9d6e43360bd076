"""Echo against a float64 loop over tokens: value and gradient, whatever the split; which tokens count; the wire."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from prime_hpc.config.sections.teacher import EchoConfig
from prime_hpc.config.sections.trainer import LossConfig
from prime_hpc.envs.samples import TOOL, USER, Sample, trace_samples
from prime_hpc.orchestrator.echo import Echo
from prime_hpc.orchestrator.errors import OrchestratorError
from prime_hpc.store.batches import RankBatch, encode_rank, read_rank_batch, write_batch
from prime_hpc.store.layout import RunPaths
from prime_hpc.trainer.batches import batch_facts, make_micro_batch, objective_part, redistribute
from prime_hpc.trainer.objectives import echo_loss, rl_loss, target_weights
from tests.support.tiny_model import random_rank_batch

BOUND = 1e-6
VOCABULARY = 300


def with_echo(lengths_of_micro: list[list[int]], seed: int) -> RankBatch:
    """A random batch whose tokens that no policy sampled have a weight now and then."""
    batch, rng = random_rank_batch(lengths_of_micro, seed=seed, vocab_size=VOCABULARY), np.random.default_rng(seed)
    chosen = ~batch.loss_mask & (rng.random(batch.num_tokens) < 0.6)
    return replace(batch, ce_weights=np.where(chosen, rng.uniform(0.1, 2, batch.num_tokens), 0).astype(np.float32))


def wanted(batch: RankBatch, theta: np.ndarray) -> tuple[float, np.ndarray]:
    """REINFORCE over tokens plus echo, one token at a time; a token's log-probability is theta[its id]."""
    assert batch.ce_weights is not None
    starts = set(batch.seq_offsets[:-1].tolist())
    places = [t for t in range(batch.num_tokens) if t not in starts]
    policy, heard = [t for t in places if batch.loss_mask[t]], [t for t in places if batch.ce_weights[t] > 0]
    value, grad = 0.0, np.zeros_like(theta)
    for t in policy:
        value -= float(batch.advantages[t]) * theta[batch.token_ids[t]] / len(policy)
        grad[batch.token_ids[t]] -= float(batch.advantages[t]) / len(policy)
    for t in heard:
        value -= float(batch.ce_weights[t]) * theta[batch.token_ids[t]] / len(heard)
        grad[batch.token_ids[t]] -= float(batch.ce_weights[t]) / len(heard)
    return value, grad


def ours(ranks: list[RankBatch], theta: np.ndarray) -> tuple[float, np.ndarray]:
    """As the engine does it, the model being a table of log-probabilities."""
    parameter = torch.tensor(theta, requires_grad=True)
    facts = [batch_facts(rank, 1) for rank in ranks]
    num_targets, num_echo = sum(f.num_targets for f in facts), sum(f.num_echo for f in facts)
    total = torch.zeros((), dtype=torch.float64)
    for rank in ranks:
        for i in range(rank.num_micro_batches):
            micro = make_micro_batch(rank, i)
            logprobs = parameter[micro.targets]
            total = total + echo_loss(micro, logprobs, num_echo)
            if micro.trained is not None:
                logprobs, micro = logprobs[micro.trained], objective_part(micro)
            weights = target_weights(micro.sequence, micro.targets_of_sequence, "token", num_targets, 1).double()
            total = total + rl_loss(LossConfig(type="reinforce"), micro, logprobs, weights)[0]
    total.backward()
    assert parameter.grad is not None
    return float(total.detach()), parameter.grad.numpy()


@pytest.mark.parametrize("seed", range(8))
def test_value_and_gradient_under_any_split(seed: int) -> None:
    whole = with_echo([[9, 4, 7], [12], [5, 6, 1]], seed)
    theta = np.random.default_rng(seed).normal(-2, 1, VOCABULARY)
    value, grad = wanted(whole, theta)
    for size in (1, 2, 5):
        found, slope = ours([redistribute([whole], r, size) for r in range(size)], theta)
        assert found == pytest.approx(value, rel=BOUND)
        np.testing.assert_allclose(slope, grad, rtol=1e-5, atol=BOUND)


def test_a_local_denominator_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = with_echo([[9, 4, 7], [12]], 0)
    theta = np.random.default_rng(0).normal(-2, 1, VOCABULARY)
    monkeypatch.setitem(globals(), "echo_loss", lambda m, lp, n: -(m.ce_weights * lp).sum() / (m.ce_weights > 0).sum())
    assert abs(ours([whole], theta)[0] - wanted(whole, theta)[0]) > 1e-3


def test_a_batch_without_echo_costs_nothing_and_one_with_it_survives_the_store(tmp_path: Path) -> None:
    heard = with_echo([[9, 4, 7], [12]], 0)
    plain = replace(heard, ce_weights=None)
    size = [sum(len(bytes(part)) for part in encode_rank(b)) for b in (plain, heard)]
    assert 4 * heard.num_tokens <= size[1] - size[0] <= 4 * heard.num_tokens + 80
    paths = RunPaths(tmp_path)
    write_batch(paths, 1, [plain], state={})
    write_batch(paths, 2, [heard], state={})
    assert read_rank_batch(paths.rollouts_step(1), 0).ce_weights is None
    np.testing.assert_array_equal(read_rank_batch(paths.rollouts_step(2), 0).ce_weights, heard.ce_weights)
    with pytest.raises(ValueError, match="ce_weights: holds values that are negative"):
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
    trace = SimpleNamespace(agent=agent, branches=branches, reward=1.0, is_truncated=False)
    return trace_samples(trace, lambda n: n.versions)


def only_first(sample: Sample) -> np.ndarray:
    """A user's filter: the first token of the tool's result, twice."""
    return 2.0 * (np.arange(sample.num_tokens) == 3)


def broken_filter(sample: Sample) -> np.ndarray:
    return np.zeros(3)


def test_what_the_environment_said_after_the_first_reply_counts_once() -> None:
    one, two = two_branches()
    assert one.roles is not None and two.roles is not None
    assert one.roles.tolist() == [0, 0, 0, TOOL, TOOL, 0, USER, 0] and not two.roles.any()
    assert Echo(EchoConfig(weight=0.5)).weights(one).tolist() == [0, 0, 0, 0.5, 0.5, 0, 0.5, 0]
    assert Echo(EchoConfig(weight=0.5, roles=["user"])).weights(one).tolist() == [0, 0, 0, 0, 0, 0, 0.5, 0]
    mine = EchoConfig(weight=0.5, filter=f"{__name__}:only_first")
    assert Echo(mine).weights(one).tolist() == [0, 0, 0, 1, 0, 0, 0, 0]
    with pytest.raises(OrchestratorError, match="broken_filter returned shape .3. for a sample of 8 tokens"):
        Echo(EchoConfig(filter=f"{__name__}:broken_filter")).weights(one)
