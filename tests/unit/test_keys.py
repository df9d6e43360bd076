"""The keys of inference servers: each server has one, its own clients find it, nobody else does."""

import asyncio
import errno
import os
import socket
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import uvicorn

from prime_hpc.client import keys
from prime_hpc.client.inference import InferenceClient, InferenceError
from prime_hpc.client.keys import KEY_VARIABLES, find_key, key_file, server_key
from prime_hpc.config.experiment import Experiment
from prime_hpc.config.sections.advantage import AdvantageConfig
from prime_hpc.inference.guard import KeyGuard, PendingConnections
from prime_hpc.orchestrator.setup import _teacher_client, make_clients, make_pool
from prime_hpc.store.io.private import NotPrivateError, check_way, make_private_dir
from prime_hpc.supervisor.main import _keys

WAIT_S = 200.0
KEY = "the-right-key"
OF_A_PROXY = {"/policy_version": "<html>log in first</html>", "/v1/models": "[1]"}


async def _app(scope: Any, receive: Any, send: Any) -> None:
    """Answers everything with its path."""
    if scope["type"] == "http":
        body = OF_A_PROXY.get(scope["path"], f'{{"data": "{scope["path"]}"}}')
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"application/json")]})
        await send({"type": "http.response.body", "body": body.encode()})


class Guarded:
    """A guarded HTTP server on a thread."""

    def __init__(self, key: str, app: Any = _app) -> None:
        self.visitors = PendingConnections()
        options: Any = {"http": self.visitors.protocol(), "loop": "asyncio", "lifespan": "off", "log_level": "error"}
        config = uvicorn.Config(KeyGuard(app, key, self.visitors), **options)
        self.server = uvicorn.Server(config)
        self.sock = socket.create_server(("127.0.0.1", 0))
        self.address = self.sock.getsockname()
        self.url = f"http://127.0.0.1:{self.address[1]}"
        self.thread = threading.Thread(target=self.server.run, kwargs={"sockets": [self.sock]}, daemon=True)
        self.thread.start()

    def close(self) -> None:
        """End it."""
        self.server.should_exit = True
        self.thread.join(WAIT_S)


@pytest.fixture
def guarded(request):
    server = Guarded(getattr(request, "param", KEY))
    yield server
    server.close()


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    return tmp_path


ROUTES = ["/", "/v1/models", "/update_weights", "/metrics", "/docs", "/openapi.json", "/health/", "//health", "/HEALTH"]


def test_no_route_but_the_health_answers_without_the_key(guarded):
    client = httpx.Client()
    for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": KEY}, {"Authorization": f"Basic {KEY}"}):
        for route in ROUTES:
            for method in ("GET", "POST", "OPTIONS", "HEAD", "DELETE", "TRACE"):
                answer = client.request(method, guarded.url + route, headers=headers)
                assert answer.status_code == 401, (method, route, headers)
        assert client.get(f"{guarded.url}/health", headers=headers).status_code == 200
        assert client.post(f"{guarded.url}/health", headers=headers).status_code == 401
    right = {"Authorization": f"bearer {KEY}"}
    assert all(client.get(guarded.url + route, headers=right).status_code == 200 for route in ROUTES)


def test_who_sends_no_key_is_let_go_and_who_sent_it_stays(guarded):
    with httpx.Client(headers={"Authorization": f"Bearer {KEY}"}) as known:
        assert known.get(guarded.url + "/v1/models").status_code == 200
        idle = [socket.create_connection(guarded.address, WAIT_S) for _ in range(50)]
        halfway = socket.create_connection(guarded.address, WAIT_S)
        halfway.sendall(b"POST /update_weights HTTP/1.1\r\nHost: x\r\n")
        for sock in [*idle, halfway]:
            sock.settimeout(WAIT_S)
            try:
                assert sock.recv(1) == b""
            except ConnectionResetError:
                pass
            sock.close()
        (connection,) = known._transport._pool.connections  # type: ignore[attr-defined]
        assert known.get(guarded.url + "/v1/models").status_code == 200
        assert known._transport._pool.connections == [connection]  # type: ignore[attr-defined]
    assert len(guarded.visitors) == 0


