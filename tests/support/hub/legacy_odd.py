"""Packages as people first write them, each with one thing that is easily got wrong."""

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


def raises(completion: Any) -> float:
    """Raise for some replies."""
    return 1.0 / (len(completion[-1]["content"]) - 3)


def load_environment(kind: str) -> Any:
    """One of them."""
    rubric = vf.Rubric(funcs=[long])
    said = [{"prompt": [{"role": "user", "content": "hi"}]}]
    match kind:
        case "session":
            return Remembers(dataset=ROWS, rubric=rubric)
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
        case "info":
            return vf.SingleTurnEnv(dataset=[*ROWS, {"question": "x", "info": "no JSON"}], rubric=rubric)
        case "splits":
            return vf.SingleTurnEnv(dataset={"train": ROWS}, rubric=rubric)
        case "twice":
            return vf.EnvGroup([load_environment("column"), load_environment("system")], env_names=["a", "a"])
        case "others":
            return vf.EnvGroup([vf.load_environment("legacy-sums"), load_environment("system")])
        case _:
            raise ValueError(kind)
