"""`tools/bench routers`: the trainer's log-probabilities against the engine's of a mixture of experts, replayed or not.

A real server samples replies of a random Qwen3-MoE (4 layers, 16 experts, 4 a token) and records to which experts it
sent each token; the trainer's policy scores them with the recorded experts (`replayed`), with its own choice (`live`),
and with recorded experts of other tokens (`shuffled`: the control, which must be far off). The dense model of the same
shape says what two implementations differ by where there is nothing to choose. Nothing is trained, so that every
importance ratio should be 1. `error` is the mean of |log p_trainer - log p_engine|, `max` its largest, `k3` the mean
KL estimate, `other` the share of (token, layer) pairs whose experts the trainer would have chosen otherwise.
"""

import asyncio
import dataclasses
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

BACKENDS = ("vllm", "transformers")
NUM_PROMPTS, PROMPT_TOKENS, REPLY_TOKENS = 64, 12, 48
SHAPE: dict[str, Any] = {
    "vocab_size": 2048,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
}
EXPERTS: dict[str, Any] = {
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 64,
    "norm_topk_prob": True,
}
CASES: tuple[tuple[str, str], ...] = (("dense", "model"), ("moe", "model"), ("moe", "float32"))
"""Model and `model.router_dtype`."""


def save(folder: Path, *, experts: bool) -> Path:
    """Write a random model of `SHAPE`, with or without experts."""
    import torch
    import transformers as hf

    torch.manual_seed(0)
    model: Any
    if experts:
        model = hf.Qwen3MoeForCausalLM(hf.Qwen3MoeConfig(**SHAPE, **EXPERTS))
    else:
        model = hf.Qwen3ForCausalLM(hf.Qwen3Config(**SHAPE))
    model.save_pretrained(folder)
    return folder


async def sample(url: str, key: str | None, num_prompts: int, num_tokens: int) -> list[Any]:
    """Training samples of random prompts with one reply each, as the orchestrator makes them."""
    import numpy as np

    from prime_hpc.client.inference import InferenceClient, parse_choice
    from prime_hpc.envs.routing import parse_routing
    from prime_hpc.envs.samples import Sample

    prompts = np.random.default_rng(0).integers(0, SHAPE["vocab_size"], (num_prompts, PROMPT_TOKENS))
    params = {"temperature": 1.0, "max_tokens": num_tokens, "ignore_eos": True, "logprobs": 0}
    bodies = [{"model": "policy", "token_ids": p.tolist(), "sampling_params": params} for p in prompts]
    async with InferenceClient(url, key) as client:
        answers = await asyncio.gather(*map(client.complete, bodies))
    samples = []
    for prompt, answer in zip(prompts, answers, strict=True):
        (choice,) = answer["choices"]
        reply, rows = parse_choice(choice), parse_routing(choice)
        ids = np.concatenate([prompt, reply.token_ids]).astype(np.int32)
        mask = np.arange(len(ids)) >= len(prompt)
        logprobs = np.zeros(len(ids), np.float32)
        logprobs[mask] = reply.logprobs
        routed = None
        if rows is not None:
            routed = np.concatenate([rows, np.full_like(rows[:1], np.iinfo(rows.dtype).max)])
        versions = np.where(mask, 0, -1).astype(np.int32)
        samples.append(Sample(ids, mask, logprobs, versions, num_turns=1, reward=0.0, routed=routed))
    return samples


def compare(policy: Any, samples: Sequence[Any]) -> dict[str, float]:
    """`error`, `max` and `k3` of the trainer's log-probabilities, by the experts that the samples name."""
    import numpy as np
    import torch

    from prime_hpc.config.sections.sampling import SamplingConfig
    from prime_hpc.orchestrator.batching.batch_builder import TrainSample, build_ranks
    from prime_hpc.trainer.batching.micro_batches import make_micro_batch

    zeros = [np.zeros(s.num_tokens, np.float32) for s in samples]
    trained = [TrainSample(s, zero, 0.0, i, i, 0) for i, (s, zero) in enumerate(zip(samples, zeros, strict=True))]
    (batch,) = build_ranks(trained, num_ranks=1, micro_batch_tokens=2048, sampling=SamplingConfig())
    found = []
    for index in range(batch.num_micro_batches):
        micro = make_micro_batch(batch, index)
        with torch.no_grad(), policy.packing(micro):
            found.append((policy(micro)[0] - micro.behaviour_logprobs).double())
    gap = torch.cat(found)
    k3 = float((gap.exp() - 1 - gap).mean())
    return {"error": float(gap.abs().mean()), "max": float(gap.abs().max()), "k3": k3, "tokens": float(len(gap))}


