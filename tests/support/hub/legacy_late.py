"""Written for the last releases of the older interface: messages of classes, declared tools, errors of its own."""

from typing import Any

import verifiers as vf
from verifiers.errors import ToolCallError
from verifiers.utils.data_utils import BOXED_SYSTEM_PROMPT, THINK_BOXED_SYSTEM_PROMPT


def replied(completion: vf.Messages, state: vf.State) -> float:
    """1 where all is as these releases have it."""
    last = completion[-1]
    assert isinstance(last, vf.AssistantMessage) and not isinstance(last, vf.UserMessage)
    assert last.role == last["role"] == "assistant" and last.content and not last.tool_calls
    assert isinstance(state["prompt"][0], vf.SystemMessage) and isinstance(state["prompt"][-1], vf.UserMessage)
    assert state["error"] is None and THINK_BOXED_SYSTEM_PROMPT.endswith("\\boxed{}.")
    return float(vf.extract_boxed_answer(last.content) == "7")


class Asks(vf.MultiTurnEnv):
    """Its own tool, declared and answered by hand."""

    async def env_response(self, messages: vf.Messages, state: vf.State, **kwargs: Any) -> vf.Messages:
        """Return the tool's answer, or ask again."""
        calls = messages[-1].tool_calls
        if not calls:
            return [vf.UserMessage(content="Call it.")]
        if calls[0].name != "seven":
            raise ToolCallError(f"no tool {calls[0].name}")
        return [vf.ToolMessage(content="7", tool_call_id=calls[0].id)]

    @vf.stop
    async def has_answered(self, state: vf.State) -> bool:
        """Return whether the reply holds a box."""
        return bool(state["trajectory"]) and "boxed" in state["trajectory"][-1]["completion"][-1].content


def load_environment() -> vf.Environment:
    """Return one task."""
    assert issubclass(ToolCallError, vf.ToolError) and issubclass(vf.SandboxError, vf.InfraError | vf.Error)
    call = vf.ToolCall(id="c0", name="seven", arguments="{}")
    return Asks(
        dataset=[{"question": "Which number?", "answer": "7"}],
        system_prompt=BOXED_SYSTEM_PROMPT,
        few_shot=[vf.AssistantMessage(tool_calls=[call]), vf.ToolMessage(content="7", tool_call_id="c0")],
        tool_defs=[vf.Tool(name="seven", description="Say seven.", parameters={"type": "object", "properties": {}})],
        rubric=vf.Rubric(funcs=[replied]),
        max_turns=4,
    )
