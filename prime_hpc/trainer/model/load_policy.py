"""Build, shard and load a policy.

The model is built without memory (meta device), sharded, and every rank reads only its own rows from the memory-mapped
safetensors (`hf_checkpoint.py`), whatever names and forms they have there (`conversions.py`).
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from loguru import logger
from torch.distributed.device_mesh import init_device_mesh

from prime_hpc.config.families import Family, family_of, vision_problem
from prime_hpc.config.sections.common import ModelConfig
from prime_hpc.moe import replay
from prime_hpc.moe.routers import use_float32_routers
from prime_hpc.runtime.failures import NodeError
from prime_hpc.store.model.files import StoredTensor, other_vocabulary, quantised, stored_tensors, without_head
from prime_hpc.trainer.batching.image_inputs import ImageInputs
from prime_hpc.trainer.lora import Adapters, add_lora
from prime_hpc.trainer.model import score_head
from prime_hpc.trainer.model.conversions import WeightMap, map_weights
from prime_hpc.trainer.model.hf_checkpoint import check_tied, read_tensors
from prime_hpc.trainer.model.policy import Policy
from prime_hpc.trainer.model.rotary import pin_rotary
from prime_hpc.trainer.model.self_test import self_test
from prime_hpc.trainer.ops import attention
from prime_hpc.trainer.ops.fp8 import check_device
from prime_hpc.trainer.parallel import Parallel
from prime_hpc.trainer.parallel.distribute import distribute

FP8_ROUNDING = 2.0**-4
"""Relative rounding error of float8_e4m3."""


def resolve_source(name: str, key: str = "model.name") -> Path:
    """Return the local directory of a model, which `key` names: `name` itself, or the hub's snapshot of it (downloaded
    where missing).
    Raises ValueError: neither exists."""
    path = Path(name).expanduser()
    if path.is_dir():
        return path
    if path.is_absolute() or name.startswith("."):
        raise NodeError(f"{key} = {name}: no such directory")
    from huggingface_hub import snapshot_download

    others = ["*.bin", "*.pth", "*.gguf", "*.h5", "*.msgpack", "*.onnx", "consolidated*"]
    try:
        return Path(snapshot_download(name, ignore_patterns=others))
    except Exception as error:  # the hub client raises a dozen unrelated classes
        raise ValueError(
            f"{key} = {name}: no such local directory, and the hub has no model of that name or cannot be "
            f"reached ({type(error).__name__}: {error})"
        ) from error


def compute_dtype(config: ModelConfig) -> torch.dtype:
    """dtype of the forward and backward pass. Raises ValueError: float16, which would need loss scaling."""
    if config.dtype == "float16":
        raise ValueError("model.dtype = float16 cannot train here (it needs loss scaling); use bfloat16 or float32")
    return torch.bfloat16 if config.dtype == "bfloat16" else torch.float32


def _stored_weights(source: Path) -> Mapping[str, StoredTensor]:
    """Return the tensors of a checkpoint; raises a ValueError for those that would load as noise, or not at all."""
    stored = stored_tensors(source)
    if not stored:
        raise ValueError(f"{source} holds no safetensors; `save_pretrained` of transformers writes them")
    for wrong in (quantised(source, stored), other_vocabulary(source, stored), without_head(source, stored)):
        if wrong is not None:
            raise ValueError(wrong)
    return stored


def _build_empty(source: Path, config: ModelConfig, *, scores: bool = False) -> tuple[Any, Family]:
    """Return the model's modules without memory for parameters, buffers (rotary frequencies) are real; how it
    trains."""
    from accelerate import init_empty_weights
    from transformers import (
        AutoConfig,
        AutoModelForCausalLM,
        AutoModelForImageTextToText,
        AutoModelForSequenceClassification,
    )

    try:
        hf_config = AutoConfig.from_pretrained(source, trust_remote_code=config.trust_remote_code)
    except (OSError, ValueError) as error:
        raise ValueError(f"{source} holds no usable config.json ({error})") from error
    except Exception as error:  # transformers checks some fields with errors of its own classes
        raise ValueError(_says(source, error)) from error
    family = family_of(hf_config.to_dict())
    stated = hf_config.to_dict()
    if problem := family.refusal or family.dtype_problem(config.dtype) or vision_problem(stated, config.vision):
        raise ValueError(problem)
    # Images attend within themselves, by no kernel that knows samples.
    kinds = {"text_config": "eager" if family.custom_attention else attention.register(), "vision_config": "sdpa"}
    kind: Any = AutoModelForCausalLM if config.vision is None else AutoModelForImageTextToText
    if scores:
        kind, hf_config = AutoModelForSequenceClassification, score_head.config_of(hf_config)
    try:
        with init_empty_weights(include_buffers=False):
            hf = kind.from_config(
                hf_config,
                dtype=torch.float32,
                attn_implementation=kinds if config.vision is not None else kinds["text_config"],
                trust_remote_code=config.trust_remote_code,
            )
    except Exception as error:  # a field that the model's code cannot take: errors of any class
        raise ValueError(_says(source, error)) from error
    hf.tie_weights()
    return hf, family


def _open(
    source: Path, config: ModelConfig, *, scores: bool
) -> tuple[Mapping[str, StoredTensor], Any, Family, dict[str, Any] | None]:
    """Return a checkpoint's tensors, the empty model of them, how it trains, and its `Policy.reward_config`."""
    stored = _stored_weights(source)
    hf, family = _build_empty(source, config, scores=scores)
    if not scores:
        return stored, hf, family, None
    stated = score_head.stated(hf, source, trust_remote_code=config.trust_remote_code)
    return score_head.stored_with_score(stored, hf, source), hf, family, stated


