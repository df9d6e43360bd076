"""`prime-hpc simulate`: the model of events against closed forms and laws, its fit, and the shapes asked for."""

import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from prime_hpc.config.experiment import Experiment
from prime_hpc.observe.metrics import MetricsWriter
from prime_hpc.simulate.calibration import fit_nonnegative
from prime_hpc.simulate.costs import Costs
from prime_hpc.simulate.events import simulate
from prime_hpc.simulate.setting import Setting, other_shapes, parse_shape, reshaped, setting_of
from prime_hpc.store.attempts import Attempt, write_attempt
from prime_hpc.store.run_paths import RunPaths
from prime_hpc.supervisor.attempt.device_split import best_split, idle_shares, split_choices, split_line
from prime_hpc.supervisor.main import _summary
from tests.support.measured_runs import tree_of

SETTING = Setting(
    ranks=1,
    servers=1,
    engines=1,
    gpus_per_engine=1,
    async_level=0,
    num_prompts=4,
    group_size=4,
    max_concurrent=16,
    max_tokens=1000,
    max_turns=1,
    max_num_seqs=None,
    max_steps=100,
    save_interval=None,
)
COSTS = Costs(
    rollouts=((100.0, 0.0),),
    token_s=0.01,
    shared_token_s=0.001,
    trained_per_sampled=2.0,
    train_fixed_s=0.1,
    train_token_s=0.0005,
    publish_s=0.2,
    load_s=0.3,
    other_s=0.05,
    handover_s=0.07,
)
GENERATE = 100 * (0.01 + 16 * 0.001)
TRAIN = 0.1 + 0.0005 * 2 * 1600


# ------------------------------------------------------------------------------------------------- closed forms


def test_level_0_takes_turns() -> None:
    outcome = simulate(SETTING, COSTS, 0)
    assert outcome.step_s == pytest.approx(GENERATE + 0.07 + TRAIN + 0.2 + 0.3)
    assert outcome.trainer_idle == pytest.approx(1 - (TRAIN + 0.2 + 0.05) / outcome.step_s)
    assert outcome.engines_idle == pytest.approx(1 - GENERATE / outcome.step_s)
    assert (outcome.lag, outcome.stale) == pytest.approx((0, 0), abs=1e-9)
    assert outcome.batch_tokens == pytest.approx(3200)
    assert outcome.in_flight == pytest.approx(16 * GENERATE / outcome.step_s)
    assert outcome.sampled_per_s == pytest.approx(1600 / outcome.step_s)


def test_a_greedy_rollout_beside_each_is_sampled_and_does_not_train() -> None:
    setting = replace(SETTING, group_size=1, max_concurrent=100)
    plain, greedy = (simulate(replace(setting, greedy=has), COSTS, 0) for has in (False, True))
    assert greedy.batch_tokens == plain.batch_tokens == pytest.approx(800)
    assert greedy.step_s - plain.step_s == pytest.approx(100 * 4 * 0.001)  # twice as many share the engine
    assert greedy.sampled_per_s * greedy.step_s == pytest.approx(800)


@pytest.mark.parametrize("train_token_s", [0.0001, 0.0005, 0.002])
def test_level_1_takes_the_longer_side(train_token_s: float) -> None:
    costs = replace(COSTS, train_token_s=train_token_s, handover_s=0, load_s=0, publish_s=0)
    outcome = simulate(replace(SETTING, async_level=1), costs, 0)
    train = 0.1 + train_token_s * 3200 + 0.05
    assert outcome.step_s == pytest.approx(max(GENERATE, train))
    assert outcome.trainer_idle == pytest.approx(max(0.0, 1 - train / GENERATE), abs=1e-9)
    assert outcome.engines_idle == pytest.approx(max(0.0, 1 - GENERATE / train), abs=1e-9)


@pytest.mark.parametrize("level", [0, 1, 2, 3])
def test_tokens_are_as_old_as_the_gate_allows_where_the_trainer_is_the_bound(level: int) -> None:
    costs = replace(COSTS, token_s=1e-6, shared_token_s=0, load_s=0, handover_s=0)
    assert simulate(replace(SETTING, async_level=level), costs, 0).lag == pytest.approx(level)


def test_requests_beyond_what_an_engine_decodes_take_turns() -> None:
    few = simulate(replace(SETTING, max_num_seqs=8), replace(COSTS, shared_token_s=0), 0)
    room = simulate(SETTING, replace(COSTS, shared_token_s=0), 0)
    assert few.step_s - room.step_s == pytest.approx(100 * 0.01)  # twice as long


