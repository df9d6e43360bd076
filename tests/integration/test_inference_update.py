"""Weight updates of real vLLM servers on CPU: exact, versioned per token, refused when wrong, ended in order.

For a model with tied embeddings (two data-parallel engines behind one server, an api key) and, in `tools/test --all`,
one with untied ones (one engine, no key). Each is compared with transformers' log-probabilities; the untied one also
with a server started fresh on the version.
"""

import asyncio
import shutil
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
import pytest
import torch

from prime_hpc.client.inference import BARE_LOGPROBS, Generation, InferenceClient, InferenceError
from prime_hpc.client.keys import find_key
from prime_hpc.inference.routes import ROUTES
from tests.support.inference_server import ServerProcess, hf_logprobs, hf_logprobs_of_all, publish, save_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

TOLERANCE = 1e-4
TRIES = 8
GREEDY = {"max_tokens": 24, "temperature": 0.0, "ignore_eos": True}
PROMPTS = [[(7 * i + 3 * j) % 400 for j in range(5 + 3 * i)] for i in range(12)]
KEY = "a secret"
COMPILED = "compiled"
"""Folder of a server's compiler."""


@dataclass
class Family:
    """One model: base and two versions."""

    tied: bool
    base: Path
    run_dir: Path
    v1: Path
    v2: Path

    @property
    def inference(self) -> dict[str, Any]:
        return {"data_parallel_size": 2, "api_key": KEY} if self.tied else {}


def client_of(server: ServerProcess, key: str | None = None) -> InferenceClient:
    return InferenceClient(server.url, api_key=key or server.key, timeout_s=250)


async def greedy(client: InferenceClient) -> list[Generation]:
    return list(await asyncio.gather(*[client.generate(prompt, GREEDY) for prompt in PROMPTS]))


def greedy_now(server: ServerProcess) -> list[Generation]:
    async def run() -> list[Generation]:
        async with client_of(server) as client:
            return await greedy(client)

    return asyncio.run(run())


def call(server: ServerProcess, method: str, *args: Any) -> Any:
    async def run() -> Any:
        async with client_of(server) as client:
            return await getattr(client, method)(*args)

    return asyncio.run(run())


def assert_same(found: list[Generation], expected: list[Generation]) -> None:
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one.token_ids, other.token_ids)
        np.testing.assert_allclose(one.logprobs, other.logprobs, atol=TOLERANCE, rtol=0)


def assert_different(found: list[Generation], other: list[Generation]) -> None:
    assert any(not np.array_equal(a.token_ids, b.token_ids) for a, b in zip(found, other, strict=True))


def assert_is(found: list[Generation], folder: Path) -> None:
    """Greedy answers of the model in `folder`: the log-probabilities, and that no token was likelier."""
    for prompt, generation in zip(PROMPTS, found, strict=True):
        completion = generation.token_ids.tolist()
        every = hf_logprobs_of_all(folder, prompt, completion)
        own = every[torch.arange(len(completion)), completion]
        np.testing.assert_allclose(generation.logprobs, own, atol=TOLERANCE, rtol=0)
        assert (every.max(-1).values - own).max() < TOLERANCE


@pytest.fixture(scope="module", params=["tied", pytest.param("untied", marks=pytest.mark.exhaustive)])
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Family:
    root = tmp_path_factory.mktemp(request.param)
    tied = request.param == "tied"
    models = [save_model(root / f"model{seed}", tied=tied, seed=seed) for seed in range(3)]
    run_dir = root / "run"
    v1, v2 = (publish(models[version], run_dir, version) for version in (1, 2))
    return Family(tied, models[0], run_dir, v1, v2)


@pytest.fixture(scope="module")
def server(family: Family) -> Iterator[ServerProcess]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(family.run_dir / COMPILED))
        process = ServerProcess(family.run_dir, family.base, family.inference)
    try:
        yield process.wait_ready()
    finally:
        process.close()


