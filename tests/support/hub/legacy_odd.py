"""Packages as people first write them, each with one thing that is easily got wrong."""

import asyncio
import functools
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import verifiers as vf

ROWS = [{"question": f"say {number}", "wanted": str(number)} for number in range(4)]
PICTURE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}


class Session:
    """What JSON has no word for."""

    def __init__(self) -> None:
        self.seen: list[str] = []


class Remembers(vf.StatefulToolEnv):
    """A tool with an argument of such a type."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.add_tool(self.remember, args_to_skip=["session"])

    async def setup_state(self, state: "vf.State", **kwargs: Any) -> "vf.State":
        """One session a rollout."""
        state["session"] = Session()
        return state

    async def remember(self, function: str, session: "Session", times: "int | None" = None) -> str:
        """Remember it."""
        session.seen.append(function)
        return f"{len(session.seen)} kept, {function} the last"

    def update_tool_args(self, tool_name: str, tool_args: Any, messages: Any, state: Any, **kwargs: Any) -> Any:
        """Fill in the session."""
        return {**tool_args, "session": state["session"]}


class KeepsInput(vf.SingleTurnEnv):
    """Keeps something of its own where the row is."""

    async def setup_state(self, state: "vf.State", **kwargs: Any) -> "vf.State":
        """As nothing was there in releases up to 0.1.6."""
        state["input"] = "a text"
        return state


class NotesInRow(vf.ToolEnv):
    """Keeps what happened where the row's own facts are; its tools are called by a method that raises."""

    async def setup_state(self, state: "vf.State", **kwargs: Any) -> "vf.State":
        """One more rollout, as the row counts them."""
        state["info"]["rollouts"].append(1)
        return state

    async def call_tool(self, tool_name: str, *args: Any, **kwargs: Any) -> Any:
        """Know no tool at all."""
        raise LookupError(f"the shop has no {tool_name}")


class Typed(vf.ToolEnv):
    """Makes its messages of classes, as the last releases have them."""

    async def call_tool(self, tool_name: str, tool_args: Any, tool_call_id: str, **kwargs: Any) -> Any:
        """Answer whatever is called."""
        return vf.ToolMessage(content=f"{tool_name} done", tool_call_id=tool_call_id)

    async def env_response(self, messages: Any, state: Any, **kwargs: Any) -> Any:
        """Say one thing more."""
        results = await super().env_response(messages, state)
        return [*results, vf.UserMessage(content=f"{results[0].content}?")]


class ScoresItself(vf.Rubric):
    """As packages did that weigh by themselves."""

    async def score_rollout(self, state: Any, **kwargs: Any) -> None:
        """Never called here."""
        state["reward"] = 42.0


def long(completion: Any) -> float:
    """Reward length."""
    return float(len(completion[-1]["content"]))


def equal(completion: Any, wanted: str) -> float:
    """Compare with another column of the row."""
    return float(completion[-1]["content"] == wanted)


def never(completion: Any, reference_solution: str) -> float:
    """Ask for what no row has."""
    return 1.0


def numbered(completion: Any, example_id: int) -> float:
    """Ask for the row's number, as releases from 0.1.6 on offer it."""
    return 10.0 + example_id


def hinted(completion: Any, hint: str) -> float:
    """Ask for what some rows have."""
    return float(len(hint))


def asked_for(completion: Any, input: str, model: str, state: Any) -> float:
    """Ask for columns that the rollout has a word for, too."""
    assert completion[-1]["content"] == "abcd" and state["turn"] == 1 and state["reward"] is None
    return float(len(input + model))


def with_price(func: Callable[..., float]) -> Callable[..., float]:
    """Give a function an argument that no rollout has."""

    @functools.wraps(func)
    def given(completion: Any, **kwargs: Any) -> float:
        return func(completion, price=2.0)

    return given


@with_price
def priced(completion: Any, price: float) -> float:
    """Take the decorator's argument."""
    return price


def judged() -> "vf.JudgeRubric":
    """A judge who says yes, asked as packages up to 0.1.6 do: with everything that the function got."""

    async def create(**request: Any) -> Any:
        return SimpleNamespace(choices=[SimpleNamespace(message=SimpleNamespace(content="yes"))])

    async def asks(judge: Any, prompt: Any, completion: Any, answer: Any, state: Any, **kwargs: Any) -> float:
        return float("yes" in await judge(prompt, completion, answer, state, **kwargs))

    client = SimpleNamespace(chat=SimpleNamespace(completions=SimpleNamespace(create=create)))
    rubric = vf.JudgeRubric(judge_client=client)
    rubric.add_reward_func(asks)
    return rubric


def raises(completion: Any) -> float:
    """Raise for some replies."""
    return 1.0 / (len(completion[-1]["content"]) - 3)


class OneAtATime(vf.Rubric):
    """Scores one reply at a time, as packages spare their judge."""

    def __init__(self) -> None:
        super().__init__(funcs=[self.waits])
        self.turn = asyncio.Lock()

    async def waits(self, completion: Any) -> float:
        """Reward length, in turn."""
        async with self.turn:
            await asyncio.sleep(0.01)
            return long(completion)


class GroupLoop(vf.EnvGroup):
    """Plays its members' rows by itself."""

    async def rollout(self, *args: Any, **kwargs: Any) -> Any:
        """Never called here."""
        raise AssertionError("never called")


