"""The transformers backend: its batch against transformers' own forward pass, its answers over HTTP, its process."""

import asyncio
import re
import shutil
import signal
import socket
import time
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import numpy as np
import pytest
import torch
import uvicorn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from prime_hpc.client.inference import (
    Generation,
    InferenceClient,
    InferenceError,
    parse_choice,
    parse_scores,
    parse_top,
)
from prime_hpc.client.keys import find_key
from prime_hpc.client.versions import versions_from_spans
from prime_hpc.inference.check_version import BadVersionError, weight_files
from prime_hpc.inference.transformers.app import build_app
from prime_hpc.inference.transformers.engine import Engine
from prime_hpc.inference.transformers.limits import model_problem
from prime_hpc.inference.transformers.model import BatchModel
from prime_hpc.inference.transformers.requests import Reader
from prime_hpc.inference.transformers.serve import Server
from prime_hpc.inference.transformers.weight_updates import BatchPolicy
from prime_hpc.store.messaging import sockets
from tests.support.inference_server import VOCAB, ServerProcess, hf_logprobs_of_all, publish, save_model
from tests.support.tiny_model import make_tiny_model

CLOSE = 5e-5
"""Largest difference of two float32 log-probabilities of one model."""
MAX_LEN = 96
GENERATE = "/inference/v1/generate"
CHATML = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"


class World(NamedTuple):
    """A served model with two versions."""

    base: Path
    v1: Path
    v2: Path
    engine: Engine
    policy: BatchPolicy
    app: Any


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    root = tmp_path_factory.mktemp("transformers")
    base = save_model(root / "base", tied=True, seed=0)
    tokenizer = AutoTokenizer.from_pretrained(base)
    tokenizer.chat_template = CHATML
    tokenizer.save_pretrained(base)
    v1, v2 = (publish(save_model(root / f"m{n}", tied=True, seed=n), root / "run", n) for n in (1, 2))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    model = BatchModel(
        str(base), dtype=torch.float32, device=torch.device("cpu"), max_len=MAX_LEN, cache_gib=0.1, max_rows=8
    )
    assert model.self_test() < CLOSE
    engine = Engine(model, seed=0)
    policy = BatchPolicy(engine, str(base), base, tmp_path_factory.mktemp("scratch"))
    app = build_app(engine, policy, Reader(tokenizer, ["policy", str(base)], VOCAB, MAX_LEN), MAX_LEN)
    engine.start()
    yield World(base, v1, v2, engine, policy, app)
    engine.stop(30)
    torch.set_num_threads(threads)
    assert engine.failure is None


