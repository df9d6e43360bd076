"""The gate before every route of a server: clients must send its key; all others get nothing but `GET /health`.

vLLM's own key check knows a few path prefixes only; this one stands before every route, ours, vLLM's and those that
plugins bring. A connection that has sent no request with the key is closed after `UNKNOWN_S`, and of such connections
`MAX_UNKNOWN` are kept. Installed by `server`.
"""

import asyncio
import hmac
from typing import Any

from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.auto import AutoHTTPProtocol

UNKNOWN_S = 2.0
LAST_LOOK_S = 0.2
"""Of that, the time in which requests are read that came while the event loop itself stood still."""
MAX_UNKNOWN = 1024
"""The oldest goes first. An orchestrator opens hundreds of connections at once, each with a request on it."""
OPEN = (("GET", "/health"),)
_NO = b'{"error": "this server needs its key: Authorization: Bearer KEY"}'

Address = tuple[str, int]


class PendingConnections:
    """The connections of one server that have sent no request with its key yet. Belongs to the event loop."""

    def __init__(self) -> None:
        self._unknown: dict[Address, tuple[asyncio.Transport, asyncio.TimerHandle]] = {}

    def __len__(self) -> int:
        return len(self._unknown)

    def protocol(self) -> type[asyncio.Protocol]:
        """uvicorn's HTTP protocol, whose connections are watched."""
        visitors = self

        class Watched(AutoHTTPProtocol):  # type: ignore[misc, valid-type]
            def connection_made(self, transport: Any) -> None:
                super().connection_made(transport)
                visitors.add(transport)

            def connection_lost(self, exc: Exception | None) -> None:
                visitors.forget(self.client)
                super().connection_lost(exc)

        return Watched

    def add(self, transport: asyncio.Transport) -> None:
        """Somebody came."""
        address = transport.get_extra_info("peername")
        if not address:
            return
        while len(self._unknown) >= MAX_UNKNOWN:
            self._end(next(iter(self._unknown)))
        address = tuple(address[:2])
        timer = asyncio.get_running_loop().call_later(UNKNOWN_S - LAST_LOOK_S, self._look_again, address)
        self._unknown[address] = transport, timer

    def forget(self, client: Any) -> None:
        """Forget one that sent the key, or is gone."""
        entry = self._unknown.pop(tuple(client), None) if client else None
        if entry is not None:
            entry[1].cancel()

    def _look_again(self, address: Address) -> None:
        # After a pause of the loop (an engine's, a busy node's) this timer runs before the request that waits in the
        # socket: whoever sent one is known by the time the next timer runs; after a second pause once what was read
        # together with it is dealt with.
        transport, _ = self._unknown[address]
        loop = asyncio.get_running_loop()
        timer = loop.call_later(LAST_LOOK_S, loop.call_soon, self._end, address)
        self._unknown[address] = transport, timer

    def _end(self, address: Address) -> None:
        entry = self._unknown.pop(address, None)
        if entry is not None:
            entry[1].cancel()
            entry[0].abort()


class KeyGuard:
    """ASGI middleware, outermost: nothing but `OPEN` is reached without the key."""

    def __init__(self, app: ASGIApp, key: str, visitors: PendingConnections) -> None:
        self._app = app
        self._expected = f"Bearer {key}".encode()
        self._visitors = visitors

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on what has the key."""
        if scope["type"] not in ("http", "websocket"):  # the server's own start and end
            await self._app(scope, receive, send)
        elif self._has_key(scope):
            self._visitors.forget(scope.get("client"))
            await self._app(scope, receive, send)
        elif scope["type"] == "http" and (scope["method"], scope["path"]) in OPEN:
            await self._app(scope, receive, send)
        elif scope["type"] == "http":
            headers = [
                (b"content-type", b"application/json"),
                (b"connection", b"close"),
                (b"www-authenticate", b"Bearer"),
            ]
            await send({"type": "http.response.start", "status": 401, "headers": headers})
            await send({"type": "http.response.body", "body": _NO})
        else:
            await send({"type": "websocket.close", "code": 1008})

    def _has_key(self, scope: Scope) -> bool:
        given = [value for name, value in scope["headers"] if name == b"authorization"]
        if len(given) != 1:
            return False
        scheme, _, key = given[0].partition(b" ")
        return hmac.compare_digest(scheme.lower() + b" " + key, b"bearer" + self._expected[6:])
