"""Warm-up demonstrations for the bundled tasks, of mixed quality on purpose.

Part of the demonstrations are right, the others follow a worse, easier habit: copying a text instead of reversing or
sorting it, counting up instead of halving the range, calling the tool that adds where the question multiplies, moving
anywhere, counting down instead of up. A model warmed up on them can do both and prefers the wrong one, which leaves
reinforcement something to choose. (A warm-up on right answers only, cut short, leaves a model that RL hardly improves
within 40 steps.)
"""

import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from prime_hpc.envs.tasksets.reverse_text_data import Split, answer_of, build_prompt, make_texts

Row = dict[str, Any]

RIGHT_SHARE = 0.4
"""Share of demonstrations that do the task right."""
NUM_DEMONSTRATIONS = 8192
SEED_OFFSET = 1_000_000
"""Added to the seed of the tasks, so that an environment of the same seed poses mostly other train tasks."""
GUESS_LIMITS = {"max_number": 40, "max_guesses": 5}
"""Arguments of `guess-number` that the demonstrations are for (configs/guess_number)."""
SHAPES: Row = {"kinds": ["colour"], "size": 32, "instructions": None}
"""Arguments of `shapes` (configs/vision)."""
CALCULATOR_MAX_NUMBER = 99


def _user(content: str) -> Row:
    return {"role": "user", "content": content}


def _assistant(content: str) -> Row:
    return {"role": "assistant", "content": content}


def reverse_text(seed: int, num: int, right: set[int]) -> Iterator[Row]:
    """Reverse the text, or copy it."""
    for i, text in enumerate(make_texts("train", SEED_OFFSET + seed, num)):
        yield {"prompt": build_prompt(text), "completion": [_assistant(answer_of(text) if i in right else text)]}


def preferences(seed: int, num: int, split: Split) -> Iterator[Row]:
    """Pairs of replies to texts of a split: reversed before copied, `num` of them."""
    for text in make_texts(split, SEED_OFFSET + seed, num):
        if text != answer_of(text):
            yield {
                "prompt": build_prompt(text),
                "chosen": [_assistant(answer_of(text))],
                "rejected": [_assistant(text)],
            }


def guess_number(seed: int, num: int, right: set[int]) -> Iterator[Row]:
    """Halve the range at every guess, or count up from its lower end."""
    from prime_hpc.envs.tasksets.guess_number import GuessNumberConfig, GuessNumberTaskset, judge

    config = GuessNumberConfig(split="train", seed=SEED_OFFSET + seed, num_tasks=num, **GUESS_LIMITS)
    for i, task in enumerate(GuessNumberTaskset(config).load()):
        data = task.data
        low, high = data.low, data.high
        messages = [_user(str(data.prompt))]
        for _ in range(data.max_guesses):
            guess = (low + high) // 2 if i in right else low
            messages.append(_assistant(str(guess)))
            answer = judge(str(guess), data.secret)
            if answer is None:
                break
            low, high = (guess + 1, high) if answer == "higher" else (low, guess - 1)
            messages.append(_user(answer))
        yield {"messages": messages if messages[-1]["role"] == "assistant" else messages[:-1]}


def calculator(seed: int, num: int, right: set[int]) -> Iterator[Row]:
    """Call the tools that the question asks for, or `add` alone; say the last result."""
    from prime_hpc.envs.tasksets.calculator import CalculatorConfig, CalculatorHarness, CalculatorTaskset, add, multiply

    tools = [
        {"type": "function", "function": tool.declaration.model_dump(exclude_none=True, exclude={"type"})}
        for tool in CalculatorHarness.local_tools
    ]
    config = CalculatorConfig(split="train", seed=SEED_OFFSET + seed, num_tasks=num, max_number=CALCULATOR_MAX_NUMBER)
    functions: dict[str, tuple[str, Callable[[int, int], int]]] = {"+": ("add", add), "*": ("multiply", multiply)}
    for i, task in enumerate(CalculatorTaskset(config).load()):
        prompt = str(task.data.prompt)
        first, *rest = prompt.removeprefix("What is ").removesuffix("?").split()
        messages = [_user(prompt)]
        value = int(first)
        for sign, operand in zip(rest[::2], rest[1::2], strict=True):
            name, function = functions[sign if i in right else "+"]
            arguments = {"a": value, "b": int(operand)}
            value = function(value, int(operand))
            messages += [
                {**_assistant(""), "tool_calls": [{"function": {"name": name, "arguments": arguments}}]},
                {"role": "tool", "content": str(value)},
            ]
        yield {"messages": [*messages, _assistant(str(value))], "tools": tools}