@pytest.fixture(scope="module")
def base_outputs(server: ServerProcess) -> list[Generation]:
    return greedy_now(server)


def test_the_base_model_is_version_0(server: ServerProcess, base_outputs: list[Generation]) -> None:
    assert call(server, "policy_version") == 0
    assert call(server, "models")[0] == "policy"
    assert all((generation.versions == 0).all() for generation in base_outputs)


def test_a_prompt_is_scored_with_the_likeliest_tokens(family: Family, server: ServerProcess) -> None:
    prompt, top_k = PROMPTS[7], 7
    wanted = np.arange(len(prompt)) % 3 == 1
    scores, top = call(server, "score_top", prompt, "policy", top_k, wanted)
    every = hf_logprobs_of_all(family.base, prompt[:1], prompt[1:])
    np.testing.assert_allclose(scores[1:], every[torch.arange(len(prompt) - 1), prompt[1:]], atol=TOLERANCE, rtol=0)
    for i in np.flatnonzero(wanted).tolist():
        np.testing.assert_allclose(top.logprobs[i], every[i - 1].topk(top_k).values, atol=TOLERANCE, rtol=0)
        np.testing.assert_allclose(top.logprobs[i], every[i - 1, top.ids[i]], atol=TOLERANCE, rtol=0)
    assert (top.ids[~wanted] == np.iinfo(np.int32).max).all()
    with pytest.raises(InferenceError, match="max allowed: 20") as refused:
        call(server, "score_top", prompt, "policy", 21, wanted)
    assert refused.value.status == 400


def test_no_request_waits_for_a_compiler(family: Family, base_outputs: list[Generation]) -> None:
    """Log-probabilities were asked for, and nothing had to be compiled first: that takes longer than an episode may."""
    assert all(len(generation.logprobs) for generation in base_outputs)
    assert not list((family.run_dir / COMPILED).rglob("*.cpp"))


def test_scores_of_a_sequence_are_the_models_own(family: Family, server: ServerProcess) -> None:
    """What a teacher says of tokens that another model sampled (`orchestrator.advantage.type = opd`)."""
    sequence = PROMPTS[-1]
    for _ in range(2):  # the second time its prefix is cached
        scores = call(server, "score", sequence)
        assert scores[0] == 0.0
        np.testing.assert_allclose(
            scores[1:], hf_logprobs(family.base, sequence[:1], sequence[1:]), atol=TOLERANCE, rtol=0
        )


def test_an_updated_server_serves_the_version(
    family: Family, server: ServerProcess, base_outputs: list[Generation], tmp_path: Path
) -> None:
    assert_is(base_outputs, family.base)
    answer = call(server, "update_weights", family.v1, 1)
    assert answer["changed"] and call(server, "policy_version") == 1
    updated = greedy_now(server)
    assert_is(updated, family.v1)
    assert_different(updated, base_outputs)
    assert all((generation.versions == 1).all() for generation in updated)
    if not family.tied:
        fresh = ServerProcess(tmp_path / "fresh", family.v1)
        try:
            assert_same(updated, greedy_now(fresh.wait_ready()))
        finally:
            fresh.close()


