"""A stand-in for somebody's API: OpenAI's chat completions, answered from the request alone, with faults on demand.

    with ScriptedApi(fault=...) as api: ... api.url ...

A reply depends on the conversation and on how often it was asked before only through `reply`, so what was killed in
between changes nothing. Faults: see `Fault`.
"""

import asyncio
import zlib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from tests.support.server_thread import ServerThread


@dataclass
class Fault:
    """How a request is answered badly."""

    status: int = 200
    body: bytes | None = None
    """Instead of a completion."""
    half: bool = False
    """The connection is cut in the middle of the body."""
    headers: dict[str, str] | None = None


Chooser = Callable[[str, int], Fault | None]
"""(conversation, how often it was asked before) -> what goes wrong, if anything."""


def noisy_reverse(messages: list[dict[str, Any]]) -> str:
    """The last message reversed; for two texts in five a wrong one, always the same."""
    text = str(messages[-1]["content"])
    return text[::-1] if zlib.crc32(text.encode()) % 5 > 1 else text


class ScriptedApi(ServerThread):
    """The API on a thread."""

    def __init__(
        self,
        reply: Callable[[list[dict[str, Any]]], str | dict[str, Any]] = noisy_reverse,
        *,
        key: str | None = None,
        fault: Chooser = lambda conversation, number: None,
        delay_s: float = 0.0,
    ) -> None:
        self.reply, self.key, self.fault, self.delay_s = reply, key, fault, delay_s
        self.asked: Counter[str] = Counter()
        super().__init__()

    @property
    def num_requests(self) -> int:
        """Completions that were asked for."""
        return sum(self.asked.values())

    def routes(self) -> list[web.RouteDef]:
        """What is answered."""
        return [web.post("/v1/chat/completions", self._complete), web.get("/v1/models", self._models)]

    def _refused(self, request: web.Request) -> web.Response | None:
        if self.key is None or request.headers.get("Authorization") == f"Bearer {self.key}":
            return None
        return web.json_response({"error": {"message": "Incorrect API key provided"}}, status=401)

    async def _models(self, request: web.Request) -> web.Response:
        return self._refused(request) or web.json_response({"object": "list", "data": [{"id": "any"}]})

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        if refused := self._refused(request):
            return refused
        body = await request.json()
        conversation = str([(m["role"], m.get("content")) for m in body["messages"]])
        number = self.asked[conversation]
        self.asked[conversation] += 1
        if self.delay_s:
            await asyncio.sleep(self.delay_s)
        said = self.reply(body["messages"])
        message = said if isinstance(said, dict) else {"content": said}
        why = "tool_calls" if message.get("tool_calls") else "stop"
        answer = {
            "id": f"c-{number}",
            "object": "chat.completion",
            "created": 1,
            "model": body["model"],
            "choices": [{"index": 0, "message": {"role": "assistant"} | message, "finish_reason": why}],
            "usage": {"prompt_tokens": len(conversation), "completion_tokens": len(str(said)), "total_tokens": 0},
        }
        fault = self.fault(conversation, number)
        if fault is None:
            return web.json_response(answer)
        if fault.half:
            response = web.StreamResponse(headers={"Content-Type": "application/json", "Content-Length": "5000"})
            await response.prepare(request)
            await response.write(b'{"id": "cut", "choices": [')
            assert request.transport is not None
            request.transport.close()
            return response
        if fault.body is not None:
            return web.Response(body=fault.body, status=fault.status, headers=fault.headers)
        return web.json_response({"error": {"message": "scripted"}}, status=fault.status, headers=fault.headers)
