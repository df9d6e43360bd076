"""Asks the model by itself."""

from typing import Any

import verifiers as vf


class OwnLoop(vf.SingleTurnEnv):
    async def rollout(self, *args: Any, **kwargs: Any) -> Any:
        raise AssertionError("never called")


def load_environment() -> vf.Environment:
    return OwnLoop(dataset=[{"question": "?", "answer": "!"}])