def run(world: World, talk: Callable[[httpx.AsyncClient], Coroutine[Any, Any, Any]]) -> Any:
    """Talk to the application."""

    async def go() -> Any:
        transport = httpx.ASGITransport(world.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://server", timeout=60) as http:
            return await asyncio.wait_for(talk(http), 120)

    return asyncio.run(go())


async def sample(http: httpx.AsyncClient, ids: list[int], **params: Any) -> list[Generation]:
    body = {"model": "policy", "token_ids": ids, "sampling_params": {"logprobs": 0, **params}}
    answer = await http.post(GENERATE, json=body)
    assert answer.status_code == 200, answer.text
    return [parse_choice(choice) for choice in answer.json()["choices"]]


def expected(model: Path, ids: list[int], made: Generation, **params: Any) -> torch.Tensor:
    """transformers' own log-probabilities of a completion under its sampling distribution."""
    logits = hf_logprobs_of_all(model, ids, made.token_ids.tolist()) / (params.get("temperature") or 1.0)
    if (p := params.get("min_p")) is not None:
        likely = logits.softmax(-1)
        logits = logits.masked_fill(likely < p * likely.amax(-1, keepdim=True), -torch.inf)
    if (k := params.get("top_k")) is not None:
        logits = logits.masked_fill(logits < logits.topk(k).values[:, -1:], -torch.inf)
    if (p := params.get("top_p")) is not None:
        ordered, order = logits.sort(descending=True)
        likely = ordered.softmax(-1)
        cut = (likely.cumsum(-1) - likely >= p).gather(1, order.argsort(-1))
        logits = logits.masked_fill(cut, -torch.inf)
    return logits.log_softmax(-1)[torch.arange(len(made.token_ids)), made.token_ids]


def prompts(count: int, longest: int = 40) -> list[list[int]]:
    rng = np.random.default_rng(count)
    return [rng.integers(3, VOCAB, rng.integers(1, longest)).tolist() for _ in range(count)]


SAMPLINGS: tuple[dict[str, Any], ...] = (
    {"temperature": 1.0},
    {"temperature": 0.7},
    {"temperature": 0.0},
    {"temperature": 0.8, "top_p": 0.8},
    {"temperature": 1.2, "top_k": 5},
    {"temperature": 1.0, "min_p": 0.1},
    {"temperature": 0.9, "top_p": 0.9, "top_k": 20, "min_p": 0.02},
)


def test_parallel_requests_have_the_log_probabilities_of_their_sampling(world: World) -> None:
    """More requests than rows, prompts of all lengths, each sampled its own way, some of them scored."""

    async def talk(http: httpx.AsyncClient) -> None:
        asked = [(ids, SAMPLINGS[i % len(SAMPLINGS)]) for i, ids in enumerate(prompts(21))]
        calls = [sample(http, ids, max_tokens=3 + i % 30, ignore_eos=True, **s) for i, (ids, s) in enumerate(asked)]
        errors = []
        for i, ((ids, params), (made,)) in enumerate(zip(asked, await asyncio.gather(*calls), strict=True)):
            assert made.finish_reason == "length" and len(made.token_ids) == 3 + i % 30
            errors.append(torch.tensor(made.logprobs) - expected(world.base, ids, made, **params))
            if not params["temperature"]:
                assert (
                    made.token_ids.tolist()
                    == hf_logprobs_of_all(world.base, ids, made.token_ids.tolist()).argmax(-1).tolist()
                )
        every = torch.cat(errors).abs()
        assert every.max() < CLOSE and every.mean() < 5e-6, (every.max(), every.mean())
        ids = prompts(5, MAX_LEN)[3]
        body = {"token_ids": ids, "sampling_params": {"max_tokens": 1, "prompt_logprobs": 30}}
        rows = (await http.post(GENERATE, json=body)).json()["prompt_logprobs"]
        scores, top = parse_scores(rows, ids), parse_top(rows, 30, [True] * len(ids))
        want = hf_logprobs_of_all(world.base, ids[:1], ids[1:])
        assert (torch.tensor(scores[1:]) - want[torch.arange(len(ids) - 1), ids[1:]]).abs().max() < CLOSE
        found = torch.from_numpy(top.logprobs[1:])
        assert (found - want.topk(30).values).abs().max() < CLOSE
        assert (found - want.gather(1, torch.from_numpy(top.ids[1:]).long())).abs().max() < CLOSE

    run(world, talk)


def test_an_update_in_flight_splits_every_completion_exactly(world: World) -> None:
    async def talk(http: httpx.AsyncClient) -> None:
        asked = prompts(6, 20)
        calls = [asyncio.create_task(sample(http, ids, max_tokens=70, ignore_eos=True)) for ids in asked]
        for version, path in ((1, world.v1), (2, world.v2)):
            before = world.engine.num_sampled
            while world.engine.num_sampled < before + 60:
                await asyncio.sleep(0.002)
            answer = (await http.post("/update_weights", json={"path": str(path), "version": version})).json()
            assert answer["changed"] and answer["version"] == version and answer["seconds"]["paused"] > 0, answer
        folders = [world.base, world.v1, world.v2]
        changed = 0
        for ids, (made,) in zip(asked, await asyncio.gather(*calls), strict=True):
            assert (np.diff(made.versions) >= 0).all()
            changed += len(set(made.versions.tolist())) - 1
            for version, folder in enumerate(folders):
                mine = made.versions == version
                error = torch.tensor(made.logprobs) - expected(folder, ids, made)
                assert not mine.any() or error[mine].abs().max() < CLOSE, version
        assert changed >= 6
        assert (await http.get("/policy_version")).json() == {"version": 2, "path": str(world.v2), "adapters": {}}
        again = await http.post("/update_weights", json={"path": str(world.v2), "version": 2})
        assert again.json()["changed"] is False
        assert (await http.post("/reload_weights")).json()["version"] == 0
        (made,) = await sample(http, [5, 6], max_tokens=4)
        assert (torch.tensor(made.logprobs) - expected(world.base, [5, 6], made)).abs().max() < CLOSE

    run(world, talk)


def test_what_ends_a_completion_and_what_makes_it_the_same_again(world: World) -> None:
    async def talk(http: httpx.AsyncClient) -> None:
        ids = [9, 8, 7]
        (greedy,) = await sample(http, ids, temperature=0, max_tokens=20, ignore_eos=True)
        found = greedy.token_ids.tolist()
        (stopped,) = await sample(http, ids, temperature=0, max_tokens=20, stop_token_ids=[found[4]], ignore_eos=True)
        assert stopped.finish_reason == "stop"
        assert stopped.token_ids.tolist() == found[: found.index(found[4]) + 1]
        tokenizer = AutoTokenizer.from_pretrained(world.base)
        text: Any = tokenizer.decode(found)
        word = text[6:9]
        body = {"prompt": ids, "temperature": 0, "max_tokens": 20, "ignore_eos": True, "return_token_ids": True}
        answer = (await http.post("/v1/completions", json={**body, "stop": word, "logprobs": 1})).json()
        choice = answer["choices"][0]
        assert (choice["text"], choice["stop_reason"]) == (text[: text.index(word)], word)
        assert choice["token_ids"] == found[: len(choice["token_ids"])] and len(choice["token_ids"]) < 20
        assert len(versions_from_spans(choice["weight_versions"], len(choice["token_ids"]))) > 0
        seeded = {"max_tokens": 8, "seed": 3, "n": 3, "ignore_eos": True}
        alone = await sample(http, ids, **seeded)
        noise = [sample(http, [4, 5], max_tokens=30, ignore_eos=True) for _ in range(4)]
        among, *_ = await asyncio.gather(sample(http, ids, **seeded), *noise)
        assert [g.token_ids.tolist() for g in alone] == [g.token_ids.tolist() for g in among]
        assert len({tuple(g.token_ids.tolist()) for g in alone}) == 3
        eos = next(iter(world.engine.model.eos))
        rows = await sample(http, ids, max_tokens=60, n=16, temperature=1.5)
        ended = [g for g in rows if g.finish_reason == "stop"]
        assert ended and all(g.token_ids[-1] == eos and eos not in g.token_ids[:-1] for g in ended)
        assert all(eos not in g.token_ids for g in rows if g.finish_reason == "length")
        message = {"role": "user", "content": [{"type": "text", "text": "abc"}]}
        chat = {"messages": [message], "max_tokens": 5, "logprobs": True, "top_logprobs": 2, "return_token_ids": True}
        answer = (await http.post("/v1/chat/completions", json=chat)).json()
        assert answer["prompt_token_ids"] == tokenizer("user: abc\n")["input_ids"]
        content = answer["choices"][0]["logprobs"]["content"]
        assert len(content) == answer["usage"]["completion_tokens"] and len(content[0]["top_logprobs"]) == 2

    run(world, talk)


REFUSED: tuple[tuple[dict[str, Any], str], ...] = (
    ({"token_ids": []}, "not empty"),
    ({"token_ids": [VOCAB]}, "out of range"),
    ({"token_ids": [1] * MAX_LEN}, "maximum context length"),
    ({"token_ids": [1], "features": {}}, "features"),
    ({"token_ids": [1], "content_parts": [], "return_token_ids": True}, "takes text alone, no images"),
    ({"token_ids": [1], "stream": True}, "stream"),
    ({"token_ids": [1], "sampling_params": {"temperature": -1}}, "temperature"),
    ({"token_ids": [1], "sampling_params": {"presence_penalty": 1}}, "presence_penalty"),
    ({"token_ids": [1], "sampling_params": {"beams": 3}}, "does not know"),
    ({"token_ids": [1], "sampling_params": {"stop": [""]}}, "stop"),
    ({"token_ids": [1], "surprise": 1}, "surprise"),
)


def test_what_it_cannot_do_is_refused(world: World, tmp_path: Path) -> None:
    async def talk(http: httpx.AsyncClient) -> None:
        for body, word in REFUSED:
            answer = await http.post(GENERATE, json=body)
            assert (answer.status_code, word in answer.json()["error"]["message"]) == (400, True), (body, answer.text)
        assert (await http.post(GENERATE, content=b"{")).status_code == 400
        assert (await http.post(GENERATE, json={"model": "other", "token_ids": [1]})).status_code == 404
        tools = {"messages": [{"role": "user", "content": "x"}], "tools": [{"type": "function"}]}
        assert (await http.post("/v1/chat/completions", json=tools)).status_code == 400
        assert (await http.post("/serve_base?name=x")).status_code == 400
        assert (await http.post("/update_weights", json={"path": "x", "version": "y"})).status_code == 422
        assert (await http.get("/policy_version?name=x")).status_code == 404
        half = tmp_path / "half"
        shutil.copytree(world.v1, half)
        (half / "model.safetensors").write_bytes(b"\0" * 100)
        wrong = publish(save_model(tmp_path / "m", tied=True, seed=5, hidden_size=64), tmp_path / "run", 1)
        for path, version in ((half, 1), (world.v1, 2), (wrong, 1), (world.v1, 0)):
            answer = await http.post("/update_weights", json={"path": str(path), "version": version})
            assert answer.status_code == 400 and answer.json()["error"], path
        assert (await http.get("/policy_version")).json()["version"] == 0
        assert len(await sample(http, [1, 2], max_tokens=2)) == 1
        assert (await http.get("/health")).status_code == 200
        figures = (await http.get("/metrics")).text
        assert "vllm:num_requests_running 0\n" in figures and "prime_hpc_policy_version 0\n" in figures

    run(world, talk)


def test_the_next_server_has_the_port_while_connections_to_the_last_one_linger() -> None:
    # as after SIGKILL: the server's side closes first, and the kernel keeps the connection for a minute
    async def answer(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"here"})

    async def serve(sock: socket.socket) -> None:
        server = Server(uvicorn.Config(answer, log_level="warning", lifespan="off"))
        serving = asyncio.create_task(server.serve(sockets=[sock]))
        while not server.started:
            await asyncio.sleep(0.01)
        async with httpx.AsyncClient() as client:
            assert (await client.get(f"http://127.0.0.1:{sock.getsockname()[1]}/")).text == "here"
            server.should_exit = True
            await serving

    first = sockets.bind("127.0.0.1", 0)
    port = first.getsockname()[1]
    asyncio.run(serve(first))
    first.close()
    with sockets.bind("127.0.0.1", port) as second:
        asyncio.run(serve(second))


