"""Adapters in a real vLLM server on CPU: the trainer's own numbers, versions per token, several names, refusals.

The adapters are published by the trainer's publisher from random slots of a tiny policy.
"""

import asyncio
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from prime_hpc.client.inference import Generation, InferenceClient, InferenceError
from prime_hpc.config.sections.lora import LoraConfig
from prime_hpc.store.run_paths import RunPaths
from prime_hpc.trainer.model.policy import Policy
from prime_hpc.trainer.weights.lora_files import AdapterPublisher
from tests.support.inference_server import ServerProcess, hf_logprobs, publish, save_model
from tests.support.lora import adapters_of, fill_randomly, lora_policy, merged_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

TOLERANCE = 1e-4
TRIES = 8
LORA = {"rank": 6, "alpha": 12}
GREEDY = {"max_tokens": 24, "temperature": 0.0, "ignore_eos": True}
PROMPTS = [[(7 * i + 3 * j) % 400 for j in range(5 + 3 * i)] for i in range(6)]
LONG = [(11 * j) % 400 for j in range(300)]
"""Two blocks of the prefix cache."""


@dataclass
class World:
    """A server, the adapters' folders by version, and the merged model of each."""

    server: ServerProcess
    base: Path
    versions: dict[int, Path]
    merged: dict[int, Path]
    policy: Policy

    def run(self, work: Any) -> Any:
        """The result of an async function of a client."""

        async def inside() -> Any:
            async with InferenceClient(self.server.url, timeout_s=200) as client:
                return await work(client)

        return asyncio.run(inside())


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    root = tmp_path_factory.mktemp("lora")
    base = save_model(root / "base", tied=True, seed=0)
    run_dir = root / "run"
    inference = {"max_num_seqs": 16, "vllm": {"enable_prefix_caching": True}}
    server = ServerProcess(run_dir, base, inference, lora=LORA)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        policy = lora_policy(base, num_slots=20, lora=LoraConfig.model_validate(LORA))
        versions, merged = {}, {}
        for version in range(1, 20):
            tensors = fill_randomly(policy, version, seed=version)
            publisher = AdapterPublisher(
                policy, base, RunPaths(run_dir), incarnation=0, model_name=str(base), slot=version
            )
            publisher.publish(version)
            versions[version] = RunPaths(run_dir).weights_step(version)
            merged[version] = root / f"merged{version}"
            merged_model(base, tensors, 2.0).save_pretrained(merged[version])
        yield World(server.wait_ready(), base, versions, merged | {0: base}, policy)
    finally:
        dist.destroy_process_group()
        server.close()


def assert_sampled_by(folder: Path, version: int, prompt: list[int], generation: Generation) -> None:
    """Every token's log-probability is the model's, and every token says so."""
    expected = hf_logprobs(folder, prompt, generation.token_ids.tolist())
    np.testing.assert_allclose(generation.logprobs, expected.numpy(), atol=TOLERANCE, rtol=0)
    assert (generation.versions == version).all()


def test_base_then_versions_in_turn(world: World) -> None:
    async def greedy(client: InferenceClient) -> list[Generation]:
        return list(await asyncio.gather(*[client.generate(p, GREEDY) for p in (*PROMPTS, LONG)]))

    assert world.run(lambda c: c.policy_version()) == 0
    for version in (0, 1, 2):
        if version:
            answer = world.run(lambda c, v=version: c.update_weights(world.versions[v], v))
            assert answer["changed"] and answer["version"] == version
            again = world.run(lambda c, v=version: c.update_weights(world.versions[v], v))
            assert again["changed"] is False and world.run(lambda c: c.policy_version()) == version
        for generations in (world.run(greedy), world.run(greedy)):  # the second one from the prefix cache
            for prompt, generation in zip((*PROMPTS, LONG), generations, strict=True):
                assert_sampled_by(world.merged[version], version, prompt, generation)


