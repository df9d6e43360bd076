"""The bundled games through real verifiers, against a scripted server that plays them well and badly."""

import re
from collections.abc import Callable
from typing import Any

import pytest

from prime_hpc.config.sections.orchestrator import EnvConfig
from prime_hpc.envs.errors import EnvError
from prime_hpc.envs.samples import EpisodeResult, EpisodeState
from prime_hpc.envs.tasksets import tic_tac_toe, wordle
from tests.support.env_world import World
from tests.support.scripted_api import ScriptedApi

pytestmark = pytest.mark.slow


def users(prompt: str) -> list[str]:
    return re.findall(r"user\n(.*?)<\|im_end\|>", prompt, re.DOTALL)


def sorter(prompt: str, number: int) -> str:
    words = [word for text in users(prompt) for word in text.split() if not word.endswith(":")]
    return " ".join(sorted(words))


def wordle_player(prompt: str, number: int) -> str:
    """The first word that agrees with every answer so far."""
    seen = re.findall(r"([a-z]{5}): ([GYX](?: [GYX]){4})", prompt)
    fits = (w for w in wordle.WORDS if all(wordle.judge(g, w) == marks.replace(" ", "") for g, marks in seen))
    return f"<guess>{next(fits)}</guess>"


def perfect_player(prompt: str, number: int) -> str:
    rows = users(prompt)[-1].split("\n")[1:]
    board = "".join("." if cell.isdigit() else cell for row in rows for cell in row.split())
    return str(tic_tac_toe.best_moves(board)[0] + 1)


def test_lists_grow_turn_by_turn_and_stay_one_sample(world: World) -> None:
    world.script = sorter
    for result in world.play(EnvConfig(id="alphabet-sort"), 4):
        assert result.usable and result.reward == 1.0 and result.metrics["num_turns"] == 3, result
        assert len(result.samples) == 1
    world.script = lambda prompt, number: sorter(prompt, number) if len(users(prompt)) == 1 else "zoo"
    for result in world.play(EnvConfig(id="alphabet-sort"), 2):
        assert result.reward == pytest.approx(1 / 3) and result.metrics["turns_exact"] == 1
    world.script = sorter
    assert [r.reward for r in world.play(EnvConfig(id="word-sorting"), 2)] == [1.0, 1.0]


def test_wordle_is_found_by_its_answers(world: World) -> None:
    world.script = wordle_player
    results = world.play(EnvConfig(id="wordle", args={"max_guesses": 12}), 6)
    assert all(result.metrics["solved"] == 1.0 and result.reward >= 0.5 for result in results)
    world.script = lambda prompt, number: "I give up"
    (result,) = world.play(EnvConfig(id="wordle"))
    assert result.usable and result.reward == 0.0 and result.metrics["num_turns"] == 6


def test_two_perfect_players_draw_and_both_are_trained(world: World) -> None:
    world.script = perfect_player
    for result in world.play(EnvConfig(id="tic-tac-toe", args={"max_opening": 1}), 4):
        assert result.usable and [sample.reward for sample in result.samples] == [0.5, 0.5]
        assert sorted(sample.agent for sample in result.samples) == ["o", "x"]
    world.script = lambda prompt, number: perfect_player(prompt, number) if "You are x" in prompt else "pass"
    for result in world.play(EnvConfig(id="tic-tac-toe", args={"max_opening": 1}), 4):
        rewards = {sample.agent: sample.reward for sample in result.samples}
        assert rewards["o"] == 0.0 and rewards.get("x", 1.0) == 1.0
        assert (result.metrics["x/reward"], result.metrics["o/reward"]) == (1.0, 0.0), "their mean is always 0.5"


def test_against_one_that_moves_anywhere_perfect_play_does_not_lose(world: World) -> None:
    world.script = perfect_player
    env = EnvConfig(id="tic-tac-toe", args={"opponent": "random", "max_opening": 1})
    results = world.play(env, 12)
    assert all(result.usable and result.reward >= 0.5 and len(result.samples) == 1 for result in results)
    assert sum(result.reward == 1.0 for result in results) > 6


def test_a_served_opponent_plays_every_opening_on_both_sides(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Perfect play against one that knows no moves wins all; against perfect play both sides draw."""
    world.script = perfect_player
    monkeypatch.setenv("VLLM_API_KEY", "of-the-other")

    def play(reply: Callable[[str], str]) -> list[EpisodeResult]:
        def answer(messages: list[dict[str, Any]]) -> str:
            return reply(f"user\n{messages[-1]['content']}<|im_end|>")

        with ScriptedApi(answer, key="of-the-other") as api:
            env = EnvConfig(id="tic-tac-toe", args={"opponent": api.url, "max_opening": 1})
            results = world.play(env, 6)
            assert api.num_requests > 0
        assert all(result.usable and len(result.samples) == 1 for result in results), results
        assert [sample.agent for result in results for sample in result.samples] == ["x", "o"] * 3
        return results

    won = play(lambda prompt: "pass")
    assert [result.reward for result in won] == [1.0] * 6
    assert won[0].metrics["as_x"] == 1.0 and "as_o" not in won[0].metrics and won[1].metrics["as_o"] == 1.0
    assert [result.reward for result in play(lambda prompt: perfect_player(prompt, 0))] == [0.5] * 6


def test_an_opponent_that_is_no_server_is_refused_and_a_deaf_one_fails_the_game(world: World) -> None:
    with pytest.raises(EnvError, match="it must be self, random or a URL"):
        world.play(EnvConfig(id="tic-tac-toe", args={"opponent": "somebody"}))
    world.script = perfect_player
    (result,) = world.play(EnvConfig(id="tic-tac-toe", args={"opponent": "http://127.0.0.1:9/v1", "max_opening": 1}))
    assert result.state is EpisodeState.FAILED and not result.usable