@pytest.mark.slow
@pytest.mark.exhaustive
def test_the_server_process(world: World, tmp_path: Path) -> None:
    """By the product's own command and clients: the key, a client that hangs up, SIGTERM with requests in flight."""
    server = ServerProcess(tmp_path / "run", world.base, {"backend": "transformers", "max_num_seqs": 4})
    try:
        server.wait_ready()
        assert httpx.post(f"{server.url}{GENERATE}", json={"token_ids": [1]}).status_code == 401

        def running() -> int:
            text = httpx.get(f"{server.url}/metrics", headers={"Authorization": f"Bearer {find_key(server.url)}"}).text
            samples = [line.split() for line in text.splitlines() if not line.startswith("#")]
            return sum(int(float(value)) for name, value in samples if "num_requests" in name)

        async def talk() -> list[Any]:
            async with InferenceClient(server.url) as client:
                assert await client.models() == ["policy", str(world.base)]
                assert (await client.update_weights(world.v1, 1))["changed"]
                made = await client.generate([4, 5, 6], {"max_tokens": 5, "ignore_eos": True})
                assert set(made.versions.tolist()) == {1}
                error = torch.tensor(made.logprobs) - expected(world.v1, [4, 5, 6], made)
                assert error.abs().max() < CLOSE
                with pytest.raises(InferenceError, match="no adapters"):
                    await client.update_weights(world.v1, 1, name="other")
                endless = {"max_tokens": 400, "ignore_eos": True}
                leaving = asyncio.create_task(client.generate([7], endless))
                while not await asyncio.to_thread(running):
                    await asyncio.sleep(0.01)
                leaving.cancel()
                deadline = time.monotonic() + 20
                while await asyncio.to_thread(running):
                    assert time.monotonic() < deadline, "a request that nobody waits for runs on"
                    await asyncio.sleep(0.01)
                tasks = [asyncio.create_task(client.generate([7, i], endless)) for i in range(8)]
                await client.generate([7, 7], {"max_tokens": 2})
                server.process.send_signal(signal.SIGTERM)
                return list(await asyncio.gather(*tasks, return_exceptions=True))

        answers = asyncio.run(talk())
        assert server.process.wait(200) == 0, server.log.read_text()
        ended = [answer.finish_reason for answer in answers if isinstance(answer, Generation)]
        assert len(ended) == 8 and set(ended) <= {"abort", "length"} and "abort" in ended
        log = server.log.read_text()
        assert re.search(r"^\d\d:\d\d:\d\d INFO    inference\[0\] transformers backend: 4 sequences", log, re.M), log
        assert "it/s]" not in log, "no progress bar"
    finally:
        server.close()


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"tensor_parallel_size": 2}, "inference.tensor_parallel_size: the transformers backend cannot do this"),
        ({"cpu_kv_cache_gib": 1e-6}, "inference.cpu_kv_cache_gib"),
        ({"backend": "json:dumps"}, "inference.backend"),
    ],
)
def test_a_server_that_cannot_serve_says_the_key(
    world: World, tmp_path: Path, change: dict[str, Any], words: str
) -> None:
    server = ServerProcess(tmp_path / "run", world.base, {"backend": "transformers", **change})
    try:
        assert server.process.wait(200) == 1
        assert words in server.log.read_text()
    finally:
        server.close()


