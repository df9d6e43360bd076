"""From groups to rank batches: every token keeps its id, mask, log-probability and version, and gets its advantage."""

import sys
from collections import defaultdict
from dataclasses import replace
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from loguru import logger
from pydantic import ValidationError

from prime_hpc.config.sections.advantage import AdvantageConfig, SoftOverlongConfig
from prime_hpc.config.sections.orchestrator import MOST_ROLLOUTS, OrchestratorConfig
from prime_hpc.config.sections.sampling import SamplingConfig
from prime_hpc.config.sections.teacher import EchoConfig
from prime_hpc.envs.samples import EpisodeResult, Sample
from prime_hpc.orchestrator.algorithms import Scorer
from prime_hpc.orchestrator.algorithms.echo import Echo
from prime_hpc.orchestrator.batching import batch_builder
from prime_hpc.orchestrator.batching.batch_builder import (
    EPISODE_BITS,
    ScoredGroup,
    build_ranks,
    count_rollouts,
    score_groups,
    train_samples,
)
from prime_hpc.orchestrator.errors import OrchestratorError
from prime_hpc.orchestrator.metrics import batch_metrics, troubles
from prime_hpc.orchestrator.rollouts.episodes import Episode, is_retryable, is_server_error, mask_all, to_episode
from prime_hpc.orchestrator.rollouts.groups import Group
from prime_hpc.orchestrator.rollouts.prompts import Prompt
from prime_hpc.store.batch.rank_batch import RankBatch
from prime_hpc.store.batch.rank_files import read_rank_batch, write_batch
from prime_hpc.store.run_paths import RunPaths
from tests.support.episodes import failed_episode, failed_result, make_episode, make_result, make_sample

SAMPLING, WARM = SamplingConfig(), SamplingConfig(temperature=0.7, top_p=0.9, top_k=20)


def score(groups: list[Group], config: AdvantageConfig) -> list[ScoredGroup]:
    scorer, names = Scorer(config, max_tokens=64), ["a", "b"]
    return score_groups(groups, scorer, zero=config.zero, scale=config.scale, env_names=names)


def test_a_group_is_no_larger_than_ids_have_room_for() -> None:
    """The first batch of a larger one ended the run with an assertion, once it had been sampled."""
    assert batch_builder.sample_id(3, MOST_ROLLOUTS - 1) < batch_builder.sample_id(4, 0)
    OrchestratorConfig(batch_size=MOST_ROLLOUTS, rollouts_per_example=MOST_ROLLOUTS)
    for env in ({}, {"env": [{"id": "reverse-text", "rollouts_per_example": MOST_ROLLOUTS + 1}]}):
        with pytest.raises(ValidationError, match="rollouts_per_example\n.*less than or equal to 4096"):
            OrchestratorConfig.model_validate(env or {"rollouts_per_example": MOST_ROLLOUTS + 1})


def make_group(position: int, results: list[EpisodeResult | None], source: int = 0) -> Group:
    slots: list[Episode | None] = [failed_episode() if r is None else to_episode(r, 1000) for r in results]
    return Group(Prompt(position, source, position, position), 0, 0, slots, num_ended=len(slots))


def sequences(ranks: list[RankBatch]) -> dict[int, list[dict[str, np.ndarray]]]:
    """Every sequence of a batch, by sample id."""
    found: dict[int, list[dict[str, np.ndarray]]] = {}
    for rank in ranks:
        for s in range(rank.num_sequences):
            tokens = slice(int(rank.seq_offsets[s]), int(rank.seq_offsets[s + 1]))
            row = {
                k: getattr(rank, k)[tokens] for k in ("token_ids", "loss_mask", "logprobs", "versions", "advantages")
            }
            row |= {k: getattr(rank, k)[s] for k in ("rewards", "group_ids", "env_ids", "temperatures")}
            row |= {} if rank.top_ps is None else {k: getattr(rank, k)[s] for k in ("top_ps", "top_ks", "min_ps")}
            found.setdefault(int(rank.sample_ids[s]), []).append(row)
    return found