def test_engines_that_sleep_keep_requests_and_wake_with_the_next_version(family: Family, server: ServerProcess) -> None:
    """On a CPU vLLM's workers give no memory back: what is tried is who waits, in which order, and what wakes them."""

    async def run() -> tuple[list[Generation], list[Generation], list[Generation]]:
        async with client_of(server) as client:
            await client.update_weights(family.v1, 1)
            long = {"max_tokens": 200, "temperature": 0.0, "ignore_eos": True}
            before = [asyncio.create_task(client.generate(prompt, long)) for prompt in PROMPTS[:4]]
            await client.generate(PROMPTS[0], {**GREEDY, "max_tokens": 5})  # sent last: the others are under way
            for _ in range(2):  # asleep, it stays so
                assert (await client.sleep()) == {"version": 1, "asleep": True}
            meanwhile = [asyncio.create_task(client.generate(prompt, GREEDY)) for prompt in PROMPTS]
            await asyncio.wait(meanwhile, timeout=1.0)
            assert await client.health() and await client.policy_version() == 1
            assert not any(task.done() for task in meanwhile)
            with pytest.raises(InferenceError, match="400"):  # refused, and asleep as before
                await client.update_weights(family.run_dir / "weights" / "step_000099", 99)
            assert not any(task.done() for task in meanwhile)
            assert (await client.update_weights(family.v2, 2))["changed"]
            answers = list(await asyncio.gather(*meanwhile)), list(await asyncio.gather(*before))
            await client.sleep()
            await client.wake_up()
            return *answers, await greedy(client)

    new, old, again = asyncio.run(run())
    assert_is(new, family.v2)
    assert all((g.versions == 2).all() for g in [*new, *again])
    assert_same(new, again)
    for generation in old:  # those under way go on with the new version where they stood
        assert len(generation.token_ids) == 200 and sorted(generation.versions.tolist()) == generation.versions.tolist()
        assert set(generation.versions.tolist()) <= {1, 2}


def test_the_same_update_again_changes_nothing(family: Family, server: ServerProcess) -> None:
    call(server, "update_weights", family.v1, 1)
    assert call(server, "update_weights", family.v1, 1)["changed"] is False
    assert_is(greedy_now(server), family.v1)


def test_both_engines_got_the_update(family: Family, server: ServerProcess) -> None:
    """vLLM's own header picks the engine; every engine must answer alike."""
    call(server, "update_weights", family.v1, 1)
    updated = greedy_now(server)
    assert_is(updated, family.v1)
    key = server.key or find_key(server.url)

    def ask(engine: int, prompt: list[int], num_logprobs: int, *more: tuple[str, str]) -> dict[str, Any]:
        sampling: dict[str, Any] = {**GREEDY, "logprobs": num_logprobs}
        body = {"model": "policy", "token_ids": prompt, "sampling_params": sampling}
        headers = dict([("X-data-parallel-rank", str(engine)), ("Authorization", f"Bearer {key}"), *more])
        answer = httpx.post(f"{server.url}/inference/v1/generate", json=body, headers=headers, timeout=60).json()
        (choice,) = answer["choices"]
        return choice

    for engine in range(2 if family.tied else 1):
        for prompt, expected in zip(PROMPTS[:3], updated, strict=False):
            choice = ask(engine, prompt, 0)
            assert choice["token_ids"] == expected.token_ids.tolist()
            assert choice["weight_versions"] == [{"version": "1", "start": 0, "end": 24}]
            # verifiers' client (renderers 0.1.12) takes the token ids of the log-probabilities from these strings
            assert [row["token"] for row in choice["logprobs"]["content"]] == [
                f"token_id:{token}" for token in choice["token_ids"]
            ]
        found = ask(engine, prompt, 0, BARE_LOGPROBS)
        assert found["token_ids"] == choice["token_ids"]
        assert found["logprobs"] == {
            "values": pytest.approx([row["logprob"] for row in choice["logprobs"]["content"]], abs=1e-5)
        }
        # more than the sampled tokens': as without the header
        found = ask(engine, prompt, 2, BARE_LOGPROBS)
        assert [len(row["top_logprobs"]) for row in found["logprobs"]["content"]] == [2] * 24


