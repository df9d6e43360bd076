"""Memory that a model needs, from its config.json alone: parameters, memory of a trainer's and of a server's GPU.

Estimates, for the decision whether a run fits at all: each is a sum whose terms are named. Neither torch nor
transformers is loaded, and nothing is downloaded: a hub model counts as known where the hub's cache has its config.
"""

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prime_hpc.config import Experiment
from prime_hpc.config.families import count_experts, experts_per_token, family_of, first_number
from prime_hpc.config.sections.lora import matches
from prime_hpc.config.sections.trainer import SMALL_LOGITS
from prime_hpc.inference.backend import load_backend, section, step_bytes
from prime_hpc.launch.estimate.vision import VisionFacts, vision_facts
from prime_hpc.store.model.config import find_config, read_config
from prime_hpc.store.model.files import stored_tensors

GIB = 2**30
CONTEXT_GIB = 1.0
"""CUDA context, NCCL's buffers and fragmentation of one trainer process."""
VOCAB_PADDING = 64
"""vLLM pads the vocabulary to a multiple of this before it splits it over tensor-parallel ranks."""
_NORMED_HEADS = frozenset({
    "afmoe", "apertus", "dots1", "exaone4", "exaone_moe", "flex_olmo", "gemma3", "gemma3n", "gemma4",
    "hunyuan_v1_dense", "hunyuan_v1_moe", "lfm2", "lfm2_moe", "minimax_m2", "nanochat", "olmo2", "olmo3", "olmoe",
    "qwen3", "qwen3_5", "qwen3_5_moe", "qwen3_moe", "qwen3_next", "qwen3_omni_moe", "qwen3_vl", "qwen3_vl_moe",
})  # fmt: skip
"""Values of `model_type` whose code in transformers norms each head's queries and keys, whatever the config says."""
_UNGATED_ROOT_NORMED = frozenset({"apertus", "arcee", "nanochat"})
_UNGATED = _UNGATED_ROOT_NORMED | {
    "biogpt", "gpt2", "gpt_neox", "gpt_neox_japanese", "jais2", "nemotron", "persimmon", "phi", "starcoder2"
}  # fmt: skip
"""Values of `model_type` whose feed-forward blocks are two matrices, most of them behind norms that keep no float32."""
_SINKS = frozenset({"gpt_oss", "granite_swa", "granitemoe_swa", "mimo_v2_flash"})
"""Values of `model_type` whose attention has sinks, which no kernel here takes: all scores are made."""
_WIDTH = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class ModelFacts:
    """Shape of a causal language model."""

    num_params: int | None
    """None: an architecture that this file cannot count, and no weights to read it from."""
    hidden: int
    intermediate: int
    """Width of the feed-forward block that one token goes through."""
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    context: int | None
    """Longest position that the model was made for."""
    kv_values: int
    """Numbers in the KV cache for one token of one layer."""
    tied: bool
    """True if the output head is the embedding."""
    num_experts: int = 0
    """0: a dense model."""
    keeps_scores: bool = False
    """True if attention keeps all its scores: by code of its own (`config.families`), or of sinks, which the kernels do
    not take (`trainer.ops.attention`)."""
    caps_logits: bool = False
    """True if its logits are capped."""
    active_experts: int = 0
    """Through which one token goes."""
    norms_heads: bool = False
    """True if each head's queries and keys are normed."""
    shared: int = 0
    """Width of the experts that every token goes through, beside those that its router chooses."""
    is_gated: bool = True
    """True if feed-forward blocks have a gate: three matrices, not two."""
    root_norms: bool = True
    """True if blocks have RMS norms, which compute in float32."""
    caps_scores: bool = False
    """True if attention caps its scores, which flash-attn alone can do without keeping them."""
    vision: VisionFacts | None = None
    """Its part that sees images, whose parameters are among `num_params`."""

    def trained_params(self, vision: str | None) -> int | None:
        """Return how many parameters train with a `model.vision`, of a model without adapters."""
        if self.num_params is None or self.vision is None or vision == "trained":
            return self.num_params
        return self.num_params - self.vision.num_params


