"""Three steps at a learning rate of 0, in one process: sampled by the second backend, updated in flight, trained."""

import asyncio
import dataclasses
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch

from prime_hpc.client.inference import parse_choice
from prime_hpc.config.sections.common import ModelConfig
from prime_hpc.config.sections.parallel import ParallelDims
from prime_hpc.config.sections.sampling import SamplingConfig
from prime_hpc.config.sections.trainer import LossConfig, OptimConfig, TrainerConfig
from prime_hpc.envs.routing import parse_routing
from prime_hpc.envs.samples import Sample
from prime_hpc.inference.transformers.app import build_app
from prime_hpc.inference.transformers.engine import Engine
from prime_hpc.inference.transformers.model import BatchModel
from prime_hpc.inference.transformers.requests import Reader
from prime_hpc.inference.transformers.weight_updates import BatchPolicy
from prime_hpc.orchestrator.batching.batch_builder import TrainSample, build_ranks
from prime_hpc.store.batch.rank_batch import RankBatch
from prime_hpc.trainer.model.load_policy import load_policy
from prime_hpc.trainer.objectives import rl_loss
from prime_hpc.trainer.optim import build_optimizer
from prime_hpc.trainer.parallel import build_parallel
from prime_hpc.trainer.train_step import TrainStep
from tests.support.inference_server import publish
from tests.support.tiny_model import make_tiny_model

pytestmark = pytest.mark.slow
CPU, PROMPTS, REPLY = torch.device("cpu"), 16, 40


async def sample(http: httpx.AsyncClient, prompt: list[int]) -> Sample:
    """One reply, as the orchestrator would have it."""
    params = {"logprobs": 0, "temperature": 1.0, "max_tokens": REPLY, "ignore_eos": True}
    answer = await http.post(
        "/inference/v1/generate", json={"model": "policy", "token_ids": prompt, "sampling_params": params}
    )
    (choice,) = answer.json()["choices"]
    reply, rows = parse_choice(choice), parse_routing(choice)
    assert rows is not None and len(rows) == len(prompt) + REPLY - 1
    ids = np.array([*prompt, *reply.token_ids], np.int32)
    mask, logprobs, versions = np.arange(len(ids)) >= len(prompt), np.zeros(len(ids), np.float32), np.full(len(ids), -1)
    logprobs[mask], versions[mask] = reply.logprobs, reply.versions
    routed = np.concatenate([rows, np.full_like(rows[:1], 255)])
    return Sample(ids, mask, logprobs, versions.astype(np.int32), 1, 0.0, routed=routed)


async def roll(app: Any, engine: Engine, policy: BatchPolicy, version: Path, step: int) -> list[Sample]:
    """All replies of a step; the next version comes while they are under way."""
    rng = np.random.default_rng(step)
    prompts = [rng.integers(3, 256, 5 + 2 * (i % 8)).tolist() for i in range(PROMPTS)]
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://server", timeout=280) as http:
        before = engine.num_sampled
        calls = [asyncio.create_task(sample(http, prompt)) for prompt in prompts]
        while engine.num_sampled == before:
            await asyncio.sleep(0.002)
        await policy.update(str(version), step, "policy")
        return list(await asyncio.gather(*calls))


def batch_of(samples: list[Sample]) -> RankBatch:
    rng = np.random.default_rng(0)
    advantages = [np.where(s.loss_mask, np.float32(rng.standard_normal()), np.float32(0)) for s in samples]
    trained = [TrainSample(s, a, 0.0, i, i // 4, 0) for i, (s, a) in enumerate(zip(samples, advantages, strict=True))]
    (batch,) = build_ranks(trained, num_ranks=1, micro_batch_tokens=512, sampling=SamplingConfig())
    return batch


def test_updates_in_flight_and_steps_keep_the_engines_probabilities(group: None, tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "model", experts=8, expert_width=32)
    versions = [publish(folder, tmp_path / "run", n) for n in (1, 2, 3)]
    options: dict[str, Any] = {"max_len": 128, "cache_gib": 0.05, "max_rows": 8, "records_experts": True}
    model = BatchModel(str(folder), dtype=torch.float32, device=CPU, float32_routers=True, **options)
    assert model.self_test() < 1e-3
    engine = Engine(model, seed=0)
    served = BatchPolicy(engine, str(folder), folder, tmp_path / "scratch")
    app = build_app(engine, served, Reader(None, ["policy"], model.vocab_size, 128), 128)
    engine.start()
    config = ModelConfig(name=str(folder), dtype="float32", router_dtype="float32")
    load: dict[str, Any] = {"reshard_after_forward": False, "chunk_tokens": 512, "replays_routers": True}
    policy = load_policy(config, folder, build_parallel(ParallelDims(), "cpu"), CPU, **load)
    optim = OptimConfig(lr=0, weight_decay=0)
    train = TrainStep(
        policy, build_optimizer(policy, optim), TrainerConfig(optim=optim, no_sync=False, reshard_after_forward=False),
        max_steps=9, normalize="token", device=CPU, peak_flops=1.0,
    )  # fmt: skip
    seen: set[int] = set()
    for step, version in enumerate(versions, 1):
        samples = asyncio.run(roll(app, engine, served, version, step))
        seen |= {int(v) for s in samples for v in s.versions[s.loss_mask]}
        metrics = train.run(step, batch_of(samples), partial(rl_loss, LossConfig()))
        assert metrics["num_targets"] == PROMPTS * REPLY and metrics["grad_norm"] > 1e-3
        assert metrics["logprob_diff"] < 1e-4 and metrics["logprob_diff_max"] < 0.01
    assert seen == {0, 1, 2, 3}
    rng = np.random.default_rng(0)
    wrong = [dataclasses.replace(s, routed=rng.permutation(s.routed)) for s in samples if s.routed is not None]
    assert train.run(4, batch_of(wrong), partial(rl_loss, LossConfig()))["logprob_diff"] > 0.1
    none = [dataclasses.replace(s, routed=None) for s in samples]
    with pytest.raises(ValueError, match="holds no recorded experts"):
        train.run(5, batch_of(none), partial(rl_loss, LossConfig()))
    engine.stop(30)
    assert engine.failure is None
