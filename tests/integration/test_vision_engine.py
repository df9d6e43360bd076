"""A real vLLM server that sees images: its log-probabilities are the trainer's, before and after a new version.

Skipped where torchvision cannot be imported, without which vLLM serves no model that sees images.
"""

import base64
import importlib.util
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import numpy as np
import pytest
import torch
import torch.distributed as dist

from prime_hpc.client.keys import find_key
from prime_hpc.trainer.model.policy import Policy
from tests.support.images import OTHER, TALL, WIDE, Shown, batch_of, logprobs, vision_policy
from tests.support.inference_server import ServerProcess, publish
from tests.support.tiny_vision import make_vision_model

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(importlib.util.find_spec("torchvision") is None, reason="no torchvision"),
]
TOLERANCE = 2e-4
Parts = list[int] | tuple[bytes, int]


class World(NamedTuple):
    """A server on the first of two models, and the trainer's policies of both."""

    server: ServerProcess
    models: list[Path]
    policies: list[Policy]


@pytest.fixture(scope="module", params=["qwen2_vl", "qwen2_5_vl", "qwen3_vl"])
def world(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    root = tmp_path_factory.mktemp(request.param)
    models = [make_vision_model(root / f"model{seed}", request.param, seed) for seed in (0, 1)]
    tree = {"model": {"name": str(models[0]), "dtype": "float32", "vision": "trained"}}
    server = ServerProcess(root / "run", models[0], tree=tree)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        policies = [vision_policy(model) for model in models]
        yield World(server.wait_ready(), models, policies)
    finally:
        dist.destroy_process_group()
        server.close()


def post(world: World, route: str, body: dict[str, Any]) -> dict[str, Any]:
    """The server's answer."""
    headers = {"Authorization": f"Bearer {find_key(world.server.url)}"}
    answer = httpx.post(f"{world.server.url}{route}", json=body, headers=headers, timeout=300)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def ask(world: World, *parts: Parts, max_tokens: int = 12) -> tuple[Shown, list[float], list[int]]:
    """A reply's sample, the log-probabilities of its sampled tokens, and its policy version."""
    config = world.policies[0].hf.config
    ids: list[int] = []
    content = []
    for part in parts:
        if isinstance(part, list):
            ids += part
            continue
        ids += [config.vision_start_token_id, config.image_token_id, config.vision_end_token_id]
        content.append({"type": "image_url", "url": f"data:image/png;base64,{base64.b64encode(part[0]).decode()}"})
    body: dict[str, Any] = {
        "model": "policy",
        "token_ids": ids,
        "return_token_ids": True,
        "sampling_params": {"max_tokens": max_tokens, "logprobs": 0, "temperature": 1.0, "ignore_eos": True},
    }
    body |= {"content_parts": content} if content else {}
    found = post(world, "/inference/v1/generate", body)
    choice = found["choices"][0]
    prompt = found["prompt_token_ids"]
    numbers = np.zeros(len(prompt) + len(choice["token_ids"]), np.int32)
    places = (found.get("mm_placeholders") or {}).get("image") or []
    for number, place in enumerate(places, 1):
        numbers[place["offset"] : place["offset"] + place["length"]] = number
    images = tuple(part[0] for part in parts if isinstance(part, tuple))
    assert [place["length"] for place in places] == [part[1] for part in parts if isinstance(part, tuple)]
    shown = Shown(np.array(prompt + choice["token_ids"], np.int32), numbers, images)
    sampled = [entry["logprob"] for entry in choice["logprobs"]["content"]]
    return shown, sampled, [int(span["version"]) for span in choice["weight_versions"]]


@torch.no_grad()
def assert_agrees(world: World, version: int) -> None:
    asked: list[list[Parts]] = [
        [[1, 5, 9], WIDE, [7, 8, 30]],
        [[1, 5, 9], TALL, [4], OTHER, [7, 8, 30, 31]],
        [[1, 5, 9], OTHER, [7, 8, 30]],
        [[1, 5, 9, 7, 8, 30]],
        [[1, 5, 9], WIDE, [7, 8, 30]],
    ]
    for parts in asked:
        shown, sampled, versions = ask(world, *parts)
        assert versions == [version]
        batch = batch_of([shown], [[0]])
        found = logprobs(world.policies[version], batch, 0)[-len(sampled) :]
        np.testing.assert_allclose(sampled, found.numpy(), atol=TOLERANCE, rtol=0)
        if shown.images:
            other = logprobs(world.policies[1 - version], batch, 0)[-len(sampled) :]
            assert (found - other).abs().max() > 100 * TOLERANCE


def test_engine_and_trainer_see_the_same(world: World) -> None:
    assert_agrees(world, 0)
    folder = publish(world.models[1], world.server.run_dir, 1)
    post(world, "/update_weights", {"path": str(folder), "version": 1})
    assert_agrees(world, 1)


def test_a_version_that_comes_in_the_midst_of_a_reply_is_shown_the_image_again(world: World) -> None:
    """Of a prompt whose image was cached: the cache is emptied, and the worker must have what to fill it from."""
    prompt: list[Parts] = [[1, 5, 9], TALL, list(range(10, 250))]
    for version in range(2, 12):  # until it comes in the midst of one
        ask(world, *prompt)
        with ThreadPoolExecutor(4) as pool:
            replies = [pool.submit(ask, world, *prompt, max_tokens=200) for _ in range(4)]
            folder = publish(world.models[0], world.server.run_dir, version)
            post(world, "/update_weights", {"path": str(folder), "version": version})
            found = [versions for _, _, versions in (reply.result() for reply in replies)]
        if [version - 1, version] in found:
            return
    pytest.fail(f"all replies were of one version: {found}")