def _says(source: Path, error: Exception) -> str:
    return f"no model can be built from {source / 'config.json'} ({type(error).__name__}: {error})"


@torch.no_grad()
def _load_shards(policy: Policy, weights: WeightMap, device: torch.device, new_head: int | None) -> None:
    """Give the empty, sharded parameters memory and read every rank's rows. `new_head`: see `load_policy`."""
    policy._apply(lambda t: torch.empty_like(t, device=device) if t.is_meta else t.to(device))
    tensors = {name: tensor.detach() for name, tensor in policy.named_weights()}
    if new_head is not None and score_head.is_new(weights.stored):
        score_head.begin(tensors.pop(score_head.SCORE), policy.hf.config, new_head)
    read_tensors(tensors, weights)


def _announce(policy: Policy, config: ModelConfig, notes: list[str]) -> None:
    count, layout = sum(p.numel() for p in policy.parameters()), policy.parallel.dims.describe()
    logger.info(f"{type(policy.hf).__name__}, {count:,} parameters, compute {compute_dtype(config)}, {layout}")
    if config.lora is not None and policy.adapters is not None:
        count, modules = policy.adapters.num_parameters, policy.adapters.modules
        logger.info(f"frozen; adapters of rank {config.lora.rank} in {len(modules)} modules: {count:,} parameters")
    for note in notes:
        logger.info(note)


def load_policy(
    config: ModelConfig,
    source: Path,
    parallel: Parallel,
    device: torch.device,
    *,
    reshard_after_forward: bool,
    chunk_tokens: int,
    num_slots: int = 1,
    context: int | None = None,
    rows: Literal["auto", "packed", "single"] = "auto",
    replays_routers: bool = False,
    new_head: int | None = None,
    key: str = "model.name",
) -> Policy:
    """Build, shard, load and test the policy. Collective.

    Args:
        source: local directory of the weights (see `resolve_source`).
        reshard_after_forward: free gathered block parameters after the forward pass.
        chunk_tokens: rows of logits that exist at once.
        num_slots: adapters at once, with `model.lora` (all zero until `Adapters.reset` or a checkpoint fills them).
        context: tokens that the engines are made for, see `rotary`; None: the model's own limit.
        rows: how samples lie, see `trainer.rows`.
        replays_routers: send tokens to the experts that micro-batches name.
        new_head: make a reward model of it, with a scalar head (`score_head`), drawn from this seed where it has none.
        key: of the config, that names the model.

    Raises:
        ValueError: no config, no weights, wrong shapes, quantised weights, a dtype or attention that cannot run here, a
            LoRA target that matches nothing, a family that cannot be trained, log-probabilities that depend on how
            samples lie (`self_test`).
    """
    dtype = compute_dtype(config)
    kernel = attention.select_kernel(config.attn, device.type, dtype)
    if config.fp8:
        check_device(device)
    try:
        stored, hf, family, reward_config = _open(source, config, scores=new_head is not None)
        weights = map_weights(hf, stored)
        check_tied(weights)
        pinned = pin_rotary(hf, context)
        single_rows = family.rows_as(rows) == "single"
        image_inputs = None
        if config.vision is not None:
            image_inputs = ImageInputs.load(source, hf.config.vision_config.spatial_merge_size)
            hf.base_model.visual.requires_grad_(config.vision == "trained")
    except ValueError as error:
        raise ValueError(f"{key} = {config.name}: {error}") from error
    why = family.reason or "trainer.rows = single"
    if single_rows and parallel.cp is not None:
        raise ValueError(f"trainer.parallel.cp: {config.name} trains one sample a row ({why}); set it to 1")
    policy = Policy(hf, config.attn, chunk_tokens, parallel, single_rows=single_rows)
    policy.weights, policy.reward_config = weights, reward_config
    policy.image_inputs, policy.trains_vision = image_inputs, config.vision == "trained"
    policy.eval()  # for good: log-probabilities are the engine's, so no dropout in any pass, and nothing to restore
    if config.lora is not None:
        add_lora(policy.hf, config.lora, dtype)
    if config.router_dtype == "float32":
        use_float32_routers(policy.hf)
    if replays_routers:
        replay.install(policy.hf)
        policy.replays_routers = True
    policy.pads_rows = kernel is attention.padded_attention
    policy.exact_logits, policy.fused_head = config.head_dtype == "float32", config.fused_head
    policy.partly_used = distribute(policy, policy.hf, config, parallel, dtype, reshard_after_forward)
    _load_shards(policy, weights, device, new_head)
    if config.lora is not None:
        everyone = init_device_mesh(device.type, (dist.get_world_size(),), mesh_dim_names=("adapters",))
        policy.adapters = Adapters(policy.hf, config.lora, num_slots, everyone, device)
        policy.adapters.base_names = weights.base_names(policy.adapters.modules)
    if dist.get_rank() == 0:
        _announce(policy, config, [*pinned, *([f"one sample a row: {why}"] if single_rows else [])])
    self_test(policy, device, FP8_ROUNDING if config.fp8 else torch.finfo(dtype).eps / 2, mixes_scales=config.fp8)
    return policy
