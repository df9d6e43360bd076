"""From traces to samples and verdicts, on traces built by hand (no server, no environment)."""

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from verifiers.v1.trace import AgentSpan, Reward, TimeSpan, TimeSplit, Timing

from prime_hpc.envs.samples import NEVER_ASKED, EpisodeState, episode_result, find_problem, trace_samples

Node = SimpleNamespace


def prompt_node(*ids: int, role: str = "user") -> Any:
    return Node(
        sampled=False,
        token_ids=list(ids),
        mask=[False] * len(ids),
        logprobs=[],
        message=SimpleNamespace(role=role, content="hello"),
    )


def reply_node(scaffold: list[int], ids: list[int], version: int = 0) -> Any:
    return Node(
        sampled=True,
        token_ids=[*scaffold, *ids],
        mask=[False] * len(scaffold) + [True] * len(ids),
        logprobs=[-0.5 - i for i in range(len(ids))],
        versions=np.full(len(ids), version, dtype=np.int32),
        message=SimpleNamespace(role="assistant", content="hi", tool_calls=None),
    )


def timing(engine: float, reward: float) -> Any:
    return Timing(
        agent=AgentSpan(start=1.0, end=9.0, model=TimeSplit(duration=engine)),
        scoring=TimeSpan(start=9.0, end=9.0 + reward),
    )


def make_trace(*paths: list[Any], **changes: Any) -> Any:
    nodes = list({id(node): node for path in paths for node in path}.values())
    numbers = {id(node): number for number, node in enumerate(nodes)}
    for path in paths:
        for before, node in zip([None, *path], path, strict=False):
            node.parent = numbers.get(id(before))
    defaults = {
        "nodes": nodes,
        "branches": [SimpleNamespace(nodes=path, trainable=True) for path in paths],
        "agent": SimpleNamespace(trainable=True, name="agent"),
        "ok": True,
        "is_timeout": False,
        "is_truncated": False,
        "stop_condition": "agent_completed",
        "errors": [],
        "calls": [SimpleNamespace(error=None, finish_reason="stop")],
        "rewards": {"r": Reward(score=1.5, weight=0.5)},
        "reward": 0.75,
        "metrics": {"exact": 0.0, "unscored": None, "odd": math.nan},
        "usage": SimpleNamespace(input_tokens=7, completion_tokens=5),
        "mm_token_type_id_map": {},
        "num_turns": sum(node.sampled for node in nodes),
        "timing": timing(1.5, 0.25),
    }
    return SimpleNamespace(**(defaults | changes))


def make_episode(*traces: Any, **changes: Any) -> Any:
    return SimpleNamespace(**({"ok": True, "is_timeout": False, "errors": [], "traces": list(traces)} | changes))


def versions_of(node: Any) -> np.ndarray | None:
    return node.versions


def test_one_branch_keeps_every_token_in_order() -> None:
    turns = [prompt_node(1, 2), reply_node([3], [4, 5], 6), prompt_node(7), reply_node([8, 9], [10], 7)]
    (sample,) = trace_samples(make_trace(turns), versions_of)
    assert sample.token_ids.tolist() == [1, 2, 3, 4, 5, 7, 8, 9, 10]
    assert sample.loss_mask.tolist() == [False, False, False, True, True, False, False, False, True]
    assert sample.logprobs.tolist() == [0, 0, 0, -0.5, -1.5, 0, 0, 0, -0.5]
    assert sample.versions.tolist() == [-1, -1, -1, 6, 6, -1, -1, -1, 7]
    assert (sample.token_ids.dtype, sample.loss_mask.dtype) == (np.int32, np.bool_)
    assert (sample.logprobs.dtype, sample.versions.dtype) == (np.float32, np.int32)
    assert (sample.num_turns, sample.min_version, sample.num_loss_tokens) == (2, 6, 3)
    assert (sample.reward, sample.rewards) == (0.75, {"r": [1.5, 0.5]})


def test_a_shared_reply_trains_in_the_first_branch_only() -> None:
    start, shared = prompt_node(1), reply_node([2], [3])
    first, second = [prompt_node(4), reply_node([], [5])], [prompt_node(6), reply_node([], [7])]
    samples = trace_samples(make_trace([start, shared, *first], [start, shared, *second]), versions_of)
    assert [s.token_ids.tolist() for s in samples] == [[1, 2, 3, 4, 5], [1, 2, 3, 6, 7]]
    assert [s.loss_mask.tolist() for s in samples] == [[False, False, True, False, True], [False] * 4 + [True]]
    assert [s.num_turns for s in samples] == [2, 1]
    assert samples[1].versions.tolist() == [-1, -1, -1, -1, 0]


