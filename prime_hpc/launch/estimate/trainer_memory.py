"""Memory of one trainer GPU: an estimate, for the decision whether a run fits at all: a sum whose terms are named."""

from dataclasses import replace

from prime_hpc.config import Experiment
from prime_hpc.config.sections.lora import matches
from prime_hpc.config.sections.trainer import SMALL_LOGITS
from prime_hpc.launch.estimate.model_facts import GIB, WIDTH, DeltaLayers, ModelFacts, read_model

CONTEXT_GIB = 1.0
"""CUDA context, NCCL's buffers and fragmentation of one trainer process."""

COMPARED_BYTES = 80
"""Of a teacher's token at a trained one, at the loss's peak: its id and log-probability, in two micro-batches; ids and
log-probabilities as the head takes and gives them; and what the divergence keeps for its gradient."""


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


def state_bytes_per_param(experiment: Experiment) -> int:
    """Bytes of one parameter in the trainer: float32 master weight, gradient and optimizer state."""
    optim = experiment.trainer.optim
    moments = {"adamw": 2, "muon": 1, "signsgd": 1 if optim.momentum else 0}[optim.type]
    return 4 * (2 + moments)


def checkpoint_gib(experiment: Experiment, facts: ModelFacts) -> float | None:
    """One checkpoint of the trainer: master weights and optimizer state, no gradients."""
    facts = _as_trained(experiment, facts)
    if facts.num_params is None:
        return None
    trained = adapter_params(experiment, facts) or facts.trained_params(experiment.model.vision) or 0
    trained += _critic_params(experiment, facts)
    return trained * (state_bytes_per_param(experiment) - 4) / GIB


def trainer_gib(experiment: Experiment, facts: ModelFacts) -> dict[str, float] | None:
    """Memory of one trainer GPU at its peak, by what it is for; None where the parameters cannot be counted.

    `state`: the rank's shard of master weights, gradients and optimizer state; with `model.lora` that of the frozen
    model in the compute type and of the adapters (of all runs that train at once), of which every rank also holds a
    whole copy of one and its gradient; with `trainer.critic` and a KL penalty's reference their own besides.
    `gathered`: whole blocks in the compute type while they are used. `gradients`: whole ones before they are scattered,
    of a block and of the token tables, or with `no_sync` of the model. `activations`: of one micro-batch. `logits`: of
    one chunk, and the head's gradient while chunks add to it; what a teacher says. `scores`: of attention, for families
    that keep all of them. `images`: with `model.vision` all that what sees images takes. `context`: CUDA and NCCL.
    """
    facts = _as_trained(experiment, facts)
    if facts.num_params is None:
        return None
    vision, num_params = experiment.model.vision, facts.trained_params(None) or 0
    trainer, width, dims = experiment.trainer, WIDTH[experiment.model.dtype], experiment.trainer.parallel_dims
    tokens = experiment.micro_batch_tokens // dims.cp
    split = dims.ep if facts.num_experts else dims.tp  # of a block's parameters before FSDP gathers them
    embeddings = facts.vocab_size * facts.hidden * (1 if facts.tied else 2)
    block = max(0, num_params - embeddings) // max(1, facts.num_layers)
    # the root (embeddings, head) and two blocks (one prefetched), plus one block's gradients in float32
    blocks = num_params - embeddings if not trainer.reshard_after_forward else 2 * block
    whole = embeddings / dims.tp + blocks / split
    adapter = adapter_params(experiment, facts)
    gathered = whole * width if trainer.num_ranks > 1 else 0
    of_layer, of_largest = _layer_bytes(experiment, facts, tokens)
    kept = experiment.model.ac
    recomputed = facts.num_layers // kept.freq if kept else 0
    of_recomputed = 0 if kept is None or kept.offload else tokens * facts.hidden * width
    if kept is not None and kept.mode == "selective":
        of_recomputed += tokens * _product_widths(facts) * width
    activations = (facts.num_layers - recomputed) * of_layer + recomputed * of_recomputed
    activations += of_largest if recomputed else 0  # of the block that is computed again just now
    if kept is not None and kept.offload:
        activations += tokens * facts.hidden * width  # the next one's input is on its way back
    bytes_per_param = 8 if trainer.optim.offload else state_bytes_per_param(experiment)
    shares = trainer.num_ranks // dims.dp_replicate
    state = num_params * bytes_per_param / shares
    if adapter:
        others = trainer.max_concurrent_runs - 1  # of these no gradient is there
        held = bytes_per_param + others * (bytes_per_param - 4)
        state = num_params * width / shares + adapter * (held / trainer.num_ranks + 8)
    loss_kl = trainer.loss.kl
    is_base = bool(adapter) and loss_kl is not None and loss_kl.model in (None, experiment.model.name)
    reference = 0.0
    if loss_kl is not None and loss_kl.target == "reference" and not is_base:
        reference = _text_params(loss_kl.model, facts) * 4 / shares
    critic = _critic_params(experiment, facts)
    parts = {
        "state": state + reference + critic * bytes_per_param / shares,
        "gathered": gathered,
        "gradients": 0.0 if adapter and not critic else _unscattered(experiment, facts, block, embeddings),
        "activations": activations,
        "logits": _head_bytes(experiment, facts, tokens, trained=not adapter),
    }
    if (distillation := trainer.loss.distillation) is not None:
        parts["logits"] += COMPARED_BYTES * experiment.micro_batch_tokens * distillation.top_k
    if facts.keeps_scores or (facts.caps_scores and experiment.model.attn != "flash"):
        kept_layers = facts.num_layers - recomputed + (1 if recomputed else 0)
        parts["scores"] = _score_bytes(experiment, facts, tokens, kept_layers)
    if vision is not None and facts.vision is not None:
        part = tokens, width, trainer.num_ranks, shares, activations + parts["logits"]
        parts["images"] = facts.vision.tower_bytes(bytes_per_param if vision == "trained" else None, *part)
    return {name: value / GIB for name, value in parts.items()} | {"context": CONTEXT_GIB}


