"""Packing: nothing lost, nothing over budget, equal micro-batches a rank, balanced."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prime_hpc.store.batch.packing import fewest_micro_batches, fill, pack, pack_by_number, pack_rows
from prime_hpc.store.batch.shared_prefixes import Sharing, find_sharing

BUDGET = 8192


def loads(assignment, lengths):
    """[R, M] tokens."""
    return np.array([[np.asarray(lengths)[micro].sum() for micro in rank] for rank in assignment])


def lognormal(mean, num_samples, seed, sigma=0.5):
    lengths = np.exp(sigma * np.random.default_rng(seed).standard_normal(num_samples))
    for _ in range(20):
        lengths = np.minimum(lengths * mean / lengths.mean(), BUDGET)
    return np.clip(lengths.round().astype(np.int64), 1, BUDGET)


def assert_sound(assignment, lengths, num_ranks, budget):
    assert len(assignment) == num_ranks
    assert len({len(rank) for rank in assignment}) == 1
    flat = [micro for rank in assignment for micro in rank]
    assert all(micro.dtype == np.int64 for micro in flat)
    assert sorted(np.concatenate(flat).tolist()) == list(range(len(lengths)))
    assert all((np.diff(micro) > 0).all() for micro in flat)
    assert loads(assignment, lengths).max() <= budget


@settings(deadline=None, max_examples=150)
@given(
    st.integers(1, 9000).flatmap(
        lambda budget: st.tuples(st.just(budget), st.lists(st.integers(1, budget), min_size=1, max_size=150))
    ),
    st.integers(1, 9),
)
def test_every_sample_once_within_budget_equal_micro_batches(case, num_ranks):
    budget, lengths = case
    assignment = pack(lengths, num_ranks, budget)
    assert_sound(assignment, lengths, num_ranks, budget)
    # never more micro-batches than when no two samples share one
    assert fewest_micro_batches(lengths, num_ranks, budget) <= len(assignment[0]) <= -(-len(lengths) // num_ranks)


@pytest.mark.parametrize("sigma", [0.3, 0.5, 0.8])
@pytest.mark.parametrize("mean", [2483, 2540, 2550])
def test_fill_of_the_named_workload(mean, sigma):
    lengths = lognormal(mean, 2048, seed=3, sigma=sigma)
    assignment = pack(lengths, 64, BUDGET)
    assert_sound(assignment, lengths, 64, BUDGET)
    assert len(assignment[0]) == 10
    assert fill(assignment, lengths, BUDGET) >= 0.969  # 2,483 tokens a sample are 97 % of 10 micro-batches a rank
    tokens = loads(assignment, lengths)
    assert tokens.sum(axis=1).max() <= 1.005 * tokens.sum(axis=1).mean()
    assert tokens.sum() >= 0.99 * 64 * tokens.max(axis=0).sum()  # nobody waits for a fuller rank


@pytest.mark.parametrize("lengths", [np.full(2048, 2600), lognormal(2600, 2048, seed=1)], ids=["constant", "lognormal"])
def test_mean_2600_reaches_its_bound(lengths):
    # 2,048 * 2,600 tokens are 10.16 full micro-batches on each of 64 ranks: 11, and so 92.3 %, is the best there is.
    assert fewest_micro_batches(lengths, 64, BUDGET) == 11
    assignment = pack(lengths, 64, BUDGET)
    assert len(assignment[0]) == 11
    assert fill(assignment, lengths, BUDGET) == pytest.approx(0.923, abs=1e-3)
    tokens = loads(assignment, lengths)
    assert tokens.sum() >= 0.99 * 64 * tokens.max(axis=0).sum()


def test_constant_length_with_one_rank_fills_three_a_micro_batch():
    assignment = pack(np.full(2048, 2600), 1, BUDGET)
    assert len(assignment[0]) == 683
    assert fill(assignment, np.full(2048, 2600), BUDGET) == pytest.approx(2048 * 2600 / (683 * BUDGET))


def test_dense_packing_without_rank_rounding():
    lengths = lognormal(2600, 2048, seed=2)
    assert fill(pack(lengths, 1, BUDGET), lengths, BUDGET) >= 0.985


def test_fewer_samples_than_ranks_pads_with_empty_micro_batches():
    assignment = pack([5, 7], 4, 8)
    assert_sound(assignment, [5, 7], 4, 8)
    assert sorted(len(rank[0]) for rank in assignment) == [0, 0, 1, 1]


def test_a_full_sample_does_not_unbalance_the_others():
    lengths = np.concatenate([[8192], np.full(255, 2000)])
    tokens = loads(pack(lengths, 8, BUDGET), lengths)
    assert tokens.sum(axis=1).max() <= 1.05 * tokens.sum(axis=1).mean()


def groups_of(num_groups, rollouts, prompt, answers, seed=0):
    """Samples of groups with a common prompt each, in random order."""
    rng = np.random.default_rng(seed)
    prompts = rng.integers(prompt[0], prompt[1], num_groups)
    order = rng.permutation(num_groups * rollouts)
    groups = np.repeat(np.arange(num_groups), rollouts)[order]
    return prompts[groups] + rng.integers(answers[0], answers[1], len(order)), Sharing(groups, prompts[groups])


def computed(assignment, lengths, sharing):
    """[R, M] tokens that are computed, each group's prompt once a micro-batch."""
    table = [[0 for _ in rank] for rank in assignment]
    for r, rank in enumerate(assignment):
        for m, micro in enumerate(rank):
            seen = set()
            for i in micro:
                table[r][m] += int(lengths[i]) - (int(sharing.prefixes[i]) if sharing.groups[i] in seen else 0)
                seen.add(sharing.groups[i])
    return np.array(table)