def test_every_token_arrives_with_its_own_values_and_its_episodes_advantage() -> None:
    rng = np.random.default_rng(0)
    groups = []
    for position in range(6):
        results: list[EpisodeResult | None] = []
        for episode in range(4):
            length = int(rng.integers(1, 30))
            sample = make_sample(
                rng.integers(0, 5, length).tolist(),
                num_prompt=int(rng.integers(1, 9)),
                first_token=1000 * position + 100 * episode,
            )
            results.append(make_result(samples=[sample], reward=float(rng.normal())))
        if position == 2:
            results[1] = None
        groups.append(make_group(position, results, source=position % 2))
    scored = score(groups, AdvantageConfig(type="grpo_no_std"))
    ranks = build_ranks(train_samples(scored), num_ranks=2, micro_batch_tokens=64, sampling=WARM)
    found = sequences(ranks)
    assert len(found) == 23
    assert len({rank.num_micro_batches for rank in ranks}) == 1
    for rank in ranks:
        rank.check()
        assert max(rank.tokens_of(m).stop - rank.tokens_of(m).start for m in range(rank.num_micro_batches)) <= 64
    for group in groups:
        mean = np.mean([e.result.reward for e in group.slots if e is not None and e.usable])
        for index, ended in enumerate(group.slots):
            assert ended is not None
            ident = group.prompt.position << EPISODE_BITS | index
            if not ended.usable:
                assert ident not in found
                continue
            [row], [sample] = found[ident], ended.result.samples
            np.testing.assert_array_equal(row["token_ids"], sample.token_ids)
            np.testing.assert_array_equal(row["loss_mask"], sample.loss_mask)
            np.testing.assert_array_equal(row["logprobs"], sample.logprobs)
            np.testing.assert_array_equal(row["versions"], sample.versions)
            expected = np.where(sample.loss_mask, np.float32(ended.result.reward - mean), 0)
            np.testing.assert_allclose(row["advantages"], expected, rtol=1e-6)
            assert row["rewards"] == np.float32(ended.result.reward)
            assert row["group_ids"] == group.prompt.position
            assert row["env_ids"] == group.prompt.source
            assert row["temperatures"] == np.float32(0.7)
            assert (row["top_ps"], row["top_ks"], row["min_ps"]) == (np.float32(0.9), 20, 0)


def with_images(sample: Sample, *images: bytes) -> Sample:
    """Its second token is a part of the first image, its third of the next."""
    numbers = np.zeros(sample.num_tokens, np.int32)
    numbers[1 : 1 + len(images)] = np.arange(1, len(images) + 1)
    return replace(sample, images=numbers, image_data=images)


def test_each_rank_has_a_table_of_its_own_images() -> None:
    one, two = b"one image", b"another"
    shown = [(one,), (two, one), (), (two,)]
    results: list[EpisodeResult | None] = [
        make_result(samples=[with_images(make_sample([0]), *images) if images else make_sample([0])], reward=float(i))
        for i, images in enumerate(shown)
    ]
    scored = score([make_group(0, results)], AdvantageConfig(type="grpo_no_std"))
    ranks = build_ranks(train_samples(scored), num_ranks=3, micro_batch_tokens=8, sampling=SAMPLING)
    found = {}
    for rank in ranks:
        rank.check()
        assert rank.images is not None and rank.image_offsets is not None
        table = [rank.encoded_image(number) for number in range(1, len(rank.image_offsets))]
        assert len(set(table)) == len(table) == rank.images.max(initial=0)
        for i, start in enumerate(rank.seq_offsets[:-1].tolist()):
            numbers = rank.images[start : rank.seq_offsets[i + 1]]
            episode = int(rank.sample_ids[i]) & ((1 << EPISODE_BITS) - 1)
            found[episode] = tuple(table[n - 1] for n in numbers.tolist() if n)
    assert found == dict(enumerate(shown))
    text = score([make_group(0, [make_result([0], reward=1.0), make_result([0])])], AdvantageConfig())
    ranks = build_ranks(train_samples(text), num_ranks=1, micro_batch_tokens=64, sampling=SAMPLING)
    assert ranks[0].images is None and ranks[0].image_bytes is None


