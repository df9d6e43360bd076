"""Complete groups from one attempt to the next: the file, and when it is void."""

import asyncio
import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from loguru import logger

from prime_hpc.config import Experiment
from prime_hpc.envs.samples import EpisodeResult, EpisodeState
from prime_hpc.orchestrator.loop import Orchestrator
from prime_hpc.orchestrator.rollouts import carried
from prime_hpc.orchestrator.rollouts.carried import CarriedGroup, GroupCarrier, decode_groups, encode_groups
from prime_hpc.orchestrator.rollouts.episodes import to_episode
from prime_hpc.orchestrator.rollouts.groups import Group
from prime_hpc.orchestrator.rollouts.prompts import Prompt
from prime_hpc.store.run_paths import RunPaths
from tests.support.episodes import failed_result, make_result, make_sample

STATE = {"step": 4, "prompts": {"cursor": 20, "pending": [[7, 0, 7]]}, "used": [1, 2], "totals": {"tokens": 99}}


def make_exp(**orchestrator: Any) -> Experiment:
    return Experiment.model_validate({"orchestrator": {"env": [{"id": "reverse-text"}], **orchestrator}})


def make_group(position: int, results: list[EpisodeResult]) -> Group:
    return Group(Prompt(position, 0, position, position % 3), 3, 0, [to_episode(r, seq_len=1000) for r in results])


def make_paths(folder: Path) -> RunPaths:
    paths = RunPaths(folder)
    paths.rollouts.mkdir(parents=True)
    return paths


def carrier(
    paths: RunPaths,
    incarnation: int,
    *,
    step: int = 4,
    state: dict[str, Any] | None = None,
    exp: Experiment | None = None,
) -> GroupCarrier:
    return GroupCarrier(paths, exp or make_exp(), incarnation, step, STATE if state is None else state)


def asked(group: Group) -> Group:
    """The group as the next attempt opens it."""
    return Group(group.prompt, 4, 0, [None] * len(group.slots))


# ---------------------------------------------------------------------------------------------------- the file


def test_a_group_comes_back_bit_for_bit() -> None:
    tools = replace(make_sample([2, 3], first_token=7), roles=np.array([0, 1, 2, 0, 0], np.uint8), agent="x", trace=1)
    tools = replace(tools, rewards={"exact": [0.1 + 0.2, -0.5]})
    results = [
        replace(make_result(samples=[make_sample([1, 2, 3]), tools], reward=0.1), metrics={"num_turns": 2.0}),
        failed_result(),
        replace(make_result([3]), completion_text="naïve \u2014 \x00", truncated=True),
    ]
    group = CarriedGroup(Prompt(5, 1, 2, 3), results)
    ((found,), meta) = decode_groups(encode_groups([group], {"a": 1}))
    assert meta["a"] == 1 and found.prompt == group.prompt and found.newest_version == 3
    for before, after in zip(results, found.results, strict=True):
        assert replace(after, samples=[]) == replace(before, samples=[])
        assert isinstance(after.state, EpisodeState)
        for one, other in zip(before.samples, after.samples, strict=True):
            for name in ("token_ids", "loss_mask", "logprobs", "versions"):
                assert getattr(one, name).dtype == getattr(other, name).dtype
                assert np.array_equal(getattr(one, name), getattr(other, name))
            expected = one.roles if one.roles is not None else np.zeros(one.num_tokens)
            assert other.roles is not None and np.array_equal(other.roles, expected)
            assert (other.agent, other.trace, other.reward) == (one.agent, one.trace, one.reward)
            assert other.rewards == one.rewards


