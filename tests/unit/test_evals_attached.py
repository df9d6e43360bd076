"""Servers that an evaluation does not start: those that are prime-hpc's own, the one that runs here, refusals."""

import asyncio
import functools
import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import verifiers.v1 as vf
from aiohttp import web
from loguru import logger
from verifiers.v1.dialects import ChatDialect
from verifiers.v1.errors import ProviderError
from verifiers.v1.types import SamplingConfig

from prime_hpc.cli.verbs.experiment import eval as verb
from prime_hpc.client.inference import InferenceClient
from prime_hpc.config import ConfigError, Loaded, load_experiment
from prime_hpc.config.sections import inference
from prime_hpc.config.sections.standalone_eval import StandaloneClientConfig
from prime_hpc.envs.chat_client import FORBIDDEN_IN_A_ROW, ChatClient, EndpointRefusedError
from prime_hpc.envs.model_client import RequestRefusedError
from prime_hpc.envs.pool_settings import ChatOptions
from prime_hpc.envs.samples import EpisodeResult, EpisodeState
from prime_hpc.evals.connect import _check_api, _is_api, _shortest_context
from prime_hpc.evals.episodes import EpisodeLog, Key
from prime_hpc.evals.errors import EvalError
from prime_hpc.evals.play import Player
from prime_hpc.evals.servers import Servers
from prime_hpc.evals.settings import record
from prime_hpc.evals.versions import Version
from prime_hpc.launch import local
from prime_hpc.store.run_paths import RunPaths, claim_incarnation
from tests.support import policy_servers


class OneTask:
    """A pool of one task, played with version 10."""

    def __init__(self) -> None:
        self.sources, self.name, self.num_tasks = [self], "e", 9

    def task(self, index: int) -> Any:
        return vf.Task(vf.TaskData(idx=0, prompt="say so"), vf.TaskConfig())

    async def run_episode(self, source_index: int, task_index: int, url_index: int = 0) -> EpisodeResult:
        return EpisodeResult(EpisodeState.COMPLETED, True, reward=1.0, versions=[10])


Scene = Callable[..., Coroutine[Any, Any, None]]
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def run(scene: Scene) -> Callable[..., None]:
    return functools.wraps(scene)(lambda *args, **kwargs: asyncio.run(scene(*args, **kwargs)))


def place() -> tuple[socket.socket, str]:
    """A socket on which nobody listens yet, and its URL."""
    sock = socket.socket()
    sock.bind(("127.0.0.1", 0))
    return sock, f"http://127.0.0.1:{sock.getsockname()[1]}/v1"


def says(answer: Any) -> Handler:
    async def handler(request: web.Request) -> web.Response:
        return web.json_response(answer)

    return handler


@asynccontextmanager
async def serving(sock: socket.socket, handlers: Mapping[str, Handler]) -> AsyncIterator[None]:
    app = web.Application()
    for path, handler in handlers.items():
        app.router.add_route("*", path, handler)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.SockSite(runner, sock).start()
    yield
    await runner.cleanup()


MODELS = {"data": [{"id": "m"}]}


@run
async def test_a_server_of_ours_that_is_just_starting_is_no_api() -> None:
    sock, url = place()
    looking = asyncio.create_task(_is_api(StandaloneClientConfig(base_url=url), [url], None, False, "eval"))
    await asyncio.sleep(0.5)  # it has been asked, and refused
    async with serving(sock, {"/v1/models": says(MODELS), "/policy_version": says({"version": 0})}):
        assert not await looking


@run
async def test_who_attaches_before_a_server_has_loaded_is_told_how_to_wait_for_it() -> None:
    sock, url = place()
    with sock, pytest.MonkeyPatch.context() as patch:
        wait = asyncio.sleep
        patch.setattr(asyncio, "sleep", lambda _: wait(0))
        with pytest.raises(EvalError, match=r"does not answer .* eval\.client\.api = tokens waits 120 s"):
            await _is_api(StandaloneClientConfig(base_url=[url]), [url], None, False, "eval")


