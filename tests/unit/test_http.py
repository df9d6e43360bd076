"""The HTTP client against real sockets: keys, deadlines, servers that are not there."""

import asyncio
import threading
from collections.abc import Awaitable, Callable
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest
from aiohttp import TCPConnector, web

from prime_hpc.client import http
from prime_hpc.client.http import Answer, HttpClient, NoAnswerError, ask
from tests.support.runs import free_port


def talk(handler: Callable[[web.Request], Awaitable[web.Response]], key: str | None, **options: float) -> Answer:
    """Three requests at once to a server of its own, which all get the same answer."""

    async def main() -> Answer:
        app = web.Application()
        app.router.add_route("*", "/x", handler)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        port = free_port()
        await web.TCPSite(runner, "127.0.0.1", port).start()
        client = HttpClient(f"http://127.0.0.1:{port}", key)
        try:
            timeout_s = options.get("timeout_s", 20.0)
            asked = [client.request("POST", "/x", b'{"a": 1}', timeout_s=timeout_s) for _ in range(3)]
            first, *others = await asyncio.gather(*asked)
            assert {other.status for other in others} == {first.status}
            return first
        finally:
            await client.close()
            await runner.cleanup()

    return asyncio.run(main())


async def echo(request: web.Request) -> web.Response:
    sent = {"key": request.headers.get("Authorization"), "body": await request.json()}
    return web.json_response(sent, status=200 if sent["key"] == "Bearer right" else 401)


def test_a_key_of_ones_own_server_is_found_when_it_asks_for_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "find_key", lambda url: "right")
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")  # of a site: not for servers of a job
    found = talk(echo, None)
    assert (found.status, found.json()) == (200, {"key": "Bearer right", "body": {"a": 1}})
    assert talk(echo, "stated").status == 401  # never another one than was stated


@pytest.mark.parametrize("hung_up", [1, http.SENDS])
def test_a_request_on_which_the_server_hung_up_is_sent_again(hung_up: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server hangs up on a connection that has said nothing yet, because its owner stood still."""
    seen = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal seen
        seen += 1
        if seen > hung_up:
            await reader.readuntil(b"{}")
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\n{}")
            await writer.drain()
        writer.close()

    connect = TCPConnector._create_connection

    async def connect_and_stand_still(*args: Any) -> Any:
        connection = await connect(*args)
        while seen <= hung_up and connection.is_connected():
            await asyncio.sleep(0.01)
        return connection

    monkeypatch.setattr(TCPConnector, "_create_connection", connect_and_stand_still)

    async def main() -> Answer:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        client = HttpClient(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", "key")
        try:
            return await client.request("POST", "/x", b"{}", timeout_s=30.0)
        finally:
            await client.close()
            server.close()

    if hung_up < http.SENDS:
        assert asyncio.run(main()).status == 200
    else:
        with pytest.raises(NoAnswerError, match="disconnected|closing transport|write request body"):
            asyncio.run(main())
    assert seen == min(hung_up + 1, http.SENDS)


def test_no_answer_is_one_error_that_says_why() -> None:
    async def never(request: web.Request) -> web.Response:
        await asyncio.sleep(60)
        raise AssertionError

    async def hangs_up(request: web.Request) -> web.Response:
        assert request.transport is not None
        request.transport.close()
        return web.Response()

    with pytest.raises(NoAnswerError, match="in time"):
        talk(never, None, timeout_s=0.3)
    with pytest.raises(NoAnswerError, match="Disconnected"):
        talk(hangs_up, None)
    lonely = HttpClient(f"http://127.0.0.1:{free_port()}")
    with pytest.raises(NoAnswerError, match="Connect"):
        asyncio.run(lonely.request("GET", "/", timeout_s=5))
    asyncio.run(lonely.close())


def test_a_client_serves_one_event_loop_after_another() -> None:
    async def once(client: HttpClient) -> str:
        try:
            await client.request("GET", "/", timeout_s=5)
        except NoAnswerError as error:
            return str(error)
        raise AssertionError

    client = HttpClient(f"http://127.0.0.1:{free_port()}")
    assert asyncio.run(once(client)) == asyncio.run(once(client))
    asyncio.run(client.close())


def test_one_question_without_an_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    class Server(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if self.headers.get("Authorization") == "Bearer right" else 403)
            self.end_headers()
            self.wfile.write(b"well")

        def log_message(self, format: str, *args: object) -> None:
            pass

    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    with HTTPServer(("127.0.0.1", 0), Server) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        url = f"http://127.0.0.1:{server.server_port}/"
        assert ask(url, timeout_s=20, key="right") == b"well"
        with pytest.raises(OSError, match="403"):
            ask(url, timeout_s=20)
        server.shutdown()
        thread.join()
    with pytest.raises(OSError, match="refused"):
        ask(url, timeout_s=5)
