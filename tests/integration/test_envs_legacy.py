"""Packages with `load_environment`, laid out as on the Environments Hub, found by id and played for training."""

import asyncio
import json
import os
import re
import signal
from concurrent.futures import ThreadPoolExecutor
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from loguru import logger

from prime_hpc.config.sections.orchestrator import EnvConfig
from prime_hpc.envs import math_answers, task_sources
from prime_hpc.envs.env_config import build_env_config
from prime_hpc.envs.errors import EnvError
from prime_hpc.envs.held_out import leave_out_trained
from prime_hpc.envs.legacy.messages import State
from prime_hpc.envs.legacy.parsers import extract_boxed_answer
from prime_hpc.envs.legacy.rubrics import Rubric
from prime_hpc.envs.legacy.taskset import LegacyData
from prime_hpc.envs.samples import EpisodeResult, EpisodeState
from prime_hpc.evals.play import task_id
from tests.support.env_world import World

pytestmark = pytest.mark.slow

HUB = Path(__file__).resolve().parents[1] / "support" / "hub"


@pytest.fixture(autouse=True)
def packages(monkeypatch: pytest.MonkeyPatch) -> None:
    for package in ("legacy_sums", "legacy_shop"):
        monkeypatch.syspath_prepend(HUB / package)


def add(prompt: str, number: int) -> str:
    a, b = re.findall(r"(\d+) \+ (\d+)", prompt)[-1]
    return f"<reasoning>\nadding\n</reasoning>\n<answer>\n{int(a) + int(b)}\n</answer>"


def test_single_turn_parser_rubric_weights_and_splits(world: World) -> None:
    world.script = add
    (result,) = world.play(EnvConfig(id="legacy-sums", args={"format_weight": 0.5}))
    assert result.usable and result.reward == 1.5, result
    assert (result.metrics["reward/correct"], result.metrics["reward/format_reward_func"]) == (1.0, 0.5)
    assert result.metrics["first_number"] == 0.0 and result.metrics["num_turns"] == 1
    assert result.prompt_text.startswith("[system] Add. Format:\n<reasoning>\n...\n</reasoning>\n<[ answer | result ]>")
    (sample,) = result.samples
    (request,) = world.server.requests
    assert sample.token_ids[: len(request["token_ids"])].tolist() == request["token_ids"]
    (result,) = world.play(EnvConfig(id="legacy_sums"), split="eval")
    assert "1000 + 1003" in result.prompt_text
    world.script = lambda prompt, number: "<answer>no</answer>"
    (result,) = world.play(EnvConfig(id="owner/legacy-sums@0.1.0"))
    assert result.metrics["reward/correct"] == 0.0 and 0 < result.reward < 0.25


def test_a_tenth_is_held_out_where_there_are_no_evaluation_tasks(world: World) -> None:
    env = EnvConfig(id="legacy-sums", args={"with_eval": False})
    counts = {}

    async def run() -> None:
        for split in ("train", "eval"):
            async with world.pool(env, split=split, beside=[env]) as pool:
                counts[split] = pool.sources[0].num_tasks

    asyncio.run(run())
    assert counts == {"train": 18, "eval": 2}


def test_a_row_that_is_trained_is_found_whatever_the_package_s_arguments(world: World) -> None:
    trained = EnvConfig(id="legacy-sums", args={"with_eval": False})
    asked = EnvConfig(id="legacy-sums", args={"with_eval": False, "format_weight": 0.5})

    async def run() -> None:
        async with world.pool(trained) as train, world.pool(asked, split="eval") as pool:
            leave_out_trained(pool.sources, train.sources, 8)

    with pytest.raises(EnvError, match="16 of its first 16 tasks are trained on as well"):
        asyncio.run(run())


