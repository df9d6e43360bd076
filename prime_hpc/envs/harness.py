"""The in-process chat harness: verifiers' agent loop as plain calls, with local and MCP tools.

verifiers finds it as `prime_hpc_in_process` (see `prime_hpc.envs.env_config`). Its built-in harnesses start a Python
process per rollout; this one only awaits the model.

Local tools are plain Python functions shown to the model, which run in this process. A taskset with such tools exports
a harness of its own: see `prime_hpc.envs.tasksets.calculator`.
"""

import inspect
import json
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

import verifiers.v1 as vf
from pydantic import TypeAdapter, ValidationError, validate_call
from verifiers.v1.dialects import parse_message
from verifiers.v1.errors import TaskError
from verifiers.v1.harness import HarnessSession, ProgramResult
from verifiers.v1.harnesses.utils.mcp import call_mcp, connect_mcp
from verifiers.v1.types import Message, Request, SystemMessage, Tool, ToolCall, ToolMessage, UserMessage

from prime_hpc.envs.images import ImageError, inlined
from prime_hpc.envs.interception import TurnRefused, interception_of
from prime_hpc.envs.legacy.messages import whole_characters

__all__ = ["InProcessHarness"]

HARNESS_ID = "prime_hpc_in_process"
DONE = ProgramResult(exit_code=0, stdout="", stderr="")


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
            return whole_characters(str(await result if inspect.isawaitable(result) else result))
        except ValidationError as error:
            problems = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors())
            return f"error: {problems}"
        except (ArithmeticError, LookupError, RecursionError, TypeError, ValueError) as error:
            return f"error: {type(error).__name__}: {error}"


def local_tool(function: Callable[..., Any]) -> LocalTool:
    """Return a tool from a function: its name, its docstring, its annotated parameters."""
    typed: Any = function
    schema = TypeAdapter(typed).json_schema()
    # pydantic's titles are the names once more
    properties = {name: {k: v for k, v in spec.items() if k != "title"} for name, spec in schema["properties"].items()}
    parameters = {"type": "object", "properties": properties, "required": schema.get("required", [])}
    if "$defs" in schema:
        parameters["$defs"] = schema["$defs"]
    declaration = Tool(
        name=function.__name__, description=inspect.getdoc(function) or "", parameters=parameters, strict=None
    )
    return LocalTool(declaration, validate_call(function))


class InProcessConfig(vf.HarnessConfig):
    """Knobs of `InProcessHarness`: verifiers' own."""

    id: str = HARNESS_ID


class InProcessHarness(vf.Harness[InProcessConfig]):
    """Ask the model, run the tools that it calls, ask again, until it answers in plain text.

    `max_turns` and the other limits are verifiers': they refuse a model call, which ends the loop.
    """

    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_MCP = True
    SUPPORTS_RESUME = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    local_tools: tuple[LocalTool, ...] = ()
    """Tools run in this process; a taskset's own harness overrides them."""
    needs_sandbox = False
    """Its tools run what a model writes: its episodes have a sandbox, stated or not."""

    def tools_of(self, runtime: Any) -> tuple[LocalTool, ...]:
        """Return the tools of one episode; those that work in its runtime are made here."""
        return self.local_tools

    async def session(self, *args: Any, **kwargs: Any) -> "InProcessSession":
        """One rollout's handle; keeps the conversation between user turns."""
        return InProcessSession(self, *args, **kwargs)

    async def launch(self, *args: Any, **kwargs: Any) -> ProgramResult:
        """Not used: `session` runs the turns."""
        raise AssertionError("InProcessHarness runs through its session")