def test_requests_in_flight_keep_their_tokens_and_label_each(family: Family, server: ServerProcess) -> None:
    sampling = {"max_tokens": 440, "temperature": 1.0, "ignore_eos": True}

    async def run() -> list[Generation]:
        async with client_of(server) as client:
            await client.update_weights(family.v1, 1)
            tasks = [asyncio.create_task(client.generate(prompt, sampling)) for prompt in PROMPTS]
            await client.generate(PROMPTS[0], {**sampling, "max_tokens": 10})  # sent last: the others are under way
            await client.update_weights(family.v2, 2)
            return list(await asyncio.gather(*tasks))

    for _ in range(TRIES):  # on a busy machine the update may come before or after all of them
        generations = asyncio.run(run())
        if any(len(set(g.versions.tolist())) == 2 for g in generations):
            break
    else:
        pytest.fail("the update fell outside every request")
    for prompt, generation in zip(PROMPTS, generations, strict=True):
        assert len(generation.token_ids) == 440
        assert (np.diff(generation.versions) >= 0).all() and set(generation.versions.tolist()) <= {1, 2}
        completion = generation.token_ids.tolist()
        by_version = {1: hf_logprobs(family.v1, prompt, completion), 2: hf_logprobs(family.v2, prompt, completion)}
        expected = np.where(generation.versions == 1, by_version[1], by_version[2])
        np.testing.assert_allclose(generation.logprobs, expected, atol=TOLERANCE, rtol=0)
        wrong = np.where(generation.versions == 1, by_version[2], by_version[1])
        assert np.abs(generation.logprobs - wrong).mean() > 0.1, "the versions cannot be told apart: the test is blind"


def test_reload_goes_back_to_the_base_model(
    family: Family, server: ServerProcess, base_outputs: list[Generation]
) -> None:
    call(server, "update_weights", family.v1, 1)
    assert call(server, "reload_weights")["version"] == 0
    again = greedy_now(server)
    assert_same(again, base_outputs)
    assert all((generation.versions == 0).all() for generation in again)
    assert call(server, "reload_weights")["changed"] is False


def bad_versions(family: Family, folder: Path) -> dict[str, tuple[Path | str, int]]:
    """Versions that must be refused, by what the refusal must say."""
    narrow = save_model(folder / "narrow", tied=family.tied, seed=9, intermediate_size=128)
    shallow = save_model(folder / "shallow", tied=family.tied, seed=9, num_hidden_layers=1)
    cut = publish(family.v1, folder / "run", 7)
    with (cut / "model.safetensors").open("r+b") as file:
        file.truncate(1000)
    loose = shutil.copytree(family.v1, folder / "loose")
    (loose / "manifest.json").unlink()
    return {
        "has shape": (publish(narrow, folder / "run", 3), 3),
        "missing tensors": (publish(shallow, folder / "run", 4), 4),
        "holds version 1, not 5": (family.v1, 5),
        "model.safetensors": (cut, 7),
        "manifest": (loose, 8),
        "No such file": (folder / "nowhere", 9),
        "absolute": ("weights/step_000001", 1),
        "base model": (family.v1, 0),
    }


def test_a_wrong_version_is_refused_and_harms_nothing(family: Family, server: ServerProcess, tmp_path: Path) -> None:
    call(server, "update_weights", family.v1, 1)
    for reason, (path, version) in bad_versions(family, tmp_path).items():
        with pytest.raises(InferenceError, match=reason) as refused:
            call(server, "update_weights", path, version)
        assert refused.value.status == 400
    assert call(server, "policy_version") == 1
    assert_is(greedy_now(server), family.v1)


def test_the_key_guards_every_route(family: Family, server: ServerProcess) -> None:
    """Ours and vLLM's own, as the server itself lists them; without a stated key the server has made one."""

    async def refused() -> list[int | None]:
        async with client_of(server, "another") as client:
            calls = [
                client.update_weights(family.v1, 1),
                client.reload_weights(),
                client.policy_version(),
                client.generate([1, 2], GREEDY),
            ]
            answers = await asyncio.gather(*calls, return_exceptions=True)
            return [a.status if isinstance(a, InferenceError) else None for a in answers]

    assert asyncio.run(refused()) == [401] * 4
    key = server.key or find_key(server.url)
    assert key and key not in server.log.read_text()
    with httpx.Client(base_url=server.url, timeout=60) as http:
        listed = http.get("/openapi.json", headers={"Authorization": f"Bearer {key}"}).json()["paths"]
        assert {"/v1/chat/completions", "/inference/v1/generate", "/health"} <= set(listed)
        routes = [(method.upper(), path) for path, methods in listed.items() for method in methods]
        routes += [(method, route.path) for route in ROUTES for method in route.methods or ()]
        routes += [("GET", path) for path in ("/docs", "/redoc", "/openapi.json", "/metrics", "/v1/realtime")]
        for method, path in routes:
            answer = http.request(method, path)
            assert answer.status_code == (200 if (method, path) == ("GET", "/health") else 401), (method, path)
    call(server, "reload_weights")


