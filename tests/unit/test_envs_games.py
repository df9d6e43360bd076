"""The bundled games' pure parts: what they pose, how replies are read and scored, what they refuse."""

import asyncio
import io
import itertools
import random
from fractions import Fraction
from typing import Any

import pytest
from PIL import Image

from prime_hpc.config.sections.orchestrator import EnvConfig
from prime_hpc.envs.env_config import resolve_taskset
from prime_hpc.envs.errors import EnvError
from prime_hpc.envs.images import decode_image
from prime_hpc.envs.task_sources import EnvSource
from prime_hpc.envs.tasksets import countdown, shapes, tic_tac_toe, wordle
from prime_hpc.envs.tasksets.calculator import CalculatorHarness
from prime_hpc.envs.tasksets.generated import GeneratedConfig, drawn
from prime_hpc.envs.tasksets.integers import last_integer
from prime_hpc.envs.tasksets.long_tail import count_score, draw_count
from prime_hpc.envs.tasksets.math_questions import answer_in
from prime_hpc.envs.tasksets.reverse_text_data import split_of
from prime_hpc.envs.tasksets.word_sorting import order_score
from prime_hpc.starter.data import demonstrations

GAMES = ("word-sorting", "alphabet-sort", "countdown", "simple-math", "shapes", "wordle", "tic-tac-toe", "long-tail")


def tasks(name: str, num: int = 200, split: str = "train", **arguments: Any) -> list[Any]:
    source = EnvSource(EnvConfig(id=name, args={"num_tasks": num, **arguments}), split, 3)  # type: ignore[arg-type]
    return [source.task(index) for index in range(num)]


@pytest.mark.parametrize("name", GAMES)
def test_tasks_follow_from_the_seed_and_the_splits_share_none(name: str) -> None:
    resolve_taskset(name)
    first, again = tasks(name), tasks(name)
    assert [task.data.model_dump() for task in first] == [task.data.model_dump() for task in again]
    held_out = tasks(name, split="eval")

    def contents(group: list[Any]) -> set[str]:
        return {str(task.data.model_dump(exclude={"name", "idx"})) for task in group}

    assert not contents(first) & contents(held_out)


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("word-sorting", {"min_words": 6, "max_words": 5}),
        ("alphabet-sort", {"num_turns": 0}),
        ("countdown", {"max_numbers": 9}),
        ("simple-math", {"operations": "+/"}),
        ("shapes", {"size": 8}),
        ("shapes", {"max_count": 17}),
        ("shapes", {"num_colours": 7}),
        ("wordle", {"max_guesses": 0}),
        ("tic-tac-toe", {"max_opening": 9}),
        ("tic-tac-toe", {"opponent": "nobody"}),
        ("long-tail", {"p99_ratio": 0.5}),
        ("long-tail", {"median_numbers": 200}),
        ("long-tail", {"max_numbers": 901}),
    ],
)
def test_impossible_arguments_are_refused(name: str, arguments: dict[str, Any]) -> None:
    with pytest.raises(EnvError, match=r"needs|knows|opponent"):
        tasks(name, **arguments)


def test_sorted_words_count_by_their_places() -> None:
    words = ["pear", "apple", "fig"]
    assert order_score(" Apple, fig pear\n", words) == 1.0
    assert order_score("apple pear fig", words) == pytest.approx(1 / 3)
    assert order_score("apple fig pear zoo", words) == 0.75
    assert order_score("", words) == 0.0
    assert order_score("pear " * 10_000, words) < 0.01


def test_a_count_is_scored_by_its_places() -> None:
    assert count_score("101 102\n103", 101, 103) == 1.0
    assert count_score("103 102 101", 101, 103) == pytest.approx(1 / 3)
    assert count_score("101 102", 101, 103) == pytest.approx(2 / 3)
    assert count_score("101 102 103 104", 101, 103) == pytest.approx(3 / 4)
    assert count_score("", 101, 103) == 0.0


@pytest.mark.parametrize("ratio", [1.0, 3.0, 10.0])
def test_long_tails_are_as_stated(ratio: float) -> None:
    """Quantiles of 20,000 draws from a fixed seed: the median, and the 99th percentile over it."""
    rng = random.Random(0)
    drawn = sorted(draw_count(rng, 40.0, ratio, 900) for _ in range(20_000))
    assert drawn[10_000] == pytest.approx(40, rel=0.03)
    assert drawn[19_800] / drawn[10_000] == pytest.approx(ratio, rel=0.08)
    counts = [task.data.last - task.data.first + 1 for task in tasks("long-tail", 1000, p99_ratio=ratio)]
    assert sorted(counts)[500] == pytest.approx(8, abs=1) and max(counts) <= 160
    assert all(100 <= task.data.first < task.data.last <= 999 for task in tasks("long-tail", 1000, p99_ratio=ratio))