def test_a_request_that_came_while_the_server_stood_still_is_answered(monkeypatch):
    monkeypatch.setattr("prime_hpc.inference.guard.UNKNOWN_S", 600.0)
    stands, goes_on = threading.Event(), threading.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["path"] == "/stand-still":
            stands.set()
            assert goes_on.wait(WAIT_S)
            loop = asyncio.get_running_loop()
            time_of_loop = loop.time
            monkeypatch.setattr(loop, "time", lambda: time_of_loop() + 1000.0)  # so long it has been
        await _app(scope, receive, send)

    guarded = Guarded(KEY, app)
    request = f"GET /v1/models HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\nConnection: close\r\n\r\n".encode()
    with httpx.Client(headers={"Authorization": f"Bearer {KEY}"}, timeout=WAIT_S) as known:
        known.get(guarded.url + "/v1/models")
        pause = threading.Thread(target=known.get, args=(guarded.url + "/stand-still",))
        late = socket.create_connection(guarded.address, WAIT_S)
        while not len(guarded.visitors):
            time.sleep(0.01)
        pause.start()
        assert stands.wait(WAIT_S)
        late.sendall(request)
        goes_on.set()
        late.settimeout(WAIT_S)
        assert late.recv(100).startswith(b"HTTP/1.1 200")
        pause.join()
        late.close()
    guarded.close()


def test_a_request_that_is_read_with_the_last_timer_after_a_second_pause_is_answered(monkeypatch):
    """Its connection was closed between the read of the key and its guard's look at it."""
    monkeypatch.setattr("prime_hpc.inference.guard.LAST_LOOK_S", 0.0)
    address = ("127.0.0.1", 1)
    ended: list[str] = []
    visitor = SimpleNamespace(get_extra_info=lambda name: address, abort=lambda: ended.append("aborted"))

    async def look() -> None:
        loop, visitors = asyncio.get_running_loop(), PendingConnections()

        async def guard() -> None:
            visitors.forget(address)
            ended.append("known")

        visitors.add(visitor)  # type: ignore[arg-type]
        visitors._look_again(address)  # its timer is due at once
        loop.call_soon(lambda: guards.append(loop.create_task(guard())))  # as uvicorn reads a request
        while not ended:
            await asyncio.sleep(0)

    guards: list[Any] = []
    asyncio.run(look())
    assert ended == ["known"]


def test_the_oldest_stranger_goes_where_there_are_too_many(guarded, monkeypatch):
    monkeypatch.setattr("prime_hpc.inference.guard.MAX_UNKNOWN", 5)
    monkeypatch.setattr("prime_hpc.inference.guard.UNKNOWN_S", 600.0)
    idle = [socket.create_connection(guarded.address, WAIT_S) for _ in range(6)]
    idle[0].settimeout(WAIT_S)
    with pytest.raises(ConnectionResetError):
        idle[0].recv(1)
        raise ConnectionResetError
    assert httpx.get(guarded.url + "/x", headers={"Authorization": f"Bearer {KEY}"}).status_code == 200
    for sock in idle:
        sock.close()


def test_a_server_by_hand_makes_a_key_that_its_users_clients_find(cache):
    key = server_key(None, "inference", "VLLM_API_KEY")
    path = key_file()
    assert len(key) >= 32 and stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    server = Guarded(key)
    try:

        async def ask(stated: str | None) -> str:
            async with InferenceClient(server.url, stated) as client:
                return (await client._call("GET", "/v1/others"))["data"]

        assert asyncio.run(ask(None)) == "/v1/others"
        with pytest.raises(InferenceError, match="401"):
            asyncio.run(ask("another"))
        assert find_key("http://gpu17:8000/v1") is None  # never sent elsewhere
    finally:
        server.close()