def test_a_saturated_engine_gives_the_same_tokens_per_second_at_any_load() -> None:
    costs = replace(COSTS, token_s=0, train_fixed_s=0, train_token_s=0, other_s=0, publish_s=0, load_s=0, handover_s=0)
    level_2 = replace(SETTING, async_level=2)
    steps = [simulate(replace(level_2, max_concurrent=n), costs, 0).step_s for n in (4, 8, 16)]
    assert steps == pytest.approx([1600 * 0.001] * 3)


def test_engines_share_the_load() -> None:
    costs = replace(COSTS, token_s=0)
    one, two = simulate(SETTING, costs, 0), simulate(replace(SETTING, engines=2), costs, 0)
    servers = simulate(replace(SETTING, servers=2), costs, 0)
    assert one.step_s - two.step_s == pytest.approx(1600 * 0.001 / 2)
    assert servers.step_s == pytest.approx(two.step_s)


def test_ranks_share_the_tokens() -> None:
    one, four = simulate(SETTING, COSTS, 0), simulate(replace(SETTING, ranks=4), COSTS, 0)
    assert one.step_s - four.step_s == pytest.approx(0.0005 * 3200 * 3 / 4)


def test_a_pause_of_the_engines_is_time_without_tokens() -> None:
    costs = replace(COSTS, train_fixed_s=0, train_token_s=0.0001, publish_s=0, handover_s=0, pause_s=0.25)
    outcome = simulate(replace(SETTING, async_level=3), costs, 0)
    assert outcome.step_s == pytest.approx(GENERATE + 0.25)


def test_time_outside_of_sampling_is_taken_before_it() -> None:
    costs = replace(COSTS, rollouts=((0.0, 3.0),))
    assert simulate(SETTING, costs, 0).step_s == pytest.approx(3.0 + 0.07 + 0.1 + 0.2 + 0.3)


def test_saves_are_spread_over_the_steps_between_them() -> None:
    bound = replace(COSTS, token_s=1e-6, shared_token_s=0, load_s=0, handover_s=0, save_s=4.0)
    level_2 = replace(SETTING, async_level=2)
    without = simulate(level_2, bound, 0).step_s
    assert simulate(replace(level_2, save_interval=8), bound, 0).step_s - without == pytest.approx(0.5)


def test_few_in_flight_take_rounds() -> None:
    outcome = simulate(replace(SETTING, max_concurrent=4), COSTS, 0)
    assert outcome.step_s == pytest.approx(4 * 100 * (0.01 + 4 * 0.001) + 0.07 + TRAIN + 0.2 + 0.3)


def test_groups_that_come_to_nothing_are_sampled_for_nothing() -> None:
    costs = replace(COSTS, token_s=0, dropped_share=0.5, train_fixed_s=0, train_token_s=0)
    outcome = simulate(replace(SETTING, async_level=2, num_prompts=16), costs, 0)
    assert outcome.step_s == pytest.approx(2 * 64 * 100 * 0.001, rel=0.15)


def test_a_large_fleet_is_simulated_in_part() -> None:
    """1,000 nodes of 8 GPUs, and a thousandth of them: step times are those of one and the same load."""
    large = replace(SETTING, ranks=2000, engines=6000, num_prompts=4000, max_concurrent=16_000, async_level=1)
    small = replace(SETTING, ranks=2, engines=6, max_concurrent=16, async_level=1)
    found, like = simulate(large, COSTS, 0), simulate(small, COSTS, 0)
    assert found.part > 10
    assert found.step_s == pytest.approx(like.step_s)
    assert found.batch_tokens == pytest.approx(1000 * like.batch_tokens)
    assert found.sampled_per_s == pytest.approx(1000 * like.sampled_per_s)


# ------------------------------------------------------------------------------------------------------- laws


def spread_out(seed: int = 1, count: int = 200) -> Costs:
    rng = random.Random(seed)
    return replace(COSTS, rollouts=tuple((rng.lognormvariate(4, 1), rng.random()) for _ in range(count)))


def test_the_same_seed_gives_the_same_outcome_and_another_one_another() -> None:
    costs, setting = spread_out(), replace(SETTING, async_level=2)
    assert simulate(setting, costs, 3) == simulate(setting, costs, 3)
    assert simulate(setting, costs, 3).step_s != simulate(setting, costs, 4).step_s


