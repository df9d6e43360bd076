"""A single-turn environment as a package of the Environments Hub is written: one module, `load_environment`."""

from typing import Any

import verifiers as vf
from verifiers.types import Messages


def load_environment(num_tasks: int = 20, format_weight: float = 0.25, with_eval: bool = True) -> vf.Environment:
    parser = vf.XMLParser(fields=["reasoning", ("answer", "result")], answer_field="answer")

    def rows(start: int, count: int) -> list[dict[str, Any]]:
        pairs = [(number, number + 3) for number in range(start, start + count)]
        return [{"question": f"{a} + {b}", "answer": str(a + b), "info": {"a": a}} for a, b in pairs]

    def correct(completion: Messages, answer: str, parser: vf.Parser) -> float:
        return 1.0 if (parser.parse_answer(completion) or "") == answer else 0.0

    async def first_number(info: dict[str, Any], state: vf.State) -> float:
        assert state["completion"][0]["role"] == "assistant"
        return float(info["a"])

    rubric = vf.Rubric(
        funcs=[correct, parser.get_format_reward_func(), first_number], weights=[1.0, format_weight, 0.0], parser=parser
    )
    return vf.SingleTurnEnv(
        dataset=rows(0, num_tasks),
        eval_dataset=rows(1000, 8) if with_eval else None,
        system_prompt=f"Add. Format:\n{parser.get_format_str()}",
        parser=parser,
        rubric=rubric,
    )