def test_an_answer_that_is_no_json_object_is_none_of_the_servers():
    server = Guarded(KEY)

    async def ask() -> None:
        async with InferenceClient(server.url, KEY) as client:
            with pytest.raises(
                InferenceError, match="policy_version: 200, but no JSON object: '<html>log in"
            ) as failed:
                await client.policy_version()
            assert failed.value.status is None
            with pytest.raises(InferenceError, match="no JSON object"):
                await client.models()

    try:
        asyncio.run(ask())
    finally:
        server.close()


@pytest.mark.parametrize("error", [PermissionError(errno.EACCES, "Permission denied"), RuntimeError("no home")])
def test_a_cache_that_cannot_be_looked_at_holds_no_key(cache, monkeypatch, error):
    def refuse(*_: object) -> None:
        raise error

    monkeypatch.setattr(Path, "is_file", refuse)
    server = Guarded(KEY)

    async def ask() -> None:
        async with InferenceClient(server.url) as client:
            with pytest.raises(InferenceError, match="401"):
                await client.policy_version()

    try:
        asyncio.run(ask())
    finally:
        server.close()


def test_the_key_is_not_sent_to_a_port_of_another_user(cache, monkeypatch):
    server_key(None, "inference", "VLLM_API_KEY")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://localhost:{listener.getsockname()[1]}/v1"
        assert find_key(url)
        monkeypatch.setattr(keys.os, "geteuid", lambda: os.getuid() + 1)
        assert find_key(url) is None


def test_servers_share_a_key_while_one_lives(cache):
    code = (
        "import sys; from pathlib import Path; from prime_hpc.client.keys import take_key;"
        "print(take_key(Path(sys.argv[1])), flush=True); sys.stdin.read()"
    )

    def start() -> tuple[subprocess.Popen[str], str]:
        command = [sys.executable, "-c", code, str(key_file())]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        return process, process.stdout.readline().strip()

    first, one = start()
    second, two = start()
    first.communicate("")
    third, three = start()
    second.communicate("")
    third.communicate("")
    fourth, four = start()
    fourth.communicate("")
    assert one == two == three != four and len(one) >= 32


def test_what_is_stated_wins_and_what_others_can_read_is_refused(cache, monkeypatch):
    monkeypatch.setenv("VLLM_API_KEY", "of-the-environment")
    assert server_key("stated", "inference", "VLLM_API_KEY") == "stated"
    assert server_key(None, "inference", "VLLM_API_KEY") == "of-the-environment"
    monkeypatch.setenv("PRIMEHPC_TEACHER_API_KEY", "of-the-attempt")
    assert server_key("stated", "teacher", "VLLM_API_KEY") == "of-the-attempt"
    monkeypatch.delenv("VLLM_API_KEY")
    server_key(None, "inference", "VLLM_API_KEY")
    key_file().chmod(0o644)
    with pytest.raises(ValueError, match=r"not this user's alone.*set inference.api_key or \$VLLM_API_KEY"):
        server_key(None, "inference", "VLLM_API_KEY")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        assert find_key(f"http://localhost:{listener.getsockname()[1]}") is None
    key_file().unlink()
    key_file().symlink_to(cache / "elsewhere")
    with pytest.raises(ValueError, match=r"set inference.api_key"):
        server_key(None, "inference", "VLLM_API_KEY")


def test_every_attempt_has_a_key_of_its_own():
    def keys_of(**values: Any) -> dict[str, str]:
        teacher = {"advantage": {"type": "opd"}, "teacher": {"model": "o/teacher"}}
        tree = {"orchestrator": teacher, "inference": {}, "teacher_inference": {}} | values
        return _keys(Experiment.model_validate(tree))

    one, two = keys_of(), keys_of()
    assert set(one) == {"PRIMEHPC_INFERENCE_API_KEY", "PRIMEHPC_TEACHER_API_KEY"}
    assert len(set(one.values())) == 1 and set(one.values()).isdisjoint(two.values())
    both = keys_of(inference={"api_key": "p"}, teacher_inference={"api_key": "t"})
    assert both == {"PRIMEHPC_INFERENCE_API_KEY": "p", "PRIMEHPC_TEACHER_API_KEY": "t"}