@pytest.mark.parametrize(
    "changes",
    [
        [{"ranks": n} for n in (1, 2, 4, 8)],
        [{"engines": n} for n in (1, 2, 4, 8)],
        [{"async_level": n} for n in (0, 1, 2)],
        [{"num_prompts": n} for n in (16, 8, 4)],
        [{"max_concurrent": n} for n in (4, 16, 64)],
    ],
)
def test_more_devices_more_overlap_or_less_work_never_take_longer(changes: Sequence[dict[str, Any]]) -> None:
    setting = replace(SETTING, num_prompts=8, max_concurrent=32, async_level=1)
    steps = [simulate(replace(setting, **change), spread_out(), 0).step_s for change in changes]
    for before, after in pairwise(steps):
        assert after <= before * 1.03, steps  # 3 %: each draws its own episodes


@pytest.mark.parametrize("name", ["token_s", "shared_token_s", "train_token_s", "publish_s", "load_s", "handover_s"])
def test_what_costs_more_takes_longer(name: str) -> None:
    dearer = replace(spread_out(), **{name: 3 * getattr(COSTS, name)})
    assert simulate(SETTING, dearer, 0).step_s > simulate(SETTING, spread_out(), 0).step_s


def test_long_rollouts_grow_stale_and_are_sampled_again() -> None:
    costs = replace(COSTS, rollouts=((1.0, 0.0),) * 30 + ((2000.0, 0.0),), token_s=0.01, shared_token_s=0)
    outcome = simulate(replace(SETTING, async_level=1, max_concurrent=32), costs, 0)
    assert outcome.stale > 0 and outcome.lag <= 1


def test_long_rollouts_hold_nobody_up_where_old_tokens_are_masked() -> None:
    costs = replace(COSTS, rollouts=((1.0, 0.0),) * 30 + ((2000.0, 0.0),), token_s=0.01, shared_token_s=0)
    setting = replace(SETTING, async_level=4, max_concurrent=32)
    outcome, masked = (simulate(replace(setting, masks_stale=masks), costs, 0) for masks in (False, True))
    assert masked.stale < outcome.stale / 2 and masked.step_s < outcome.step_s / 1.5


# ------------------------------------------------------------------------------------------------ calibration


@pytest.mark.parametrize("truth", [(0.02, 0.003, 0.5), (0.0, 0.01, 0.0), (0.03, 0.0, 1.0)])
def test_a_fit_finds_what_made_the_times(truth: tuple[float, float, float]) -> None:
    rng = np.random.default_rng(0)
    tokens, in_flight = rng.integers(1, 200, 300), rng.uniform(1, 64, 300)
    features = np.stack([tokens, tokens * in_flight, np.ones(300)], 1)
    np.testing.assert_allclose(fit_nonnegative(features, features @ np.array(truth)), truth, atol=1e-9)


def test_a_fit_is_never_below_zero() -> None:
    features = np.stack([np.arange(1.0, 9.0), np.ones(8)], 1)
    assert fit_nonnegative(features, np.full(8, 10.0) - features[:, 0])[0] == 0
    assert fit_nonnegative(features, np.full(8, -1.0)).tolist() == [0, 0]


# ------------------------------------------------------------------------------------------- shapes and splits


def test_shapes_are_parsed_and_what_is_wrong_is_named(tmp_path: Path) -> None:
    experiment = Experiment.model_validate(tree_of("x", tmp_path))
    other = setting_of(
        reshaped(experiment, parse_shape("trainer=1, inference=3,async=0,batch=64,group=8,concurrent=9"))
    )
    assert (other.ranks, other.inference, other.async_level, other.num_prompts) == (1, 3, 0, 8)
    assert (other.group_size, other.max_concurrent, other.devices) == (8, 9, 4)
    servers = setting_of(reshaped(experiment, parse_shape("inference=6,servers=3")))
    assert (servers.servers, servers.engines) == (3, 2)


def test_splits_have_as_many_devices_and_leave_nobody_without() -> None:
    assert split_choices(2, 6, 1, 9) == [(1, 7), (3, 5), (4, 4), (5, 3), (6, 2), (7, 1)]
    assert split_choices(4, 4, 4, 9) == []
    many = split_choices(2000, 6000, 8, 5)
    assert len(many) == 5 and all(sum(pair) == 8000 and min(pair) > 0 and pair[1] % 8 == 0 for pair in many)
    assert all(pair[1] % 8 == 0 for pair in split_choices(32, 96, 2, 5))
    assert other_shapes(replace(SETTING, gpus_per_engine=0)) == []