def test_the_trainer_says_the_same(world: World) -> None:
    from prime_hpc.trainer.batching.micro_batches import make_micro_batch
    from tests.support.tiny_model import random_rank_batch

    world.run(lambda c: c.update_weights(world.versions[2], 2))
    batch = random_rank_batch([[40]], seed=0)
    generation = world.run(lambda c: c.generate(PROMPTS[0], {**GREEDY, "max_tokens": 35}))
    batch.token_ids[:] = PROMPTS[0] + generation.token_ids.tolist()
    batch.loss_mask[:] = np.arange(40) >= 5
    batch.temperatures[:] = 1
    micro = make_micro_batch(batch, 0)
    with torch.no_grad(), adapters_of(world.policy).use(2), world.policy.packing(micro):
        logprobs, _ = world.policy(micro)
    np.testing.assert_allclose(generation.logprobs, logprobs.numpy(), atol=TOLERANCE, rtol=0)


@pytest.mark.exhaustive
def test_requests_in_flight_end_with_their_version(world: World) -> None:
    async def work(client: InferenceClient) -> tuple[list[Generation], list[bool], Generation]:
        await client.update_weights(world.versions[1], 1)
        early = [asyncio.create_task(client.generate(p, {**GREEDY, "max_tokens": 480})) for p in PROMPTS * 2]
        await client.generate(PROMPTS[0], {**GREEDY, "max_tokens": 2})  # sent last: most others are under way
        await client.update_weights(world.versions[2], 2)
        under_way = [not task.done() for task in early]
        late = await client.generate(PROMPTS[1], GREEDY)
        return list(await asyncio.gather(*early)), under_way, late

    for _ in range(TRIES):  # on a busy machine the update may come before or after all of them
        early, under_way, late = world.run(work)
        for prompt, generation in zip(PROMPTS * 2, early, strict=True):
            assert len(generation.token_ids) == 480 and generation.finish_reason == "length"
            version = int(generation.versions[0])
            assert_sampled_by(world.merged[version], version, prompt, generation)
        assert_sampled_by(world.merged[2], 2, PROMPTS[1], late)
        if any(held and one.versions[0] == 1 for held, one in zip(under_way, early, strict=True)):
            return
    pytest.fail("no request was under way while the version changed")


def test_several_names_and_the_base_in_one_batch(world: World) -> None:
    async def work(client: InferenceClient) -> list[Generation]:
        await client.update_weights(world.versions[2], 2)
        await client.update_weights(world.versions[3], 3, name="run_b")
        await client.update_weights(world.versions[1], 1, name="run_c")  # as many as the engine has places
        assert await client.adapter_versions() == {"policy": 2, "run_b": 3, "run_c": 1}
        assert await client.policy_version("run_b") == 3
        names = ["policy", "run_b", "run_c", str(world.base)] * 3
        return list(await asyncio.gather(*[client.generate(LONG, GREEDY, model=name) for name in names]))

    for generation, version in zip(world.run(work), [2, 3, 1, 0] * 3, strict=True):
        assert_sampled_by(world.merged[version], version, LONG, generation)

    async def unload(client: InferenceClient) -> None:
        assert (await client.reload_weights("run_b"))["changed"]
        assert (await client.reload_weights("run_c"))["changed"]
        with pytest.raises(InferenceError, match="run_b") as caught:
            await client.generate(LONG, GREEDY, model="run_b")
        assert caught.value.status == 404
        with pytest.raises(InferenceError, match="no adapter is served as run_b; there are") as caught:
            await client.policy_version("run_b")
        assert caught.value.status == 404
        assert await client.policy_version() == 2

    world.run(unload)


def test_many_versions_under_one_long_request(world: World) -> None:
    """The engines have room for a few; what is too old is aborted, with its own version, and the server lives."""

    async def work(client: InferenceClient) -> tuple[Generation, list[Generation]]:
        await client.update_weights(world.versions[1], 1)
        early = asyncio.create_task(client.generate(PROMPTS[1], {**GREEDY, "max_tokens": 450}))
        await client.generate(PROMPTS[0], {**GREEDY, "max_tokens": 2})
        for version in range(4, 20):
            await client.update_weights(world.versions[version], version)
        await client.update_weights(world.versions[2], 2)
        later = await asyncio.gather(*[client.generate(p, GREEDY) for p in PROMPTS])
        return await early, list(later)

    early, later = world.run(work)
    assert early.finish_reason in ("abort", "length") and len(set(early.versions.tolist())) <= 1
    begun_with = int(early.versions[0]) if len(early.versions) else 1  # 1, unless a busy server took it up later
    assert_sampled_by(world.merged[begun_with], begun_with, PROMPTS[1], early)
    for prompt, generation in zip(PROMPTS, later, strict=True):
        assert_sampled_by(world.merged[2], 2, prompt, generation)


