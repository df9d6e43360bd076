"""Messages and tools of a verifiers trace as chat templates, servers and supervised data take them."""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any


def conversations_of(episode: Any) -> list[dict[str, Any]]:
    """Every conversation of an episode as plain JSON, as supervised data has it: one a trained branch.

    Returns:
        dicts of `messages` (role, content, `reasoning_content`, `tool_calls`, `tool_call_id`; a reply that the model
        did not sample, or that an earlier branch holds already, has `train: false`), `tools` (definitions, where there
        are any), `reward` and `agent` of the trace, and `completion_tokens` that it sampled in all.
    """
    found = []
    for trace in (trace for trace in episode.traces if trace.agent.trainable):
        held: set[int] = set()
        for branch in (branch for branch in trace.branches if branch.trainable):
            new = [node.sampled and id(node) not in held for node in branch.nodes]
            if not any(new):
                continue
            held.update(id(node) for node in branch.nodes if node.sampled)
            row: dict[str, Any] = {"messages": list(map(_plain_message, branch.nodes, new))}
            if trace.tools:
                row["tools"] = list(map(_plain_tool, trace.tools))
            tokens = trace.usage.completion_tokens if trace.usage is not None else 0
            found.append(row | {"reward": float(trace.reward), "agent": trace.agent.name, "completion_tokens": tokens})
    return found


def branch_conversation(nodes: Sequence[Any], tools: Sequence[Any]) -> dict[str, Any]:
    """Return a branch as plain JSON: `messages` and `tools` as `conversations_of` has them, and `starts`, the place of
    each message's first token among the branch's."""
    starts = [0, *accumulate(len(node.token_ids) for node in nodes)][: len(nodes)]
    messages = [_plain_message(node, True) for node in nodes]
    return {"messages": messages, "starts": starts, "tools": list(map(_plain_tool, tools or []))}


def _plain_message(node: Any, is_new: bool) -> dict[str, Any]:
    message = node.message
    row: dict[str, Any] = {"role": message.role, "content": _plain_content(message.content)}
    if reasoning := getattr(message, "reasoning_content", None):
        row["reasoning_content"] = reasoning
    if calls := getattr(message, "tool_calls", None):
        row["tool_calls"] = [
            {"id": c.id, "type": "function", "function": {"name": c.name, "arguments": c.arguments}} for c in calls
        ]
    if message.role == "tool":
        row["tool_call_id"] = message.tool_call_id
        row |= {"name": message.name} if message.name else {}
    if message.role == "assistant" and not is_new:
        row["train"] = False
    return row


def _plain_content(content: Any) -> Any:
    """Return text as it is, parts as text where that is all they are, other parts as plain JSON."""
    if content is None or isinstance(content, str):
        return content or ""
    parts = [part.model_dump(mode="json", exclude_none=True) for part in content]
    return "".join(p["text"] for p in parts) if all(p.get("type") == "text" for p in parts) else parts


def _plain_tool(tool: Any) -> dict[str, Any]:
    """Return a definition as servers and chat templates take it."""
    function = {"name": tool.name, "description": tool.description, "parameters": tool.parameters}
    return {"type": "function", "function": function}
