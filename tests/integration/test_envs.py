"""Episodes through real verifiers against a scripted token server: exactness, versions, verdicts, deadlines."""

import asyncio
import json
import re
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from prime_hpc.config.sections.orchestrator import EnvConfig
from prime_hpc.config.sections.sampling import SamplingConfig
from prime_hpc.envs import pool
from prime_hpc.envs.pool_settings import ChatOptions
from prime_hpc.envs.samples import UNANSWERED, UNSCORED, EpisodeResult, EpisodeState, Sample
from tests.support.env_world import World
from tests.support.scripted_api import Fault, ScriptedApi
from tests.support.scripted_server import Reply, ScriptedServer, experts_of, logprob_of, reverse_last_user

pytestmark = pytest.mark.slow

MISBEHAVING = "tests.support.misbehaving"


def check_against_requests(sample: Sample, requests: list[dict[str, Any]]) -> None:
    """The sample is exactly what went over the wire: each prompt is its prefix, each reply follows its prompt."""
    ids = sample.token_ids.tolist()
    mask = np.zeros(len(ids), dtype=bool)
    starts = [len(request["token_ids"]) for request in requests]
    for request, start in zip(requests, starts, strict=True):
        assert ids[:start] == request["token_ids"]
        end = start
        while end < len(ids) and sample.loss_mask[end]:
            assert sample.logprobs[end] == pytest.approx(logprob_of(ids[end], end - start), abs=1e-7)
            end += 1
        assert end > start
        mask[start:end] = True
    assert np.array_equal(mask, sample.loss_mask)
    assert np.all(sample.logprobs[~mask] == 0) and np.all(sample.versions[~mask] == -1)


def encodes_differently(sample: Sample, world: World) -> bool:
    """Whether decoding and encoding again would have given other tokens, as it does for what a model samples."""
    text = world.tokenizer.decode(sample.token_ids)
    return world.tokenizer.encode(text, add_special_tokens=False) != sample.token_ids.tolist()


def test_single_turn_is_token_exact_and_scored(world: World) -> None:
    world.server.version = 12
    (result,) = world.play(EnvConfig(id="reverse-text"))
    assert result.state is EpisodeState.COMPLETED and result.usable and not result.truncated
    assert result.reward == 1.0 and result.metrics["exact"] == 1.0
    (sample,) = result.samples
    check_against_requests(sample, world.server.requests)
    assert set(sample.versions[sample.loss_mask].tolist()) == {12}
    (request,) = world.server.requests
    assert request["model"] == "policy"
    params = request["sampling_params"]
    assert params["temperature"] == 1.0 and params["max_tokens"] == 64 and params["logprobs"] == 0
    assert world.tokenizer.eos_token_id in params["stop_token_ids"]
    expected = world.tokenizer.apply_chat_template(
        [{"role": "user", "content": result.prompt_text.removeprefix("[user] ")}],
        tokenize=False,
        add_generation_prompt=True,
        enable_thinking=False,
    )
    assert world.tokenizer.decode(request["token_ids"]) == expected


