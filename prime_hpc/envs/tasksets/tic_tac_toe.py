"""tic-tac-toe: self-play. Two agents, `x` and `o`, both the policy, play one game from a given position.

A player sees the board with the free squares' numbers and replies with one of them (its last digit counts). A reply
without a free square loses. Reward: 1 for a win, 0.5 for a draw, 0 for a loss, each player its own; `advantage: rae`
keeps a baseline for each role. For evaluation the policy has an opponent: with `opponent: random` it plays the side
that is to move, and the environment moves anywhere for the other; with `opponent: http://HOST:PORT/v1`, a model that is
served there (its own former self, say), it plays every opening twice, once on each side. An opponent whose very first
reply names no free square moves anywhere.
"""

import random
import re
from collections.abc import Iterable, Sequence
from contextlib import AsyncExitStack
from typing import Any

import verifiers.v1 as vf
from pydantic import model_validator

from prime_hpc.envs.lazy_runtime import LazyBox
from prime_hpc.envs.tasksets.generated import MOST_MISSES, GeneratedConfig
from prime_hpc.envs.tasksets.reverse_text_data import split_of

__all__ = ["TicTacToeEnv", "TicTacToeTaskset"]

LINES = ((0, 1, 2), (3, 4, 5), (6, 7, 8), (0, 3, 6), (1, 4, 7), (2, 5, 8), (0, 4, 8), (2, 4, 6))
_DIGIT = re.compile(r"[1-9]")
SERVED_MODEL = "policy"
"""Name under which `inference` serves its model."""
KEY_VARIABLE = "VLLM_API_KEY"
"""Environment variable with the key of an opponent's server."""
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
    role: str = ""
    """The policy's, where a served model plays the other."""


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

    @vf.metric
    async def draw(self, trace: vf.Trace) -> float:
        """1 where nobody won."""
        return float(trace.info.get("result") == 0.5)

    @vf.metric
    async def by_role(self, trace: vf.Trace) -> dict[str, float]:
        """`as_x` or `as_o`: the result, apart for each role."""
        role = trace.info.get("role")
        return {f"as_{role}": float(trace.info.get("result", 0.0))} if role else {}


class TicTacToeConfig(GeneratedConfig):
    """Arguments of `tic-tac-toe`; the two splits have no opening in common, the empty board is in one of them."""

    num_tasks: int = 2000
    """How many games."""
    max_opening: int = 4
    """Moves drawn at random before the players begin, at most."""
    opponent: str = "self"
    """The player of the other side: `self`, `random`, or the URL of a server's OpenAI routes (`http://HOST:8001/v1`)."""
    instructions: str | None = INSTRUCTIONS
    """The system prompt."""


def openings(seed: object, split: str, max_moves: int) -> Iterable[str]:
    """Positions after a few random moves that nobody has won, without end; `x` began.
    Raises ValueError: so few moves give none of this split."""
    rng = random.Random(f"tic-tac-toe:{split}:{seed}")
    misses = 0
    while misses < MOST_MISSES:
        misses += 1
        board = "." * 9
        for number in range(rng.randint(0, max_moves)):
            board = place(board, rng.choice(free(board)), "xo"[number % 2])
        if winner(board) is None and split_of(board) == split:
            misses = 0
            yield board
    raise ValueError(f"tic-tac-toe: no opening of at most {max_moves} moves is of the {split} split")


def to_move(board: str) -> str:
    """Return who is to move."""
    return "x" if board.count("x") == board.count("o") else "o"


def is_served(opponent: str) -> bool:
    """Return whether an opponent is a server's model."""
    return opponent.startswith(("http://", "https://"))


class TicTacToeTaskset(vf.Taskset[TicTacToeTask, TicTacToeConfig]):
    """Games from short random openings."""

    def load(self) -> Iterable[TicTacToeTask]:
        """Return the split's openings, in the seed's order; the same one may come again."""
        config = self.config
        if not 1 <= config.max_opening <= 6:
            raise ValueError("tic-tac-toe needs 1 <= max_opening <= 6")
        if config.opponent not in ("self", "random") and not is_served(config.opponent):
            raise ValueError(f"opponent is {config.opponent!r}: it must be self, random or a URL (http://HOST:PORT/v1)")
        boards = openings(config.seed, config.split, config.max_opening)
        roles = ("x", "o") if is_served(config.opponent) else ("",)
        for number, board in zip(range(-(-config.num_tasks // len(roles))), boards, strict=False):
            for role in roles[: config.num_tasks - number * len(roles)]:
                data = TicTacToeData(
                    prompt=show(board, to_move(board)),
                    system_prompt=config.instructions,
                    board=board,
                    opponent=config.opponent,
                    role=role,
                )
                yield TicTacToeTask(data, config.task)


class TicTacToeEnvConfig(vf.EnvConfig):
    """Two seats, both the policy; a third for a served model, which takes the place of one of them."""

    x: vf.AgentConfig = vf.AgentConfig()
    o: vf.AgentConfig = vf.AgentConfig()
    opponent: vf.AgentConfig = vf.AgentConfig(model=SERVED_MODEL)

    @model_validator(mode="after")
    def _opponents_server(self) -> "TicTacToeEnvConfig":
        served = getattr(self.taskset, "opponent", "self")
        if is_served(served) and self.opponent.client is None:
            client = vf.EvalClientConfig(base_url=served, api_key_var=KEY_VARIABLE)
            self.opponent = self.opponent.model_copy(update={"client": client})
        return self


class TicTacToeEnv(vf.Env[TicTacToeEnvConfig]):
    """Lets the two play, and keeps the board."""

    async def setup(self, agents: Any) -> None:
        """Learn from the policy's own games alone."""
        agents.opponent.trainable = False

    async def run(self, task: Any, agents: Any) -> None:
        """One game."""
        board, role = task.data.board, task.data.role
        names = {name: name for name in "xo"} if task.data.opponent == "self" else {to_move(board): to_move(board)}
        if role:
            names = {name: name if name == role else "opponent" for name in "xo"}
        # Nobody is asked before its turn: the environment opens the conversations.
        asked = type(task)(task.data.model_copy(update={"prompt": None}), task.config)
        async with AsyncExitStack() as stack:
            seats = {}
            for name, agent in names.items():
                box = await stack.enter_async_context(LazyBox())
                seats[name] = await stack.enter_async_context(getattr(agents, agent).interaction(asked, runtime=box))
                if agent == role:
                    seats[name].trace.info["role"] = role
            await _play(board, seats)


async def _play(board: str, seats: dict[str, Any]) -> None:
    """Play to the end and record each player's result. A player that is cut off ends the game without one.
    `seats`: by player; one that has none moves at random, in each position always the same way."""
    while free(board) and winner(board) is None:
        player = to_move(board)
        if player not in seats:
            board = place(board, _anywhere(board), player)
            continue
        segment = await seats[player].turn(show(board, player))
        if segment.terminated:
            return
        square = move_in(segment.last_reply, board)
        if square is None and not any(seat.trace.agent.trainable and seat.trace.num_turns for seat in seats.values()):
            square = _anywhere(board)  # a game in which the policy says nothing would have no score
        if square is None:
            seats[player].trace.info["illegal"] = True
            _record(seats, "o" if player == "x" else "x")
            return
        board = place(board, square, player)
    _record(seats, winner(board))


def _anywhere(board: str) -> int:
    """Return a free square, in each position always the same one."""
    return random.Random(board).choice(free(board))


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
