"""A taskset that shows one picture after the other: the first in the prompt, each of the others in a user's turn.

Used by `tests/integration/test_envs_images.py` through its dotted name, as a user's own taskset would be.
"""

import io
from collections.abc import Iterable
from typing import Any

import verifiers.v1 as vf
from PIL import Image

from prime_hpc.envs.images import encode_image
from prime_hpc.envs.lazy_runtime import LazyBox

__all__ = ["AlbumEnv", "AlbumTaskset"]

PICTURES = (("red", (32, 48)), ("blue", (64, 32)), ("red", (32, 48)))
"""Colour and size of each; the last is the first once more."""


def picture(number: int) -> bytes:
    """The encoded picture of a turn."""
    colour, size = PICTURES[number]
    file = io.BytesIO()
    Image.new("RGB", size, colour).save(file, "PNG")
    return file.getvalue()


def page(number: int) -> vf.UserMessage:
    """The user's message of a turn."""
    shown: Any = {"type": "image_url", "image_url": {"url": encode_image(picture(number))}}
    return vf.UserMessage(content=[{"type": "text", "text": f"Page {number}"}, shown, {"type": "text", "text": "?"}])


class AlbumTask(vf.Task[vf.TaskData]):
    """A reward for any reply."""

    @vf.reward
    async def replied(self, trace: vf.Trace) -> float:
        """1.0"""
        return 1.0


class AlbumTaskset(vf.Taskset[AlbumTask, vf.TasksetConfig]):
    """Endless."""

    INFINITE = True

    def load(self) -> Iterable[AlbumTask]:
        """Always the same."""
        while True:
            yield AlbumTask(vf.TaskData(prompt=[page(0)]), self.config.task)


class AlbumEnvConfig(vf.EnvConfig):
    """One seat: who looks."""

    agent: vf.AgentConfig = vf.AgentConfig()


class AlbumEnv(vf.Env[AlbumEnvConfig]):
    """Turns the pages."""

    async def run(self, task: Any, agents: Any) -> None:
        """One album."""
        async with LazyBox() as box, agents.agent.interaction(task, runtime=box) as game:
            segment = await game.turn()
            for number in range(1, len(PICTURES)):
                if segment.terminated:
                    return
                segment = await game.turn([page(number)])