@pytest.mark.parametrize(
    ("now", "idle", "overlap", "suggested"),
    [
        ((4, 4), (0.5, 0.0), True, (3, 5)),  # works 2 and 4 of 8: 2.67 and 5.33
        ((2, 6), (0.0, 0.5), True, (3, 5)),  # 2 and 3: 3.2 and 4.8
        ((4, 4), (0.0, 0.0), True, (4, 4)),
        ((2, 8), (0.2, 0.8), False, (5, 5)),  # 1.6 and 1.6 take turns
        ((1, 1), (0.9, 0.0), True, (1, 1)),
    ],
)
def test_the_split_that_idle_shares_suggest(
    now: tuple[int, int], idle: tuple[float, float], overlap: bool, suggested: tuple[int, int]
) -> None:
    found = best_split(*now, trainer_idle=idle[0], engines_idle=idle[1], overlap=overlap)
    assert found[:2] == suggested and (found[2] > 0) == (suggested != now)


def test_the_suggested_split_is_what_the_model_finds_best() -> None:
    """8 devices at level 1, both sides' speeds in proportion to them."""
    costs = replace(COSTS, token_s=0, train_fixed_s=0, train_token_s=0.001, publish_s=0, load_s=0, handover_s=0)
    costs = replace(costs, other_s=0)
    base = replace(SETTING, async_level=2, num_prompts=32, max_concurrent=128)
    outcomes = {n: simulate(replace(base, ranks=n, engines=8 - n), costs, 0) for n in range(1, 8)}
    best = min(outcomes, key=lambda n: outcomes[n].step_s)
    now = outcomes[3]
    found = best_split(3, 5, trainer_idle=now.trainer_idle, engines_idle=now.engines_idle, overlap=True)
    assert found[0] == best == 5


def test_an_attempt_ends_with_the_split_that_its_idle_shares_suggest(tmp_path: Path) -> None:
    tree = {
        "name": "run",
        "output_dir": str(tmp_path),
        "async_level": 1,
        "trainer": {"num_ranks": 4},
        "inference": {"data_parallel_size": 4},
        "orchestrator": {"env": [{"id": "reverse-text"}]},
    }
    experiment = Experiment.model_validate(tree)
    assert split_line(experiment, tmp_path, 0.0) is None
    metrics = RunPaths(tmp_path).metrics
    trainer, orchestrator = MetricsWriter(metrics("trainer")), MetricsWriter(metrics("orchestrator"))

    def steps(first: int, last: int, waits: float, **idle: float) -> None:
        for step in range(first, last + 1):
            trainer.log(step, time=100.0 * first + step, **{"time/step": 10.0, "time/wait": waits})
            orchestrator.log(step, time=100.0 * first + step, **{"time/step": 10.0, **idle})

    steps(1, 3, 0.0, **{"time/wait_weights": 9.0})  # an earlier attempt
    steps(4, 4, 9.9, **{"time/wait_servers": 9.9})  # engines start
    steps(5, 8, 5.0, **{"time/weight_pause": 0.0})
    line = split_line(experiment, tmp_path, 400.0)
    assert line is not None and "3 trainer ranks and 5 for engines, not 4 and 4" in line and "20% shorter" in line
    assert "waited for 50% of this attempt, the engines for 0%" in line
    for moment in (420.0, 460.0):  # the engines had sampled what the trainer takes first, and waited for its start
        orchestrator.log(5, time=moment, **{"time/step": 40.0, "time/wait_weights": 40.0})
    attempt = Attempt(2, 2, 400.0, "resumes", seconds={"start": 95.0})
    write_attempt(RunPaths(tmp_path).attempts, attempt)
    assert "the engines for 0%" in list(_summary(experiment, tmp_path))[-1]
    steps(9, 60, 0.1)
    assert "no other split of 8 devices" in (split_line(experiment, tmp_path, 900.0) or "")
    assert idle_shares([{"time/step": 1.0}], []) is None
    assert split_line(experiment.model_copy(update={"kind": "sft"}), tmp_path, 0.0) is None
    on_one_gpu = {"trainer_gpu_ids": [0, 1, 2, 3], "inference_gpu_ids": [3, 4, 5, 6]}
    assert split_line(experiment.model_copy(update=on_one_gpu), tmp_path, 400.0) is None  # they have it in common