def test_a_version_of_experts_is_read_before_the_engine_pauses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also while it samples: transformers' way to load makes a model, under a default dtype of the whole process."""
    base, newer = (make_tiny_model(tmp_path / name, experts=4, seed=n) for n, name in enumerate(("base", "newer")))
    dense = make_tiny_model(tmp_path / "dense")
    model = BatchModel(
        str(base), dtype=torch.bfloat16, device=torch.device("cpu"), max_len=64, cache_gib=0.01, max_rows=4
    )
    wanted = AutoModelForCausalLM.from_pretrained(newer, dtype=torch.bfloat16).state_dict()
    with monkeypatch.context() as patch:
        patch.setattr(torch, "set_default_dtype", lambda dtype: pytest.fail("other threads compute"))
        tensors = model.open(weight_files(newer))
        with pytest.raises(BadVersionError, match="missing .'model.layers.0.mlp.experts"):
            model.open(weight_files(dense))
    shutil.rmtree(newer)
    model.load(tensors)
    assert model.hf.state_dict().keys() == wanted.keys()
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in model.hf.state_dict().items())


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", ["llama", "mixtral", "gemma", "gpt2", "granite"])
def test_other_families_compute_in_a_batch_what_they_compute_alone(kind: str, tmp_path: Path) -> None:
    sizes: dict[str, Any] = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 128}
    small: dict[str, Any] = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128, "vocab_size": 64}
    config = AutoConfig.for_model(kind, **(small if kind == "gpt2" else sizes), bos_token_id=1, eos_token_id=2)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    assert model_problem(config.to_dict(), 64) == ""
    model = BatchModel(
        str(tmp_path), dtype=torch.float32, device=torch.device("cpu"), max_len=64, cache_gib=0.01, max_rows=4
    )
    assert model.self_test() < CLOSE
    with torch.no_grad():
        for parameter in model.hf.parameters():
            parameter.add_(1.0)
    model.load(model.open(weight_files(tmp_path)))
    logits = model.forward(0, [[3, 4, 5]], [0], 3, [(0, 2)])
    own = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)(torch.tensor([[3, 4, 5]])).logits[0, -1:]
    assert (logits.log_softmax(-1) - own.log_softmax(-1)).abs().max() < CLOSE