def test_prompts_that_differ_in_an_image_alone_are_not_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(batch_builder, "find_sharing", lambda keys, groups: seen.extend(keys))
    images = [b"one", b"two", b"one"]
    results: list[EpisodeResult | None] = [
        make_result(samples=[with_images(make_sample([0]), image)], reward=float(i)) for i, image in enumerate(images)
    ]
    scored = score([make_group(0, results)], AdvantageConfig())
    build_ranks(train_samples(scored), num_ranks=1, micro_batch_tokens=64, sampling=SAMPLING)
    one, two, same = (keys.tolist() for keys in seen)
    assert one == same and one[0] == two[0] and one[1] != two[1] and one[2:] == two[2:]


def test_branches_of_one_episode_share_sample_id_and_advantage() -> None:
    two = make_result(samples=[make_sample([0, 0]), make_sample([1], first_token=500)], reward=1.0)
    scored = score([make_group(5, [two, make_result([0], reward=0.0)])], AdvantageConfig(type="grpo_no_std"))
    found = sequences(build_ranks(train_samples(scored), num_ranks=1, micro_batch_tokens=50, sampling=SAMPLING))
    assert sorted(len(rows) for rows in found.values()) == [1, 2]
    for row in found[5 << EPISODE_BITS]:
        assert set(row["advantages"][row["loss_mask"]]) == {np.float32(0.5)}


def test_groups_without_signal_are_dropped_or_kept_by_choice() -> None:
    flat = make_group(0, [make_result([0], reward=1.0), make_result([0], reward=1.0)])
    steep = make_group(1, [make_result([0], reward=1.0), make_result([0], reward=0.0)])
    dropped = score([flat, steep], AdvantageConfig(zero="drop"))
    kept = score([flat, steep], AdvantageConfig(zero="keep"))
    assert {s.group_id for s in train_samples(dropped)} == {1}
    assert {s.group_id for s in train_samples(kept)} == {0, 1}


def cut_short(reward: float) -> EpisodeResult:
    return replace(make_result([0], reward=reward), truncated=True)


def test_a_batch_without_any_signal_keeps_its_smallest_group() -> None:
    groups = [make_group(p, [make_result([0] * n), make_result([0] * n)]) for p, n in enumerate([5, 2, 9])]
    samples = train_samples(score_groups(groups, Scorer(AdvantageConfig(), max_tokens=9), zero="drop"))
    assert {s.group_id for s in samples} == {1}
    assert all((s.advantages == 0).all() for s in samples)
    # the same where nothing may train because every rollout was cut short
    groups = [make_group(0, [cut_short(1.0), cut_short(0.0)])]
    for kind in ("grpo", "sft"):  # an objective that imitates looks at no advantage
        scored = score(groups, AdvantageConfig(type=kind, overlong="mask", zero="keep"))
        samples = train_samples(scored)
        assert len(samples) == 2 and not any(s.advantages.any() or s.sample.loss_mask.any() for s in samples)
        assert count_rollouts(scored).tolist() == [0, 0]
        [rank] = build_ranks(samples, num_ranks=1, micro_batch_tokens=64, sampling=SAMPLING)
        rank.check()


