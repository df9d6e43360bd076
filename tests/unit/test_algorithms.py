"""Advantage algorithms at their corners, penalties, the registry; values are proved in `tests/proofs`."""

import itertools
import math
import sys
from dataclasses import replace
from types import ModuleType

import numpy as np
import pytest

from prime_hpc.config import Experiment
from prime_hpc.config.errors import ConfigError
from prime_hpc.config.sections.advantage import AdvantageConfig
from prime_hpc.envs.samples import EpisodeResult, EpisodeState
from prime_hpc.orchestrator.algorithms import RewardGroup, Scorer, Scores, get_algorithm
from prime_hpc.orchestrator.algorithms.penalties import sampled_runs
from prime_hpc.orchestrator.errors import OrchestratorError
from prime_hpc.orchestrator.rollouts.episodes import Episode, to_episode
from tests.support.episodes import make_episode, make_result, make_sample

CENTERED = ["grpo", "gdpo", "dr_grpo", "grpo_no_std", "rloo", "opo", "max_rl", "pass_at_k", "pkpo"]


def episodes(rewards: list[float], lengths: list[int] | None = None) -> list[Episode]:
    return [make_episode([0] * n, reward=r) for r, n in zip(rewards, lengths or [1] * len(rewards), strict=True)]


def advantages(kind: str, rewards: list[float], lengths: list[int] | None = None, **config: object) -> list[float]:
    scorer = Scorer(AdvantageConfig.model_validate({"type": kind} | config), max_tokens=100)
    return scorer.score(episodes(rewards, lengths)).advantages.tolist()