@run
async def test_a_server_that_is_not_ours_is_told_from_one_of_ours() -> None:
    sock, url = place()
    async with serving(sock, {"/health": says({}), "/policy_version": says({"hello": "world"})}):
        servers = Servers([InferenceClient(url)], [url], 5.0)
        with pytest.raises(EvalError, match="names no version.*is it prime-hpc's own server"):
            await servers.load(Version(0))
        await servers.close()


@run
async def test_a_server_of_another_model_is_warned_of() -> None:
    experiment = load_experiment(["--model.name", "m", "--environment-ids", "reverse-text"], "eval", {}).experiment
    said: list[str] = []
    sink = logger.add(said.append, format="{message}", level="WARNING")
    for name in ("m", "other"):
        sock, url = place()
        rows = [{"id": "policy", "max_model_len": 64}, {"id": name, "max_model_len": 64}]
        async with serving(sock, {"/v1/models": says({"data": rows})}), InferenceClient(url) as client:
            assert await _shortest_context(experiment, [client]) == 64
    logger.remove(sink)
    assert len(said) == 1 and "serves other, not m" in said[0]


@run
async def test_who_waits_for_an_api_at_the_start_says_so() -> None:
    """One that took connections and never answered was waited for in silence, for two minutes."""
    sock, url = place()
    said: list[str] = []
    sink = logger.add(said.append, level="WARNING", format="{message}")
    async with asyncio.timeout(60):
        asked = asyncio.create_task(_check_api(url, None, "KEY", "eval"))
        while not said:
            await asyncio.sleep(0.01)
        async with serving(sock, {"/v1/models": says(MODELS)}):
            await asked
    logger.remove(sink)
    assert said[0].startswith(f"{url} does not answer (") and said[0].endswith("it is asked again\n")


@run
async def test_an_answer_that_is_none_is_told_with_what_it_lacks() -> None:
    """It was called an answer 502 of a server that had said 200, or 503 of one that had said nothing."""
    body = {"model": "m", "messages": [{"role": "user", "content": "?"}]}
    answer = {"id": "c", "object": "chat.completion", "created": 1, "model": "m", "choices": [{"index": 0}]}
    sock, url = place()
    said: list[str] = []
    async with serving(sock, {"/v1/chat/completions": says(answer)}):
        client = ChatClient(url, None, ChatOptions(10.0, 0), 10.0)
        with pytest.raises(ProviderError, match="answered 200, but no completion") as unreadable:
            await client.get_response(ChatDialect(), body, SamplingConfig())
        said.append(str(unreadable.value))
    with pytest.raises(ProviderError, match="gave no answer 1 times: ") as silent:
        await client.get_response(ChatDialect(), body, SamplingConfig())
    said.append(str(silent.value))
    await client.close()
    assert "(choices.0.finish_reason: Field required)" in said[0] and '"index": 0' in said[0], "and what it was"
    assert not any("answered 50" in words for words in said)


@run
async def test_half_a_character_in_an_answer_is_replaced() -> None:
    """The request was sent again, seven times, and then the episode failed."""
    message = {"index": 0, "message": {"role": "assistant", "content": "a\ud83d\U0001f600"}, "finish_reason": "stop"}
    answer = {"id": "c", "object": "chat.completion", "created": 1, "model": "m", "choices": [message]}
    bodies = [json.dumps(answer).encode(), b'{"\\ud83d": ' + b"[" * 100_000]

    async def complete(request: web.Request) -> web.Response:
        return web.Response(body=bodies.pop(0), content_type="application/json")

    sock, url = place()
    async with serving(sock, {"/v1/chat/completions": complete}):
        client = ChatClient(url, None, ChatOptions(200.0, 0), 200.0)
        body = {"model": "m", "messages": [{"role": "user", "content": "?"}]}
        response = await client.get_response(ChatDialect(), body, SamplingConfig())
        assert response.message.content == "a\ufffd\U0001f600" and response.raw["id"] == "c"
        with pytest.raises(ProviderError, match="no completion .ValueError: it is nested too deep"):
            await client.get_response(ChatDialect(), body, SamplingConfig())
        await client.close()