def test_tokens_that_are_left_out_on_purpose_keep_their_lag() -> None:
    groups = [
        make_group(p, [replace(make_result([2] * n), truncated=True) for _ in range(2)]) for p, n in ((0, 3), (1, 30))
    ]
    scored = score(groups, AdvantageConfig(overlong="mask"))
    assert not any(s.sample.loss_mask.any() for s in train_samples(scored))
    row = batch_metrics(scored, ["a"], step=4)
    assert (row["lag/mean"], row["lag/max"], row["rollouts/masked"]) == (1.0, 1, 4)
    [group], teacher = (
        groups[:1],
        [[np.full(s.num_tokens, -2.0, np.float32) for s in e.result.samples] for e in groups[0].usable],
    )
    scorer = Scorer(AdvantageConfig(type="opd", overlong="drop"), max_tokens=64)
    row = batch_metrics(score_groups([group], scorer, zero="drop", references=[teacher]), ["a"], step=4)
    sampled = [s.logprobs[s.loss_mask] for e in group.usable for s in e.result.samples]
    assert row["teacher/reverse_kl"] == pytest.approx(np.concatenate(sampled).mean() + 2.0)


def test_rollouts_that_were_cut_short_are_masked_dropped_or_kept() -> None:
    groups = [make_group(0, [make_result([0], reward=1.0), make_result([0], reward=0.0), cut_short(0.0)])]
    advantages = {
        way: [s.advantages[-1] for s in train_samples(score(groups, AdvantageConfig(type="dr_grpo", overlong=way)))]
        for way in ("keep", "mask", "drop", "penalize")
    }
    assert advantages["keep"] == pytest.approx([2 / 3, -1 / 3, -1 / 3])
    assert advantages["mask"] == pytest.approx([2 / 3, -1 / 3])  # still part of the mean
    assert advantages["drop"] == pytest.approx([0.5, -0.5])
    assert advantages["penalize"] == pytest.approx([1.0, 0.0, -1.0])


@pytest.mark.parametrize("kind", ["dr_grpo", "rloo", "opo", "reinforce"])
def test_advantages_are_scaled_over_the_whole_step(kind: str) -> None:
    rewards = [[1.0, 0.0, 0.0, 0.0], [1.0, 1.0, 1.0, 1.0], [0.5, 0.0, 3.0, 0.25]]
    groups = [make_group(p, [make_result([2], reward=r) for r in given]) for p, given in enumerate(rewards)]
    groups.append(make_group(3, [make_result([2], reward=9.0), None, None, None]))  # too few for all but reinforce
    plain = score(groups, AdvantageConfig(type=kind))
    scaled = score(groups, AdvantageConfig(type=kind, scale="batch"))
    found = np.concatenate([entry.advantages for entry in plain if entry.kept.any()])  # groups without signal too
    size = np.sqrt(np.mean(found**2))
    for before, after in zip(plain, scaled, strict=True):
        assert after.advantages == pytest.approx(before.advantages / size) and after.trains == before.trains
    advantages = np.concatenate([s.advantages[s.sample.loss_mask] for s in train_samples(scaled)])
    assert set(advantages.tolist()) <= {np.float32(a) for entry in scaled for a in entry.advantages}
    level = [make_group(0, [make_result([2], reward=1.0)] * 4)]
    assert not any(entry.advantages.any() for entry in score(level, AdvantageConfig(type="dr_grpo", scale="batch")))


def test_reinforce_plus_plus_baseline_is_the_standard_deviation_of_the_step() -> None:
    rng = np.random.default_rng(0)
    rewards = rng.random((6, 4))
    groups = [make_group(p, [make_result([2], reward=r) for r in given]) for p, given in enumerate(rewards.tolist())]
    scored = score(groups, AdvantageConfig(type="dr_grpo", scale="batch"))
    distances = rewards - rewards.mean(1, keepdims=True)
    assert np.stack([entry.advantages for entry in scored]) == pytest.approx(distances / distances.std())


