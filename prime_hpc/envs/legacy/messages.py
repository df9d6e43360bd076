"""Messages, tool calls and rollout state in the shapes that packages for the older verifiers interface read."""

import inspect
from collections.abc import Awaitable, Callable, Iterable, Sequence
from types import FunctionType
from typing import Any, ClassVar, Literal, cast

from pydantic import TypeAdapter
from verifiers.v1.types import AssistantMessage as Reply
from verifiers.v1.types import Tool, ToolCall

from prime_hpc.config.named_code import signature_of


class ChatMessage(dict[str, Any]):
    """One chat message. Releases of the interface differ: `message["content"]` and `message.content` both work."""

    _role: ClassVar[str | None] = None
    _optional: ClassVar[frozenset[str]] = frozenset()
    """Fields that the last releases answer with None where a message has none."""

    def __init__(self, *given: Any, **fields: Any) -> None:
        super().__init__(*given, **fields)
        if self._role is not None:
            self.setdefault("role", self._role)
        if calls := self.get("tool_calls"):
            self["tool_calls"] = [_tool_call(call) if isinstance(call, ToolCall) else call for call in calls]

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            if name in self._optional:
                return None
            raise AttributeError(name) from None


class SystemMessage(ChatMessage):
    """Packages for the last releases make messages of these classes, and ask which of them one is."""

    _role = "system"


class UserMessage(ChatMessage):
    """The user's, or the environment's."""

    _role = "user"


class AssistantMessage(ChatMessage):
    """The model's."""

    _role = "assistant"
    _optional = frozenset({"content", "reasoning_content", "tool_calls"})


class ToolMessage(ChatMessage):
    """A call's result."""

    _role = "tool"


_CLASSES: dict[Any, type[ChatMessage]] = {
    "system": SystemMessage,
    "user": UserMessage,
    "assistant": AssistantMessage,
    "tool": ToolMessage,
}


class State(dict[str, Any]):
    """One rollout: its example (`prompt`, `answer`, `info`, `task`, `example_id`), `trajectory`, `completion`, and
    whatever the environment keeps here."""


Message = ChatMessage
Messages = list[Any]
ChatMessages = list[Any]
Info = dict[str, Any]
SamplingArgs = dict[str, Any]
MessageType = Literal["chat", "completion"]
RewardFunc = Callable[..., Any]
TrajectoryStep = dict[str, Any]


async def maybe_await(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Call a plain or an async function; its own arguments may have any name."""
    result = function(*args, **kwargs)
    return await result if isinstance(result, Awaitable) else result


def marked(thing: Any, mark: str) -> list[Any]:
    """Return an object's methods with a mark (`vf.stop`, `vf.cleanup`, `vf.teardown`), by priority and name."""
    names = {name for cls in type(thing).__mro__ for name, value in vars(cls).items() if hasattr(value, mark)}
    methods = [method for name in names if hasattr(method := getattr(thing, name), mark)]
    return sorted(methods, key=lambda m: (-getattr(m, f"{mark}_priority", 0), m.__name__))


def accepted(function: Callable[..., Any], offered: dict[str, Any]) -> dict[str, Any]:
    """Of the offered arguments those that the function names, or all where it takes any."""
    parameters = signature_of(function).parameters
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return offered
    return {name: value for name, value in offered.items() if name in parameters}


def assistant_message(message: Reply) -> ChatMessage:
    """Return a reply in OpenAI's chat shape; `tool_calls` is there only where the model called something."""
    found = AssistantMessage(content=message.content or "")
    if message.reasoning_content:
        found["reasoning_content"] = message.reasoning_content
    if message.tool_calls:
        found["tool_calls"] = [_tool_call(call) for call in message.tool_calls]
    return found


def _tool_call(call: ToolCall) -> ChatMessage:
    function = ChatMessage(name=call.name, arguments=call.arguments)
    return ChatMessage(id=call.id, type="function", function=function, name=call.name, arguments=call.arguments)


def chat_messages(messages: Any) -> Messages:
    """Messages of any release: one message, a list of them, or a user's text."""
    if isinstance(messages, str):
        return [ChatMessage(role="user", content=messages)]
    if isinstance(messages, dict) or not isinstance(messages, Iterable):
        messages = [messages]
    return [_chat_message(message) for message in messages]


def _chat_message(message: Any) -> ChatMessage:
    if type(message) in _CLASSES.values():
        return message
    fields = message if isinstance(message, dict) else message.model_dump(exclude_none=True)
    return _CLASSES.get(fields.get("role"), ChatMessage)(fields)


def wire(message: ChatMessage) -> dict[str, Any]:
    """As verifiers v1 reads it: without the keys that only a Python caller may use."""
    return {key: value for key, value in message.items() if value is not None}


def whole_characters(text: str) -> str:
    """Return a text with a replacement for each half of a character, which JSON can spell and nothing can encode."""
    return text if text.isascii() else text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def tool_declaration(function: Callable[..., Any], without: Sequence[str] = ()) -> dict[str, Any]:
    """OpenAI's declaration of a Python function: its name, its docstring, its annotated parameters.
    `without`: parameters that the model is not shown; they may be of any type, also one that JSON has no word for."""
    typed: Any = _shown(function, without) if without else function
    schema = TypeAdapter(typed).json_schema()
    parameters = {key: value for key, value in schema.items() if key in ("type", "properties", "required", "$defs")}
    name = getattr(function, "__name__", type(function).__name__)
    description = inspect.getdoc(function) or ""
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


def _shown(function: Callable[..., Any], without: Sequence[str]) -> Callable[..., Any]:
    """Return a stand-in with the parameters that are left; their annotations are evaluated where the function is."""
    signature = signature_of(function)
    kept = [parameter for name, parameter in signature.parameters.items() if name not in without]
    inner: Any = inspect.unwrap(getattr(function, "__func__", function))
    hints = {p.name: p.annotation for p in kept if p.annotation is not p.empty}
    shown: Any = FunctionType(_nothing.__code__, getattr(inner, "__globals__", {}))
    shown.__module__, shown.__annotations__ = function.__module__, hints
    shown.__signature__ = inspect.Signature(kept)
    return cast(Callable[..., Any], shown)


def _nothing() -> None:
    """Body of stand-ins, which nobody calls."""


def v1_tool(declaration: Any) -> Tool:
    """Return a declaration in OpenAI's shape, or already flat, as verifiers v1 passes it to the model."""
    flat = declaration.get("function", declaration) if isinstance(declaration, dict) else declaration.model_dump()
    return Tool(name=flat["name"], description=flat.get("description") or "", parameters=flat.get("parameters") or {})
