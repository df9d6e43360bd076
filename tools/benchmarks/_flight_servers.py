"""Inference servers that answer from a script, many in one process, for `flight.py`: as cheap as a server can be.

    python _flight_servers.py SETTINGS.json      prints its ports, serves until its standard input ends

A reply has as many tokens as chance says and comes as late; its bytes are made once for each length. A version is
served from the moment that it is loaded. At its end a process writes down when requests came and when replies left,
seconds of the machine's monotonic clock, which all its processes share.
"""

import asyncio
import json
import random
import re
import sys
import time
from array import array
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

LENGTH = re.compile(rb"content-length: *(\d+)", re.IGNORECASE)
BACKLOG = 1024


class Script:
    """Answers of all servers of a process, and their times."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self._rng = random.Random(settings["seed"])
        self._delay_s, self.model_len = settings["delay_s"], settings["max_model_len"]
        self._replies = [_reply(settings, n) for n in range(settings["least_tokens"], settings["most_tokens"] + 1, 8)]
        self.came, self.left = array("d"), array("d")

    def draw(self) -> tuple[float, tuple[bytes, bytes]]:
        """Seconds until the reply, half to one and a half times the mean, and its bytes around the version."""
        return self._delay_s * self._rng.uniform(0.5, 1.5), self._rng.choice(self._replies)


def _reply(settings: dict[str, Any], number: int) -> tuple[bytes, bytes]:
    """A choice of so many tokens, up to its version and from there on."""
    rng = random.Random(number)
    ids = [*rng.choices(settings["letters"], k=number - 1), settings["eos"]]
    values = [-round(rng.expovariate(1.0), 4) - 1e-4 for _ in ids]
    choice = {"index": 0, "finish_reason": "stop", "token_ids": ids, "logprobs": {"values": values}}
    choice["weight_versions"] = [{"version": "VERSION", "start": 0, "end": number}]
    before, after = json.dumps({"request_id": "scripted", "choices": [choice]}).encode().split(b"VERSION")
    return before, after


class Server:
    """One of them: a version."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.version = 0


class Connection(asyncio.Protocol):
    """One connection, one request at a time."""

    def __init__(self, server: Server) -> None:
        self._server, self._received = server, b""

    def connection_made(self, transport: Any) -> None:
        """Keep it."""
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """Answer a request that is whole."""
        self._received += data
        head, end, body = self._received.partition(b"\r\n\r\n")
        found = LENGTH.search(head)
        if not end or len(body) < (int(found[1]) if found else 0):
            return
        self._received = b""
        if head.startswith(b"POST /inference/v1/generate"):
            script = self._server.script
            script.came.append(time.monotonic())
            delay_s, reply = script.draw()
            asyncio.get_running_loop().call_later(delay_s, self._generated, reply)
        else:
            self._write(json.dumps(self._administer(head, body)).encode())

    def _generated(self, reply: tuple[bytes, bytes]) -> None:
        self._server.script.left.append(time.monotonic())
        self._write(str(self._server.version).encode().join(reply))

    def _administer(self, head: bytes, body: bytes) -> dict[str, Any]:
        if head.startswith(b"POST /update_weights"):
            self._server.version = json.loads(body)["version"]
        if head.startswith(b"POST /reload_weights"):
            self._server.version = 0
        models = [{"id": "policy", "max_model_len": self._server.script.model_len}]
        return {"version": self._server.version, "path": None, "changed": True, "object": "list", "data": models}

    def _write(self, body: bytes) -> None:
        head = f"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        self._transport.write(head.encode() + body)


async def serve(settings: dict[str, Any]) -> None:
    """Serve until standard input ends."""
    loop, script = asyncio.get_running_loop(), Script(settings)
    ports = []
    for _ in range(settings["num_servers"]):
        server = Server(script)
        listening = await loop.create_server(partial(Connection, server), "127.0.0.1", 0, backlog=BACKLOG)
        ports.append(listening.sockets[0].getsockname()[1])
    print(json.dumps(ports), flush=True)
    ended = asyncio.Event()
    loop.add_reader(sys.stdin, ended.set)
    await ended.wait()
    np.savez(Path(settings["log"]), came=np.array(script.came), left=np.array(script.left))


if __name__ == "__main__":
    from prime_hpc.runtime.limits import raise_descriptor_limit

    raise_descriptor_limit()
    asyncio.run(serve(json.loads(Path(sys.argv[1]).read_text())))