@pytest.fixture
def own(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    module = ModuleType("own_advantages")
    monkeypatch.setitem(sys.modules, "own_advantages", module)
    return module


@pytest.mark.parametrize("kind", CENTERED)
@pytest.mark.parametrize("value", [0.0, 1.0, 0.1, 1e-3, 1e6 + 0.1, -7.3])
def test_equal_rewards_give_exact_zeros(kind: str, value: float) -> None:
    assert advantages(kind, [value] * 7, [1, 2, 3, 4, 5, 6, 7]) == [0.0] * 7


def test_the_control_deals_out_the_same_advantages_whatever_each_has_earned() -> None:
    rewards, count = np.array([1.0, 0, 0, 1, 0.5, 0, 0, 0.25]), np.arange(1, 9)
    shuffled, plain = (get_algorithm(name).build(AdvantageConfig()) for name in ("grpo_shuffled", "grpo"))
    found: list[np.ndarray] = []
    for position in range(200):
        group = RewardGroup(rewards, count, position=position)
        found.append(shuffled.score_group(group))
        np.testing.assert_allclose(np.sort(found[-1]), np.sort(plain.score_group(group)))
        np.testing.assert_array_equal(found[-1], shuffled.score_group(group))  # the same again
    assert np.abs(np.mean(found, axis=0)).max() < 0.25  # nobody's own


def test_remax_compares_with_the_greedy_rollout_under_the_same_penalties() -> None:
    """`length` is relative to the longest of all, the greedy one included."""

    def found(rewards: list[float], greedy: float, lengths: list[int], **config: object) -> list[float]:
        scorer = Scorer(AdvantageConfig.model_validate({"type": "remax"} | config), max_tokens=100)
        *group, last = episodes([*rewards, greedy], lengths)
        return scorer.score(group, greedy=last).advantages.tolist()

    cut = replace(episodes([1.0])[0], result=replace(episodes([1.0])[0].result, truncated=True))
    for overlong, trains in (("drop", False), ("mask", True)):  # it does not train anyhow
        scorer = Scorer(AdvantageConfig.model_validate({"type": "remax", "overlong": overlong}), max_tokens=9)
        assert scorer.score(episodes([0.0, 1.0]), greedy=cut).kept.tolist() == [trains] * 2
    assert get_algorithm("remax").greedy and get_algorithm("remax").min_group == 1
    assert found([1.0], 0.25, [1, 1]) == [0.75]
    assert found([0.1 + 0.2, 1.0], 0.3, [1, 1, 1]) == [0.0, 0.7]  # rounding is no signal
    length = {"length": {"output": 0.4, "by_success": False}}
    assert found([1.0, 1.0], 1.0, [1, 2, 4], **length) == pytest.approx([0.3, 0.2])
    assert found([1.0, 0.0], 0.5, [4, 2, 1]) == [0.5, -0.5]


def test_known_values() -> None:
    assert advantages("grpo", [1, 0, 0, 1]) == pytest.approx([1, -1, -1, 1], abs=1e-5)
    assert advantages("rloo", [1, 0, 0, 0]) == pytest.approx([1, -1 / 3, -1 / 3, -1 / 3])
    assert advantages("opo", [1, 0], [3, 1]) == pytest.approx([0.25, -0.75])
    assert advantages("max_rl", [1, 0, 0, 0]) == pytest.approx([3, -1, -1, -1])
    assert advantages("none", [0.5, -1.0]) == [0.5, -1.0]


def test_an_optimal_token_baseline_weighs_what_came_before_a_token() -> None:
    """Of three replies one was sure of every token, one of none; the third goes on alone."""
    replies = [[0.0, 0.0], [math.log(0.5)] * 2, [math.log(0.25), 0.0, -1.0]]
    scores = _against_token_baselines(replies, [1.0, 0.0, 2.0])
    assert scores.tokens is not None
    first, second = 2 * 0.75 / 1.25, 2 * 0.75 / 1.75  # weights 0, 1/2, 3/4; 0, 1, 3/4
    wanted = [[1 - first, 1 - second], [-first, -second], [2 - first, 2 - second, 0.0]]
    for [row], expected in zip(scores.tokens, wanted, strict=True):
        assert row[-len(expected) :].tolist() == pytest.approx(expected, rel=1e-6)
    assert scores.advantages.tolist() == pytest.approx([float(np.mean(row)) for row in wanted])
    assert not _against_token_baselines(replies, [0.1] * 3).has_signal


def test_tokens_that_only_equal_replies_reach_have_exactly_no_advantage_over_a_token_baseline() -> None:
    rng = np.random.default_rng(0)
    replies = [np.log(rng.uniform(0.01, 0.99, n)).tolist() for n in (20, 20, 20, 20, 3)]
    tokens = _against_token_baselines(replies, [0.3, 0.3, 0.3, 0.1 + 0.2, 0.0]).tokens
    assert tokens is not None
    assert all(row[-20:-17].all() and not row[-17:].any() for [row] in tokens[:4])


def _against_token_baselines(replies: list[list[float]], rewards: list[float]) -> Scores:
    """Of a group whose replies have these log-probabilities."""
    group = []
    for logs, reward in zip(replies, rewards, strict=True):
        sample = replace(make_sample([0] * len(logs)), reward=reward)
        sample.logprobs[sample.loss_mask] = logs
        group.append(to_episode(make_result(samples=[sample], reward=reward), 100))
    return Scorer(AdvantageConfig(type="optimal_token_baseline"), max_tokens=99).score(group)


def test_gdpo_tells_apart_what_adds_up_to_the_same() -> None:
    """One reply has the form, the others the answer: their sums are equal, so GRPO learns nothing."""
    scores = [(1.0, 0.0), (0.0, 1.0), (0.0, 1.0), (0.0, 1.0)]

    def found(kind: str, scale: float = 1.0, **config: object) -> list[float]:
        group = []
        for form, correct in scores:
            named = {"form": [form, 1.0], "correct": [correct * scale, 1 / scale]}
            sample = replace(make_sample([0], reward=form + correct), rewards=named)
            group.append(to_episode(make_result(samples=[sample], reward=form + correct), 1000))
        config = {"type": kind, **config}
        return Scorer(AdvantageConfig.model_validate(config), max_tokens=100).score(group).advantages.tolist()

    assert found("grpo") == [0.0] * 4
    assert found("gdpo") == pytest.approx([0.0] * 4, abs=1e-12)  # of one weight, and each the other's reverse
    heavy = found("gdpo", scale=4.0)  # a fourth of the weight for four times the score
    assert heavy == pytest.approx([0.75 * np.sqrt(3), *[-0.25 * np.sqrt(3)] * 3], abs=1e-5)


def test_gdpo_of_one_function_is_grpo() -> None:
    rewards = [0.25, 1.0, 0.0, 1e9 + 1 / 3]
    group = []
    for r in rewards:
        sample = replace(make_sample([0], reward=r), rewards={"a": [r, 1.0]})
        group.append(to_episode(make_result(samples=[sample], reward=r), 1000))
    cut_off = EpisodeResult(EpisodeState.TIMEOUT, False)
    group.append(to_episode(cut_off, 1000, timeout_reward=0.0))  # without any
    found = Scorer(AdvantageConfig(type="gdpo"), max_tokens=9).score(group).advantages
    np.testing.assert_allclose(found, advantages("grpo", [*rewards, 0.0]))
    unnamed = Scorer(AdvantageConfig(type="gdpo"), max_tokens=9).score(episodes([1.0, 0.5, 0.0]))
    assert unnamed.advantages.tolist() == advantages("grpo", [1.0, 0.5, 0.0])


def test_max_rl_learns_nothing_where_nobody_succeeds() -> None:
    assert advantages("max_rl", [0.0, -1.0]) == [0.0, 0.0]


@pytest.mark.parametrize(("n", "good", "k"), [(8, 2, 3), (8, 1, 7), (5, 3, 2), (32, 4, 8)])
def test_pass_at_k_of_success_and_failure_is_the_paper_s_closed_form(n: int, good: int, k: int) -> None:
    found = advantages("pass_at_k", [1.0] * good + [0.0] * (n - good), pass_k=k, eps=1e-12)
    mean = 1 - math.comb(n - good, k) / math.comb(n, k)
    std = math.sqrt(mean * (1 - mean))
    bad = (1 - mean - math.comb(n - good - 1, k - 1) / math.comb(n - 1, k - 1)) / std
    assert found == pytest.approx([(1 - mean) / std] * good + [bad] * (n - good))


@pytest.mark.parametrize("rewards", [[1.0, 1, 1, 0, 0], [0.3, 0.1 + 0.2, 0.3, 0, 0.7 - 0.7], [-5.0] * 3 + [-6, -7]])
def test_a_group_whose_every_subset_holds_one_of_the_best_teaches_nothing_of_pass_at_k(rewards: list[float]) -> None:
    assert advantages("pass_at_k", rewards, pass_k=3) == [0.0] * 5


@pytest.mark.parametrize("k", [2, 3, 4])
def test_pkpo_is_an_unbiased_gradient_of_the_best_of_k(k: int) -> None:
    """Of a softmax policy over three replies, by all the groups of four that it may sample."""
    rewards, n = np.array([0.0, 0.4, 1.0]), 4
    probs = np.exp([0.3, 1.0, -0.5]) / np.exp([0.3, 1.0, -0.5]).sum()
    found = np.zeros(3)
    for drawn in itertools.product(range(3), repeat=n):
        scores = np.eye(3)[list(drawn)] - probs  # grad of log pi, of each
        own = np.array(advantages("pkpo", rewards[list(drawn)].tolist(), pass_k=k))
        found += probs[list(drawn)].prod() * (own @ scores) / n
    at_most = np.cumsum(probs)  # P(reward <= the j-th); E[max of k] = sum r_j (F_j^k - F_{j-1}^k)
    slopes = k * at_most ** (k - 1)
    wanted = np.zeros(3)
    for a in range(3):
        of_logit = probs * (np.eye(3)[a] - probs[a])  # d probs / d logit a
        change = slopes * np.cumsum(of_logit)
        wanted[a] = rewards @ np.diff(np.concatenate([[0.0], change]))
    np.testing.assert_allclose(found, wanted, atol=1e-12)


def test_with_all_rollouts_in_one_subset_the_best_alone_has_an_advantage() -> None:
    assert advantages("pkpo", [0.2, 1.0, 0.7, 0.0], pass_k=4) == pytest.approx([0, 4 * (1.0 - 0.7), 0, 0])
    assert advantages("pkpo", [0.2, 1.0, 1.0, 0.0], pass_k=4) == [0.0] * 4
    assert advantages("pkpo", [0.5, 1.0], pass_k=4) == [0.0, 1.0]  # the others failed
    assert advantages("pass_at_k", [0.0, 1.0], pass_k=4) == pytest.approx([-1, 1], abs=1e-5)


@pytest.mark.parametrize(("kind", "pass_k", "least"), [("pass_at_k", 8, 9), ("pkpo", 9, 9)])
def test_a_best_of_more_rollouts_than_there_are_is_refused(kind: str, pass_k: int, least: int) -> None:
    orchestrator = {"env": [{"id": "reverse-text"}], "advantage": {"type": kind, "pass_k": pass_k}}
    with pytest.raises(ValueError, match=rf"{kind} with .*advantage\.pass_k = {pass_k} needs at least {least}"):
        Experiment.model_validate({"orchestrator": orchestrator})
    orchestrator["advantage"] = {"type": kind, "pass_k": pass_k - 1}
    Experiment.model_validate({"orchestrator": orchestrator})


def test_scoring_does_not_change_the_rewards() -> None:
    group = episodes([0.5, -1.0])
    result = Scorer(AdvantageConfig(type="none"), max_tokens=9).score(group)
    result.advantages[:] = 9
    assert [e.result.reward for e in group] == [0.5, -1.0] and result.rewards.tolist() == [0.5, -1.0]


def test_rewards_that_overflow_name_their_group() -> None:
    scores = Scorer(AdvantageConfig(), max_tokens=9).score(episodes([1.7e308, 0.9e308]), env="game", position=4)
    assert "group of prompt 4 (game): grpo" in scores.problem and "1.7e+308" in scores.problem
    assert not scores.kept.any() and not scores.advantages.any()
    large = Scorer(AdvantageConfig(type="rloo"), max_tokens=9).score(episodes([3e38, -3e38]))
    assert "rloo" in large.problem and not large.kept.any()  # a batch has no room for 6e38


def test_a_group_of_one_needs_no_baseline() -> None:
    assert {name for name in ("none", "reinforce", "rae", *CENTERED) if get_algorithm(name).min_group == 1} == {
        "none",
        "reinforce",
        "rae",
    }
    with pytest.raises(ValueError, match="rloo compares rollouts of one prompt"):
        Experiment.model_validate(
            {"orchestrator": {"advantage": {"type": "rloo"}, "rollouts_per_example": 1, "batch_size": 4}}
        )


def test_rae_remembers_each_environment_and_its_state_goes_on() -> None:
    config = AdvantageConfig(type="rae", decay=0.5)
    scorer = Scorer(config, max_tokens=9)
    assert scorer.score(episodes([1.0, 1.0]), env="a").advantages.tolist() == [0.5, 0.25]
    assert scorer.score(episodes([4.0]), env="b").advantages.tolist() == [2.0]
    later = Scorer(config, max_tokens=9)
    later.load_state_dict(scorer.state_dict())
    for one in (scorer, later):
        assert one.score(episodes([1.0]), env="a").advantages.tolist() == [0.125]
    before_roles = Scorer(config, max_tokens=9)
    before_roles.load_state_dict({"a": 0.75})
    assert before_roles.score(episodes([1.0]), env="a").advantages.tolist() == [0.125]
    assert Scorer(AdvantageConfig(), max_tokens=9).state_dict() == {}


def test_own_function_and_class_by_import_path(own: ModuleType) -> None:
    class Counting:
        min_group = 3

        def __init__(self, start: int) -> None:
            self.count = start

        def score_group(self, group: RewardGroup) -> np.ndarray:
            self.count += 1
            return group.rewards * self.count

    own.half = lambda group, factor=0.5: factor * group.rewards  # type: ignore[attr-defined]
    own.Counting, own.number, own.Empty = Counting, 3, dict  # type: ignore[attr-defined]
    assert advantages("own_advantages:half", [2.0, 4.0]) == [1.0, 2.0]
    assert advantages("own_advantages:half", [2.0], args={"factor": 3}) == [6.0]
    scorer = Scorer(AdvantageConfig(type="own_advantages:Counting", args={"start": 1}), max_tokens=9)
    assert scorer.min_group == 3 and scorer.state_dict() == {}
    assert scorer.score(episodes([1.0] * 3)).advantages.tolist() == [2.0] * 3
    assert scorer.score(episodes([1.0] * 3)).advantages.tolist() == [3.0] * 3
    for name, reason in [("number", "not a function"), ("missing", "no attribute"), ("Empty", "no score_group")]:
        with pytest.raises(ConfigError, match=rf"orchestrator\.advantage\.type.*{reason}"):
            get_algorithm(f"own_advantages:{name}")
    with pytest.raises(ConfigError, match=r"orchestrator\.advantage\.type.*No module"):
        get_algorithm("no_such_package:f")


def test_own_code_that_fails_is_named_with_the_group(own: ModuleType) -> None:
    own.raises = lambda group: 1 / 0  # type: ignore[attr-defined]
    own.shapeless = lambda group: 0.0  # type: ignore[attr-defined]
    for name, reason in [("raises", "ZeroDivisionError"), ("shapeless", r"shape \[\]")]:
        scorer = Scorer(AdvantageConfig(type=f"own_advantages:{name}"), max_tokens=9)
        with pytest.raises(OrchestratorError, match=rf"own_advantages:{name}.*group of prompt 3|{reason}"):
            scorer.score(episodes([1.0]), position=3)


@pytest.mark.parametrize(
    ("tree", "reason"),
    [
        ({"type": "grop"}, "did you mean grpo"),
        ({"type": "grpo", "args": {"a": 1}}, "args are for your own algorithm"),
        ({"overlong": "cut"}, "'mask'"),
        ({"decay": 1.0}, "less than 1"),
    ],
)
def test_settings_that_cannot_work_are_refused(tree: dict, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        AdvantageConfig.model_validate(tree)
    with pytest.raises(ConfigError, match="grpo_no_std"):
        get_algorithm("grop")


# ------------------------------------------------------------------------------------------------- penalties


def test_length_penalty_makes_the_shorter_of_two_good_answers_better() -> None:
    short, long, wrong = advantages("dr_grpo", [1.0, 1.0, 0.0], [10, 40, 40], length={"output": 0.3})
    assert short > long > wrong
    assert short - long == pytest.approx((2 / 3) * 0.3 * 0.75)
    # where nothing succeeds nobody is pushed to be short, unless that is asked for
    assert advantages("dr_grpo", [0.0, 0.0], [10, 40], length={}) == [0.0, 0.0]
    assert advantages("dr_grpo", [0.0, 0.0], [10, 40], length={"by_success": False}) == pytest.approx([0.0375, -0.0375])


def test_a_rollout_that_is_dropped_is_no_measure_of_the_others_length() -> None:
    """As one that has failed is none."""
    cut = to_episode(replace(make_result([0] * 100), truncated=True), 1000)
    config = AdvantageConfig.model_validate({"type": "dr_grpo", "overlong": "drop", "length": {"output": 0.3}})
    with_cut = Scorer(config, max_tokens=200).score([*episodes([1.0, 1.0], [10, 20]), cut])
    assert with_cut.advantages.tolist() == [*advantages("dr_grpo", [1, 1], [10, 20], length={"output": 0.3}), 0.0]
    alone = Scorer(config, max_tokens=200).score([cut, cut])
    assert not alone.kept.any() and not alone.problem


def test_repetition_penalty_counts_repeated_ngrams() -> None:
    samples = [make_sample([0] * 12) for _ in range(2)]
    samples[1] = replace(samples[1], token_ids=np.where(samples[1].loss_mask, 7, 1).astype(np.int32))
    group = [to_episode(make_result(samples=[s], reward=1.0), 1000) for s in samples]
    config = AdvantageConfig.model_validate({"type": "none", "repetition": {"ngram": 3, "coef": 1.0}})
    varied, stuck = Scorer(config, max_tokens=9).score(group).rewards.tolist()
    assert varied == 1.0 and stuck == pytest.approx(1 - 0.9)  # one distinct 3-gram of ten


def test_ngrams_never_span_what_was_not_sampled() -> None:
    sample = make_sample([0] * 6, num_prompt=0)
    sample = replace(sample, loss_mask=np.array([True, True, False, True, True, True]))
    [first, second] = sampled_runs(to_episode(make_result(samples=[sample]), 1000))
    assert (first.tolist(), second.tolist()) == ([100, 101], [103, 104, 105])


def test_soft_overlong_looks_at_turns_and_not_at_their_sum() -> None:
    turns = make_sample([0] * 65, num_prompt=0)
    turns = replace(turns, loss_mask=np.arange(65) % 11 < 10)  # six turns of 10 tokens, one between them
    group = [to_episode(make_result(samples=[turns], reward=1.0), 1000)]

    def reward(**soft: object) -> float:
        config = AdvantageConfig.model_validate({"type": "none", "soft_overlong": soft})
        return Scorer(config, max_tokens=20).score(group).rewards.item()

    assert reward() == 1.0
    assert reward(per="episode", max_tokens=60) == 0.0
    with pytest.raises(ValueError, match="per = episode needs max_tokens"):
        reward(per="episode")


def test_a_rollout_over_its_deadline_counts_where_that_is_asked_for() -> None:
    timeout = EpisodeResult(state=EpisodeState.TIMEOUT, usable=False, reason="no end after 5 s", error_type="Timeout")
    assert not to_episode(timeout, 100).usable
    late = to_episode(timeout, 100, timeout_reward=-0.5)
    assert late.usable and late.result.reward == -0.5 and late.reason == "no end after 5 s"
    scores = Scorer(AdvantageConfig(type="dr_grpo"), max_tokens=9).score([*episodes([1.0, 1.0]), late])
    assert scores.advantages.tolist() == pytest.approx([0.5, 0.5, -1.0])
    # of two agents, it counts for each of the roles
    two = [replace(make_sample([0], reward=r), agent=a, trace=n) for n, (a, r) in enumerate([("x", 1.0), ("y", 0.0)])]
    both = to_episode(make_result(samples=two, reward=0.5), 1000)
    tokens = Scorer(AdvantageConfig(type="dr_grpo"), max_tokens=9).score([both, late]).tokens
    assert tokens is not None and [row.max() for row in tokens[0]] == pytest.approx([0.75, 0.25])
    assert tokens[1] == []
    # and so does a greedy one
    tokens = Scorer(AdvantageConfig(type="remax"), max_tokens=9).score([both], greedy=late).tokens
    assert tokens is not None and [row.max() for row in tokens[0]] == [1.5, 0.5]


def test_soft_overlong_has_defaults_from_the_sampling_limit() -> None:
    config = AdvantageConfig.model_validate({"type": "none", "soft_overlong": {}})
    rewards = Scorer(config, max_tokens=100).score(episodes([0.0] * 4, [80, 90, 100, 120])).rewards
    assert rewards.tolist() == pytest.approx([0.0, -0.5, -1.0, -1.0])