def test_sigterm_with_requests_in_flight_ends_everything(server: ServerProcess) -> None:
    """Last in the file: it ends the server."""

    async def run() -> tuple[list[Any], int]:
        async with client_of(server) as client:
            sampling = {"max_tokens": 400, "temperature": 1.0, "ignore_eos": True}
            tasks = [asyncio.create_task(client.generate(prompt, sampling)) for prompt in PROMPTS * 2]
            await client.generate(PROMPTS[0], {**sampling, "max_tokens": 5})  # sent last: the others are under way
            code = await asyncio.to_thread(server.terminate)
            return list(await asyncio.gather(*tasks, return_exceptions=True)), code

    assert len(server.members()) >= 2
    results, code = asyncio.run(run())
    assert code == 0, server.log.read_text(errors="replace")[-3000:]
    for result in results:  # one that was quick enough is whole
        assert not isinstance(result, Generation) or result.finish_reason == "abort" or len(result.token_ids) == 400
    assert any(isinstance(r, Generation) for r in results), results[0]
    psutil.wait_procs(server.members(), timeout=280)
    assert server.members() == []
    deadline = time.monotonic() + 60
    while list(server.temporary.iterdir()) and time.monotonic() < deadline:  # who clears up waits for their end as well
        time.sleep(0.1)
    assert list(server.temporary.iterdir()) == []


def test_a_taken_port_is_named_at_once(tmp_path: Path) -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        server = ServerProcess(tmp_path / "run", tmp_path, port=port)
        try:
            assert server.process.wait(200) == 1
            assert f"cannot listen on 127.0.0.1:{port}: Address already in use" in server.log.read_text()
            assert "Traceback" not in server.log.read_text()
        finally:
            server.close()


@pytest.mark.exhaustive
def test_a_kept_cache_serves_running_requests_alone(family: Family) -> None:
    """With `keep_kv_cache` a request that runs goes on over the update; one that comes after it sees nothing of the old
    weights, though its prompt's blocks are still there; nor of a version 1 that was before the run went back."""
    process = ServerProcess(family.run_dir, family.base, family.inference | {"keep_kv_cache": True})
    prompt = [(11 * i) % 400 for i in range(150)]  # several blocks
    again = publish(family.v2, family.run_dir / "again", 1)

    async def run() -> tuple[Generation, Generation, Generation]:
        async with client_of(process) as client:
            await client.generate(prompt, GREEDY)
            long = asyncio.create_task(client.generate(prompt, GREEDY | {"max_tokens": 350}))
            await asyncio.sleep(0.5)
            answer = await client.update_weights(family.v1, 1)
            assert answer["seconds"].keys() == {"check", "read", "open", "paused"}
            after = await client.generate(prompt, GREEDY)
            await long
            await client.reload_weights()
            await client.update_weights(again, 1)
            return await long, after, await client.generate(prompt, GREEDY)

    try:
        process.wait_ready()
        long, *found = asyncio.run(run())
    finally:
        process.close()
    assert len(long.token_ids) == 350
    for folder, after in zip((family.v1, again), found, strict=True):
        own = hf_logprobs(folder, prompt, after.token_ids.tolist())
        np.testing.assert_allclose(after.logprobs, own, atol=TOLERANCE, rtol=0)
