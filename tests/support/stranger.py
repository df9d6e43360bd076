"""Another user of the machine, or of the cluster's network, who tries everything on a run's ports.

    python -I tests/support/stranger.py HOST PORT,PORT,... [--uid N] [--flood N]

Needs nothing but the standard library, and no right. On each port: every message of `MESSAGES`, and where HTTP
answers, every method and route of `ROUTES`; then `--flood` connections that say nothing. Prints one JSON object: what
came back, by port; `told` are answers that a stranger should not get.
"""

import argparse
import encodings.idna  # noqa: F401 - looked up at the first connection, when the interpreter may be out of reach
import json
import os
import selectors
import socket
import struct
import time
from concurrent.futures.thread import ThreadPoolExecutor
from typing import Any

WAIT_S = 3.0
"""A server may hold a silent connection for 2 s."""
NUM_AT_ONCE = 8
GONE_S = 10.0
"""A thousand come in by and by, a few dozen at once, each for 2 s at most."""
_PATH = "/tmp/stranger/weights/step_000001"
_NONCE = json.dumps({"nonce": "0" * 32})
MESSAGES: dict[str, bytes] = {
    "silence": b"",
    "empty line": b"\n",
    "nonsense": bytes(range(256)),
    "too much": b"x" * 100_000,
    "http": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "send stop": b'{"topic": "stop", "payload": {"reason": "mischief", "save": false}, "incarnation": 99}\n',
    "send stop, no secret": b'{"topic": "stop", "payload": {"reason": "mischief"}, "secret": ""}\n',
    "send save": b'{"topic": "save", "payload": {"id": 1}}\n',
    "send batch": b'{"topic": "batch", "payload": {"step": 1, "digest": "0", "source": "127.0.0.1:1"}}\n',
    "send weights": json.dumps({"topic": "weights", "payload": {"version": 99, "path": _PATH}}).encode() + b"\n",
    "send server": b'{"topic": "server", "payload": {"role": "inference", "index": 0, "url": "http://127.0.0.1:1/v1"}}\n',
    "send status": b'{"topic": "status", "payload": {"role": "trainer", "index": 0, "time": 1, "state": "failed"}}\n',
    "send agent": b'{"topic": "agent", "payload": {"label": "trainer", "start_number": 1, "event": "exited"}}\n',
    "send launch": b'{"topic": "launch/trainer", "payload": '
    b'{"start_number": 1, "commands": [["touch", "/tmp/stranger"]]}}\n',
    "send end": b'{"topic": "end/trainer", "payload": {"start_number": 1}}\n',
    "ask for a manifest": b'{"artifact": "rollouts/step_000001", "file": "manifest.json"}\n',
    "ask for a batch": b'{"artifact": "rollouts/step_000001", "file": "rank_0000.safetensors", "secret": ""}\n',
    "ask for the config": b'{"artifact": "..", "file": "run.yaml"}\n',
    "a nonce": _NONCE.encode() + b"\n",
    "a nonce and a guess": (_NONCE + "\n" + json.dumps({"proof": "0" * 64}) + "\n").encode(),
    # torch's TCPStore: validate, then list all keys, count them, set one; gloo: an address to connect to
    "store: count": struct.pack("<BI", 0, 0x3C85F7CE) + b"\x08",
    "store: set": struct.pack("<BI", 0, 0x3C85F7CE)
    + b"\x01"
    + struct.pack("<Q", 1)
    + b"k"
    + struct.pack("<Q", 1)
    + b"v",
    "store: list": struct.pack("<BI", 0, 0x3C85F7CE) + b"\x13",
    "gloo: a pair": struct.pack("<q", 0),
    "zmq: greeting": b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(48),
}
_BODY = json.dumps({"path": _PATH, "version": 99, "model": "policy", "token_ids": [1], "sampling_params": {}})
ROUTES = [
    *("/", "/health", "/ping", "/load", "/version", "/metrics", "/docs", "/redoc", "/openapi.json", "/server_info"),
    *("/update_weights", "/reload_weights", "/serve_base?name=x", "/policy_version", "/inference/v1/generate"),
    *("/v1/models", "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings", "/v1/realtime"),
    *("/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/v1/messages", "/generate", "/tokenize", "/detokenize"),
    *("/invocations", "/pause", "/resume", "/sleep", "/wake_up", "/is_sleeping", "/collective_rpc", "/abort_requests"),
    *("/reset_prefix_cache", "/reset_mm_cache", "/scale_elastic_ep", "/start_profile", "/stop_profile", "/pooling"),
    *("/classify", "/score", "/v1/score", "/rerank", "/v1/audio/transcriptions", "/init_weight_transfer_engine"),
    *("//update_weights", "/health/../update_weights", "/health%2f..%2fupdate_weights", "/update_weights/"),
]
METHODS = ("GET", "POST")
OPEN = {("GET", "/health")}
"""Says whether the server lives, and nothing else."""