def word_sorting(seed: int, num: int, right: set[int]) -> Iterator[Row]:
    """Sort the words, or copy them."""
    from prime_hpc.envs.tasksets.word_sorting import WordSortingConfig, WordSortingTaskset

    config = WordSortingConfig(
        split="train", seed=SEED_OFFSET + seed, num_tasks=num, min_words=2, max_words=3, instructions=None
    )
    for i, task in enumerate(WordSortingTaskset(config).load()):
        words = sorted(task.data.words) if i in right else task.data.words
        yield {"messages": [_user(str(task.data.prompt)), _assistant(" ".join(words))]}


def long_tail(seed: int, num: int, right: set[int]) -> Iterator[Row]:
    """Count up, or as far down: both replies are as long. Most are short: where a count begins and ends is what is hard
    to learn, and a long one says little of it."""
    from prime_hpc.envs.tasksets.long_tail import LongTailConfig, LongTailTaskset

    config = LongTailConfig(
        split="train", seed=SEED_OFFSET + seed, num_tasks=num, instructions=None, median_numbers=3.0
    )
    for i, task in enumerate(LongTailTaskset(config).load()):
        numbers = range(task.data.first, task.data.last + 1)
        said = " ".join(map(str, numbers if i in right else reversed(numbers)))
        yield {"messages": [_user(str(task.data.prompt)), _assistant(said)]}


def tic_tac_toe(seed: int, num: int, right: set[int]) -> Iterator[Row]:
    """Move as perfect play does, or to any free square, against one that moves anywhere: a player's side of a game."""
    from prime_hpc.envs.tasksets import tic_tac_toe as game

    rng = random.Random(f"starter-tic-tac-toe:{seed}")
    config = game.TicTacToeConfig(split="train", seed=SEED_OFFSET + seed, num_tasks=num)
    for i, task in enumerate(game.TicTacToeTaskset(config).load()):
        board = task.data.board
        shown, messages = game.to_move(board), []
        while game.free(board) and game.winner(board) is None:
            player = game.to_move(board)
            choose = game.best_moves if i in right and player == shown else game.free
            square = rng.choice(choose(board))
            if player == shown:
                messages += [_user(game.show(board, player)), _assistant(str(square + 1))]
            board = game.place(board, square, player)
        yield {"messages": messages}


def shapes(seed: int, num: int, right: set[int]) -> Iterator[Row]:
    """Name the colour that the picture shows, or red whatever it shows."""
    from prime_hpc.envs.tasksets.shapes import ShapesConfig, ShapesTaskset

    config = ShapesConfig(split="train", seed=SEED_OFFSET + seed, num_tasks=num, **SHAPES)
    for i, task in enumerate(ShapesTaskset(config).load()):
        prompt = [message.model_dump(include={"role", "content"}) for message in task.data.prompt]
        yield {"messages": [*prompt, _assistant(task.data.answer if i in right else "red")]}


TASKS: dict[str, Callable[[int, int, set[int]], Iterator[Row]]] = {
    "reverse-text": reverse_text,
    "guess-number": guess_number,
    "calculator": calculator,
    "word-sorting": word_sorting,
    "tic-tac-toe": tic_tac_toe,
    "long-tail": long_tail,
    "shapes": shapes,
}


def demonstrations(seed: int, num: int = NUM_DEMONSTRATIONS, task: str = "reverse-text") -> list[Row]:
    """`num` rows as `sft.data` reads them, over tasks of the train split; `RIGHT_SHARE` of them do the task right."""
    right = set(random.Random(f"starter-demonstrations:{seed}").sample(range(num), round(num * RIGHT_SHARE)))
    return list(TASKS[task](seed, num, right))


def write_demonstrations(path: Path, rows: list[Row]) -> None:
    """Write demonstrations as JSON lines."""
    with path.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