@run
async def test_a_reply_that_the_server_cut_off_for_repeating_itself_is_a_long_one() -> None:
    """vLLM has a word of its own for it; the answer was called none, and asked for again."""
    message = {"index": 0, "message": {"role": "assistant", "content": "a a a"}, "finish_reason": "repetition"}
    answer = {"id": "c", "object": "chat.completion", "created": 1, "model": "m", "choices": [message]}

    async def complete(request: web.Request) -> web.Response:
        return web.json_response(answer)

    sock, url = place()
    async with serving(sock, {"/v1/chat/completions": complete}):
        client = ChatClient(url, None, ChatOptions(200.0, 0), 200.0)
        body = {"model": "m", "messages": [{"role": "user", "content": "?"}]}
        response = await client.get_response(ChatDialect(), body, SamplingConfig())
        await client.close()
    assert response.finish_reason == "length" and response.message.content == "a a a"


@run
async def test_one_request_that_a_filter_refuses_costs_one_episode() -> None:
    statuses = [403, 200, *[403] * (FORBIDDEN_IN_A_ROW + 1)]
    message = {"index": 0, "message": {"role": "assistant", "content": "hi"}, "finish_reason": "stop"}
    answer = {"id": "c", "object": "chat.completion", "created": 1, "model": "m", "choices": [message]}

    async def complete(request: web.Request) -> web.Response:
        return web.json_response(answer, status=statuses.pop(0))

    sock, url = place()
    async with serving(sock, {"/v1/chat/completions": complete}):
        client = ChatClient(url, None, ChatOptions(10.0, 0), 10.0)
        body = {"model": "m", "messages": [{"role": "user", "content": "?"}]}
        with pytest.raises(EndpointRefusedError, match="answered 403"):  # nobody was answered: the key is wrong
            await client.get_response(ChatDialect(), body, SamplingConfig())
        await client.get_response(ChatDialect(), body, SamplingConfig())
        for _ in range(FORBIDDEN_IN_A_ROW):
            with pytest.raises(RequestRefusedError, match="answered 403"):
                await client.get_response(ChatDialect(), body, SamplingConfig())
        with pytest.raises(EndpointRefusedError, match="answered 403"):  # no filter: the key was revoked
            await client.get_response(ChatDialect(), body, SamplingConfig())
        await client.close()


@run
async def test_the_server_that_runs_here_is_found_with_the_key_of_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def models(request: web.Request) -> web.Response:
        return web.json_response(MODELS, status=200 if request.headers.get("Authorization") == "Bearer own" else 401)

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    sock, url = place()
    monkeypatch.setattr(inference, "DEFAULT_PORT", sock.getsockname()[1])
    async with serving(sock, {"/v1/models": models}):
        assert await asyncio.to_thread(verb._local_server, "m") is None
        for key, found in (("other", None), ("own", url)):
            monkeypatch.setenv("VLLM_API_KEY", key)
            assert await asyncio.to_thread(verb._local_server, "m") == found