@pytest.mark.parametrize("started", ["inference", "teacher"])
def test_a_key_of_the_attempt_goes_to_no_server_of_others(started: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One group is started, the other attached to; both clients name the same variable, which is the user's."""
    server = "http://elsewhere:8000/v1"
    tree: dict[str, Any] = {"orchestrator": {"advantage": {"type": "opd"}, "teacher": {"model": "o/teacher"}}}
    tree["orchestrator"]["env"] = [{"id": "reverse-text"}]
    if started == "inference":
        tree["inference"], tree["orchestrator"]["teacher"]["base_url"] = {}, server
    else:
        tree["teacher_inference"], tree["orchestrator"]["client"] = {}, {"base_url": server}
    experiment = Experiment.model_validate(tree)
    keys = _keys(experiment)
    assert list(keys) == [KEY_VARIABLES[started]]
    for name, value in ({"VLLM_API_KEY": "of-the-user"} | keys).items():
        monkeypatch.setenv(name, value)
    sent = {
        "inference": make_clients(experiment, [server])[0]._http._key,
        "teacher": _teacher_client(InferenceClient, server, experiment)._http._key,
    }
    other = "teacher" if started == "inference" else "inference"
    assert sent == {started: keys[KEY_VARIABLES[started]], other: "of-the-user"}
    config = experiment.orchestrator
    asked = make_pool(experiment, [server], config.env, config.sampling, "train")._settings
    assert asked.api_key == sent["inference"] and "of-the" not in repr(asked)
    config = config.model_copy(update={"advantage": AdvantageConfig(type="sft")})  # the teacher plays
    imitated = experiment.model_copy(update={"orchestrator": config})
    pool = make_pool(imitated, [server], config.env, config.sampling, "train")
    assert pool._settings.api_key == sent["teacher"]
    assert asked.is_policy and not pool._settings.is_policy


# ------------------------------------------------------------------------------------ directories nobody else prepared


def test_a_way_that_others_could_swap_is_refused(tmp_path):
    safe = tmp_path / "a" / "b"
    make_private_dir(safe)
    assert stat.S_IMODE(safe.stat().st_mode) == 0o700
    (tmp_path / "link").symlink_to("a")
    make_private_dir(tmp_path / "link" / "c")
    (tmp_path / "a").chmod(0o777)
    for path in (safe, tmp_path / "link" / "c", tmp_path / "a" / "b" / "new"):
        with pytest.raises(NotPrivateError, match=f"others may write to {tmp_path / 'a'}"):
            make_private_dir(path)
    (tmp_path / "a").chmod(0o1777)  # sticky, as /tmp is: what is there stays its owner's
    make_private_dir(safe)
    safe.chmod(0o770)
    os.chown(safe, -1, os.getgid())
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    with pytest.raises(OSError, match="symbolic links"):
        check_way(tmp_path / "loop" / "x")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory to another user")
def test_a_directory_of_another_user_is_refused_wherever_it_stands(tmp_path):
    theirs = tmp_path / "theirs"
    (theirs / "mine").mkdir(parents=True)
    os.chown(theirs, 65534, 65534)
    with pytest.raises(NotPrivateError, match=f"{theirs} belongs to user 65534"):
        make_private_dir(theirs / "mine")
    (tmp_path / "sticky").mkdir(mode=0o1777)
    (tmp_path / "real").mkdir()
    link = tmp_path / "sticky" / "link"
    link.symlink_to(tmp_path / "real")
    os.chown(link, 65534, 65534, follow_symlinks=False)
    with pytest.raises(NotPrivateError, match=f"{link} belongs to user 65534"):
        make_private_dir(link / "x")
