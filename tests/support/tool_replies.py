"""What a scripted engine answers where a model would use a tool or write a program (`$SCRIPTED_REPLIES`)."""

import json
import os

from tests.support.scripted_server import reverse_last_user

PROGRAM = "```python\ndef double(x):\n    return 2 * x\n```"


def reverse_or_program(prompt: str, number: int) -> str:
    """Answer reverse-text, and write the right program for `PROBLEM`."""
    return PROGRAM if "def double" in prompt else reverse_last_user(prompt, number)


def use_python(prompt: str, number: int) -> str:
    """Run `$SCRIPTED_CODE` with the tool `python`, then say 0; write the right program for `PROBLEM`."""
    if "def double" in prompt:
        return PROGRAM
    if "<tool_response>" in prompt:
        return "It is 0."
    call = {"name": "python", "arguments": {"code": os.environ["SCRIPTED_CODE"]}}
    return f"<tool_call>\n{json.dumps(call)}\n</tool_call>"


PROBLEM = {
    "task_id": "T/0",
    "prompt": "def double(x):\n    '''Twice x.'''\n",
    "entry_point": "double",
    "test": "def check(f):\n    assert f(2) == 4",
    "canonical_solution": "    return 2 * x\n",
}
"""A row of HumanEval."""