def test_advantages_of_tokens_are_scaled_with_their_rollouts() -> None:
    def seats(reward: float) -> EpisodeResult:
        parts = enumerate((("x", reward), ("o", 1 - reward)))
        samples = [replace(make_sample([2], reward=r), agent=a, trace=t) for t, (a, r) in parts]
        return make_result(samples=samples, reward=0.5)

    groups = [make_group(0, [seats(r) for r in (1.0, 0.0, 0.0)])]
    groups.append(make_group(1, [make_result([2], reward=r) for r in (4.0, 0.0, 2.0)]))
    plain, scaled = (score(groups, AdvantageConfig(type="dr_grpo", scale=scale)) for scale in ("none", "batch"))
    assert plain[0].tokens is not None and scaled[0].tokens is not None
    size = plain[1].advantages[0] / scaled[1].advantages[0]
    for before, after in zip(plain[0].tokens, scaled[0].tokens, strict=True):
        assert [(row / size).tolist() for row in before] == [pytest.approx(row.tolist()) for row in after]
    assert any(row.any() for rows in plain[0].tokens for row in rows)
    (alone,) = score(groups[:1], AdvantageConfig(type="dr_grpo", scale="batch"))  # a game's seats add up to nothing
    assert alone.tokens is not None
    squares = [float(np.max(row**2)) for rows in alone.tokens for row in rows]
    assert np.mean(squares) == pytest.approx(1)


def test_groups_and_lengths_by_outcome() -> None:
    lengths = [[2, 9, 4], [3, 3, 3], [5, 5, 8], [2, 2, 2]]
    rewards = [[1.0, 0.0, 0.0], [1.0, 1.0, 1.0], [0.0, 0.0, 0.5], [0.0, 0.0, 0.0]]
    groups = [
        make_group(p, [replace(make_result([n]), reward=r, truncated=n > 8) for n, r in zip(*both, strict=True)])
        for p, both in enumerate(zip(lengths, rewards, strict=True))
    ]
    sampled = [[e.num_sampled_tokens for e in group.usable] for group in groups]
    row = batch_metrics(score(groups, AdvantageConfig(type="dr_grpo")), ["a"], step=1)
    assert (row["groups/solved_all"], row["groups/solved_none"], row["groups/zero_signal"]) == (1, 2, 2)
    assert row["completion/truncated"] == pytest.approx(1 / 12)
    above, below = [sampled[0][0], sampled[2][2]], [*sampled[0][1:], *sampled[2][:2]]
    assert row["completion/tokens_mean_above"] == np.mean(above)
    assert row["completion/tokens_mean_below"] == np.mean(below)
    every = np.concatenate(sampled)
    assert [row[f"completion/tokens_p{p}"] for p in (10, 90)] == np.percentile(every, (10, 90)).tolist()
    assert row["completion/tokens_mean_untruncated"] == np.delete(every, 1).mean()  # but the one of 9
    prompts = [e.num_prompt_tokens for group in groups for e in group.usable]
    assert (row["prompt/tokens_mean"], row["prompt/tokens_max"]) == (np.mean(prompts), max(prompts))
    scored = score(groups, AdvantageConfig(type="dr_grpo"))
    assert batch_metrics(scored, ["a"], step=1, good=0.5)["groups/solved_none"] == 1
    assert row["groups/with_signal"] == 2 and "signal" not in troubles(defaultdict(int, row))
    level = batch_metrics(score(groups[1:2], AdvantageConfig()), ["a"], step=1)
    assert (level["groups/trained"], level["groups/with_signal"]) == (1, 0), "the one that stands in the batch"
    assert "no group has a signal" in troubles(defaultdict(int, level))
    assert "completion/tokens_mean_above" not in level, "nothing was better than anything"
    for p, group in enumerate(groups):
        group.prompt = replace(group.prompt, source=p % 2)
    two = batch_metrics(score(groups, AdvantageConfig(type="dr_grpo")), ["lab/a", "b"], step=1)
    kinds = ("in_batch", "solved_all", "solved_none")
    assert [[two[f"groups/{env}/{kind}"] for kind in kinds] for env in ("lab/a", "b")] == [[2, 0, 1], [2, 1, 1]]