def talk(host: str, port: int, message: bytes) -> tuple[str, bytes]:
    """Say one thing. Returns `refused`, `deaf` (no connection), `closed` or `held`, and all that came back."""
    try:
        sock = socket.create_connection((host, port), WAIT_S)
    except TimeoutError:
        return "deaf", b""
    except OSError:
        return "refused", b""
    answer = b""
    with sock:
        sock.settimeout(WAIT_S)
        end = time.monotonic() + WAIT_S
        try:
            if message:
                sock.sendall(message)
            while time.monotonic() < end and (data := sock.recv(65536)):
                answer += data
        except TimeoutError:
            return "held", answer
        except OSError:
            pass
    return "closed" if time.monotonic() < end + 0.5 else "held", answer


def request(host: str, port: int, method: str, route: str) -> int | None:
    """Status of one HTTP request without a key; None where no HTTP came back."""
    head = f"{method} {route} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Type: application/json\r\n"
    _, answer = talk(host, port, f"{head}Content-Length: {len(_BODY)}\r\n\r\n{_BODY}".encode())
    return int(answer.split()[1]) if answer.startswith(b"HTTP/1.") else None


def is_harmless(answer: bytes) -> bool:
    """Nothing, a fresh random number, or a refusal."""
    if not answer or answer.startswith((b"HTTP/1.1 401", b"HTTP/1.1 400", b"HTTP/1.0 400")):
        return True
    try:
        return set(json.loads(answer)) == {"nonce"}
    except ValueError:
        return False


def flood(host: str, port: int, number: int) -> int:
    """Hold `number` silent connections; how many the other end has closed, or never took, `GONE_S` after the last."""
    selector = selectors.DefaultSelector()
    gone, end = 0, time.monotonic() + 200
    for _ in range(number):
        try:
            sock = socket.create_connection((host, port), WAIT_S)
        except OSError:
            gone += 1
            if time.monotonic() > end:
                return number  # deaf: nobody takes a connection
            continue
        sock.setblocking(False)
        selector.register(sock, selectors.EVENT_READ)
    end = time.monotonic() + GONE_S
    while gone < number and time.monotonic() < end:
        for key, _ in selector.select(0.2):
            selector.unregister(key.fileobj)
            key.fileobj.close()  # type: ignore[union-attr]
            gone += 1
    for key in list(selector.get_map().values()):
        key.fileobj.close()  # type: ignore[union-attr]
    return gone


def visit(host: str, port: int, num_idle: int) -> dict[str, Any]:
    """Everything, on one port."""
    told: list[list[Any]] = []
    held, states = 0, set()
    is_http = False
    for name, message in MESSAGES.items():
        state, answer = talk(host, port, message)
        states.add(state)
        is_http = is_http or answer.startswith(b"HTTP/1.")
        held += state == "held"
        if not is_harmless(answer):
            told.append([name, answer[:100].decode(errors="replace")])
        if state == "deaf":
            break
    num_routes = 0
    if is_http:
        for method in METHODS:
            for route in ROUTES:
                num_routes += 1
                status = request(host, port, method, route)
                if status is not None and status not in (400, 401) and (method, route) not in OPEN:
                    told.append([f"{method} {route}", status])
    gone = num_idle if states <= {"deaf", "refused"} else flood(host, port, num_idle)
    return {
        "host": host,
        "port": port,
        "states": sorted(states),
        "http": is_http,
        "messages": len(MESSAGES),
        "routes": num_routes,
        "told": told,
        "held": held,
        "idle_gone": gone,
    }


def main() -> None:
    """Try everything as a user without rights."""
    parser = argparse.ArgumentParser()
    parser.add_argument("host")
    parser.add_argument("ports")
    parser.add_argument("--uid", type=int, help="become this user first")
    parser.add_argument("--flood", type=int, default=1000)
    args = parser.parse_args()
    if args.uid is not None:
        import resource

        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, max(soft, 16384)), hard))
        os.setgroups([])
        os.setgid(args.uid)
        os.setuid(args.uid)
    with ThreadPoolExecutor(NUM_AT_ONCE) as pool:  # most of the time a connection is waited for that nobody takes
        found = list(pool.map(lambda port: visit(args.host, int(port), args.flood), args.ports.split(",")))
    print(json.dumps({"uid": os.getuid(), "ports": found}))


if __name__ == "__main__":
    main()
