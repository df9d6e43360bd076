"""Limits of the transformers backend, by key and reason: for lint, and for a server that starts."""

from collections.abc import Iterator, Mapping
from typing import Any

from prime_hpc.config.experiment import Experiment
from prime_hpc.config.families import family_of, with_text_part
from prime_hpc.inference.backend import Refusal, stated_samplings
from prime_hpc.inference.transformers.parameters import BadRequestError, parse_params
from prime_hpc.store.model.config import read_config

_ROPE = ("dynamic", "longrope")
"""Rotary embeddings that transformers computes anew for each forward pass, from its longest row."""
_VLLM = "use inference.backend = vllm"


def step_bytes(*, num_heads: int, shared_width: int, vocab_size: int, max_len: int, width: int) -> int:
    """Bytes that one sequence takes in a decoding step beside the cache, at most: `backend.StepsBesideCache`.

    First one layer's keys and values, once for each head: beside a mask transformers' attention repeats those that
    heads share. Then four arrays over the vocabulary in float32: logits, log-probabilities, noise and their race.
    """
    return max(num_heads * shared_width * max_len * width, 16 * vocab_size)


def refusals(experiment: Experiment) -> Iterator[Refusal]:
    """Yield the keys of vLLM's alone, a model that does not attend as a batch of rows needs it, and sampling that is
    not built."""
    yield from _vllm_keys(experiment)
    yield from _model(experiment)
    yield from _sampling(experiment)


def _vllm_keys(experiment: Experiment) -> Iterator[Refusal]:
    servers = experiment.inference
    if servers is None:
        return
    total = servers.num_replicas * servers.data_parallel_size
    more = f"data_parallel_size = 1, and num_replicas = {total} for as many servers"
    rows: dict[str, tuple[bool, str, str]] = {
        "data_parallel_size": (servers.data_parallel_size > 1, "one server is one engine", more),
        "data_parallel_size_local": ((servers.data_parallel_size_local or 1) > 1, "one server is one engine", more),
        "tensor_parallel_size": (
            servers.tensor_parallel_size > 1,
            "an engine computes on one device",
            f"tensor_parallel_size = 1, or {_VLLM}",
        ),
        "across_nodes": (servers.across_nodes == "engine_group", "there are no groups of engines", "leave it out"),
        "headless": (servers.headless, "there are no groups of engines", "leave it out"),
        "kv_offload_gib": (
            servers.kv_offload_gib is not None,
            "its cache stays where it is",
            f"leave it out, or {_VLLM}",
        ),
        "sleep": (servers.sleep, "the engine keeps its memory", f"leave it out, or {_VLLM}"),
        "batch_invariant": (servers.batch_invariant, "it has no such kernels", f"leave it out, or {_VLLM}"),
        "compile_cache": (servers.compile_cache is not None, "nothing is compiled", "leave it out"),
        "vllm": (bool(servers.vllm), "vLLM's own arguments (quantization and others) are not its", "leave them out"),
    }
    for key, (asked, reason, remedy) in rows.items():
        if asked:
            yield Refusal(f"inference.{key}", f"the transformers backend cannot do this: {reason}", remedy)


def _model(experiment: Experiment) -> Iterator[Refusal]:
    model = experiment.model
    if model.lora is not None:
        yield Refusal("model.lora", "the transformers backend serves no adapters", f"leave it out, or {_VLLM}")
    if model.vision is not None:
        yield Refusal(
            "model.vision", "the transformers backend takes text alone, no images", f"leave it out, or {_VLLM}"
        )
    config = read_config(model.name)
    if config is None:
        return
    problem = model_problem(config, experiment.max_model_len)
    if problem:
        yield Refusal("model.name", f"the transformers backend cannot serve {model.name}: {problem}", _VLLM)


def model_problem(config: Mapping[str, Any], max_len: int) -> str:
    """Return the reason that a model cannot be served in a batch of rows; empty: nothing is known against it.
    `config`: the fields of its config.json."""
    family = family_of(config)
    if family.rows != "packed":
        return family.reason
    own = with_text_part(config)
    if config.get("quantization_config"):
        return "its weights are quantized"
    window = own.get("sliding_window") if own.get("use_sliding_window", True) else None
    layers = own.get("layer_types") or ()
    slides = any(layer != "full_attention" for layer in layers) if layers else window is not None
    if slides and not (isinstance(window, int) and window >= max_len):
        return f"it attends to a window of tokens (sliding_window = {window})"
    rope = own.get("rope_parameters") or own.get("rope_scaling") or {}
    kind = rope.get("rope_type") or rope.get("type") if isinstance(rope, Mapping) else None
    return f"its rotary embedding ({kind}) depends on what else is in the batch" if kind in _ROPE else ""


def _sampling(experiment: Experiment) -> Iterator[Refusal]:
    for key, sampling in stated_samplings(experiment).items():
        for name, value in (sampling.extra or {}).items():
            try:
                parse_params({name: value})
            except BadRequestError as error:
                yield Refusal(f"{key}.extra", str(error), f"leave it out, or {_VLLM}")
