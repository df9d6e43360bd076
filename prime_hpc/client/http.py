"""HTTP to servers: `HttpClient` for event loops, `ask` for a single question from elsewhere.

Neither follows proxy variables unless told to: calls between a job's own nodes must not be caught by a site's proxy.
"""

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass
from http.client import HTTPException
from typing import TYPE_CHECKING, Any
from urllib.request import ProxyHandler, Request, build_opener

from prime_hpc.client.keys import find_key

if TYPE_CHECKING:
    import aiohttp

CONNECT_S = 30.0
KEEP_ALIVE_S = 60
"""A client keeps an idle connection for so long."""
SERVERS_KEEP_ALIVE_S = 75
"""A server of ours keeps it longer, so that no request meets its end."""
SENDS = 3
"""Tries of a request on which the server hung up without a word: it does so on connections that say nothing for long,
and this process may have stood still. One that is gone refuses the next connection."""


class NoAnswerError(OSError):
    """The server did not answer, or not in time."""


@dataclass(frozen=True)
class Answer:
    """A server's answer, whole."""

    status: int
    body: bytes
    headers: Mapping[str, str]

    def json(self) -> Any:
        """Return the body as JSON. Raises a ValueError where it is none."""
        return json.loads(self.body)


class HttpClient:
    """Connections to one server, of the event loop that asks; `close` ends them."""

    def __init__(self, base_url: str, key: str | None = None, *, proxied: bool = False) -> None:
        """Make a client; opens no connection yet.

        Args:
            base_url: what paths are appended to; may be changed when the server moves.
            key: sent as a Bearer token; None: that of this user's own servers on this machine (`keys.find_key`), once a
                server asks for one.
            proxied: follow proxy variables: for APIs on the internet.
        """
        self.base_url = base_url
        self._key, self._is_stated, self._proxied = key, key is not None and key != "", proxied
        self._session: aiohttp.ClientSession | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    async def request(
        self,
        method: str,
        path: str,
        body: bytes | None = None,
        *,
        timeout_s: float | None,
        headers: Mapping[str, str] | None = None,
    ) -> Answer:
        """Ask once; with another key where the server was started again by hand.
        `timeout_s`: deadline of the whole answer; None: the caller's.
        Raises NoAnswerError: no connection, no whole answer, or none in time."""
        tried = self._key
        answer = await self._send(method, path, body, timeout_s, headers)
        if answer.status == 401 and not self._is_stated and tried != (found := find_key(self.base_url)):
            self._key = found  # not compared with it: another request may have found it meanwhile
            answer = await self._send(method, path, body, timeout_s, headers)
        return answer

    async def _send(
        self, method: str, path: str, body: bytes | None, timeout_s: float | None, headers: Mapping[str, str] | None
    ) -> Answer:
        import aiohttp

        loop = asyncio.get_running_loop()
        if self._session is not None and self._loop is not loop:
            self._session.detach()  # its connections ended with their loop
            self._session = None
        if self._session is None:
            connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_S)
            self._session, self._loop = aiohttp.ClientSession(connector=connector, trust_env=self._proxied), loop
        sent = {"Content-Type": "application/json", **(headers or {})}
        if self._key:
            sent["Authorization"] = f"Bearer {self._key}"
        url, end = self.base_url + path, None if timeout_s is None else loop.time() + timeout_s
        hung_up = (aiohttp.ServerDisconnectedError, aiohttp.ClientConnectionResetError)
        left = SENDS
        while True:
            left -= 1
            left_s = None if end is None else max(end - loop.time(), 1e-3)
            timeout = aiohttp.ClientTimeout(
                total=left_s, connect=CONNECT_S if left_s is None else min(CONNECT_S, left_s)
            )
            try:
                async with self._session.request(method, url, data=body, headers=sent, timeout=timeout) as answer:
                    return Answer(answer.status, await answer.read(), answer.headers)
            except TimeoutError as error:
                raise NoAnswerError(f"no answer in time ({type(error).__name__})") from error
            except (aiohttp.ClientError, OSError) as error:
                if not left or (not isinstance(error, hung_up) and not isinstance(error.__cause__, hung_up)):
                    raise NoAnswerError(f"{type(error).__name__}: {error}") from error

    async def close(self) -> None:
        """End the connections."""
        if self._session is not None:
            await self._session.close()
            self._session = None


class ServerClient:
    """One server, whose address may change: what its clients have in common."""

    _suffix = "/v1"
    """Cut off an address that is given with it: paths say more."""

    def __init__(self, base_url: str, key: str | None, *, proxied: bool = False) -> None:
        """Make a client; opens no connection yet. Arguments as of `HttpClient`."""
        self._http = HttpClient(base_url.rstrip("/").removesuffix(self._suffix), key, proxied=proxied)

    @property
    def base_url(self) -> str:
        """The address that paths are appended to."""
        return self._http.base_url

    def move(self, base_url: str) -> None:
        """Ask at another address from now on: the server was started again there. May be called from another thread."""
        self._http.base_url = base_url.rstrip("/").removesuffix(self._suffix)

    async def close(self) -> None:
        """Close the connections."""
        await self._http.close()


def ask(url: str, *, timeout_s: float, key: str | None = None, method: str = "GET") -> bytes:
    """Return the answer to one request, without an event loop.
    Raises OSError: no answer in time, or a status that is no success."""
    request = Request(url, headers={"Authorization": f"Bearer {key}"} if key else {}, method=method)
    try:
        with build_opener(ProxyHandler({})).open(request, timeout=timeout_s) as answer:
            return bytes(answer.read())
    except HTTPException as error:  # no HTTP at all
        raise NoAnswerError(f"{type(error).__name__}: {error}") from error