class InProcessSession(HarnessSession):
    """The conversation of one rollout, in memory."""

    harness: InProcessHarness

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._stack: AsyncExitStack | None = None
        """Of the task's MCP servers, where it has any."""
        self._messages: list[Message] | None = None
        self._tools: list[Tool] = []
        self._local = {tool.declaration.name: tool for tool in self.harness.tools_of(self.runtime)}
        self._dispatch: dict[str, tuple[str, str]] = {}
        self._servers: dict[str, Any] = {}

    async def _run(self, messages: list[Message] | None) -> ProgramResult:
        """One segment: from the opening prompt or a user's turn to the next plain reply."""
        if self._messages is None:
            opening = self._opening(include_prompt=messages is None)
            try:  # an API fetches from an address itself
                self._messages = await inlined(opening, fetch=interception_of(self.endpoint).is_policy(self.secret))
            except ImageError as error:
                raise TaskError(str(error)) from error
            await self._connect_tools()
        self._messages += messages or []
        interception = interception_of(self.endpoint)
        try:
            while True:
                request = Request.model_construct(messages=list(self._messages), tools=self._tools or None)
                response = await interception.complete(self.secret, request)
                self._messages.append(response.message)
                if not response.message.tool_calls or response.finish_reason == "length":
                    return DONE
                for call in response.message.tool_calls:
                    self._messages.append(await self._call_tool(call))
        except TurnRefused:
            return DONE  # the trace's stop condition says why

    def _opening(self, *, include_prompt: bool) -> list[Message]:
        """System prompt and, unless a user opens the conversation, the task's prompt."""
        system, prompt = self.harness.resolve_prompt(self.data)
        messages: list[Message] = [SystemMessage(content=system)] if system else []
        if isinstance(prompt, str):
            prompt = [UserMessage(content=prompt)]
        if include_prompt or isinstance(self.data.prompt, list):
            messages += [parse_message(m) if isinstance(m, dict) else m for m in prompt or []]
        return messages

    async def _connect_tools(self) -> None:
        """Declare the local tools, and connect to the task's MCP servers where it has any."""
        disabled = set(self.harness.config.disabled_tools or ())
        self._tools = [tool.declaration for name, tool in self._local.items() if name not in disabled]
        if self.mcp_urls:
            timeout = self.harness.config.tool_timeout
            servers = {name: {"url": url, "timeout": timeout} for name, url in self.mcp_urls.items()}
            self._stack = AsyncExitStack()
            schemas, self._dispatch, self._servers = await connect_mcp({"mcpServers": servers}, self._stack)
            self._tools += [Tool(**s["function"]) for s in schemas if s["function"]["name"] not in disabled]

    async def _call_tool(self, call: ToolCall) -> ToolMessage:
        """Run one tool call; the model is told about calls that cannot be run."""
        if call.name in self._local:
            content: Any = await self._local[call.name].call(call.arguments)
        elif call.name in self._dispatch:
            content = await self._call_mcp(call)
            if isinstance(content, list) and not interception_of(self.endpoint).shows_images(self.secret):
                content = "\n".join(map(_in_words, content))
        else:
            known = ", ".join(tool.name for tool in self._tools) or "none"
            content = f"error: there is no tool {call.name!r}; tools: {known}"
        message = parse_message({"role": "tool", "tool_call_id": call.id, "name": call.name, "content": content})
        assert isinstance(message, ToolMessage)
        return message

    async def _call_mcp(self, call: ToolCall) -> Any:
        """Run a tool of an MCP server; its failures go back to the model."""
        try:
            arguments = json.loads(call.arguments or "{}")
        except (RecursionError, ValueError) as error:
            return f"error: the arguments are not JSON: {error}"
        try:
            return await call_mcp(self._servers, self._dispatch, call.name, arguments)
        except Exception as error:  # noqa: BLE001 - a tool's failure is the model's to handle, whatever it is
            return f"error: {type(error).__name__}: {error}"

    async def close(self) -> None:
        """Disconnect from the MCP servers. Idempotent."""
        await super().close()
        if self._stack is not None:
            await self._stack.aclose()


def _in_words(part: dict[str, Any]) -> str:
    """Return a text part, and of a picture what it is: a policy that is shown text alone must know that it saw none."""
    if part["type"] == "text":
        return str(part["text"])
    kind = part["image_url"]["url"].partition(":")[2].partition(";")[0]
    return f"[a picture ({kind}), which cannot be shown here: prompts are text]"