@pytest.mark.usefixtures("forked_hosts")
def test_api_key_sampling_extras_and_session_reach_the_server(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    sampling = SamplingConfig(temperature=0.0, max_tokens=9, top_k=5, extra={"min_tokens": 2})
    world.play(EnvConfig(id="reverse-text"), api_key="secret", sampling=sampling)
    headers = world.server.headers[0]
    assert headers["Authorization"] == "Bearer secret" and headers["X-Session-ID"]
    monkeypatch.setenv("SOME_KEY", "of-the-environment")
    for key in ("secret", None):  # of the run, wherever it is played; else of where it is played
        world.play(EnvConfig(id="reverse-text", workers=1), api_key_var="SOME_KEY", api_key=key)
    sent = [headers["Authorization"] for headers in world.server.headers[1:]]
    assert sent == ["Bearer secret", "Bearer of-the-environment"]
    params = world.server.requests[0]["sampling_params"]
    assert (params["temperature"], params["max_tokens"], params["top_k"], params["min_tokens"]) == (0.0, 9, 5, 2)
    assert "top_p" not in params and "min_p" not in params


def test_a_seat_that_draws_its_tokens_otherwise_than_the_trainer_computes_does_not_train(world: World) -> None:
    hot = EnvConfig(id="reverse-text", env_args={"agent": {"sampling": {"temperature": 0.3}}})
    (result,) = world.play(hot)
    assert not result.usable and "agent 'agent' has a sampling of its own" in result.reason
    assert "{'temperature': 0.3}" in result.reason and "{'temperature': 1.0}" in result.reason
    same = EnvConfig(id="reverse-text", env_args={"agent": {"sampling": {"temperature": 1.0}}})
    (result,) = world.play(same)
    assert result.usable
    (result,) = world.play(same, greedy=True)
    assert not result.usable and "a greedy rollout is drawn with {'temperature': 0.0}" in result.reason
    (result,) = world.play(hot, keep_samples=False)
    assert result.state is EpisodeState.COMPLETED, "nobody trains on an evaluation"
    (result,) = world.play(hot, is_policy=False)
    assert result.usable, "a model that imitates has no ratio to its teacher"
    shorter = EnvConfig(id="reverse-text", env_args={"agent": {"sampling": {"max_tokens": 5, "top_p": 1.0}}})
    (result,) = world.play(shorter)
    assert result.usable and world.server.requests[-1]["sampling_params"]["max_tokens"] == 5


def test_versions_of_a_reply_across_a_weight_update(world: World) -> None:
    world.script = lambda prompt, number: Reply("guess it is 1", spans=[("3", 0, 4), ("4", 4, None)])
    (result,) = world.play(EnvConfig(id="reverse-text"))
    (sample,) = result.samples
    versions = sample.versions[sample.loss_mask]
    assert versions[:4].tolist() == [3] * 4 and set(versions[4:].tolist()) == {4}
    assert sample.min_version == 3


@pytest.mark.usefixtures("forked_hosts")
def test_episodes_that_nobody_trains_on_bring_the_versions_of_their_tokens_alone(world: World) -> None:
    world.script = lambda prompt, number: Reply("guess it is 1", spans=[("3", 0, 4), ("4", 4, None)])
    (result,) = world.play(EnvConfig(id="reverse-text"), keep_samples=False)
    (whole,) = world.play(EnvConfig(id="reverse-text"))
    assert result.state is EpisodeState.COMPLETED and not result.usable and result.samples == []
    assert list(result.versions) == [3, 4] and not whole.versions
    alike = ("reward", "metrics", "prompt_text", "completion_text", "num_completion_tokens", "num_prompt_tokens")
    assert all(getattr(result, name) == getattr(whole, name) for name in alike)
    (of_worker,) = world.play(EnvConfig(id="reverse-text", workers=1), keep_samples=False)
    assert list(of_worker.versions) == [3, 4] and of_worker.samples == []
    asked = ["logprobs" in request["sampling_params"] for request in world.server.requests]
    assert asked == [False, True, False], "the server works for each log-probability"


def guesser(prompt: str, number: int) -> str:
    """Bisects, from the conversation alone."""
    low, high = map(int, re.search(r"from (\d+) to (\d+)", prompt).groups())  # type: ignore[union-attr]
    turns = re.findall(r"<\|im_start\|>(\w+)\n(.*?)<\|im_end\|>", prompt, re.DOTALL)
    for (_, guess), (_, answer) in zip(turns[1::2], turns[2::2], strict=False):
        value = int(guess.rsplit(" ", 1)[-1])
        low, high = (value + 1, high) if answer == "higher" else (low, value - 1)
    return f"guess {(low + high) // 2}"


def test_multi_turn_is_one_exact_sample(world: World) -> None:
    world.script = guesser
    env = EnvConfig(id="guess-number", args={"max_guesses": 8})

    async def run() -> list[EpisodeResult]:
        results = []
        async with world.pool(env) as pool:
            for index in range(5):
                world.server.version = index
                before = len(world.server.requests)
                result = await pool.run_episode(0, index)
                (sample,) = result.samples
                check_against_requests(sample, world.server.requests[before:])
                assert encodes_differently(sample, world)
                assert set(sample.versions[sample.loss_mask].tolist()) == {index}
                assert sample.num_turns == len(world.server.requests) - before
                results.append(result)
        return results

    results = asyncio.run(run())
    assert all(result.metrics["solved"] == 1.0 and 0.5 <= result.reward <= 1.0 for result in results)
    assert max(result.metrics["num_turns"] for result in results) > 2
    best = min(results, key=lambda r: r.metrics["num_turns"])
    worst = max(results, key=lambda r: r.metrics["num_turns"])
    assert best.reward > worst.reward


def test_each_turn_keeps_the_experts_that_sampled_it(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(world.server, "records_experts", True)
    world.script = lambda prompt, number: "guess 0"
    before = len(world.server.requests)
    (result,) = world.play(EnvConfig(id="guess-number", max_turns=3))
    (sample,) = result.samples
    assert sample.routed is not None and sample.routed.shape == (sample.num_tokens, 2, 1)
    done = 0
    for number, request in enumerate(world.server.requests[before:], before):
        end = len(request["token_ids"])
        while end < sample.num_tokens and sample.loss_mask[end]:
            end += 1
        assert np.array_equal(sample.routed[done : end - 1], experts_of(number, end - 1)[done:])
        done = end - 1
    assert (sample.routed[done:] == 255).all() and len(world.server.requests) == before + 3


def test_max_turns_truncates_and_still_scores(world: World) -> None:
    world.script = lambda prompt, number: "guess 0"
    (result,) = world.play(EnvConfig(id="guess-number", max_turns=3))
    assert result.usable and result.truncated and result.metrics["num_turns"] == 3 and result.reward == 0.0


def test_a_full_context_truncates_a_conversation_and_fails_an_overlong_prompt(world: World) -> None:
    world.script = lambda prompt, number: "guess 0"
    (result,) = world.play(EnvConfig(id="guess-number"), max_model_len=150)
    assert result.usable and result.truncated and 1 < result.metrics["num_turns"] < 7
    assert all(len(s.token_ids) <= 150 for s in result.samples)
    (result,) = world.play(EnvConfig(id="guess-number"), max_model_len=10)
    assert result.state is EpisodeState.FAILED and "context" in result.reason


def tool_user(prompt: str, number: int) -> str:
    """Does one step of the expression by a tool call, then answers with the tool's result."""
    responses = re.findall(r"<tool_response>\n(.*?)\n</tool_response>", prompt)
    question = re.search(r"What is (.*?)\?", prompt).group(1)  # type: ignore[union-attr]
    product = re.match(r"(\d+) \* (\d+)(?: \+ (\d+))?$", question)
    if product is None:
        a, b = question.split(" + ")
        calls = [("add", a, b)]
    else:
        calls = [("multiply", product.group(1), product.group(2))]
        if product.group(3):
            calls.append(("add", responses[0] if responses else "", product.group(3)))
    if len(responses) == len(calls):
        return f"the answer is {responses[-1]}"
    name, a, b = calls[len(responses)]
    call = {"name": name, "arguments": {"a": int(a), "b": int(b)}}
    return f"user tool\n<tool_call>\n{json.dumps(call)}\n</tool_call>"


def test_tools_run_in_process_and_stay_one_exact_sample(world: World) -> None:
    world.script = tool_user

    async def run() -> None:
        async with world.pool(EnvConfig(id="calculator")) as pool:
            for index in range(6):
                before = len(world.server.requests)
                result = await pool.run_episode(0, index)
                assert result.usable and result.reward == 1.0, result
                (sample,) = result.samples
                check_against_requests(sample, world.server.requests[before:])
                assert encodes_differently(sample, world)
                assert result.metrics["tool_calls"] == result.metrics["num_turns"] - 1 >= 1

    asyncio.run(run())
    prompt = world.tokenizer.decode(world.server.requests[0]["token_ids"])
    assert '"name": "multiply"' in prompt and "<tools>" in prompt


def test_a_model_that_calls_tools_wrongly_is_told(world: World) -> None:
    replies = [
        '<tool_call>\n{"name": "divide", "arguments": {"a": 1, "b": 2}}\n</tool_call>',
        '<tool_call>\n{"name": "add", "arguments": {"a": "x"}}\n</tool_call>',
        "no idea",
    ]
    world.script = lambda prompt, number: replies[number]
    (result,) = world.play(EnvConfig(id="calculator"))
    assert result.usable and result.reward == 0.0 and result.metrics["num_turns"] == 3
    assert "no tool 'divide'" in result.completion_text and "error: a: " in result.completion_text


def test_the_documents_own_environment_plays(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (Path(__file__).parents[2] / "prime_hpc" / "envs" / "README.md").read_text()
    (example,) = re.findall(r"```python\n(# the module `stock`.*?)```", text, re.DOTALL)
    (tmp_path / "stock.py").write_text(example)
    monkeypatch.syspath_prepend(tmp_path)
    call = '<tool_call>\n{"name": "stock", "arguments": {"names": ["%s"]}}\n</tool_call>'
    replies = [call % "plums", call % "pears", "14 pears"]
    world.script = lambda prompt, number: replies[number]
    (result,) = world.play(EnvConfig(id="stock", args={"things": ["pears"]}))
    assert result.reward == 1.0 and "error: KeyError: 'plums'" in result.completion_text, result


def test_reasoning_gym_scores_the_tagged_answer(world: World) -> None:
    def solve(prompt: str, number: int) -> str:
        a, sign, b = re.findall(r"(\d+) ([+-]) (\d+) =", prompt)[-1]
        return f"<answer>{int(a) + int(b) * (1 if sign == '+' else -1)}</answer>"

    world.script = solve
    env = EnvConfig(id="reasoning-gym", args={"generators": {"chain_sum": {"min_terms": 2, "max_terms": 2}}})
    results = world.play(env, 3)
    assert [result.reward for result in results] == [1.0, 1.0, 1.0], results[0]


def test_a_generation_that_the_engine_aborts_does_not_train(world: World) -> None:
    world.script = lambda prompt, number: Reply("half a", finish_reason="abort")
    (result,) = world.play(EnvConfig(id="reverse-text"))
    assert not result.usable and result.samples == [] and "abort" in result.reason


def test_length_limit_is_a_flag_not_a_failure(world: World) -> None:
    (result,) = world.play(EnvConfig(id="reverse-text"), sampling=SamplingConfig(max_tokens=3))
    assert result.usable and result.truncated and result.samples[0].num_loss_tokens == 3


def test_server_errors_fail_the_episode_with_the_status(world: World) -> None:
    world.script = lambda prompt, number: Reply(status=500)
    (result,) = world.play(EnvConfig(id="reverse-text"))
    assert (result.state, result.error_type) == (EpisodeState.FAILED, "ProviderError") and "500" in result.reason
    world.script = lambda prompt, number: Reply("x", overrides={"weight_versions": None})
    (result,) = world.play(EnvConfig(id="reverse-text"))
    assert (result.state, result.error_type) == (EpisodeState.FAILED, "ProviderError") and "version" in result.reason


def test_a_server_that_is_restarted_is_waited_for(world: World) -> None:
    world.script = lambda prompt, number: Reply(status=503) if number < 3 else "back"
    (result,) = world.play(EnvConfig(id="reverse-text"))
    assert result.usable and len(world.server.requests) == 4


def test_episodes_go_to_the_server_they_are_sent_to(world: World, tokenizer: Any) -> None:
    with ScriptedServer(tokenizer, reverse_last_user) as other:
        other.version = 5

        async def run() -> list[EpisodeResult]:
            async with world.pool(EnvConfig(id="reverse-text"), urls=[world.server.url, other.url]) as pool:
                return [await pool.run_episode(0, 0, url) for url in (0, 1, 1)]

        results = asyncio.run(run())
    assert (len(world.server.requests), len(other.requests)) == (1, 2)
    assert [result.samples[0].min_version for result in results] == [0, 5, 5]


def test_a_reward_that_raises_fails_only_its_episodes(world: World) -> None:
    results = world.play(EnvConfig(id=MISBEHAVING, args={"kind": "raises", "every": 3}), 9)
    assert [result.usable for result in results] == [True, True, False] * 3
    for result in results[2::3]:
        assert (result.state, result.error_type) == (EpisodeState.FAILED, "TaskError")
        assert "cannot be scored" in result.reason and result.samples == []


def test_an_error_without_words_fails_only_its_episodes(world: World) -> None:
    results = world.play(EnvConfig(id=MISBEHAVING, args={"kind": "speechless", "every": 2}), 4)
    assert [result.usable for result in results] == [True, False] * 2
    assert {result.reason for result in results[1::2]} == {"Speechless"}


def test_a_reward_that_is_not_a_number_does_not_train(world: World) -> None:
    (result,) = world.play(EnvConfig(id=MISBEHAVING, args={"kind": "nan"}))
    assert not result.usable and "nan" in result.reason


@pytest.mark.parametrize("kind", ["sleeps", "ignores_cancellation", "blocks_in_python", "blocks_in_c"])
def test_an_environment_that_never_returns_times_out_alone(world: World, kind: str) -> None:
    """The caller gets TIMEOUT in time, its own loop never stops, and later episodes run."""
    bad = EnvConfig(id=MISBEHAVING, args={"kind": kind}, timeout_s=1.5)
    good = EnvConfig(id="reverse-text", timeout_s=60)

    async def run() -> tuple[EpisodeResult, float, float, EpisodeResult]:
        async with world.pool(bad, good) as pool:
            gaps, last = [0.0], time.monotonic()

            async def tick() -> None:
                nonlocal last
                while True:
                    await asyncio.sleep(0.05)
                    now = time.monotonic()
                    gaps.append(now - last)
                    last = now

            ticker = asyncio.create_task(tick())
            started = time.monotonic()
            result = await pool.run_episode(0, 0)
            took = time.monotonic() - started
            deadline = time.monotonic() + 30
            while not (later := await pool.run_episode(1, 1)).usable and time.monotonic() < deadline:
                await asyncio.sleep(0.2)
            ticker.cancel()
            return result, took, max(gaps), later

    result, took, gap, later = asyncio.run(run())
    assert result.state is EpisodeState.TIMEOUT and "1.5 s" in result.reason
    # what blocks does so for 25 s and more
    assert 1.4 < took < 20, "the episode did not end at its deadline"
    assert gap < 15, "the caller's own loop was blocked"
    assert later.usable and later.reward == 1.0


@pytest.mark.exhaustive
def test_a_timeout_says_that_the_environments_thread_was_late(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "BEHIND_S", 0.0)
    (result,) = world.play(EnvConfig(id=MISBEHAVING, args={"kind": "blocks_in_python"}, timeout_s=1.5))
    assert re.match(
        "no end after 1.5 s, while its reward was computed; the one thread .* s late, busy for .*env_servers.workers",
        result.reason,
    )


def test_a_timeout_says_whether_the_api_never_answered_or_the_reward_was_not_computed(world: World) -> None:
    """A judge that hung was taken for a model that rambles."""
    hangs_scoring = EnvConfig(id=MISBEHAVING, args={"kind": "sleeps"}, timeout_s=1.5)
    own_limit = hangs_scoring.model_copy(
        update={"timeout_s": 60.0, "env_args": {"agent": {"timeout": {"scoring": 0.5}}}}
    )
    for delay_s, expected in ((0.0, UNSCORED), (30.0, UNANSWERED)):
        with ScriptedApi(delay_s=delay_s) as api:
            (result,) = world.play(hangs_scoring, urls=[api.url], chat=ChatOptions(600, 0), keep_samples=False)
        assert (result.state, result.error_type) == (EpisodeState.TIMEOUT, expected)
    for env, reason in ((hangs_scoring, "no end after 1.5 s, while its reward was computed"), (own_limit, "scoring_t")):
        (own,) = world.play(env)
        assert own.error_type == UNSCORED and reason in own.reason
    world.script = lambda prompt, number: Reply("late", delay_s=30.0)
    (slow,) = world.play(EnvConfig(id="reverse-text", timeout_s=1.5))
    assert (slow.error_type, slow.reason) == ("Timeout", "no end after 1.5 s")


@pytest.mark.exhaustive
def test_an_api_that_asks_for_a_longer_pause_than_the_deadline_bears_is_told(world: World) -> None:
    """It looked as if nobody had waited."""
    said = {}
    for pause in ("120", "0.1", "Fri, 01 Jan 2100 00:00:00 GMT", "Fri, 01 Jan 2010 00:00:00 GMT", "soon"):
        with ScriptedApi(fault=lambda conversation, number: Fault(429, headers={"Retry-After": pause})) as api:  # noqa: B023
            env = EnvConfig(id="reverse-text", timeout_s=30)
            (result,) = world.play(env, urls=[api.url], chat=ChatOptions(600, 1), keep_samples=False)
        said[pause] = result.reason
    assert "429 1 times and asks for a pause of 120 s, where the environments' shortest timeout_s" in said["120"]
    assert "429 2 times: " in said["0.1"] and "429 2 times: " in said["soon"]
    assert "429 1 times and asks for a pause of 300 s" in said["Fri, 01 Jan 2100 00:00:00 GMT"], (
        "the longest that counts"
    )
    assert "429 2 times: " in said["Fri, 01 Jan 2010 00:00:00 GMT"]


def test_cancelling_the_caller_cancels_the_episode(world: World) -> None:
    world.script = lambda prompt, number: Reply("x", delay_s=30)

    async def run() -> None:
        async with world.pool(EnvConfig(id="reverse-text")) as pool:
            task = asyncio.create_task(pool.run_episode(0, 0))
            while not world.server.requests:
                await asyncio.sleep(0.02)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

    started = time.monotonic()
    asyncio.run(run())
    assert time.monotonic() - started < 25


def test_closing_the_pool_ends_episodes_in_flight(world: World) -> None:
    world.script = lambda prompt, number: Reply("x", delay_s=30)

    async def run() -> EpisodeResult:
        async with world.pool(EnvConfig(id="reverse-text")) as pool:
            task = asyncio.create_task(pool.run_episode(0, 0))
            while not world.server.requests:
                await asyncio.sleep(0.02)
        return await task

    assert asyncio.run(run()).state is EpisodeState.CANCELLED