def test_branches_without_anything_new_to_train_give_no_sample() -> None:
    start, shared = prompt_node(1), reply_node([2], [3])
    trace = make_trace([start, shared], [start, shared, prompt_node(4)])
    assert len(trace_samples(trace, versions_of)) == 1
    trace.branches[0].trainable = False  # a rejected attempt must not claim the shared reply
    (sample,) = trace_samples(trace, versions_of)
    assert sample.loss_mask.tolist() == [False, False, True, False]
    assert trace_samples(make_trace([start, shared], agent=SimpleNamespace(trainable=False)), versions_of) == []


def error(kind: str = "TaskError", text: str = "boom\n  at line 3") -> Any:
    return SimpleNamespace(type=kind, message=text)


# The rows are verifiers' behaviours: `ok` stays true for deadlines, unscored rewards and aborted generations.
VERDICTS = [
    ("good", {}, {}, None, ""),
    ("provider error", {"ok": False, "errors": [error("ProviderError", "500")]}, {"ok": False}, "failed", "500"),
    ("agent deadline", {"is_timeout": True, "stop_condition": "agent_timeout"}, {}, "timeout", "agent_timeout"),
    ("scoring deadline", {"is_timeout": True, "rewards": {"r": None}}, {}, "timeout", "deadline"),
    ("reward raises", {"ok": False, "errors": [error()]}, {"ok": False}, "failed", "TaskError: boom at line 3"),
    ("reward missing", {"rewards": {"r": None}}, {}, "failed", "'r' was not computed"),
    ("no reward at all", {"rewards": {}}, {}, "failed", "no reward"),
    ("reward nan", {"rewards": {"r": Reward(score=math.nan)}}, {}, "failed", "nan"),
    ("reward inf", {"rewards": {"r": Reward(score=math.inf)}}, {}, "failed", "inf"),
    (
        "rewards beyond all numbers",
        {"rewards": dict.fromkeys("ab", Reward(score=1.5e308)), "reward": math.inf},
        {},
        "failed",
        "add up to inf",
    ),
    (
        "rewards beyond a batch's numbers",
        {"rewards": {"r": Reward(score=-1e39)}, "reward": -1e39},
        {},
        "failed",
        "add up to -1e+39",
    ),
    ("rewards that are no number together", {"reward": math.nan}, {}, "failed", "add up to nan"),
    ("aborted", {"calls": [SimpleNamespace(error=None, finish_reason=None)]}, {}, "failed", "aborted"),
    ("failed call, handled", {"calls": [SimpleNamespace(error=error(), finish_reason=None)]}, {}, None, ""),
    ("truncated", {"is_truncated": True, "stop_condition": "max_turns"}, {}, None, ""),
    ("recovered after retries", {"errors": [error()]}, {}, None, ""),
]


@pytest.mark.parametrize(
    ("trace", "episode", "state", "reason"), [v[1:] for v in VERDICTS], ids=[v[0] for v in VERDICTS]
)
def test_verdict(trace: dict[str, Any], episode: dict[str, Any], state: str | None, reason: str) -> None:
    made = make_episode(make_trace([prompt_node(1), reply_node([2], [3])], **trace), **episode)
    result = episode_result(made, versions_of, 1.0)
    assert result.usable == (state is None)
    assert result.state == (state or EpisodeState.COMPLETED)
    assert reason in result.reason
    assert bool(result.samples) == result.usable
    assert result.truncated == trace.get("is_truncated", False)


def test_episode_deadline_leaves_no_traces() -> None:
    problem = find_problem(make_episode(ok=False, is_timeout=True, errors=[error("TimeoutError")]))
    assert problem is not None and problem.state is EpisodeState.TIMEOUT
    problem = find_problem(make_episode())
    assert problem is not None and problem.state is EpisodeState.FAILED


@pytest.mark.parametrize("versions", [None, np.zeros(5, dtype=np.int32)])
def test_tokens_of_unknown_version_do_not_train(versions: np.ndarray | None) -> None:
    reply = reply_node([2], [3, 4])
    reply.versions = versions
    result = episode_result(make_episode(make_trace([prompt_node(1), reply])), versions_of, 1.0)
    assert not result.usable and "version" in result.reason