def test_refusals_leave_everything_as_it_was(world: World, tmp_path: Path) -> None:
    whole = publish(world.base, tmp_path / "whole", 7)
    other = save_model(tmp_path / "other", tied=True, seed=0, hidden_size=64)
    foreign = lora_policy(other, lora=LoraConfig(rank=4))
    paths = RunPaths(tmp_path / "foreign")
    AdapterPublisher(foreign, other, paths, incarnation=0, model_name="other").publish(8)
    wide = lora_policy(world.base, lora=LoraConfig(rank=16))
    AdapterPublisher(wide, world.base, paths, incarnation=0, model_name="base").publish(9)
    broken = tmp_path / "broken"
    shutil.copytree(world.versions[3], broken)
    (broken / "adapter_model.safetensors").write_bytes(b"x" * 100)
    cases = [
        (whole, 7, "and this server serves adapters"),
        (paths.weights_step(8), 8, "has shape"),
        (paths.weights_step(9), 9, r"rank 16, the server was started for 8 \(model.lora.rank\)"),
        (broken, 3, "not a complete weight version"),
        (world.versions[3], 4, "holds version 3, not 4"),
        (tmp_path / "nothing", 4, "not a complete weight version"),
    ]

    async def work(client: InferenceClient) -> Generation:
        await client.update_weights(world.versions[2], 2)
        for folder, version, words in cases:
            with pytest.raises(InferenceError, match=words) as caught:
                await client.update_weights(folder, version)
            assert caught.value.status == 400
        assert await client.policy_version() == 2
        return await client.generate(LONG, GREEDY)

    assert_sampled_by(world.merged[2], 2, LONG, world.run(work))


def test_back_to_the_base_model(world: World) -> None:
    async def work(client: InferenceClient) -> Generation:
        await client.update_weights(world.versions[2], 2)
        assert (await client.reload_weights())["version"] == 0
        assert await client.policy_version() == 0
        return await client.generate(LONG, GREEDY)

    assert_sampled_by(world.merged[0], 0, LONG, world.run(work))


def test_a_run_begins_as_the_base_model_under_its_own_name(world: World) -> None:
    async def work(client: InferenceClient) -> list[Generation]:
        assert (await client.serve_base("run_new"))["version"] == 0
        assert await client.policy_version("run_new") == 0
        before = await client.generate(LONG, GREEDY, model="run_new")
        await client.update_weights(world.versions[1], 1, name="run_new")
        after = await client.generate(LONG, GREEDY, model="run_new")
        await client.serve_base("run_new")  # its next attempt begins anew
        anew = await client.generate(LONG, GREEDY, model="run_new")
        await client.reload_weights("run_new")
        with pytest.raises(InferenceError, match="run_new"):
            await client.generate(LONG, GREEDY, model="run_new")
        return [before, after, anew]

    for generation, version in zip(world.run(work), [0, 1, 0], strict=True):
        assert_sampled_by(world.merged[version], version, LONG, generation)


def test_a_version_that_is_made_anew_is_loaded_and_shares_no_cache(world: World, tmp_path: Path) -> None:
    """A run that goes back makes versions once more, under the same names; a server that serves on has the former."""
    again = RunPaths(tmp_path / "again")

    def publish(slot: int) -> None:
        shutil.rmtree(again.weights_step(7), ignore_errors=True)
        options: dict[str, Any] = {"incarnation": 0, "model_name": str(world.base), "slot": slot}
        AdapterPublisher(world.policy, world.base, again, **options).publish(7)

    async def work(client: InferenceClient) -> Generation:
        assert (await client.update_weights(again.weights_step(7), 7))["changed"]
        assert not (await client.update_weights(again.weights_step(7), 7))["changed"]
        return await client.generate(LONG, GREEDY)

    for slot in (3, 5):
        publish(slot)
        assert_sampled_by(world.merged[slot], 7, LONG, world.run(work))


def test_it_ends_in_order(world: World) -> None:
    assert world.server.terminate() == 0