def test_a_group_that_cannot_be_scored_does_not_train_and_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("broken_advantages")
    module.nan_where_first_is_one = lambda group: group.rewards * (np.nan if group.rewards[0] == 1 else 1)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "broken_advantages", module)
    config = AdvantageConfig(type="broken_advantages:nan_where_first_is_one")
    bad = make_group(7, [make_result([0], reward=1.0), make_result([0], reward=0.0)])
    good = make_group(8, [make_result([0], reward=0.5), make_result([0], reward=0.0)])
    scored = score([bad, good], config)
    assert [s.trains for s in scored] == [False, True]
    assert "group of prompt 7 (a)" in scored[0].problem and "[1, 0]" in scored[0].problem
    assert batch_metrics(scored, ["a"], step=1)["groups/unscorable"] == 1
    with pytest.raises(OrchestratorError, match="none of the batch's 1 groups could be scored.*prompt 7"):
        score([bad], config)


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_fewer_samples_than_ranks_still_gives_every_rank_as_many_micro_batches(num_ranks: int) -> None:
    scored = score([make_group(0, [make_result([0], reward=r) for r in (0.0, 1.0)])], AdvantageConfig())
    ranks = build_ranks(train_samples(scored), num_ranks=num_ranks, micro_batch_tokens=8, sampling=SAMPLING)
    assert len(ranks) == num_ranks
    assert len({rank.num_micro_batches for rank in ranks}) == 1
    assert sum(rank.num_sequences for rank in ranks) == 2


def test_rows_of_their_own_hold_the_same_samples() -> None:
    results: list[EpisodeResult | None] = [
        make_result(samples=[make_sample([0] * n, first_token=9 * n)], reward=float(n)) for n in (3, 29, 4, 28, 2)
    ]
    samples = train_samples(score([make_group(0, results)], AdvantageConfig()))
    packed = build_ranks(samples, num_ranks=2, micro_batch_tokens=64, sampling=SAMPLING)
    single = build_ranks(samples, num_ranks=2, micro_batch_tokens=64, sampling=SAMPLING, single_rows=True)
    assert sequences(single).keys() == sequences(packed).keys()
    lengths = [np.diff(rank.seq_offsets) for rank in single]
    longest_together = [n.max() - n.min() for n in lengths]
    assert max(longest_together) <= 2 and {rank.num_micro_batches for rank in single} == {1}


def test_a_batch_survives_the_store(tmp_path: object) -> None:
    paths = RunPaths(tmp_path)  # type: ignore[arg-type]
    scored = score([make_group(3, [make_result([4, 5], reward=r) for r in (0.0, 1.0)])], AdvantageConfig())
    ranks = build_ranks(train_samples(scored), num_ranks=2, micro_batch_tokens=16, sampling=SAMPLING)
    write_batch(paths, 1, ranks, state={}, meta={}, incarnation=0)
    again = sequences([read_rank_batch(paths.rollouts_step(1), r) for r in range(2)])
    for ident, rows in sequences(ranks).items():
        for name, value in rows[0].items():
            np.testing.assert_array_equal(value, again[ident][0][name])


def test_an_episode_counts_its_sampled_tokens_and_versions() -> None:
    episode = make_episode([2, 2, 5])
    assert (episode.min_version, episode.max_version, episode.version_sum) == (2, 5, 9)
    assert (episode.num_sampled_tokens, episode.num_prompt_tokens) == (3, 3)


def test_what_may_not_train() -> None:
    too_long = to_episode(make_result([0] * 20), seq_len=22)
    assert not too_long.usable and "seq_len (22)" in too_long.reason
    assert not to_episode(make_result(samples=[]), 100).usable
    assert to_episode(failed_result("TaskError: boom"), 100).reason == "TaskError: boom"


def test_only_what_may_be_another_ones_fault_is_tried_again() -> None:
    assert is_server_error(failed_result(error_type="ProviderError"))
    assert is_retryable(failed_result(error_type="BlockedLoop"))
    for name in ("BlockedLoop", "AbortedGeneration", "MalformedResponse"):
        assert not is_server_error(failed_result(error_type=name)) and is_retryable(failed_result(error_type=name))
    assert not is_retryable(failed_result(error_type="TaskError"))
    assert not is_retryable(make_result([0]))


