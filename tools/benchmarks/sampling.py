"""`tools/bench sampling`: the trainer's log-probabilities against the engine's, of one policy, by dtype and sampling.

A real vLLM server on the CPU samples replies of a random Qwen3 of 7 million parameters, with the parameters that a run
with this `orchestrator.sampling` would send; the trainer's policy scores the batch that the orchestrator would make of
them. Nothing is trained, so that every importance ratio should be 1: what is left are the rounding of two
implementations and mistakes. Peaked distributions, as a trained model's are, and a vocabulary of 16,384.

`bias` is the mean of log p_trainer - log p_engine over the sampled tokens, `error` the mean of its absolute value,
`ratio` the mean importance ratio. `untruncated` is the mean ratio where the trainer scores over the whole vocabulary.
"""

import asyncio
import dataclasses
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

DTYPES = ("float32", "bfloat16")
SAMPLINGS: tuple[dict[str, Any], ...] = (
    {"temperature": 1.0},
    {"temperature": 0.7},
    {"temperature": 0.6},
    {"temperature": 1.0, "top_p": 0.95},
    {"temperature": 0.7, "top_p": 0.95, "top_k": 20},
    {"temperature": 1.0, "min_p": 0.05},
)
NUM_PROMPTS = 64
PROMPT_TOKENS = 12
REPLY_TOKENS = 64
VOCAB = 16_384
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 4,
    "initializer_range": 0.3,
}
"""Logits with a standard deviation of about 5: replies of some 1 to 2 nats a token."""


@contextmanager
def trainer_policy(model: Path, dtype: str) -> Iterator[Any]:
    """The policy that a trainer of one rank has, in a process group of its own."""
    import torch
    import torch.distributed as dist

    from prime_hpc.config.sections.common import ModelConfig
    from prime_hpc.config.sections.parallel import ParallelDims
    from prime_hpc.trainer.model.load_policy import load_policy
    from prime_hpc.trainer.parallel import build_parallel

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        config = ModelConfig(name=str(model), dtype=dtype)
        parallel = build_parallel(ParallelDims(), "cpu")
        yield load_policy(config, model, parallel, torch.device("cpu"), reshard_after_forward=False, chunk_tokens=1024)
    finally:
        dist.destroy_process_group()


async def sample(url: str, key: str | None, sampling: Any, num_prompts: int, num_tokens: int) -> list[Any]:
    """Training samples of random prompts, each with one reply of `num_tokens` tokens."""
    import numpy as np

    from prime_hpc.client.inference import InferenceClient
    from prime_hpc.envs.samples import Sample

    rng = np.random.default_rng(0)
    prompts = rng.integers(0, 256, (num_prompts, PROMPT_TOKENS))
    parameters = sampling.parameters() | {"max_tokens": num_tokens, "ignore_eos": True}
    async with InferenceClient(url, key) as client:
        replies = await asyncio.gather(*(client.generate(prompt, parameters) for prompt in prompts))
    samples = []
    for prompt, reply in zip(prompts, replies, strict=True):
        ids = np.concatenate([prompt, reply.token_ids]).astype(np.int32)
        mask = np.arange(len(ids)) >= len(prompt)
        logprobs = np.zeros(len(ids), np.float32)
        logprobs[mask] = reply.logprobs
        versions = np.where(mask, 0, -1).astype(np.int32)
        samples.append(Sample(ids, mask, logprobs, versions, num_turns=1, reward=0.0))
    return samples


def compare(policy: Any, samples: Sequence[Any], sampling: Any) -> dict[str, float]:
    """Figures of one batch: `bias`, `error`, `ratio`, `untruncated`, and how many tokens they are of."""
    import numpy as np
    import torch

    from prime_hpc.orchestrator.batching.batch_builder import TrainSample, build_ranks
    from prime_hpc.trainer.batching.micro_batches import make_micro_batch

    zeros = [np.zeros(s.num_tokens, np.float32) for s in samples]
    trained = [TrainSample(s, zero, 0.0, i, i, 0) for i, (s, zero) in enumerate(zip(samples, zeros, strict=True))]
    found: list[tuple[Any, Any]] = []
    (batch,) = build_ranks(trained, num_ranks=1, micro_batch_tokens=2048, sampling=sampling)
    for index in range(batch.num_micro_batches):
        micro = make_micro_batch(batch, index)
        whole = dataclasses.replace(micro, top_p=None, top_k=None, min_p=None)
        with torch.no_grad(), policy.packing(micro):
            found.append(tuple((policy(m)[0] - micro.behaviour_logprobs).double() for m in (micro, whole)))
    gap, over_all = (torch.cat(parts) for parts in zip(*found, strict=True))
    return {
        "bias": gap.mean().item(),
        "error": gap.abs().mean().item(),
        "max": gap.abs().max().item(),
        "ratio": gap.exp().mean().item(),
        "untruncated": over_all.exp().mean().item(),
        "tokens": float(len(gap)),
    }


def measure(
    folder: Path,
    dtype: str,
    samplings: Sequence[dict[str, Any]],
    *,
    num_prompts: int = NUM_PROMPTS,
    num_tokens: int = REPLY_TOKENS,
    inference: Mapping[str, Any] | None = None,
    **shape: Any,
) -> list[dict[str, float]]:
    """Figures of each sampling, from one server (`inference`: more of its section) and one policy of a new random model
    below `folder`."""
    from prime_hpc.config.sections.sampling import SamplingConfig
    from tests.support.inference_server import ServerProcess, save_model

    model = save_model(folder / "model", tied=True, seed=0, **SHAPE | shape)
    server = ServerProcess(folder / "run", model, {"max_num_seqs": 64, **(inference or {})}, dtype=dtype)
    figures = []
    try:
        server.wait_ready()
        with trainer_policy(model, dtype) as policy:
            for stated in samplings:
                sampling = SamplingConfig(**stated)
                samples = asyncio.run(sample(server.url, server.key, sampling, num_prompts, num_tokens))
                figures.append(compare(policy, samples, sampling))
    finally:
        server.close()
    return figures


def run() -> dict[str, Any]:
    """Figures by dtype and sampling."""
    rows = []
    for dtype in DTYPES:
        with tempfile.TemporaryDirectory(prefix="sampling-") as folder:
            for stated, found in zip(SAMPLINGS, measure(Path(folder), dtype, SAMPLINGS), strict=True):
                rows.append({"dtype": dtype, **stated, **found})
    return {"rows": rows}


def render(figures: dict[str, Any]) -> str:
    """A table, one sampling a line."""
    lines = [f"{'dtype':<9} {'sampling':<44} {'bias':>9} {'error':>9} {'max':>8} {'ratio':>7} {'untruncated':>11}"]
    for row in figures["rows"]:
        stated = ", ".join(f"{k} {row[k]:g}" for k in ("temperature", "top_p", "top_k", "min_p") if k in row)
        lines.append(
            f"{row['dtype']:<9} {stated:<44} {row['bias']:>9.1e} {row['error']:>9.1e} {row['max']:>8.1e} "
            f"{row['ratio']:>7.4f} {row['untruncated']:>11.4f}"
        )
    return "\n".join([*lines, f"{figures['rows'][0]['tokens']:.0f} sampled tokens a line"])