def test_every_countdown_can_be_reached_and_nothing_of_a_reply_is_run() -> None:
    for task in tasks("countdown", 40, max_numbers=3):
        numbers, target = task.data.numbers, task.data.target
        forms = ("{0}{3}{1}{4}{2}", "({0}{3}{1}){4}{2}", "{0}{3}({1}{4}{2})")
        tried = (
            form.format(*order, *signs)
            for order in itertools.permutations(numbers)
            for signs in itertools.product("+-*/", repeat=2)
            for form in forms
        )
        assert any(countdown.score(expression, numbers, target) == 1.0 for expression in tried), task.data.prompt
    assert countdown.evaluate("(1 + 2) * 3 / 2") == (Fraction(9, 2), [1, 2, 3, 2])
    for text in ("1/0", "2**9", "7//2", "__import__('os')", "-1", "1 +", "(" * 150, "1e9", "9" * 201):
        assert countdown.evaluate(text) is None, text
    assert countdown.score("so <answer>2 * 3 = 6</answer>", [2, 3], 6) == 1.0
    assert countdown.score("<answer>2 + 3</answer>", [2, 3], 6) == 0.1
    assert countdown.score("<answer>6</answer>", [2, 3], 6) == 0.0  # not the given numbers
    assert countdown.score("<answer>2 * 3 * 1</answer>", [2, 3], 6) == 0.0


def test_a_draw_that_is_seldom_of_use_is_found() -> None:
    config, draws = GeneratedConfig(id="rare", num_tasks=2, split=split_of("a")), itertools.count()
    assert [*drawn("rare", config, lambda _: ("a", n) if (n := next(draws)) % 50_000 == 9 else None)] == [9, 50_009]


def test_simple_math_counts_the_last_number() -> None:
    assert last_integer("12 + 3 = 15, so 1,015") == 1015
    assert last_integer("it is -4.") == -4
    assert last_integer("none") is None
    said = {"is 18.0.": 18, "12 / 8 = 1.5": None, "1e3": 1000, "3 - 8 = \N{MINUS SIGN}5": -5, "10-3": 3, "f(x)-7": 7}
    said |= {
        "1,2,3": 3,
        "1{,}234": 1234,
        "x = - 5": -5,
        "9" * 20: int("9" * 20),
        "9" * 20_000: None,
        "it is _-5_": -5,
        "it is __-5__.": -5,
        "a_-5": 5,
        "\\text{Answer: }-5": -5,
        "\\mathbf{x}-5": 5,
        "x_{1}-5": 5,
        "2^{10}=1024.": 1024,
    }
    assert {reply: last_integer(reply) for reply in said} == said
    assert [answer_in(reply, integer=True) for reply in ("1,2,3", "10-3", "= \N{MINUS SIGN}1,005.50")] == [
        "3",
        "3",
        "-1005.50",
    ]
    (task, *_) = tasks("simple-math", 1, min_terms=3, max_terms=3)
    question = task.data.prompt.removeprefix("What is ").removesuffix("?")
    assert task.data.answer == eval(question, {"__builtins__": {}})


def test_large_operands_and_arguments_that_leave_no_task() -> None:
    (task,) = tasks("simple-math", 1, min_terms=20, max_terms=20, max_number=10**15)
    assert task.data.answer == eval(task.data.prompt.removeprefix("What is ")[:-1], {"__builtins__": {}})
    with pytest.raises(EnvError, match="none of the eval split"):
        tasks("simple-math", 5, "eval", max_number=3, max_terms=2, operations="*")
    with pytest.raises(ValueError, match="no opening of at most 0 moves"):
        [next(iter(tic_tac_toe.openings(0, split, 0))) for split in ("train", "eval")]


def test_tools_say_of_any_arguments_that_they_are_wrong() -> None:
    (add, _) = CalculatorHarness.local_tools
    assert "RecursionError" in asyncio.run(add.call('{"a": ' + "[" * 100_000))


def test_shapes_shows_what_it_asks_for() -> None:
    for kind, questions in (("colour", "What colour"), ("form", "Which shape"), ("count", "How many dots")):
        for task in tasks("shapes", 20, kinds=[kind], size=32):
            (message,) = task.data.prompt
            shown, asked = message.content
            assert asked.text.startswith(questions) and task.data.answer in task.data.choices
            with Image.open(io.BytesIO(decode_image(shown.image_url.url))) as picture:
                assert (picture.format, picture.mode, picture.size) == ("PNG", "RGB", (32, 32))
                colours = {colour for _, colour in picture.getcolors() or []}
            (drawn,) = colours - {(255, 255, 255)}
            assert kind != "colour" or shapes.COLOURS[task.data.answer] == drawn
    assert shapes.dots(64, "red", [0, 5, 15]).getpixel((8, 8)) == shapes.COLOURS["red"]
    assert shapes.dots(64, "red", [0, 5, 15]).getpixel((8, 24)) == (255, 255, 255)