def test_batch_metrics_say_lag_reward_and_signal() -> None:
    groups = [
        make_group(0, [make_result([3, 3], reward=1.0), make_result([1, 1], reward=0.0)], source=0),
        make_group(1, [make_result([3], reward=0.5), make_result([3], reward=0.5)], source=1),
    ]
    row = batch_metrics(score(groups, AdvantageConfig()), ["a", "b"], step=4)
    assert row["reward/mean"] == pytest.approx(0.5)
    assert row["reward/a/mean"] == pytest.approx(0.5)
    assert row["lag/max"] == 2
    assert row["lag/mean"] == pytest.approx(4 / 6)
    assert (row["groups/trained"], row["groups/zero_signal"]) == (1, 1)


def test_rewards_that_differ_by_rounding_have_no_signal() -> None:
    """As sums of weighted rewards do: 0.1 + 0.2 is not 0.3. The advantages are exact zeros."""
    group = make_group(0, [make_result([3], reward=0.1 + 0.2), make_result([3], reward=0.3)])
    row = batch_metrics(score([group], AdvantageConfig()), ["a"], step=4)
    assert (row["groups/zero_signal"], row["groups/reward_spread"]) == (1, 0.0)


def test_tokens_that_are_too_old_do_not_train_and_change_nothing_else() -> None:
    """Rewards, advantages, lengths and the other tokens are those of the batch without a floor."""
    rng = np.random.default_rng(1)
    groups = []
    for position in range(8):
        results: list[EpisodeResult | None] = []
        for episode in range(4):
            versions = np.sort(rng.integers(0, 6, int(rng.integers(1, 12)))).tolist()
            versions = [max(v, 3) for v in versions] if episode == 0 else versions  # one is young enough
            first = make_sample(versions, num_prompt=2, first_token=1000 * position + 100 * episode)
            second = make_sample([0, 1], num_prompt=3, first_token=1000 * position + 100 * episode + 50)
            samples = [first, second] if episode == 1 else [first]
            results.append(make_result(samples=samples, reward=float(rng.normal())))
        groups.append(make_group(position, results))
    config = AdvantageConfig(type="grpo_no_std", soft_overlong=SoftOverlongConfig(buffer=4))
    after = score_groups(groups, Scorer(config, max_tokens=12), zero=config.zero, env_names=["a"], floor=3)
    plain = score_groups(groups, Scorer(config, max_tokens=12), zero=config.zero, env_names=["a"])
    for one, other in zip(plain, after, strict=True):
        assert np.array_equal(one.advantages, other.advantages) and np.array_equal(one.rewards, other.rewards)
        assert [e.num_sampled_tokens for e in one.episodes] == [e.num_sampled_tokens for e in other.episodes]
    whole, masked = train_samples(plain), train_samples(after)
    assert {s.sample_id for s in masked} <= {s.sample_id for s in whole}
    found = {(s.sample_id, int(s.sample.token_ids[0])): s for s in whole}
    for sample in masked:
        theirs = found[sample.sample_id, int(sample.sample.token_ids[0])]
        young = theirs.sample.loss_mask & (theirs.sample.versions >= 3)
        assert np.array_equal(sample.sample.loss_mask, young) and young.any()
        assert np.array_equal(sample.sample.token_ids, theirs.sample.token_ids)
        assert np.array_equal(sample.sample.logprobs, np.where(young, theirs.sample.logprobs, 0))
        assert np.array_equal(sample.sample.versions, np.where(young, theirs.sample.versions, -1))
        assert np.array_equal(sample.advantages, np.where(young, theirs.advantages, 0))
    num_young = sum(int((s.sample.versions >= 3).sum()) for s in whole)
    assert sum(s.sample.num_loss_tokens for s in masked) == num_young < sum(s.sample.num_loss_tokens for s in whole)
    assert count_rollouts(after)[0] == num_young
    for rank in build_ranks(
        masked, num_ranks=2, micro_batch_tokens=64, sampling=SAMPLING, totals=count_rollouts(after)
    ):
        rank.check()
        assert not len(rank.versions[rank.loss_mask]) or rank.versions[rank.loss_mask].min() >= 3
    row, all_tokens = batch_metrics(after, ["a"], 6), batch_metrics(plain, ["a"], 6)
    total = sum(s.sample.num_loss_tokens for s in whole)
    assert row["tokens/stale"] == pytest.approx(1 - num_young / total) and row["lag/max"] <= 2
    assert all_tokens["tokens/stale"] == 0 and all_tokens["lag/max"] == 5
    assert row["completion/tokens_mean"] == all_tokens["completion/tokens_mean"]
    assert row["reward/mean"] == all_tokens["reward/mean"]
    young_versions = np.concatenate([s.sample.versions[s.sample.loss_mask] for s in masked])
    assert row["lag/mean"] == pytest.approx(5 - young_versions.mean())


