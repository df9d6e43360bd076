"""tic-tac-toe: self-play. Two agents, `x` and `o`, both the policy, play one game from a given position.

A player sees the board with the free squares' numbers and replies with one of them (its last digit counts). A reply
without a free square loses. Reward: 1 for a win, 0.5 for a draw, 0 for a loss, each player its own; `advantage: rae`
keeps a baseline for each role. With `opponent: random`, for evaluation, the policy plays the side that is to move, and
the environment moves anywhere for the other.
"""

import random
import re
from collections.abc import Iterable, Sequence
from contextlib import AsyncExitStack
from typing import Any, Literal

import verifiers.v1 as vf

from prime_hpc.envs.lazy_runtime import lazy_box
from prime_hpc.envs.tasksets.splitting import split_of

__all__ = ["TicTacToeEnv", "TicTacToeTaskset"]

LINES = ((0, 1, 2), (3, 4, 5), (6, 7, 8), (0, 3, 6), (1, 4, 7), (2, 5, 8), (0, 4, 8), (2, 4, 6))
_DIGIT = re.compile(r"[1-9]")
INSTRUCTIONS = "You play tic-tac-toe. Reply with the number of a free square."


def show(board: str, player: str) -> str:
    """Return the board for a player: three rows, free squares as their numbers."""
    cells = [mark if mark != "." else str(square + 1) for square, mark in enumerate(board)]
    rows = "\n".join(" ".join(cells[row : row + 3]) for row in (0, 3, 6))
    return f"You are {player}.\n{rows}"


def free(board: str) -> list[int]:
    """Free squares, 0 to 8."""
    return [square for square, mark in enumerate(board) if mark == "."]


def winner(board: str) -> str | None:
    """Return `x` or `o` where it has a line."""
    for a, b, c in LINES:
        if board[a] != "." and board[a] == board[b] == board[c]:
            return board[a]
    return None


def move_in(reply: str, board: str) -> int | None:
    """Return the square (0 to 8) that a reply names last; None where it is taken or there is none."""
    found = _DIGIT.findall(reply)
    if not found:
        return None
    square = int(found[-1]) - 1
    return square if board[square] == "." else None


def place(board: str, square: int, player: str) -> str:
    """Return the board after a move."""
    return f"{board[:square]}{player}{board[square + 1 :]}"


class TicTacToeData(vf.TaskData):
    """Position that a game begins with."""

    board: str
    opponent: str = "self"


class TicTacToeTask(vf.Task[TicTacToeData]):
    """Scores a player by the result that the environment recorded."""

    @vf.reward
    async def result(self, trace: vf.Trace) -> float:
        """1, 0.5 or 0; 0 where the game did not come to an end."""
        return float(trace.info.get("result", 0.0))

    @vf.metric
    async def illegal(self, trace: vf.Trace) -> float:
        """1 where the player lost by a reply without a free square."""
        return float(bool(trace.info.get("illegal")))


class TicTacToeConfig(vf.TasksetConfig):
    """Arguments of `tic-tac-toe`."""

    split: Literal["train", "eval"] = "train"
    """The set of openings; the two sets have none in common (but the empty board's)."""
    seed: int = 0
    """In what order."""
    num_tasks: int = 2000
    """How many games."""
    max_opening: int = 4
    """Moves drawn at random before the players begin, at most."""
    opponent: Literal["self", "random"] = "self"
    """The player of the other side."""
    instructions: str | None = INSTRUCTIONS
    """The system prompt."""


def openings(seed: object, split: str, max_moves: int) -> Iterable[str]:
    """Positions after a few random moves that nobody has won, without end; `x` began."""
    rng = random.Random(f"tic-tac-toe:{split}:{seed}")
    while True:
        board = "." * 9
        for number in range(rng.randint(0, max_moves)):
            board = place(board, rng.choice(free(board)), "xo"[number % 2])
        if winner(board) is None and split_of(board) == split:
            yield board


def to_move(board: str) -> str:
    """Return who is to move."""
    return "x" if board.count("x") == board.count("o") else "o"


class TicTacToeTaskset(vf.Taskset[TicTacToeTask, TicTacToeConfig]):
    """Games from short random openings."""

    def load(self) -> Iterable[TicTacToeTask]:
        """Return the split's openings, in the seed's order; the same one may come again."""
        config = self.config
        if not 1 <= config.max_opening <= 6:
            raise ValueError("tic-tac-toe needs 1 <= max_opening <= 6")
        boards = openings(config.seed, config.split, config.max_opening)
        for _, board in zip(range(config.num_tasks), boards, strict=False):
            data = TicTacToeData(
                prompt=show(board, to_move(board)),
                system_prompt=config.instructions,
                board=board,
                opponent=config.opponent,
            )
            yield TicTacToeTask(data, config.task)


class TicTacToeEnvConfig(vf.EnvConfig):
    """Two seats, both the policy."""

    x: vf.AgentConfig = vf.AgentConfig()
    o: vf.AgentConfig = vf.AgentConfig()


class TicTacToeEnv(vf.Env[TicTacToeEnvConfig]):
    """Lets the two play, and keeps the board."""

    async def run(self, task: Any, agents: Any) -> None:
        """One game."""
        board = task.data.board
        names = ("x", "o") if task.data.opponent == "self" else (to_move(board),)
        # Nobody is asked before its turn: the environment opens the conversations.
        asked = type(task)(task.data.model_copy(update={"prompt": None}), task.config)
        async with AsyncExitStack() as stack:
            seats = {}
            for name in names:
                box = await stack.enter_async_context(lazy_box())
                seats[name] = await stack.enter_async_context(getattr(agents, name).interaction(asked, runtime=box))
            await _play(board, seats)


async def _play(board: str, seats: dict[str, Any]) -> None:
    """Play to the end and record each player's result. A player that is cut off ends the game without one.

    Args:
        board: position that it begins with.
        seats: by player; one that has none moves at random, in each position always the same way.
    """
    while free(board) and winner(board) is None:
        player = to_move(board)
        if player not in seats:
            board = place(board, random.Random(board).choice(free(board)), player)
            continue
        segment = await seats[player].turn(show(board, player))
        if segment.terminated:
            return
        square = move_in(segment.last_reply, board)
        if square is None:
            seats[player].trace.info["illegal"] = True
            _record(seats, "o" if player == "x" else "x")
            return
        board = place(board, square, player)
    _record(seats, winner(board))


def _record(seats: dict[str, Any], won: str | None) -> None:
    for name, seat in seats.items():
        seat.trace.info["result"] = 0.5 if won is None else float(name == won)


def best_moves(board: str) -> Sequence[int]:
    """Return the moves that perfect play does not lose by, those that win first: for demonstrations and tests."""
    player = to_move(board)
    values = {square: -_value(place(board, square, player)) for square in free(board)}
    most = max(values.values())
    return [square for square, value in values.items() if value == most]


_KNOWN: dict[str, int] = {}


def _value(board: str) -> int:
    """Return 1, 0 or -1 for the player to move under perfect play."""
    if board not in _KNOWN:
        if winner(board) is not None:
            _KNOWN[board] = -1
        elif not free(board):
            _KNOWN[board] = 0
        else:
            player = to_move(board)
            _KNOWN[board] = max(-_value(place(board, square, player)) for square in free(board))
    return _KNOWN[board]