def call(tool: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': tool, 'arguments': arguments})}\n</tool_call>"


def test_tools_run_until_the_model_answers(world: World) -> None:
    def shop(prompt: str, number: int) -> str:
        found = re.findall(r"<tool_response>\n(\d+) EUR\n</tool_response>", prompt)
        return f"\\boxed{{{found[-1]}}}" if found else call("price", item="apple")

    world.script = shop
    (result,) = world.play(EnvConfig(id="legacy-shop"))
    assert result.usable and result.reward == 1.0, result
    assert result.metrics["price_calls"] == result.metrics["total_tool_calls"] == 1.0
    (sample,) = result.samples
    first, second = world.server.requests
    assert sample.token_ids[: len(second["token_ids"])].tolist() == second["token_ids"]
    assert second["token_ids"][: len(first["token_ids"])] == first["token_ids"] and sample.num_turns == 2
    prompt = world.tokenizer.decode(first["token_ids"])
    assert '"name": "price"' in prompt and "Price of an item." in prompt


def test_a_tool_that_fails_is_told_to_the_model_and_the_turns_are_limited(world: World) -> None:
    replies = [call("price", item="plum"), call("prize", item="apple"), call("price", item="pear"), "no"]
    world.script = lambda prompt, number: replies[number]
    (result,) = world.play(EnvConfig(id="legacy-shop", args={"max_turns": 3}))
    assert result.usable and result.reward == 0.0 and result.metrics["num_turns"] == 3
    assert "plum" in result.completion_text and "no tool 'prize'" in result.completion_text


def test_tools_see_the_rollout_s_state_and_the_model_does_not(world: World) -> None:
    world.script = lambda prompt, number: call("buy", item="pear") if number < 2 else "done"
    (result,) = world.play(EnvConfig(id="legacy-shop", args={"kind": "basket"}))
    assert result.usable and result.reward == 2.0 and "2 in the basket" in result.completion_text
    declared = re.search(
        r"<tools>(.*)</tools>", world.tokenizer.decode(world.server.requests[0]["token_ids"]), re.DOTALL
    )
    assert declared is not None and '"item"' in declared.group(1) and '"basket"' not in declared.group(1)


def test_a_conversation_ends_by_its_own_stop_condition(world: World) -> None:
    def offer(prompt: str, number: int) -> str:
        return str(10 * (1 + prompt.count("More than")))

    world.script = offer
    (result,) = world.play(EnvConfig(id="legacy-shop", args={"kind": "haggle", "max_turns": -1}))
    assert result.usable and result.reward == pytest.approx(1 / 3) and not result.truncated
    assert "[user] More than 20!" in result.completion_text
    (result,) = world.play(EnvConfig(id="legacy-shop", args={"kind": "haggle", "max_turns": -1}, max_turns=2))
    assert result.truncated and result.reward == 0.5


def test_a_group_of_environments_plays_each_row_with_its_own(world: World) -> None:
    world.script = lambda prompt, number: "30" if "More" in prompt or number % 4 > 1 else "\\boxed{3}"
    results: list[EpisodeResult] = world.play(EnvConfig(id="legacy-shop", args={"kind": "group"}), 4)
    assert all(result.state is EpisodeState.COMPLETED for result in results)
    assert ["reward/correct" in result.metrics for result in results] == [True, True, False, False]
    assert ["reward/turns" in result.metrics for result in results] == [False, False, True, True]


def odd(kind: str) -> EnvConfig:
    return EnvConfig(id="tests.support.hub.legacy_odd", args={"kind": kind})


def test_a_hidden_argument_may_be_of_any_type_and_a_tool_s_of_any_name(world: World) -> None:
    world.script = lambda prompt, number: call("remember", function="f") if number < 2 else "done"
    (result,) = world.play(odd("counted"))
    assert result.metrics["remember_calls"] == 2.0
    assert "1 kept, f the last" in result.completion_text and "2 kept, f the last" in result.completion_text
    prompt = world.tokenizer.decode(world.server.requests[0]["token_ids"])
    assert '"function": {"title": "Function", "type": "string"}' in prompt and "session" not in prompt
    assert '"times": {"anyOf": [{"type": "integer"}, {"type": "null"}]' in prompt


def test_what_a_rollout_writes_into_its_row_is_its_own(world: World) -> None:
    async def run() -> list[EpisodeResult]:
        async with world.pool(odd("notes")) as pool:
            results = [await pool.run_episode(0, 0) for _ in range(2)]
            assert pool.sources[0].task(0).data.example["info"] == {"rollouts": []}
            return results

    assert [result.reward for result in asyncio.run(run())] == [1.0, 1.0]


def test_a_tool_call_that_a_package_handles_itself_may_fail_as_a_tool_may(world: World) -> None:
    world.script = lambda prompt, number: "done" if "has no price" in prompt else call("price", item="pear")
    (result,) = world.play(odd("notes"))
    assert result.usable and result.reason == "" and "[tool] the shop has no price" in result.completion_text


def test_messages_may_be_objects_of_classes(world: World) -> None:
    world.script = lambda prompt, number: "yes" if "away done?" in prompt else call("away")
    (result,) = world.play(odd("typed"))
    assert result.usable and result.reward == 3.0, result
    assert result.prompt_text == "[system] Be brief.\n[user] hi"
    assert "[tool] away done\n[user] away done?\n[assistant] yes" in result.completion_text


def test_a_package_for_the_last_releases_has_their_messages_tools_and_errors(world: World) -> None:
    tool = ["seven"]

    def script(prompt: str, number: int) -> str:
        if "Call it." not in prompt:
            return "hm"
        return "\\boxed{7}" if prompt.count("<tool_response>") == 2 else call(tool[0])

    world.script = script
    (result,) = world.play(EnvConfig(id="tests.support.hub.legacy_late"))
    assert result.usable and (result.reward, result.metrics["reward_errors"]) == (1.0, 0.0), result
    prompt = world.tokenizer.decode(world.server.requests[0]["token_ids"])
    assert "Say seven." in prompt and "put your final answer within \\boxed{}" in prompt
    tool[0] = "eight"
    (result,) = world.play(EnvConfig(id="tests.support.hub.legacy_late"))
    assert result.state is EpisodeState.FAILED and "no tool eight" in result.reason, result


def test_an_error_that_ends_a_rollout_fails_it(world: World) -> None:
    """`stop_errors` was left aside: what could not be played was scored."""
    world.script = lambda prompt, number: "done" if "away" in prompt.rpartition("</tools>")[2] else call("away")
    (result,) = world.play(odd("away"))
    assert not result.usable and "ConnectionError: the service is away" in result.reason


def test_a_reward_function_may_take_any_column_of_its_row(world: World) -> None:
    world.script = lambda prompt, number: "0"
    right, wrong = world.play(odd("column"), 2)
    assert (right.reward, wrong.reward) == (1.0, 0.0)


@pytest.mark.parametrize(
    ("kind", "rewards"),
    [
        ("numbered", [10.0, 11.0]),
        ("hinted", [0.0, 3.0]),
        ("priced", [2.0, 2.0]),
        ("judged", [1.0, 1.0]),
        ("input", [4.0, 4.0]),
        ("words", [8.0, 8.0]),
    ],
)
def test_what_a_reward_function_can_get_is_not_refused(world: World, kind: str, rewards: list[float]) -> None:
    world.script = lambda prompt, number: "abcd"
    assert [result.reward for result in world.play(odd(kind), 2)] == rewards


def test_an_evaluation_s_task_is_the_same_whatever_the_package_s_arguments() -> None:
    """Two evaluations with another key of the judge could not be compared: they had no task in common."""
    one, other, another = (
        SimpleNamespace(data=LegacyData(prompt=prompt, environment=environment, example={}))
        for prompt, environment in (("q", '["m", {"judge_api_key": "a"}]'), ("q", '["m", {}]'), ("r", '["m", {}]'))
    )
    assert task_id(one) == task_id(other) != task_id(another)


@pytest.mark.parametrize(
    ("text", "loose", "strict"),
    [(r"\boxed{1} \boxed{a{b}c}", "a{b}c", "a{b}c"), ("12", "12", ""), (r"\boxed{{1}", r"\boxed{{1}", "")],
)
def test_an_answer_in_a_box_may_be_asked_for_alone(text: str, loose: str, strict: str) -> None:
    """Later releases' packages ask so: the stand-in raised, and every reply scored 0."""
    assert (extract_boxed_answer(text), extract_boxed_answer(text, strict=True)) == (loose, strict)


def test_a_reward_that_asks_for_a_signal_fails_its_episodes() -> None:
    """Each was 0, on the thread of the environments, and all of them were learned from."""

    def bounded(completion: Any) -> float:
        before = signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.signal(signal.SIGALRM, before)
        return 1.0

    async def value(weight: float) -> float:
        return await Rubric([bounded]).value(bounded, State(completion=[]), weight)

    def elsewhere(weight: float) -> float:
        with ThreadPoolExecutor(1) as threads:
            return threads.submit(asyncio.run, value(weight)).result()

    assert asyncio.run(value(1.0)) == 1.0 and elsewhere(0.0) == 0.0, "a metric is nothing to learn from"
    with pytest.raises(EnvError, match=r"'bounded' asks for a signal \(signal.alarm, as a deadline\), which works on"):
        elsewhere(1.0)


def test_a_reward_whose_lock_is_of_a_loop_that_was_left_behind_fails_its_episodes() -> None:
    turn = asyncio.Lock()

    async def waits(completion: Any) -> float:
        async with turn:
            await asyncio.sleep(0.01)
            return 1.0

    async def values(weight: float) -> list[float]:
        rubric = Rubric([waits])
        return await asyncio.gather(*(rubric.value(waits, State(completion=[]), weight) for _ in range(2)))

    assert asyncio.run(values(1.0)) == [1.0, 1.0] and asyncio.run(values(0.0)) == [1.0, 0.0]
    with pytest.raises(RuntimeError, match="bound to a different event loop"):
        asyncio.run(values(1.0))


@pytest.mark.timeout(60)
def test_a_package_may_load_others_in_threads_and_change_each(world: World) -> None:
    world.script = lambda prompt, number: "abc"
    results = world.play(odd("threads"), 5)
    assert [result.reward for result in results] == [5.0] * 4 + [2.0]


def test_rewards_that_raise_are_counted(world: World) -> None:
    world.script = lambda prompt, number: "abc"
    (result,) = world.play(odd("raises"))
    assert result.reward == 3.0 and result.metrics["reward/raises"] == 0.0 and result.metrics["reward_errors"] == 1.0
    world.script = lambda prompt, number: "abcd"
    (result,) = world.play(odd("raises"))
    assert result.reward == 5.0 and result.metrics["reward_errors"] == 0.0
    (result,) = world.play(odd("never-metric"))
    assert result.reward == 4.0 and result.metrics["never"] == 0.0 and result.metrics["reward_errors"] == 1.0


def test_a_system_prompt_goes_before_prompts_that_have_none(world: World) -> None:
    (result,) = world.play(odd("system"))
    assert result.prompt_text == "[system] Be brief.\n[user] hi"


def test_a_picture_is_refused_rather_than_left_out(world: World) -> None:
    (result,) = world.play(odd("picture"))
    assert not result.usable and "a user message holds image_url" in result.reason and not world.server.requests


@pytest.mark.usefixtures("forked_hosts")
@pytest.mark.parametrize("workers", [0, 1])
def test_an_environment_is_torn_down_once_in_each_process_and_split_when_nobody_plays_it(
    workers: int, world: World, tmp_path: Path
) -> None:
    log = tmp_path / "freed"
    env = EnvConfig(id="tests.support.hub.legacy_odd", args={"kind": "freed", "log": str(log)}, workers=workers)

    async def run() -> None:
        async with world.pool(env):
            async with world.pool(env, split="eval", beside=[env]) as evaluated:
                assert (await evaluated.run_episode(0, 0)).state is EpisodeState.COMPLETED
            assert log.read_text().split().count(str(os.getpid())) == 1

    asyncio.run(run())
    pids = log.read_text().split()
    assert pids.count(str(os.getpid())) == 2 and len(set(pids)) == len(pids) - 1 == 1 + 2 * workers


def test_training_and_evaluation_do_not_meet_at_a_package_s_lock(world: World) -> None:
    """They have a loop each, and a lock is of one: what waited for it on the other was scored 0, and learned from."""
    world.script = lambda prompt, number: "abc"
    env = odd("in_turn")

    async def run() -> list[EpisodeResult]:
        async with (
            world.pool(env, beside=[env]) as trained,
            world.pool(env, split="eval", beside=[env]) as evaluated,
        ):
            assert evaluated.sources[0].num_tasks == 8
            pools = (trained, evaluated, trained)  # whoever waits first, has it
            return [
                result for pool in pools for result in await asyncio.gather(*(pool.run_episode(0, i) for i in range(8)))
            ]

    assert [(result.reward, result.metrics["reward_errors"]) for result in asyncio.run(run())] == [(3.0, 0.0)] * 24


def test_what_a_package_takes_to_be_made_counts_as_loading(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers have so many times as long to open: one that took two minutes was ended as it did."""
    clock, build = [0.0], task_sources.build_env_config

    def slow(*args: Any) -> Any:
        clock[0] += 300.0
        return build(*args)

    monkeypatch.setattr(task_sources, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    monkeypatch.setattr(task_sources, "build_env_config", slow)
    assert task_sources.EnvSource(odd("column"), "train", 0).load_s == 300.0


def test_a_rubric_tidies_up_after_each_rollout_and_at_the_end(world: World, tmp_path: Path) -> None:
    log = tmp_path / "tidied"
    env = EnvConfig(id="tests.support.hub.legacy_odd", args={"kind": "tidies", "log": str(log)})
    first, second = world.play(env, 2)
    assert first.usable and second.usable and log.read_text().split() == ["rollout", "rollout", "end"]


def test_a_package_that_compares_answers_is_warned_of_and_has_its_process_before_the_first_one(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[str] = []
    monkeypatch.setattr(math_answers, "begin", begun.append)
    monkeypatch.syspath_prepend(tmp_path)
    rubric = "import verifiers as vf\nfrom verifiers.v1 import verify_boxed_math_answer\n# or math_verify.verify\n"
    made = f"{rubric}def load_environment():\n    return vf.SingleTurnEnv(dataset=[{{'question': 'q'}}] * 2)\n"
    (tmp_path / "compares_itself.py").write_text(made)
    said = StringIO()
    sink = logger.add(said, level="WARNING")
    try:
        world.play(EnvConfig(id="reverse-text"))
        assert not begun and "math_verify" not in said.getvalue()
        world.play(EnvConfig(id="compares-itself"))
    finally:
        logger.remove(sink)
    assert begun == ["prime_hpc.envs.bounded.math_comparison:compare"]
    assert "environment 'compares-itself' speaks of math_verify" in said.getvalue()


def test_a_package_puts_others_together(world: World) -> None:
    world.script = add
    first, *_ = world.play(odd("others"), 3)
    assert first.metrics["reward/correct"] == 1.0


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("never", "'never' takes reference_solution, which no rollout has"),
        ("info", "row 4: its info is a text, but no JSON"),
        ("blob", "row 4 of its dataset holds what cannot be written as JSON (question: str, blob: bytes"),
        ("splits", "row 0 of its dataset is no mapping of columns, but 'train'"),
    ],
)
def test_what_its_rows_lack_is_said_before_it_is_played(world: World, kind: str, words: str) -> None:
    with pytest.raises(EnvError) as caught:
        world.play(odd(kind))
    assert words in str(caught.value) and "environment 'tests.support.hub.legacy_odd'" in str(caught.value)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (
            EnvConfig(id="legacy-sums", args={"num_task": 3}),
            "args.num_task: no such argument; did you mean 'num_tasks'",
        ),
        (EnvConfig(id="legacy-sums", harness="bash"), "leave `harness` out"),
        (EnvConfig(id="legacy-shop", args={"kind": "sandbox"}), "verifiers.SandboxEnv is not played: it runs code in"),
        (EnvConfig(id="legacy-shop", args={"kind": "compared"}), "'best' compares all rollouts of a group"),
        (EnvConfig(id="legacy-none"), "taskset 'legacy-none' is not installed"),
        (EnvConfig(id="tests.support.hub.legacy_own_loop"), "class OwnLoop has a rollout() of its own"),
        (EnvConfig(id="tests.support.hub.legacy_unknown"), "has no attribute 'QuantumEnv'"),
        (
            EnvConfig(id="tests.support.hub.legacy_trainer"),
            "verifiers.GRPOTrainer is not played: training is prime-hpc's",
        ),
        (EnvConfig(id="tests.support.hub.legacy_needs"), "pip install not_a_module_of_anyone"),
        (odd("scores"), "class ScoresItself has a score_rollout() of its own"),
        (odd("group_loop"), "class GroupLoop has a rollout() of its own"),
        (odd("keys"), "needs variables that are not set: A_KEY_THAT_IS_NOT_SET, NOR_IS_THIS (in a job: slurm.env)"),
        (odd("twice"), "EnvGroup has two environments of one name (a, a)"),
        (EnvConfig(id="tests.support.hub.legacy_broken"), "KeyError: 'A_KEY_OF_A_JUDGE_THAT_NOBODY_HAS' (in /"),
        (EnvConfig(id="tests.support.hub.legacy_exits"), "load_environment() failed: SystemExit: set THE_KEY"),
        (EnvConfig(id="tests.support.env_world"), "has no `load_environment` function either"),
    ],
    ids=lambda value: value.id + str(value.args.get("kind", "")) if isinstance(value, EnvConfig) else "",
)
def test_what_cannot_be_played_is_refused_by_name(
    config: EnvConfig, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for package in ("legacy_sums", "legacy_shop"):
        monkeypatch.syspath_prepend(HUB / package)
    with pytest.raises(EnvError) as caught:
        build_env_config(config, "train", 0)
    assert words in str(caught.value) and config.id.split("/")[-1] in str(caught.value)