def test_images_come_back_each_once_and_text_stays_without() -> None:
    picture, other = b"\x89PNG" * 500, b"\xff\xd8 another"
    seen = replace(make_sample([2, 3]), images=np.array([0, 1, 2, 0, 0], np.int32), image_data=(picture, other))
    again = replace(make_sample([4]), images=np.array([0, 1, 0, 0], np.int32), image_data=(other,))
    results = [make_result(samples=[seen, make_sample([1])]), make_result(samples=[again])]
    group = CarriedGroup(Prompt(5, 1, 2, 3), results)
    content = encode_groups([group], {})
    ((found,), _) = decode_groups(content)
    samples = [sample for result in found.results for sample in result.samples]
    assert [s.image_data for s in samples] == [(picture, other), (), (other,)]
    assert [None if s.images is None else s.images.tolist() for s in samples] == [[0, 1, 2, 0, 0], None, [0, 1, 0, 0]]
    assert content.count(picture) == 1 and group.num_bytes > len(picture) + len(other)
    text = CarriedGroup(Prompt(5, 1, 2, 3), [make_result([1])])
    assert decode_groups(encode_groups([text], {}))[0][0].results[0].samples[0].images is None


def test_recorded_experts_come_back_also_beside_a_sample_that_has_none() -> None:
    one, other = make_sample([2, 3]), make_sample([1])
    experts = np.arange(one.num_tokens * 4, dtype=np.uint8).reshape(one.num_tokens, 2, 2)
    group = CarriedGroup(Prompt(5, 1, 2, 3), [make_result(samples=[other, replace(one, routed=experts)])])
    ((found,), _) = decode_groups(encode_groups([group], {}))
    unknown, known = (sample.routed for sample in found.results[0].samples)
    assert known is not None and known.dtype == np.uint8 and np.array_equal(known, experts)
    assert unknown is not None and unknown.shape == (other.num_tokens, 2, 2) and (unknown == 255).all()


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: content[: len(content) // 2],
        lambda content: content[:300] + bytes([content[300] ^ 1]) + content[301:],
        lambda content: b"",
        lambda content: b"\x80\x04N.",
    ],
    ids=["cut", "a bit", "empty", "a pickle"],
)
def test_a_damaged_file_is_said_and_sampled_again(damage: Callable[[bytes], bytes], tmp_path: Path) -> None:
    paths, group = make_paths(tmp_path), make_group(5, [make_result([1])])
    carrier(paths, 1).save([group])
    paths.carried_groups.write_bytes(damage(paths.carried_groups.read_bytes()))
    told: list[str] = []
    sink = logger.add(told.append, level="WARNING", format="{message}")
    try:
        after = carrier(paths, 2)
    finally:
        logger.remove(sink)
    assert after.num_left == 0 and after.take(asked(group)) == []
    assert "cannot be used" in told[0]
    assert not paths.carried_groups.exists()


def test_whichever_byte_is_wrong_it_is_either_right_or_refused() -> None:
    content = encode_groups([CarriedGroup(Prompt(5, 1, 2, 3), [make_result([1, 2, 3])])], {})
    refused = 0
    for place in range(0, len(content), 7):
        damaged = content[:place] + bytes([content[place] ^ 0x5A]) + content[place + 1 :]
        try:
            decode_groups(damaged)
        except ValueError:
            refused += 1
    assert refused > len(content) / 7 / 3


# ---------------------------------------------------------------------------------------------------- who may use it


def test_the_next_attempt_takes_what_was_complete_once(tmp_path: Path) -> None:
    paths = make_paths(tmp_path)
    batched, waiting = make_group(5, [make_result([4], reward=1.0)] * 2), make_group(6, [make_result([3, 4])] * 2)
    first = carrier(paths, 1)
    first.batch(5, [batched], STATE | {"step": 5}, served=4)
    first.save([waiting])
    second = carrier(paths, 2)
    assert second.num_left == 2
    assert [result.reward for result in second.take(asked(batched))] == [1.0, 1.0]
    assert len(second.take(asked(waiting))) == 2
    assert second.take(asked(waiting)) == []
    assert carrier(paths, 2).num_left == 0