def test_replies_without_tokens_do_not_train() -> None:
    empty = reply_node([], [])
    result = episode_result(make_episode(make_trace([prompt_node(1), empty])), versions_of, 1.0)
    assert not result.usable and result.error_type == "EmptyEpisode"
    for versions, state in ((), EpisodeState.FAILED), ((3, 4), EpisodeState.COMPLETED), (None, EpisodeState.COMPLETED):
        unkept = episode_result(make_episode(make_trace([prompt_node(1), empty])), None, 1.0, versions=versions)
        assert (unkept.state, unkept.usable, unkept.versions) == (state, False, list(versions or ()))


def test_a_game_that_others_end_before_the_policy_s_turn_has_a_score_and_does_not_train() -> None:
    silent = make_trace([], calls=[])
    others = make_trace([prompt_node(1), reply_node([2], [3])], agent=SimpleNamespace(trainable=False, name="opponent"))
    for versions in (versions_of, None):
        result = episode_result(make_episode(silent, others), versions, 1.0, versions=() if versions is None else None)
        assert (result.state, result.usable, result.reason) == (EpisodeState.COMPLETED, False, NEVER_ASKED)
        assert result.reward == 0.75 and not result.samples
    alone = episode_result(make_episode(silent), versions_of, 1.0)
    assert (alone.state, alone.error_type) == (EpisodeState.FAILED, "EmptyEpisode")  # a harness that asks nobody


def test_texts_are_those_of_the_last_branch() -> None:
    """Which one that is, is asked for only where there are several: verifiers puts a branch together at each look."""

    def say(node: Any, words: str) -> Any:
        node.message.content = words
        return node

    start, shared = say(prompt_node(1), "start"), say(reply_node([2], [3]), "shared")
    trace = make_trace([start, shared, prompt_node(4)], [start, shared, say(prompt_node(5), "last")])
    found = episode_result(make_episode(trace), versions_of, 1.0)
    assert (found.prompt_text, found.completion_text) == ("[user] start", "[assistant] shared\n[user] last")
    chain = make_trace([start, shared])
    del chain.branches
    found = episode_result(make_episode(chain), None, 1.0, versions=[0, 0])
    assert (found.prompt_text, found.completion_text) == ("[user] start", "shared")


def test_result_carries_finite_scores_and_texts() -> None:
    result = episode_result(make_episode(make_trace([prompt_node(1), reply_node([2], [3])])), versions_of, 2.5)
    assert (result.num_prompt_tokens, result.num_completion_tokens) == (7, 5)
    assert result.metrics == {"exact": 0.0, "reward/r": 0.75, "num_turns": 1.0}
    assert (result.reward, result.duration_s) == (0.75, 2.5)
    assert result.seconds == {"engine": 1.5, "environment": 0.75, "reward": 0.25}
    beside = [make_trace([prompt_node(1), reply_node([2], [3])], timing=timing(2.0, 0.5)) for _ in range(2)]
    assert episode_result(make_episode(*beside), versions_of, 4.5).seconds == {
        "engine": 4.0,
        "environment": 0.0,
        "reward": 0.5,
    }
    assert (result.prompt_text, result.completion_text) == ("[user] hello", "hi")


def test_of_several_agents_each_has_its_own_scores() -> None:
    """The mean over a proposer and its solvers, or over the seats of a game, says nothing about any of them."""

    def seat(name: str, reward: float, num_replies: int) -> Any:
        turns = [prompt_node(1), *(reply_node([], [n]) for n in range(num_replies))]
        agent, named = SimpleNamespace(trainable=True, name=name), {"r": Reward(score=reward)}
        return make_trace(turns, agent=agent, reward=reward, rewards=named, metrics={"exact": reward})

    traces = [seat("proposer", 1.0, 1), seat("solver", 0.0, 2), seat("solver", 0.5, 4)]
    result = episode_result(make_episode(*traces), versions_of, 1.0)
    assert (result.reward, result.metrics["exact"], result.metrics["num_turns"]) == (0.5, 0.5, 7 / 3)
    own = {name: value for name, value in result.metrics.items() if name.startswith(("proposer/", "solver/"))}
    assert own == {
        **{"proposer/exact": 1.0, "proposer/reward/r": 1.0, "proposer/num_turns": 1.0, "proposer/reward": 1.0},
        **{"solver/exact": 0.25, "solver/reward/r": 0.25, "solver/num_turns": 3.0, "solver/reward": 0.25},
    }