def test_a_batch_whose_young_tokens_are_of_groups_without_a_signal_still_makes_a_version() -> None:
    """As one without any signal does: with advantages of 0."""
    config = AdvantageConfig(type="grpo_no_std", zero="drop")
    even = make_group(0, [make_result([5, 5], reward=1.0), make_result([5], reward=1.0)])
    old = [make_result([0, 1], reward=1.0), make_result([1], reward=0.0)]
    signal = make_group(1, [*old, None])
    scored = score_groups([even, signal], Scorer(config, max_tokens=64), zero="drop", floor=3)
    samples = train_samples(scored)
    assert {s.group_id for s in samples} == {0} and not any(s.advantages.any() for s in samples)
    assert sum(s.sample.num_loss_tokens for s in samples) == 3


def test_the_young_tokens_of_a_long_reply_count_as_a_part_of_it() -> None:
    """Where a sequence's length divides: not as a whole reply of few tokens."""
    late, young = make_result([0] * 190 + [5] * 10, reward=1.0), make_result([5] * 200, reward=0.0)
    scored = score_groups(
        [make_group(0, [late, young])], Scorer(AdvantageConfig(), max_tokens=300), zero="drop", floor=4
    )
    samples = train_samples(scored)
    assert [s.sample.num_loss_tokens for s in samples] == [10, 200]
    assert [s.rollout_tokens for s in samples] == [200, 200] and count_rollouts(scored).tolist() == [210, 2]


def test_a_batch_whose_young_episodes_are_unusable_after_all_still_makes_a_version() -> None:
    """A teacher refused to score the only one that is young enough."""
    group = make_group(0, [make_result([0, 1], reward=1.0), make_result([5], reward=0.0)])
    group.slots[1] = replace(group.usable[1], usable=False)
    scored = score_groups([group], Scorer(AdvantageConfig(type="reinforce"), max_tokens=9), zero="keep", floor=4)
    [sample] = train_samples(scored)
    assert not sample.sample.loss_mask.any() and not sample.advantages.any()


def test_echo_says_once_that_nothing_tells_whose_the_tokens_are() -> None:
    config, warnings = EchoConfig(), list[str]()
    sink = logger.add(warnings.append, level="WARNING", format="{message}")
    two_turns = [(7, replace(make_sample([0]), roles=np.zeros(4, np.uint8))) for _ in range(2)]
    spoken = replace(make_sample([0, 0]), roles=np.array([0, 0, 0, 0, 2], np.uint8), num_turns=2)
    episode = replace(make_episode([0]), result=make_result(samples=[sample for _, sample in two_turns]))
    masked = [(9, sample) for sample in mask_all(episode).result.samples]
    for quiet in ([], two_turns[:1], [*two_turns, (8, spoken)], masked):
        Echo(config).tell_if_idle(quiet)
    assert not warnings
    echo = Echo(config)
    for _ in range(2):
        echo.tell_if_idle([*masked, *two_turns])
    logger.remove(sink)
    assert len(warnings) == 1 and "echo learns nothing" in warnings[0]
