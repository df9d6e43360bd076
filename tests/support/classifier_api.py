"""A stand-in for a judge's server: `/health`, `/v1/models` with its name, and `/classify`, whose logit is the length of
the last message."""

import asyncio
import threading
from typing import Any

from aiohttp import web

from tests.support.server_thread import ServerThread


class ClassifierApi(ServerThread):
    """The server on a thread; answers wait for `hold`."""

    def __init__(self, name: str, key: str | None = None) -> None:
        self.name, self.key, self.waiting, self.num_asked = name, key, 0, 0
        self.hold = threading.Event()
        self.hold.set()
        self.last: dict[str, Any] = {}
        super().__init__()

    def routes(self) -> list[web.RouteDef]:
        """What is answered."""
        return [
            web.get("/health", self._health),
            web.get("/v1/models", self._models),
            web.post("/classify", self._classify),
        ]

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response()

    async def _models(self, request: web.Request) -> web.Response:
        self.num_asked += 1
        self.waiting += 1
        try:
            while not self.hold.is_set():
                await asyncio.sleep(0.01)
        finally:
            self.waiting -= 1
        return web.json_response({"data": [{"id": self.name}]})

    async def _classify(self, request: web.Request) -> web.Response:
        if self.key is not None and request.headers.get("Authorization") != f"Bearer {self.key}":
            return web.json_response({"error": "no"}, status=401)
        self.num_asked += 1
        self.last = await request.json()
        return web.json_response({"data": [{"index": 0, "probs": [float(len(self.last["messages"][-1]["content"]))]}]})