def busy(table):
    """Tokens on the fullest rank of each micro-step."""
    return table.max(axis=0).sum()


@settings(deadline=None, max_examples=100)
@given(st.integers(1, 5), st.integers(1, 12), st.integers(1, 9), st.integers(1, 300), st.integers(0, 10**6))
def test_groups_are_packed_soundly_and_never_cost_more(num_ranks, num_groups, rollouts, prompt, seed):
    lengths, sharing = groups_of(num_groups, rollouts, (1, prompt + 1), (1, 300), seed)
    kept, alone = pack(lengths, num_ranks, 700, sharing), pack(lengths, num_ranks, 700)
    assert_sound(kept, lengths, num_ranks, 700)
    if sharing.num_tokens >= 0.05 * lengths.sum():
        dealt = np.sort(computed(alone, lengths, sharing).ravel())[::-1].reshape(-1, num_ranks)
        assert busy(computed(kept, lengths, sharing)) <= dealt.max(axis=1).sum()


def test_long_prompts_are_computed_nearly_once():
    lengths, sharing = groups_of(64, 8, (900, 1100), (50, 500))
    scattered, kept = pack(lengths, 8, BUDGET), pack(lengths, 8, BUDGET, sharing)
    assert_sound(kept, lengths, 8, BUDGET)
    table = computed(kept, lengths, sharing)
    assert 8 * busy(table) <= 1.1 * table.sum(), "micro-batches of a micro-step are alike"
    assert busy(table) <= 0.6 * busy(computed(scattered, lengths, sharing))


def test_what_samples_have_in_common_is_found():
    tokens = [np.array(t, np.int32) for t in ([1, 2, 3, 4], [7, 7], [1, 2, 3], [1, 2, 9, 4], [7, 7, 7], [5])]
    sharing = find_sharing(tokens, [30, 10, 30, 30, 10, 20])
    assert sharing.prefixes.tolist() == [2, 2, 2, 2, 2, 1] and sharing.num_tokens == 2 * 2 + 2
    sizes = np.array([len(t) for t in tokens])
    assert sharing.computed(sizes, np.array([0, 0, 0, 1, 1, 1]), 2).tolist() == [4 + 2 + 1, 4 + 3 + 1]
    assert len(np.unique(sharing.chunks(sizes, 100))) == 3 and len(np.unique(sharing.chunks(sizes, 1))) == 6


def test_same_input_same_packing():
    lengths = lognormal(900, 300, seed=5)
    first, second = pack(lengths, 4, BUDGET), pack(lengths, 4, BUDGET)
    assert all((a == b).all() for x, y in zip(first, second, strict=True) for a, b in zip(x, y, strict=True))


@pytest.mark.parametrize(
    ("lengths", "num_ranks", "message"),
    [
        ([3, 11], 1, "sample 1 has 11 tokens"),
        ([3, 0], 1, "sample 1 has no tokens"),
        ([], 2, "nothing to pack"),
        ([3], 0, "num_ranks"),
    ],
)
def test_bad_input_is_named(lengths, num_ranks, message):
    with pytest.raises(ValueError, match=message):
        pack(lengths, num_ranks, 10)


def padded(assignment, lengths):
    """[R, M] tokens with a row for each sample, padded to the longest of its micro-batch."""
    sizes = np.asarray(lengths)
    return np.array([[len(m) * sizes[m].max() if len(m) else 0 for m in rank] for rank in assignment])


@settings(deadline=None, max_examples=100)
@given(
    st.integers(1, 9000).flatmap(
        lambda budget: st.tuples(st.just(budget), st.lists(st.integers(1, budget), min_size=1, max_size=150))
    ),
    st.integers(1, 9),
)
def test_rows_of_their_own_fit_the_budget_with_their_padding(case, num_ranks):
    budget, lengths = case
    assignment = pack_rows(lengths, num_ranks, budget)
    assert_sound(assignment, lengths, num_ranks, budget)
    assert padded(assignment, lengths).max() <= budget


@pytest.mark.parametrize("num_ranks", [1, 4])
def test_rows_of_similar_length_share_a_micro_batch(num_ranks):
    lengths = lognormal(900, 512, seed=4, sigma=0.8)
    ours, other = pack_rows(lengths, num_ranks, BUDGET), pack(lengths, num_ranks, BUDGET)
    assert padded(ours, lengths).sum() <= 1.06 * lengths.sum()
    assert padded(other, lengths).sum() > 1.6 * lengths.sum()
    steps = padded(ours, lengths).max(axis=0)  # a micro-step lasts as long as its fullest rank
    assert steps.sum() * num_ranks <= 1.12 * lengths.sum()


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_samples_by_number_meet_those_of_similar_length(num_ranks):
    lengths = lognormal(2600, 46, seed=1)
    assignment = pack_by_number(lengths, num_ranks, 4)
    assert_sound(assignment, lengths, num_ranks, 4 * BUDGET)
    micros = [micro for rank in assignment for micro in rank if len(micro)]
    assert sorted(map(len, micros)) == [2] + [4] * 11
    spans = sorted((lengths[micro].min(), lengths[micro].max()) for micro in micros)
    assert all(above[0] >= below[1] for below, above in itertools.pairwise(spans))


def test_one_overlong_row_is_refused_by_name():
    with pytest.raises(ValueError, match="sample 1 has 9 tokens"):
        pack_rows([3, 9], 1, 8)


def test_long_samples_bound_the_number_of_micro_batches() -> None:
    assert fewest_micro_batches([600] * 10, 1, 1000) == 10  # no two fit together
    assert fewest_micro_batches([400] * 10, 1, 1000) == 5  # two do; by tokens it would be four
    assert fewest_micro_batches([400] * 10, 2, 1000) == 3