def test_shapes_wants_the_right_answer_and_no_other() -> None:
    choices = list(shapes.COLOURS)
    assert shapes.named("It is Red.", choices) == {"red"}
    assert shapes.named("red or blue", choices) == {"red", "blue"}
    assert shapes.named("<think>blue?</think>red", choices) == {"red"}
    assert shapes.named("reddish", choices) == set() and shapes.named("13 dots", ["1", "3", "13"]) == {"13"}


def test_wordle_marks_letters_as_often_as_they_are_there() -> None:
    assert wordle.judge("crane", "crane") == "GGGGG"
    assert wordle.judge("eerie", "crane") == "XXYXG"
    assert wordle.judge("allow", "lilac") == "YYGXX"
    assert wordle.guess_in("maybe <guess>Crane</guess>?") == "crane"
    assert wordle.guess_in("I say crane then house") == "house"
    assert wordle.guess_in("no") is None
    assert len(wordle.WORDS) == len(set(wordle.WORDS)) and all(len(word) == 5 for word in wordle.WORDS)
    assert {split_of(word) for word in wordle.WORDS} == {"train", "eval"}


def test_perfect_play_never_loses_and_positions_are_read_right() -> None:
    assert tic_tac_toe.winner("xxx.oo...") == "x" and tic_tac_toe.winner("." * 9) is None
    assert tic_tac_toe.show("x...o....", "x") == "You are x.\nx 2 3\n4 o 6\n7 8 9"
    assert tic_tac_toe.move_in("not 1, I take 9", "x...o....") == 8
    assert [tic_tac_toe.move_in(reply, "x...o....") for reply in ("1", "0", "", "pass")] == [None] * 4
    assert tic_tac_toe.best_moves("xx.oo....") == [2]
    assert len(tic_tac_toe.best_moves("." * 9)) == 9  # a draw, wherever one begins

    def lost(board: str) -> bool:
        """Whether `o`, playing perfectly, can be beaten from here."""
        if tic_tac_toe.winner(board) is not None or not tic_tac_toe.free(board):
            return tic_tac_toe.winner(board) == "x"
        if tic_tac_toe.to_move(board) == "x":
            return any(lost(tic_tac_toe.place(board, square, "x")) for square in tic_tac_toe.free(board))
        return lost(tic_tac_toe.place(board, tic_tac_toe.best_moves(board)[0], "o"))

    assert not lost("." * 9)


@pytest.mark.parametrize("task", ["word-sorting", "tic-tac-toe", "long-tail"])
def test_demonstrations_end_with_a_reply(task: str) -> None:
    rows = demonstrations(0, 50, task)
    assert rows == demonstrations(0, 50, task) and len(rows) == 50
    for row in rows:
        roles = [message["role"] for message in row["messages"]]
        assert roles == ["user", "assistant"] * (len(roles) // 2) and roles


def test_the_later_an_opening_the_more_the_next_move_decides() -> None:
    """Share of the variance of a game's result that the next move explains, both sides playing at random: the signal of
    one game for one move, and why `configs/tic_tac_toe/rl.yaml` trains on late openings. Exact, over all positions.
    """
    known: dict[str, tuple[float, float]] = {}

    def moments(board: str) -> tuple[float, float]:
        """Mean and mean square of the result of `x`."""
        if board not in known:
            won = tic_tac_toe.winner(board)
            if won is not None or not tic_tac_toe.free(board):
                result = 0.5 if won is None else float(won == "x")
                known[board] = (result, result**2)
            else:
                known[board] = tuple(sum(values) / len(values) for values in zip(*after(board), strict=True))
        return known[board]

    def after(board: str) -> list[tuple[float, float]]:
        player = tic_tac_toe.to_move(board)
        return [moments(tic_tac_toe.place(board, square, player)) for square in tic_tac_toe.free(board)]

    shares, boards = {}, {"." * 9: 1.0}
    for moves in range(7):
        explained = total = 0.0
        later: dict[str, float] = {}
        for board, weight in boards.items():
            mean, square = moments(board)
            explained += weight * (sum(m**2 for m, _ in after(board)) / len(after(board)) - mean**2)
            total += weight * (square - mean**2)
            for free in tic_tac_toe.free(board):
                moved = tic_tac_toe.place(board, free, tic_tac_toe.to_move(board))
                if tic_tac_toe.winner(moved) is None:
                    later[moved] = later.get(moved, 0.0) + weight / len(tic_tac_toe.free(board))
        shares[moves] = round(explained / total, 2)
        boards = later
    assert list(shares.values()) == sorted(shares.values())
    assert {moves: shares[moves] for moves in (0, 3, 4, 5, 6)} == {0: 0.01, 3: 0.07, 4: 0.13, 5: 0.26, 6: 0.45}
