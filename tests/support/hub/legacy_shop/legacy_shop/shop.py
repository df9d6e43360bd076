"""Three kinds: functions as tools, tools that see the rollout's state, and a conversation with stop conditions."""

from typing import Any

import verifiers as vf
from verifiers.envs.stateful_tool_env import StatefulToolEnv
from verifiers.types import Messages, State
from verifiers.utils.data_utils import extract_boxed_answer

PRICES = {"apple": 3, "pear": 5}


async def price(item: str, currency: str = "EUR") -> str:
    """Price of an item."""
    return f"{PRICES[item]} {currency}"


def buy(item: str, basket: list) -> str:
    """Put an item into the basket."""
    basket.append(item)
    return f"{len(basket)} in the basket"


class Basket(StatefulToolEnv):
    async def setup_state(self, state: State, **kwargs: Any) -> State:
        state["basket"] = []
        return await super().setup_state(state)

    def update_tool_args(
        self, tool_name: str, tool_args: dict, messages: Messages, state: State, **kwargs: Any
    ) -> dict:
        return {**tool_args, "basket": state["basket"]} if tool_name == "buy" else tool_args


class Haggle(vf.MultiTurnEnv):
    """Says no until the offer is high enough."""

    async def env_response(self, messages: Messages, state: State, **kwargs: Any) -> Messages:
        state["offers"] = [*state.get("offers", []), messages[-1]["content"]]
        return [{"role": "user", "content": f"More than {messages[-1]['content']}!"}]

    @vf.stop
    async def sold(self, state: State) -> bool:
        return bool(state["trajectory"]) and state["trajectory"][-1]["completion"][-1]["content"] == "30"


def load_environment(kind: str = "tools", max_turns: int = 4) -> vf.Environment:
    from datasets import Dataset

    rows = Dataset.from_list(
        [{"question": f"What does {item} cost?", "answer": str(cost)} for item, cost in PRICES.items()]
    )
    parser = vf.MaybeThinkParser(extract_fn=extract_boxed_answer)

    def correct(parser: vf.Parser, completion: Messages, answer: str, **kwargs: Any) -> float:
        return float(parser.parse_answer(completion) == answer)

    if kind == "tools":
        rubric = vf.RubricGroup([vf.Rubric(funcs=[correct], parser=parser), vf.ToolRubric(tools=[price])])
        return vf.ToolEnv(dataset=rows, tools=[price], rubric=rubric, parser=parser, max_turns=max_turns)
    if kind == "basket":

        def bought(state: State) -> float:
            return float(len(state["basket"]))

        env = Basket(dataset=rows, rubric=vf.Rubric(funcs=[bought]), max_turns=max_turns)
        env.add_tool(buy, args_to_skip=["basket"])
        return env
    if kind == "group":
        return vf.EnvGroup([load_environment("tools"), load_environment("haggle")], env_names=["tools", "haggle"])
    if kind == "compared":

        def best(completions: list, **kwargs: Any) -> list[float]:
            return [0.0] * len(completions)

        return vf.SingleTurnEnv(dataset=rows, rubric=vf.Rubric(funcs=[best]))
    if kind == "sandbox":
        return vf.SandboxEnv(dataset=rows)

    def turns(state: State) -> float:
        return 1.0 / len(state["trajectory"])

    return Haggle(dataset=rows, rubric=vf.Rubric(funcs=[turns]), max_turns=max_turns)