def test_episodes_go_on_with_the_servers_that_they_began_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    argv = ["--model.name", "m", "--environment-ids", "reverse-text", "--output-dir", str(tmp_path), "--name"]
    started: list[Loaded] = []

    def start(loaded: Loaded) -> int:
        started.append(loaded)
        return 0

    monkeypatch.setattr(local, "run", start)
    here = ["--client.base-url", "http://127.0.0.1:8000/v1"]
    record(load_experiment([*argv, "own"], "eval", {}).experiment, tmp_path / "own")
    record(load_experiment([*argv, "attached", *here], "eval", {}).experiment, tmp_path / "attached")
    monkeypatch.setattr(verb, "_local_server", lambda model: here[1])
    for name, is_attached in (("own", False), ("attached", True), ("new", True)):
        verb.run_alone([*argv, name], "eval", "eval")
        assert (started[-1].experiment.eval.client is not None) is is_attached, name
    monkeypatch.setattr(verb, "_local_server", lambda model: None)
    verb.run_alone([*argv, "own"], "eval", "eval")
    with pytest.raises(ConfigError, match="start `prime-hpc inference` again"):
        verb.run_alone([*argv, "attached"], "eval", "eval")


@pytest.mark.parametrize(("own_step", "other_step"), [(10, 10), (10, 20), (0, 20)])
@run
async def test_replies_of_another_version_are_not_scored(tmp_path: Path, own_step: int, other_step: int) -> None:
    """Two evaluations shared the server that runs here: 895 of 1024 episodes of one were scored by the other's weights,
    and nobody said so. With other numbers they took turns to load theirs, and each other's episodes failed."""
    folder, others = (tmp_path / name / "weights" / f"step_{other_step:06d}" for name in ("a", "b"))
    own = Version(own_step, folder if own_step else None)
    client, log = policy_servers.Server(), EpisodeLog(RunPaths(tmp_path), claim_incarnation(RunPaths(tmp_path)))
    servers = Servers(cast(Any, [client]), ["http://host:1/v1"], 30.0, are_attached=True)

    class Shared(OneTask):
        """A pool in whose third episode somebody else has the server load a version."""

        async def run_episode(self, source_index: int, task_index: int, url_index: int = 0) -> EpisodeResult:
            if task_index == 2:
                await client.update_weights(others, other_step)
            found = await super().run_episode(source_index, task_index)
            return replace(found, versions=[client.version])

    await servers.load(own)
    player = Player(cast(Any, Shared()), servers, log, max_concurrent=1, is_api=False)
    with pytest.raises(EvalError, match=rf"other weights of step {other_step} meanwhile, .*/b/weights/step_0000"):
        await player.play(own, [Key(own_step, "e", task, 0) for task in range(4)])
    assert {key.task for key in log.records} <= {0, 1}, "a look that came too late scores nothing"
    assert client.folder == others, "that one's replies are of its weights"
    await client.reload_weights()
    assert await servers.still_serves(0) == (own_step == 0), "one that came back without is asked to load ours again"


@run
async def test_looks_at_an_attached_server_are_shared_and_take_no_seat(tmp_path: Path) -> None:
    """Each episode asked the server what it serves before the next began: a tenth of what a cheap episode costs."""
    all_began, started = asyncio.Event(), list[int]()

    class Asked(policy_servers.Server):
        looks = 0

        async def served(self, name: str = "") -> tuple[int, str]:
            self.looks += 1
            await all_began.wait()
            return await super().served(name)

    class Counted(OneTask):
        async def run_episode(self, source_index: int, task_index: int, url_index: int = 0) -> EpisodeResult:
            started.append(task_index)
            if len(started) == 8:
                all_began.set()
            return await super().run_episode(source_index, task_index)

    client, log = Asked(), EpisodeLog(RunPaths(tmp_path), claim_incarnation(RunPaths(tmp_path)))
    servers = Servers(cast(Any, [client]), ["http://host:1/v1"], 30.0, are_attached=True)
    version = Version(10, tmp_path / "weights" / "step_000010")
    await servers.load(version)
    player = Player(cast(Any, Counted()), servers, log, max_concurrent=1, is_api=False)
    await asyncio.wait_for(player.play(version, [Key(10, "e", task, 0) for task in range(8)]), 60)
    assert sorted(key.task for key in log.records) == started == list(range(8))
    client.looks = 0
    assert all(await asyncio.gather(*(servers.still_serves(0) for _ in range(20)))) and client.looks == 1