def read_model(name: str, environ: Mapping[str, str] = os.environ) -> ModelFacts | None:
    """Shape of a model; None where its config cannot be found or is of a kind that this file does not know."""
    path, config = find_config(name, environ), read_config(name, environ)
    return None if path is None or config is None else model_facts(config, stored_params(path.parent))


def model_facts(config: Mapping[str, Any], num_params: int | None = None) -> ModelFacts | None:
    """Shape from the fields of a config.json.

    Args:
        config: its fields, or those below `text_config`.
        num_params: where they were counted; else they are computed.

    Returns:
        None where a field is missing that every llama-like model has.
    """
    if isinstance(config.get("text_config"), dict):
        config = {**config, **config["text_config"]}
    if config.get("model_type") == "gpt2":
        config = _as_others_name_it(config)
    try:
        hidden, layers, heads = (int(config[k]) for k in ("hidden_size", "num_hidden_layers", "num_attention_heads"))
        vocab = int(config["vocab_size"])
        kv_heads = int(config.get("num_key_value_heads") or heads)
        head_dim = int(config.get("head_dim") or hidden // heads)
        kind = str(config.get("model_type", "")).removesuffix("_text")
        experts = count_experts(config)
        width = first_number(config, "moe_intermediate_size") if experts else 0
        width = width or first_number(config, "intermediate_size")
        # Llama 4's code in transformers has every expert compute every token, and adds one that all go through
        active = experts if kind == "llama4" else experts_per_token(config)
        active = active if experts else 1
        context = config.get("max_position_embeddings")
        latent = int(config.get("kv_lora_rank") or 0)
        if latent:
            head_dim = first_number(config, "qk_nope_head_dim") + first_number(config, "qk_rope_head_dim") or head_dim
        shared = first_number(config, "shared_expert_intermediate_size", "shared_intermediate_size")
        shared = shared or first_number(config, "n_shared_experts", "num_shared_experts", "num_shared_expert") * width
        shared = (width if kind == "llama4" else shared) if experts else 0
        kv_values = latent + int(config.get("qk_rope_head_dim") or 0) if latent else 2 * kv_heads * head_dim
    except (KeyError, TypeError, ValueError, ZeroDivisionError):
        return None
    tied, vision = bool(config.get("tie_word_embeddings", False)), vision_facts(config)
    if num_params is None and width and not latent and not config.get("shared_expert_intermediate_size"):
        attention = hidden * head_dim * (2 * heads + 2 * kv_heads)
        mlp = (2 if kind in _UNGATED else 3) * hidden * width * max(1, experts) + 3 * hidden * shared + hidden * experts
        num_params = layers * (attention + mlp + 2 * hidden) + hidden + vocab * hidden * (1 if tied else 2)
        num_params += vision.num_params if vision is not None else 0
    return ModelFacts(
        num_params, hidden, width * active, layers, heads, kv_heads, head_dim, vocab,
        context if isinstance(context, int) else None, kv_values, tied, experts,
        family_of(config).custom_attention or kind in _SINKS,
        bool(config.get("final_logit_softcapping") or config.get("logits_soft_cap")), active if experts else 0,
        kind in _NORMED_HEADS or bool(config.get("use_qk_norm")), shared, kind not in _UNGATED,
        kind not in _UNGATED - _UNGATED_ROOT_NORMED, bool(config.get("attn_logit_softcapping")), vision,
    )  # fmt: skip


def _as_others_name_it(gpt2: Mapping[str, Any]) -> dict[str, Any]:
    """Return GPT-2's config by the names that later models have."""
    found = {"tie_word_embeddings": True, **gpt2}
    found |= {"hidden_size": gpt2.get("n_embd"), "num_hidden_layers": gpt2.get("n_layer")}
    found |= {"num_attention_heads": gpt2.get("n_head"), "max_position_embeddings": gpt2.get("n_positions")}
    return found | {"intermediate_size": gpt2.get("n_inner") or 4 * (gpt2.get("n_embd") or 0)}


def stored_params(folder: Path) -> int | None:
    """Return the number of values in a directory's safetensors files, from their headers; None where there are none."""
    shapes = stored_shapes(folder)
    return sum(math.prod(shape) for shape in shapes.values()) if shapes else None


def stored_shapes(folder: Path) -> dict[str, tuple[int, ...]] | None:
    """Name -> shape of the tensors in a directory's safetensors files; None where they cannot be read, or are none."""
    try:
        return {name: tensor.shape for name, tensor in stored_tensors(folder).items()} or None
    except ValueError:  # half-written
        return None


def adapter_params(experiment: Experiment, facts: ModelFacts) -> int:
    """Parameters of one adapter of `model.lora`, from the usual projections' shapes; 0 where it is off."""
    lora = experiment.model.lora
    if lora is None:
        return 0
    hidden, wide = facts.hidden, facts.intermediate
    heads, kv_heads = facts.num_heads * facts.head_dim, facts.num_kv_heads * facts.head_dim
    widths = {"q_proj": heads, "k_proj": kv_heads, "v_proj": kv_heads, "o_proj": heads}
    widths |= dict.fromkeys(("gate_proj", "up_proj", "down_proj"), wide)
    chosen = [n for n in widths if any(matches(t, f"model.layers.0.{n}") for t in lora.target_modules)]
    return lora.rank * facts.num_layers * sum(hidden + widths[name] for name in chosen or widths)


def vocab_fits(vocab_size: int, width: int) -> bool:
    """Return whether vLLM can split the padded vocabulary over `width` tensor-parallel ranks."""
    return -(-vocab_size // VOCAB_PADDING) * VOCAB_PADDING % width == 0


def state_bytes_per_param(experiment: Experiment) -> int:
    """Bytes of one parameter in the trainer: float32 master weight, gradient and optimizer state."""
    optim = experiment.trainer.optim
    moments = {"adamw": 2, "muon": 1, "signsgd": 1 if optim.momentum else 0}[optim.type]
    return 4 * (2 + moments)


def checkpoint_gib(experiment: Experiment, facts: ModelFacts) -> float | None:
    """One checkpoint of the trainer: master weights and optimizer state, no gradients."""
    if facts.num_params is None:
        return None
    trained = adapter_params(experiment, facts) or facts.trained_params(experiment.model.vision) or 0
    return trained * (state_bytes_per_param(experiment) - 4) / GIB


def trainer_gib(experiment: Experiment, facts: ModelFacts) -> dict[str, float] | None:
    """Memory of one trainer GPU at its peak, by what it is for; None where the parameters cannot be counted.

    `state`: the rank's shard of master weights, gradients and optimizer state; with `model.lora` that of the frozen
    model in the compute type and of the adapter, of which every rank also holds a whole copy and its gradient.
    `gathered`: whole blocks in the compute type while they are used. `gradients`: whole ones before they are scattered,
    of a block and of the token tables, or with `no_sync` of the model. `activations`: of one micro-batch. `logits`: of
    one chunk, and the head's gradient while chunks add to it. `scores`: of attention, for families that keep all of
    them. `images`: with `model.vision` all that what sees images takes. `context`: CUDA and NCCL.
    """
    if facts.num_params is None:
        return None
    vision, num_params = experiment.model.vision, facts.trained_params(None) or 0
    trainer, width, dims = experiment.trainer, _WIDTH[experiment.model.dtype], experiment.trainer.parallel_dims
    tokens = experiment.micro_batch_tokens // dims.cp
    split = dims.ep if facts.num_experts else dims.tp  # of a block's parameters before FSDP gathers them
    embeddings = facts.vocab_size * facts.hidden * (1 if facts.tied else 2)
    block = max(0, num_params - embeddings) // max(1, facts.num_layers)
    # the root (embeddings, head) and two blocks (one prefetched), plus one block's gradients in float32
    blocks = num_params - embeddings if not trainer.reshard_after_forward else 2 * block
    whole = embeddings / dims.tp + blocks / split
    adapter = adapter_params(experiment, facts)
    gathered = whole * width if trainer.num_ranks > 1 else 0
    of_layer = tokens * _kept_widths(experiment, facts) * width
    kept = experiment.model.ac
    recomputed = facts.num_layers // kept.freq if kept else 0
    of_recomputed = 0 if kept is None or kept.offload else tokens * facts.hidden * width
    if kept is not None and kept.mode == "selective":
        of_recomputed += tokens * _product_widths(facts) * width
    activations = (facts.num_layers - recomputed) * of_layer + recomputed * of_recomputed
    activations += of_layer if recomputed else 0  # of the block that is computed again just now
    if kept is not None and kept.offload:
        activations += tokens * facts.hidden * width  # the next one's input is on its way back
    bytes_per_param = 8 if trainer.optim.offload else state_bytes_per_param(experiment)
    shares = trainer.num_ranks // dims.dp_replicate
    state = num_params * bytes_per_param / shares
    if adapter:
        state = num_params * width / shares + adapter * (bytes_per_param / trainer.num_ranks + 8)
    loss_kl = trainer.loss.kl
    needs_reference = loss_kl and loss_kl.target == "reference" and not (adapter and loss_kl.model is None)
    reference = num_params * 4 / shares if needs_reference else 0
    parts = {
        "state": state + reference,
        "gathered": gathered,
        "gradients": 0.0 if adapter else _unscattered(experiment, facts, block, embeddings),
        "activations": activations,
        "logits": _head_bytes(experiment, facts, tokens, trained=not adapter),
    }
    if facts.keeps_scores or (facts.caps_scores and experiment.model.attn != "flash"):
        kept_layers = facts.num_layers - recomputed + (1 if recomputed else 0)
        parts["scores"] = _score_bytes(experiment, facts, tokens, kept_layers)
    if vision is not None and facts.vision is not None:
        part = tokens, width, trainer.num_ranks, shares, activations + parts["logits"]
        parts["images"] = facts.vision.tower_bytes(bytes_per_param if vision == "trained" else None, *part)
    return {name: value / GIB for name, value in parts.items()} | {"context": CONTEXT_GIB}


def _head_bytes(experiment: Experiment, facts: ModelFacts, tokens: int, *, trained: bool) -> float:
    """Bytes beside the hidden states while log-probabilities, or their gradients, are computed.

    With fused kernels one chunk's logits in their own type, which become their gradient. Else
    one chunk's logits in float32 and, in a half-precision type, the product that they come of and the last chunk's
    gradient. More chunks than one add up the head's own gradient in float32, each through a product of its size.
    """
    width, vocab = _WIDTH[experiment.model.dtype], facts.vocab_size / experiment.trainer.parallel_dims.tp
    chunk = min(max(experiment.trainer.logits_chunk_tokens, int(SMALL_LOGITS / vocab)), tokens)
    half, head = (0 if width == 4 else width), vocab * facts.hidden
    if half and _fuses_head(experiment, facts):
        return chunk * vocab * half + (head * (4 + half) if trained and chunk < tokens else 0)
    if chunk == tokens:
        return chunk * vocab * (4 + max(half, 0.5))
    logits = chunk * vocab * (4 + max(2 * half, 0.5))  # 0.5: an eighth of the exponentials, for the entropy
    return max(logits, chunk * vocab * (4 + half) + head * half) + 4 * head if trained else logits


def _fuses_head(experiment: Experiment, facts: ModelFacts) -> bool:
    """Return whether a GPU's kernels take the head, as `trainer.ops.logprobs` decides."""
    model, is_plain = experiment.model, not facts.caps_logits and experiment.trainer.parallel_dims.tp == 1
    truncates = experiment.kind == "rl" and experiment.orchestrator.sampling.truncates
    return model.fused_head and model.head_dtype == "model" and is_plain and not truncates


def _score_bytes(experiment: Experiment, facts: ModelFacts, tokens: int, kept_layers: int) -> float:
    """Bytes of attention's scores where no kernel does without them: of every kept layer the probabilities in float32
    and in the compute type, as most of transformers' own code has them (some keeps the latter only), and of one layer
    scores and gradients besides."""
    longest = (experiment.sft.data.seq_len if experiment.kind == "sft" else None) or experiment.seq_len
    scores = max(tokens // longest, 1) * longest**2 * facts.num_heads
    return scores * (kept_layers * (4 + _WIDTH[experiment.model.dtype]) + 6)


def whole_gradient_bytes(experiment: Experiment, facts: ModelFacts) -> float | None:
    """Bytes of one rank's whole gradients in float32, before FSDP scatters them; None where they cannot be counted."""
    if facts.num_params is None:
        return None
    if experiment.model.lora is not None:
        return 0.0
    dims = experiment.trainer.parallel_dims
    embeddings = facts.vocab_size * facts.hidden * (1 if facts.tied else 2)
    blocks = (facts.trained_params(experiment.model.vision) or 0) - embeddings
    return 4 * (embeddings / dims.tp + blocks / (dims.ep if facts.num_experts else dims.tp))


def _unscattered(experiment: Experiment, facts: ModelFacts, block: float, embeddings: float) -> float:
    """Bytes of gradients that are not yet, or not yet altogether, in shards.

    A block's leave the backward pass in the compute type and are reduced in float32; the token tables' stay until its
    end.
    """
    dims, width = experiment.trainer.parallel_dims, _WIDTH[experiment.model.dtype]
    block /= dims.ep if facts.num_experts else dims.tp
    whole = whole_gradient_bytes(experiment, facts) or 0.0
    if experiment.trainer.defers_sync(whole):
        return whole + block * width
    return block * (width + 4) + embeddings * width / dims.tp


def _kept_widths(experiment: Experiment, facts: ModelFacts) -> float:
    """Values of one token of one block that its backward pass takes, in the compute type: two RMS norms, attention with
    rotary positions, a feed-forward block.

    Eager, a norm keeps its input (of half precision: in float32) and the normed values, and the products behind it
    theirs; so are gate, activation, the other half and their product. Compiled, what is cheap is computed again. 0.99
    to 1.07 of `plan --rehearse`, Qwen3 and Llama from 0.6B to 8B and 30B-A3B; eager 0.87 to 1.00, shapes of GPT-NeoX,
    Qwen2-MoE, GLM-4.5, DeepSeek-V3 and (1.15) Llama 4.
    """
    model, tp = experiment.model, experiment.trainer.parallel_dims.tp
    heads, keys = facts.num_heads * facts.head_dim, facts.num_kv_heads * facts.head_dim
    of_norm = (4 if _WIDTH[model.dtype] == 2 else 3) if facts.root_norms else 2
    inner = 2 * heads + 2 * keys
    if facts.norms_heads:
        inner += heads if model.compile else (of_norm - 1) * (heads + keys)
    if facts.num_experts:  # they stay outside of the graphs; each has its own copy of its tokens, in and out
        inner += 4 * facts.intermediate + 2 * facts.active_experts * facts.hidden
        inner += 4 * facts.shared + (facts.hidden if facts.shared else 0)
    else:
        inner += (4 if facts.is_gated else 2) * facts.intermediate - (facts.intermediate if model.compile else 0)
    return (4 if model.compile else 2 * of_norm) * facts.hidden + inner / tp


def _product_widths(facts: ModelFacts) -> int:
    """Values of one token of one block that are results of matrix products or of attention."""
    attention = 2 * facts.num_heads * facts.head_dim + 2 * facts.num_kv_heads * facts.head_dim
    return attention + 2 * facts.intermediate + 2 * facts.hidden


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

    Args:
        experiment: states the parallelism and the share of the memory.
        facts: of the model.
        gpu_gib: memory of one GPU, where it is known.
    """
    inference = experiment.inference
    if inference is None or facts.num_params is None:
        return None
    width = _WIDTH[experiment.model.dtype]
    split = inference.tensor_parallel_size
    stages = inference.pipeline_parallel_size
    weights = facts.num_params * width / (split * stages) / GIB
    # key-value heads are split as far as there are any; a latent cache is whole on every rank
    latent = facts.kv_values != 2 * facts.num_kv_heads * facts.head_dim
    shares = 1 if latent else min(split, facts.num_kv_heads)
    token_bytes = -(-facts.num_layers // stages) * facts.kv_values * width // shares
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
