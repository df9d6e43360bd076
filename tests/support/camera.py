"""A taskset with an MCP server whose tool returns a picture beside words.

Used by `tests/integration/test_envs_images.py` through its dotted name, as a user's own taskset would be.
"""

from collections.abc import Iterable
from typing import Any

import verifiers.v1 as vf
from mcp.types import CallToolResult, ImageContent, TextContent

__all__ = ["CameraTaskset"]


class CameraTools(vf.Toolset[vf.ToolsetConfig]):
    """One tool."""

    @vf.tool
    def look(self) -> CallToolResult:
        """Look out of the window."""
        picture = ImageContent(type="image", data="bm8gcGljdHVyZQ==", mime_type="image/png")
        return CallToolResult(content=[TextContent(type="text", text="a cat"), picture])


class CameraTask(vf.Task[vf.TaskData]):
    """A reward of 1 for the animal."""

    @classmethod
    def toolsets(cls, config: Any) -> list[vf.Toolset]:
        """A server for each rollout."""
        return [CameraTools(vf.ToolsetConfig())]

    @vf.reward
    async def named(self, trace: vf.Trace) -> float:
        """1.0 for the cat."""
        return float("cat" in (trace.assistant_messages[-1].content or ""))


class CameraConfig(vf.TasksetConfig):
    """Arguments."""

    shown: str = ""
    """URL of an image in the prompt; empty: it is text."""


class CameraTaskset(vf.Taskset[CameraTask, CameraConfig]):
    """Endless."""

    INFINITE = True

    def load(self) -> Iterable[CameraTask]:
        """Always the same."""
        question, shown = "What is outside?", self.config.shown
        parts: Any = [{"type": "text", "text": question}, {"type": "image_url", "image_url": {"url": shown}}]
        prompt: Any = [vf.UserMessage(content=parts)] if shown else question
        while True:
            yield CameraTask(vf.TaskData(prompt=prompt), self.config.task)


if __name__ == "__main__":
    CameraTools.run()