def test_a_greedy_rollout_goes_along_as_the_last_one(tmp_path: Path) -> None:
    paths, group = make_paths(tmp_path), make_group(5, [make_result([4], reward=1.0)])
    group.has_greedy, group.greedy = True, to_episode(make_result([4], reward=0.5), seq_len=1000)
    carrier(paths, 1).save([group])
    second, wanted = carrier(paths, 2), asked(group)
    wanted.has_greedy = True
    assert [result.reward for result in second.take(wanted)] == [1.0, 0.5]


def test_a_group_that_had_been_sent_back_stays_the_try_that_it_was(tmp_path: Path) -> None:
    """By it traces name its rollouts, which are not played again, and a batch takes it before others."""
    paths, group = make_paths(tmp_path), make_group(5, [make_result([4])])
    group.attempt = 2
    carrier(paths, 1).save([group])
    second = carrier(paths, 2)
    second.save([])
    third, wanted = carrier(paths, 3), asked(group)
    assert third.take(wanted) and wanted.attempt == 2


def test_what_an_attempt_has_not_opened_goes_on_to_the_next(tmp_path: Path) -> None:
    paths, groups = make_paths(tmp_path), [make_group(p, [make_result([4])]) for p in (5, 6, 7)]
    carrier(paths, 1).save(groups)
    second = carrier(paths, 2)
    assert second.take(asked(groups[0]))
    second.save(groups[:1])
    third = carrier(paths, 3)
    assert third.num_left == 3 and all(third.take(asked(group)) for group in groups)


def test_an_attempt_that_ended_before_it_read_them_loses_none(tmp_path: Path) -> None:
    paths, group = make_paths(tmp_path), make_group(5, [make_result([4])])
    carrier(paths, 1).save([group])
    assert carrier(paths, 3).take(asked(group))


def test_a_stop_while_the_servers_get_ready_loses_nothing() -> None:
    async def main() -> None:
        began, kept = asyncio.Event(), Mock()

        async def prepare() -> None:
            began.set()
            await asyncio.Event().wait()

        loop: Any = Mock(exp=make_exp(), carrier=kept, book=Mock(complete=["group"]), _prepare=prepare)
        loop._groups_kept = partial(Orchestrator._groups_kept, loop)
        running = asyncio.create_task(Orchestrator.run(loop))
        await began.wait()
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        kept.save.assert_called_once_with(["group"])

    asyncio.run(main())


def test_a_stop_keeps_groups_before_it_waits_for_episodes_to_end() -> None:
    async def main() -> None:
        began, order = asyncio.Event(), []

        async def work() -> None:
            began.set()
            await asyncio.Event().wait()

        async def close() -> None:
            order.append("closed")

        loop: Any = Mock(exp=make_exp(), _work=work)
        loop.weights.run = loop.engines.run = asyncio.Event().wait
        loop.carrier.save, loop.dispatcher.close = lambda groups: order.append("saved"), close
        loop._groups_kept = partial(Orchestrator._groups_kept, loop)
        running = asyncio.create_task(Orchestrator._work_and_watch(loop))
        await began.wait()
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert order == ["saved", "closed"]

    asyncio.run(main())


def test_batches_that_became_versions_are_nobody_s_loss(tmp_path: Path) -> None:
    paths, first = make_paths(tmp_path), carrier(make_paths(tmp_path / "a"), 1)
    first = carrier(paths, 1)
    for step in (5, 6, 7):
        first.batch(step, [make_group(step, [make_result([4])])], STATE | {"step": step}, served=6)
    first.save([])
    assert carrier(paths, 2).num_left == 1


def test_a_group_with_newer_tokens_than_the_start_is_sampled_again(tmp_path: Path) -> None:
    paths, old, new = make_paths(tmp_path), make_group(5, [make_result([4])]), make_group(6, [make_result([4, 5])])
    carrier(paths, 1).save([old, new])
    after = carrier(paths, 2)
    assert after.take(asked(old)) and not after.take(asked(new))