def other_choices(policy: Any, samples: Sequence[Any]) -> float:
    """Share of (token, layer) pairs in which the trainer's own choice is not the recorded set of experts."""
    import numpy as np
    import torch

    from prime_hpc.moe.routers import moe_layers
    from prime_hpc.trainer.batching.micro_batches import build_rank_batch, make_micro_batch

    chosen: list[torch.Tensor] = []
    layers = moe_layers(policy.hf)
    hooks = [m.experts.register_forward_pre_hook(lambda _, args: chosen.append(args[1])) for m in layers]
    differ = []
    for s in samples:
        micro = make_micro_batch(build_rank_batch([[0]], [s.token_ids], [s.loss_mask]), 0)
        chosen.clear()
        with torch.no_grad(), policy.packing(micro):
            policy(micro)
        live = torch.stack(chosen, 1).sort(-1).values.numpy()[:-1]
        differ.append((live != np.sort(s.routed[:-1], -1)).any(-1).ravel())
    for hook in hooks:
        hook.remove()
    return float(np.concatenate(differ).mean())


def measure(
    folder: Path, backend: str, dtype: str, *, cases: Sequence[tuple[str, str]] = CASES, **counts: int
) -> list[dict[str, Any]]:
    """Rows of figures of one backend and type, a server and a policy for each case, below `folder`."""
    import numpy as np

    from tests.support.inference_server import ServerProcess

    rows = []
    for kind, router in cases:
        is_moe, place = kind == "moe", folder / f"{backend}-{dtype}-{kind}-{router}"
        model = save(folder / kind, experts=is_moe)
        tree: dict[str, dict[str, Any]] = {"model": {"router_dtype": router}, "trainer": {"router_replay": is_moe}}
        server = ServerProcess(place, model, {"max_num_seqs": 32, "backend": backend}, dtype=dtype, tree=tree)
        try:
            server.wait_ready()
            how = {"num_prompts": NUM_PROMPTS, "num_tokens": REPLY_TOKENS} | counts
            samples = asyncio.run(sample(server.url, server.key, **how))
        finally:
            server.close()
        row: dict[str, Any] = {"backend": backend, "dtype": dtype, "model": kind, "router": router}
        live = [dataclasses.replace(s, routed=None) for s in samples]
        with trainer_policy(model, dtype, router, is_moe) as policy:
            if not is_moe:
                rows.append(row | {"experts": "none"} | compare(policy, live))
                continue
            rng, other = np.random.default_rng(1), other_choices(policy, samples)
            mixed = [dataclasses.replace(s, routed=rng.permutation(s.routed)) for s in samples]
            for name, used in (("replayed", samples), ("live", live), ("shuffled", mixed)):
                rows.append(row | {"experts": name, "other": other} | compare(policy, used))
    return rows


def trainer_policy(model: Path, dtype: str, router: str, replays: bool) -> Any:
    """The policy that a trainer of one rank has, in a process group of its own."""
    from contextlib import contextmanager

    import torch
    import torch.distributed as dist

    from prime_hpc.config.sections.common import ModelConfig
    from prime_hpc.config.sections.parallel import ParallelDims
    from prime_hpc.trainer.model.load_policy import load_policy
    from prime_hpc.trainer.parallel import build_parallel

    @contextmanager
    def opened() -> Any:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        try:
            config = ModelConfig.model_validate({"name": str(model), "dtype": dtype, "router_dtype": router})
            parallel, cpu = build_parallel(ParallelDims(), "cpu"), torch.device("cpu")
            options: dict[str, Any] = {"reshard_after_forward": False, "chunk_tokens": 1024}
            yield load_policy(config, model, parallel, cpu, replays_routers=replays, **options)
        finally:
            dist.destroy_process_group()

    return opened()


def run() -> dict[str, Any]:
    """Figures by backend, type, model and experts."""
    rows = []
    for backend in BACKENDS:
        for dtype in ("float32", "bfloat16"):
            with tempfile.TemporaryDirectory(prefix="routers-") as folder:
                rows += measure(Path(folder), backend, dtype)
    return {"rows": rows}


def render(figures: dict[str, Any]) -> str:
    """A table, one comparison a line."""
    titles = ("backend", "dtype", "model", "router", "experts", "error", "max", "k3", "other")
    lines = ["{:<13} {:<9} {:<6} {:<8} {:<9} {:>9} {:>9} {:>9} {:>7}".format(*titles)]
    for row in figures["rows"]:
        other = f"{row['other']:.2%}" if "other" in row else ""
        lines.append(
            f"{row['backend']:<13} {row['dtype']:<9} {row['model']:<6} {row['router']:<8} {row['experts']:<9} "
            f"{row['error']:>9.1e} {row['max']:>9.1e} {row['k3']:>9.1e} {other:>7}"
        )
    return "\n".join([*lines, f"{figures['rows'][0]['tokens']:.0f} sampled tokens a line"])