def _critic_params(experiment: Experiment, facts: ModelFacts) -> int:
    """Parameters of a critic, whose head is a row; 0 where there is none."""
    critic = experiment.trainer.critic
    return 0 if experiment.kind != "rl" or critic is None else _text_params(critic.name, facts, scores=True)


def _text_params(name: str | None, facts: ModelFacts, *, scores: bool = False) -> int:
    """Parameters of another model beside the policy, of the policy's `facts` where it has no name or is not known yet,
    without what sees images. `scores`: its head is a row."""
    own = (read_model(name) if name is not None else None) or facts
    return _headless_params(own) if scores else own.trained_params(None) or 0


def _headless_params(facts: ModelFacts) -> int:
    """Parameters of the text part without an output head: what a model that scores keeps of it."""
    head = 0 if facts.tied else facts.vocab_size * facts.hidden
    return facts.headless_params or (facts.trained_params(None) or 0) - head


def _as_trained(experiment: Experiment, facts: ModelFacts) -> ModelFacts:
    """Return the facts of the model that trains: of a reward model the text part alone, whose head is a row."""
    if not experiment.trains_reward_model or facts.num_params is None:
        return facts
    return replace(facts, tied=True, num_params=_headless_params(facts), vision=None)


def _head_bytes(experiment: Experiment, facts: ModelFacts, tokens: int, *, trained: bool) -> float:
    """Bytes beside the hidden states while log-probabilities, or their gradients, are computed.

    With fused kernels one chunk's logits in their own type, which become their gradient. Else
    one chunk's logits in float32 and, in a half-precision type, the product that they come of and the last chunk's
    gradient. More chunks than one add up the head's own gradient in float32, each through a product of its size.
    """
    if experiment.trains_reward_model:
        return 0.0
    width, vocab = WIDTH[experiment.model.dtype], facts.vocab_size / experiment.trainer.parallel_dims.tp
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
    samplings = experiment.orchestrator.policy_samplings or [experiment.orchestrator.policy_sampling]
    truncates = experiment.kind == "rl" and any(sampling.truncates for sampling in samplings)
    return model.fused_head and model.head_dtype == "model" and is_plain and not truncates


