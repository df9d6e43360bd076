"""Memory of one GPU of an engine: an estimate, and what of a model it cannot split."""

import math
from dataclasses import dataclass

from prime_hpc.config import Experiment
from prime_hpc.inference.backend import load_backend, section, step_bytes
from prime_hpc.launch.estimate.model_facts import GIB, WIDTH, ModelFacts

VOCAB_PADDING = 64
"""vLLM pads the vocabulary to a multiple of this before it splits it over tensor-parallel ranks."""


@dataclass(frozen=True)
class EngineMemory:
    """Memory of one GPU of an engine."""

    weights_gib: float
    kv_gib: float | None
    """Memory that is left for the KV cache; None where the GPU's memory is not known."""
    token_bytes: int
    """KV cache of one token on one GPU."""
    max_tokens: int | None
    """Tokens that the KV cache holds."""
    step_gib: float = 0.0
    """Memory that a step takes beside the cache."""


def engine_overhead_gib(experiment: Experiment) -> float:
    """Return the memory of a GPU that an engine takes beside weights and key-value cache, GiB."""
    return load_backend(section(experiment).backend).overhead_gib


def engine_memory(experiment: Experiment, facts: ModelFacts, gpu_gib: float | None) -> EngineMemory | None:
    """Memory of one GPU of an engine; None where the run serves nothing or the parameters cannot be counted.
    `gpu_gib`: memory of one GPU, where it is known."""
    inference = experiment.inference
    if inference is None or facts.num_params is None:
        return None
    width = WIDTH[experiment.model.dtype]
    split = inference.tensor_parallel_size
    stages = inference.pipeline_parallel_size
    weights = facts.num_params * width / (split * stages) / GIB
    # key-value heads are split as far as there are any; a latent cache is whole on every rank
    latent = facts.kv_values != 2 * facts.num_kv_heads * facts.head_dim
    shares = 1 if latent else min(split, facts.num_kv_heads)
    token_bytes = -(-facts.num_caches // stages) * facts.kv_values * width // shares
    if gpu_gib is None:
        return EngineMemory(weights, None, token_bytes, None)
    # a cache that is stated is taken whatever the share says
    left = inference.kv_cache_gib
    row = max(1, token_bytes * experiment.max_model_len)
    beside = _step_bytes(experiment, facts, width)  # which a cache that is stated does not hold
    if left is None:
        left = gpu_gib * inference.gpu_memory_utilization - weights - engine_overhead_gib(experiment)
        left *= row / (row + beside) if left > 0 and beside else 1
    rows = min(left * GIB / row, inference.max_num_seqs or math.inf)
    tokens = max(0, int(left * GIB / token_bytes)) if token_bytes else None
    return EngineMemory(weights, left, token_bytes, tokens, max(0.0, rows * beside / GIB))


def _step_bytes(experiment: Experiment, facts: ModelFacts, width: int) -> int:
    """Bytes of one longest sample in a step of an engine, beside its cache."""
    shared = 2 * facts.head_dim if facts.num_kv_heads < facts.num_heads else 0
    return step_bytes(
        experiment,
        num_heads=facts.num_heads,
        shared_width=shared,
        vocab_size=facts.vocab_size,
        max_len=experiment.max_model_len,
        width=width,
    )


def vocab_fits(vocab_size: int, width: int) -> bool:
    """Return whether vLLM can split the padded vocabulary over `width` tensor-parallel ranks."""
    return -(-vocab_size // VOCAB_PADDING) * VOCAB_PADDING % width == 0