class Freed(vf.SingleTurnEnv):
    """Says in a file that it was freed: the first handler that is called fails."""

    log: str

    @vf.teardown(priority=1)
    def fail(self) -> None:
        """Never."""
        raise ValueError("it cannot")

    @vf.teardown
    async def free(self) -> None:
        """Add a line."""
        with Path(self.log).open("a") as file:
            file.write(f"{os.getpid()}\n")


class Tidies(vf.Rubric):
    """Says in a file what it was asked to tidy up."""

    log: str

    @vf.cleanup
    async def tidy(self, state: Any, answer: str) -> None:
        """Add a line for a rollout, which is over and scored."""
        assert answer == "" and state["completion"]
        with Path(self.log).open("a") as file:
            file.write("rollout\n")

    @vf.cleanup
    def look(self, rollout: Any) -> None:
        """Need no name for the state."""
        assert rollout["completion"]

    @vf.teardown
    async def end(self) -> None:
        """Add a line."""
        with Path(self.log).open("a") as file:
            file.write("end\n")


def away() -> str:
    """Ask a service."""
    raise ConnectionError("the service is away")


def load_environment(kind: str, log: str = "") -> Any:
    """One of them."""
    rubric = vf.Rubric(funcs=[long])
    said = [{"prompt": [{"role": "user", "content": "hi"}]}]
    match kind:
        case "counted":
            env = Remembers(dataset=ROWS, rubric=rubric)
            env.add_rubric(vf.ToolRubric(tools=env.tools))
            return env
        case "input":
            return KeepsInput(dataset=ROWS, rubric=rubric)
        case "notes":
            noted: dict[str, Any] = {"question": "x", "info": {"rollouts": []}}
            return NotesInRow(dataset=[noted], rubric=vf.Rubric(funcs=[lambda info: float(len(info["rollouts"]))]))
        case "typed":
            prompt = [vf.SystemMessage(content="Be brief."), vf.UserMessage(content="hi")]
            return Typed(dataset=[{"prompt": prompt}], rubric=rubric, tools=[away])
        case "away":
            return vf.ToolEnv(dataset=ROWS, rubric=rubric, tools=[away], stop_errors=[ConnectionError])
        case "keys":
            vf.ensure_keys(["PATH", "A_KEY_THAT_IS_NOT_SET", "NOR_IS_THIS"])
            return vf.SingleTurnEnv(dataset=ROWS, rubric=rubric)
        case "scores":
            return vf.SingleTurnEnv(dataset=ROWS, rubric=vf.RubricGroup([rubric, ScoresItself()]))
        case "column":
            return vf.SingleTurnEnv(dataset=ROWS, rubric=vf.Rubric(funcs=[equal]))
        case "never":
            return vf.SingleTurnEnv(dataset=ROWS, rubric=vf.Rubric(funcs=[long, never]))
        case "never-metric":
            return vf.SingleTurnEnv(dataset=ROWS, rubric=vf.Rubric(funcs=[long, never], weights=[1.0, 0.0]))
        case "raises":
            return vf.SingleTurnEnv(dataset=ROWS, rubric=vf.Rubric(funcs=[raises, long]))
        case "system":
            return vf.SingleTurnEnv(dataset=said, system_prompt="Be brief.", rubric=rubric)
        case "picture":
            shown = [{"prompt": [{"role": "user", "content": [{"type": "text", "text": "see"}, PICTURE]}]}]
            return vf.SingleTurnEnv(dataset=shown, rubric=rubric)
        case "blob":
            return vf.SingleTurnEnv(dataset=[*ROWS, {"question": "x", "blob": b"\xff"}], rubric=rubric)
        case "info":
            return vf.SingleTurnEnv(dataset=[*ROWS, {"question": "x", "info": "no JSON"}], rubric=rubric)
        case "splits":
            return vf.SingleTurnEnv(dataset={"train": ROWS}, rubric=rubric)
        case "numbered":
            return vf.SingleTurnEnv(dataset=ROWS, rubric=vf.Rubric(funcs=[numbered]))
        case "hinted":
            rows = [*ROWS[:1], {"question": "x", "hint": "two"}]
            return vf.SingleTurnEnv(dataset=rows, rubric=vf.Rubric(funcs=[hinted]))
        case "priced":
            return vf.SingleTurnEnv(dataset=ROWS, rubric=vf.Rubric(funcs=[priced]))
        case "words":
            words = ("input", "completion", "model", "turn", "reward", "metrics", "trajectory", "responses", "timing")
            rows = [row | dict.fromkeys(words, "text") for row in ROWS]
            return vf.SingleTurnEnv(dataset=rows, rubric=vf.Rubric(funcs=[asked_for]))
        case "judged":
            return vf.SingleTurnEnv(dataset=ROWS, rubric=judged())
        case "threads":
            with ThreadPoolExecutor(2) as threads:
                parts = list(threads.map(lambda name: vf.load_environment(__name__, kind=name), ["priced", "priced"]))
            parts[0].add_rubric(rubric)
            return vf.EnvGroup(parts)
        case "freed":
            return Freed(dataset=said * 20, rubric=rubric, log=log)
        case "tidies":
            env = vf.SingleTurnEnv(dataset=said * 2, rubric=rubric)
            env.add_rubric(Tidies(log=log))
            return env
        case "in_turn":
            return vf.SingleTurnEnv(dataset=said * 80, rubric=OneAtATime())
        case "group_loop":
            return GroupLoop([load_environment("column")])
        case "twice":
            return vf.EnvGroup([load_environment("column"), load_environment("system")], env_names=["a", "a"])
        case "others":
            return vf.EnvGroup([vf.load_environment("legacy-sums"), load_environment("system")])
        case _:
            raise ValueError(kind)