def test_another_prompt_or_group_size_takes_nothing(tmp_path: Path) -> None:
    paths, group = make_paths(tmp_path), make_group(5, [make_result([4])])
    carrier(paths, 1).save([group, make_group(6, [make_result([4])])])
    after = carrier(paths, 2)
    other = replace(group.prompt, task=group.prompt.task + 1)
    assert after.take(Group(other, 4, 0, [None])) == []
    assert after.take(Group(Prompt(6, 0, 6, 0), 4, 0, [None, None])) == []


OTHER = STATE | {"totals": {"tokens": 100}}


@pytest.mark.parametrize(
    ("after", "why"),
    [
        (partial(carrier, incarnation=1), "incarnation 1, this is 1"),
        (partial(carrier, incarnation=2, step=3, state=STATE | {"step": 3}), "knew no step 3"),
        (partial(carrier, incarnation=2, state=OTHER), "knew no step 4 as this one has it"),
        (partial(carrier, incarnation=2, exp=make_exp(sampling={"temperature": 0.5})), "has changed"),
        (partial(carrier, incarnation=2, exp=make_exp(env=[{"id": "calculator"}])), "has changed"),
    ],
    ids=["the same attempt", "an older step", "another history", "sampling", "environment"],
)
def test_who_is_not_the_same_history_takes_nothing(
    after: Callable[[RunPaths], GroupCarrier], why: str, tmp_path: Path
) -> None:
    paths, group = make_paths(tmp_path), make_group(5, [make_result([1])])
    carrier(paths, 1).save([group])
    told: list[str] = []
    sink = logger.add(told.append, level="INFO", format="{message}")
    try:
        assert after(paths).num_left == 0
    finally:
        logger.remove(sink)
    assert any(why in line for line in told), told
    assert not paths.carried_groups.exists(), "it can be of no use any more"


def test_a_state_that_went_through_a_file_is_the_same_history(tmp_path: Path) -> None:
    paths, state = make_paths(tmp_path), STATE | {"prompts": {"cursor": 3, "pending": ((7, 0, 7),)}}
    first = carrier(paths, 1, step=3, state=STATE | {"step": 3})
    first.batch(4, [make_group(4, [make_result([3])])], state, served=4)
    first.save([make_group(5, [make_result([4])])])
    again = json.loads(json.dumps(state | {"algorithm": {"seen": 3}}))
    assert carrier(paths, 2, state=again).num_left == 1


def test_nothing_is_written_without_attempts_or_groups(tmp_path: Path) -> None:
    paths = make_paths(tmp_path)
    carrier(paths, 0).save([make_group(5, [make_result([1])])])
    carrier(paths, 1).save([])
    assert not paths.carried_groups.exists()


def test_what_there_is_no_time_to_write_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(carried, "MOST_BYTES", 2 * 14 * 4)
    paths = make_paths(tmp_path)
    carrier(paths, 1).save([make_group(p, [make_result([1])]) for p in range(5)])
    assert carrier(paths, 2).num_left == 2


def test_groups_are_kept_before_the_first_batch_is_there(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    carrier(paths, 1).save([make_group(5, [make_result([1])])])
    assert carrier(paths, 2).num_left == 1


def test_a_place_that_cannot_be_written_is_no_reason_to_fail(tmp_path: Path) -> None:
    carrier(RunPaths(tmp_path / "gone"), 1).save([make_group(5, [make_result([1])])])
    assert not (tmp_path / "gone").exists()


def test_of_a_long_run_the_newest_states_alone_are_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(carried, "MOST_STATES", 8)
    paths = make_paths(tmp_path)
    first = carrier(paths, 1)
    for step in range(5, 105):
        first.batch(step, [make_group(step, [make_result([step])])], STATE | {"step": step}, served=step)
    first.save([make_group(200, [make_result([96])])])
    _, meta = decode_groups(paths.carried_groups.read_bytes())
    assert sorted(map(int, meta["states"])) == list(range(97, 105))
    assert carrier(paths, 2, step=104, state=STATE | {"step": 104}).num_left == 1
