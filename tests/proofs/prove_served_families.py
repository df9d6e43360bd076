"""Model family x (served, not served): the engine samples from the distribution that the trainer trains.

Every family that lint takes: a small random model is served by vLLM on this CPU, then the trainer's next version, which
its publisher wrote, is loaded into the running engine, then the base model again. The log-probabilities of what was
sampled are compared with the trainer's own. A family that vLLM refuses to start is `not_served`: nothing silent. One
that starts and then fails is `wrong`, unless lint refuses it with CPU engines.

`value`: largest difference of a log-probability, in nats.
"""

import json
import math
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import torch

from prime_hpc.config import Experiment
from prime_hpc.config.families import family_of
from prime_hpc.config.sections.common import ModelConfig
from prime_hpc.config.sections.parallel import ParallelDims
from prime_hpc.inference.backend import load_backend
from prime_hpc.inference.vllm.backend import OTHER_ON_CPU
from prime_hpc.store.run_paths import RunPaths
from prime_hpc.trainer.batching.micro_batches import build_rank_batch, make_micro_batch
from prime_hpc.trainer.model.load_policy import load_policy
from prime_hpc.trainer.model.policy import Policy
from prime_hpc.trainer.parallel import build_parallel
from prime_hpc.trainer.weights.publish import build_publisher
from tests.proofs import Proof
from tests.proofs.prove_families import Verdict, one_rank
from tests.proofs.served_engines import EngineFailedError, Engines, NotServedError, Reply, engines
from tests.support.every_family import VOCAB, CannotBuildError, family_names, served_config, tiny_model

BOUND = 1e-2
"""Float32 on both sides: rounding is below 1e-3, but for apertus (5e-3), of whose activation vLLM keeps two numbers in
bfloat16; a wrong layer is at 9e-2 and above."""
HUB_KEYS = {
    "afmoe": {"score_func": "sigmoid", "route_norm": True, "n_group": 1, "topk_group": 1},
    "deepseek_v3": {"topk_method": "noaux_tc", "scoring_func": "sigmoid"},
    "glm4_moe": {"head_dim": 32},
    "glm4_moe_lite": {"first_k_dense_replace": 1},
    "hy_v3": {"first_k_dense_replace": 1, "expert_hidden_dim": 64, "route_norm": True, "qk_norm": True},
    "lfm2": {"conv_dim": 128, "block_dim": 128, "block_ff_dim": 192, "block_multiple_of": 8}
    | {"block_ffn_dim_multiplier": 1.0},
    "minimax_m2": {"rotary_dim": 32, "scoring_func": "sigmoid", "use_qk_norm": True, "use_routing_bias": True},
}
"""What checkpoints of the hub say and vLLM reads, and transformers' configs have no field for."""


def load(folder: Path) -> Policy:
    """The trainer's policy, on this rank alone."""
    config = ModelConfig.model_validate({"name": str(folder), "dtype": "float32", "attn": "sdpa"})
    parallel = build_parallel(ParallelDims(), "cpu")
    return load_policy(config, folder, parallel, torch.device("cpu"), reshard_after_forward=True, chunk_tokens=512)


@torch.no_grad()
def change(policy: Policy) -> None:
    """Another version: every tensor by a tenth of its size or so."""
    generator = torch.Generator().manual_seed(1)
    for parameter in policy.parameters():
        local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
        size = local.float().std().clamp(min=0.1) if local.numel() > 1 else torch.tensor(0.2)
        local.add_(torch.randn(local.shape, generator=generator) * 0.3 * size)


@torch.no_grad()
def gap(policy: Policy, replies: list[Reply]) -> float:
    """Largest difference of a log-probability of what was sampled."""
    ids = [np.array([*reply.prompt, *reply.token_ids], np.int32) for reply in replies]
    masks = [np.arange(len(i)) >= len(reply.prompt) for i, reply in zip(ids, replies, strict=True)]
    batch = build_rank_batch([list(range(len(ids)))], ids, masks)
    micro = make_micro_batch(batch, 0, torch.device("cpu"), share_prefixes=False, single_rows=policy.single_rows)
    with policy.packing(micro):
        logprobs, _ = policy(micro)
    expected = torch.tensor([value for reply in replies for value in reply.logprobs], dtype=torch.float64)
    worst = float((logprobs.double() - expected).abs().max())
    return worst if np.isfinite(worst) else float("inf")


def told_by_lint(base: Path) -> str:
    """What lint says of an RL run of the model with CPU engines."""
    experiment = Experiment.model_validate(
        {
            "kind": "rl",
            "device": "cpu",
            "name": "x",
            "output_dir": str(base.parent),
            "seq_len": 64,
            "model": {"name": str(base), "dtype": "float32"},
            "orchestrator": {"env": [{"id": "reverse-text"}], "sampling": {"max_tokens": 24}},
            "inference": {},
        }
    )
    return "; ".join(refusal.reason for refusal in load_backend("vllm").refusals(experiment))


def judge(family: str, folder: Path, served: Engines) -> Verdict:
    """One family's verdict.

    Args:
        family: its model_type.
        folder: an empty directory.
    """
    refusal = family_of({"model_type": family}).refusal
    if refusal:
        return Verdict(family, "refused", reason=refusal)
    try:
        model = tiny_model(served_config(family))
    except CannotBuildError as error:
        return Verdict(family, "not_built", reason=str(error))
    base = folder / "base"
    model.save_pretrained(base)
    stated = json.loads((base / "config.json").read_text()) | HUB_KEYS.get(family, {})
    (base / "config.json").write_text(json.dumps(stated))
    if family_of(stated).refused:
        return Verdict(family, "refused", reason=family_of(stated).refusal)
    if family in OTHER_ON_CPU:
        return Verdict(family, "refused", reason="lint refuses it with CPU engines")
    paths = RunPaths(folder / "run")
    with one_rank():
        try:
            policy = load(base)
        except ValueError as error:
            return Verdict(family, "not_built", reason=str(error))
        change(policy)
        build_publisher(policy, base, paths, dtype=torch.float32, incarnation=0, model_name=family).publish(1)
        try:
            before, after, again = served.play(base, [paths.weights_step(1), base], VOCAB)
        except NotServedError as error:
            return Verdict(family, "not_served", reason=str(error))
        except EngineFailedError as error:
            told = told_by_lint(base)
            return Verdict(family, "refused", reason=told) if told else Verdict(family, "wrong", math.inf, str(error))
        gaps = {"updated": gap(policy, after)}
        policy = load(base)
        gaps = {"base": gap(policy, before), **gaps, "base again": gap(policy, again)}
    worst = max(gaps.values())
    reason = "" if worst < BOUND else ", ".join(f"{what} {value:.1e}" for what, value in gaps.items())
    return Verdict(family, "served" if worst < BOUND else "wrong", worst, reason)


def prove(trials: int, families: Sequence[str] = ()) -> Iterable[Proof]:
    """Every family, or each named one, once, whatever `trials` is; what is not served is listed without a claim."""
    with engines() as served:
        for family in families or family_names():
            with tempfile.TemporaryDirectory() as folder:
                found = judge(family, Path(folder), served)
            value = found.worst if found.verdict in ("served", "wrong") else 0.0
            yield Proof(family, "log-probabilities", 1, value, BOUND, found.verdict, found.reason)
