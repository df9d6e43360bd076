"""Tools that run in this process: plain Python functions shown to the model, called by the in-process harness.

A taskset with such tools exports a harness of its own: see `prime_hpc.envs.tasksets.calculator`.
"""

import inspect
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pydantic import TypeAdapter, ValidationError, validate_call
from verifiers.v1.types import Tool


@dataclass(frozen=True)
class LocalTool:
    """One function that the model may call."""

    declaration: Tool
    """Name, description and JSON schema of the arguments, as the model sees them."""
    function: Callable[..., Any]
    """Takes validated arguments; what it returns is shown to the model as text."""

    async def call(self, arguments: str) -> str:
        """Run it on the model's raw JSON arguments; what goes wrong is told to the model, not raised."""
        try:
            values = json.loads(arguments or "{}")
            if not isinstance(values, dict):
                return "error: the arguments must be a JSON object"
            result = self.function(**values)
            return str(await result if inspect.isawaitable(result) else result)
        except ValidationError as error:
            problems = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors())
            return f"error: {problems}"
        except (ArithmeticError, LookupError, TypeError, ValueError) as error:
            return f"error: {type(error).__name__}: {error}"


def local_tool(function: Callable[..., Any]) -> LocalTool:
    """Return a tool from a function: its name, its docstring, its annotated parameters."""
    typed: Any = function
    schema = TypeAdapter(typed).json_schema()
    parameters = {
        "type": "object",
        "properties": {name: {"type": spec["type"]} for name, spec in schema["properties"].items()},
        "required": schema.get("required", []),
    }
    declaration = Tool(
        name=function.__name__, description=inspect.getdoc(function) or "", parameters=parameters, strict=None
    )
    return LocalTool(declaration, validate_call(function))