def _score_bytes(experiment: Experiment, facts: ModelFacts, tokens: int, kept_layers: int) -> float:
    """Bytes of attention's scores where no kernel does without them: of every kept layer the probabilities in float32
    and in the compute type, as most of transformers' own code has them (some keeps the latter only), and of one layer
    scores and gradients besides."""
    longest = (experiment.sft.data.seq_len if experiment.kind == "sft" else None) or experiment.seq_len
    scores = max(tokens // longest, 1) * longest**2 * facts.num_heads
    return scores * (kept_layers * (4 + WIDTH[experiment.model.dtype]) + 6)


def whole_gradient_bytes(experiment: Experiment, facts: ModelFacts) -> float | None:
    """Bytes of one rank's whole gradients in float32, before FSDP scatters them; None where they cannot be counted."""
    facts = _as_trained(experiment, facts)
    if facts.num_params is None:
        return None
    if experiment.model.lora is not None and not _critic_params(experiment, facts):
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
    dims, width = experiment.trainer.parallel_dims, WIDTH[experiment.model.dtype]
    block /= dims.ep if facts.num_experts else dims.tp
    whole = whole_gradient_bytes(experiment, facts) or 0.0
    if experiment.trainer.defers_sync(whole):
        return whole + block * width
    return block * (width + 4) + embeddings * width / dims.tp


def _layer_bytes(experiment: Experiment, facts: ModelFacts, tokens: int) -> tuple[float, float]:
    """Bytes that the backward pass takes of some tokens of one block: of the mean block, and of the largest."""
    width = WIDTH[experiment.model.dtype]
    full, delta = tokens * _kept_widths(experiment, facts) * width, facts.delta
    if delta is None:
        return full, full
    attention = _attention_widths(experiment, facts) / experiment.trainer.parallel_dims.tp * width
    linear = full + tokens * (_delta_bytes(delta, width) - attention)
    count = delta.num_layers
    return (full * (facts.num_layers - count) + linear * count) / facts.num_layers, max(full, linear)


def _delta_bytes(delta: DeltaLayers, width: int) -> float:
    """Bytes of one token of a gated delta rule that its backward pass takes, in transformers' own code: flash-linear-
    attention's kernels, where they are installed, take less.

    In float32, of each head: eight times its keys and values, five matrices of a chunk of 64 tokens and one state a
    chunk. In the compute type: what goes into the convolution and what comes out of it; where that is float32, too,
    keys and values twice more, which a half-precision type's copies stand for. 0.94 to 1.03 of `plan --rehearse`,
    blocks of Qwen3.5 and narrower ones in either type.
    """
    chunk, heads = 64, delta.key_dim + delta.value_dim
    of_head = 8 * heads + 5 * chunk + delta.key_dim * delta.value_dim / chunk + (2 * heads if width == 4 else 0)
    return 4 * (delta.value_heads * of_head + delta.keys) + 2 * width * (2 * delta.keys + delta.values)


def _kept_widths(experiment: Experiment, facts: ModelFacts) -> float:
    """Values of one token of one block that its backward pass takes, in the compute type: two RMS norms, attention with
    rotary positions, a feed-forward block.

    Eager, a norm keeps its input (of half precision: in float32) and the normed values, and the products behind it
    theirs; so are gate, activation, the other half and their product. Compiled, what is cheap is computed again. 0.99
    to 1.07 of `plan --rehearse`, Qwen3 and Llama from 0.6B to 8B and 30B-A3B; eager 0.87 to 1.00, shapes of GPT-NeoX,
    Qwen2-MoE, GLM-4.5, DeepSeek-V3 and (1.15) Llama 4.
    """
    model, tp = experiment.model, experiment.trainer.parallel_dims.tp
    inner = _attention_widths(experiment, facts)
    if facts.num_experts:  # they stay outside of the graphs; each has its own copy of its tokens, in and out
        inner += 4 * facts.intermediate + 2 * facts.active_experts * facts.hidden
        inner += 4 * facts.shared + (facts.hidden if facts.shared else 0)
    else:
        inner += (4 if facts.is_gated else 2) * facts.intermediate - (facts.intermediate if model.compile else 0)
    return (4 if model.compile else 2 * _norm_copies(experiment, facts)) * facts.hidden + inner / tp


def _attention_widths(experiment: Experiment, facts: ModelFacts) -> int:
    """Those of attention alone."""
    heads, keys = facts.num_heads * facts.head_dim, facts.num_kv_heads * facts.head_dim
    inner = 2 * heads + 2 * keys + (3 * heads if facts.delta is not None else 0)  # its gate, and what that makes
    if facts.norms_heads:
        inner += heads if experiment.model.compile else (_norm_copies(experiment, facts) - 1) * (heads + keys)
    return inner


def _norm_copies(experiment: Experiment, facts: ModelFacts) -> int:
    """Values that a norm keeps of each of its input's."""
    return (4 if WIDTH[experiment.model.dtype] == 2 else 3) if facts.root_norms else 2


def _product_widths(facts: ModelFacts) -> int:
    """Values of one token of one block that are results of matrix products or of attention."""
    attention = 2 * facts.num_heads * facts.head_dim + 2 * facts.num_kv_heads * facts.head_dim
    return attention + 2 * facts.intermediate + 2 * facts.hidden
