"""From the experiment tree to vLLM's command line and environment. Pure functions.

Imports neither torch nor vllm: what is built here can be shown by a plan and tested in milliseconds.
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from prime_hpc.client.http import SERVERS_KEEP_ALIVE_S
from prime_hpc.config.experiment import Experiment
from prime_hpc.config.families import with_text_part
from prime_hpc.config.named_code import NETWORK_TRANSPORTS
from prime_hpc.config.secret import revealed
from prime_hpc.config.sections.inference import InferenceConfig
from prime_hpc.inference.backend import POLICY, REPLICA_SEED_STRIDE, scores, section
from prime_hpc.inference.vllm.arguments import JSON, not_passed_through
from prime_hpc.store.model.config import read_config
from prime_hpc.weight_transport.network.nccl import read_again

Device = Literal["cpu", "cuda"]

WORKER_EXTENSION = "prime_hpc.inference.vllm.worker.PolicyWorker"
RECEIVING_EXTENSION = "prime_hpc.inference.vllm.transfer_worker.ReceivingWorker"
"""Instead, where weights come over the network."""

TRANSFER_ENGINE = "prime_hpc"
"""By which vLLM knows `transfer_engine.TransferEngine`."""

NUM_WORKERS = "PRIMEHPC_NUM_WORKERS"
"""Environment variable: workers of all servers of a role together."""

GIB = 1 << 30

MOST_LOGPROBS = 20
"""Log-probabilities a token that vLLM gives unless it is told otherwise (`--max-logprobs`)."""

VLLM_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Ranks for which vLLM has room; a smaller adapter is padded."""
MAX_VERSIONS_AT_ONCE = 4
"""Of one adapter in one batch of the engine: each costs GPU memory, requests of further ones wait."""
SPARE_ADAPTERS = 4
"""Versions beyond those that stay loaded in host memory while requests still use them."""

CPU_DEFAULTS: dict[str, Any] = {
    # The episodes of a group share their prompt. vLLM's own choice on CPU, 128, is longer than many a whole prompt, and
    # only full blocks can be shared; its CPU kernels want multiples of 32.
    "block_size": 32,
    "enable_prefix_caching": True,
    # They are computed at every step for a /metrics that nobody scrapes on a CPU machine, unless `prometheus` or
    # `adaptive_concurrency` does.
    "disable_log_stats": True,
}
"""Defaults on CPU only; `inference.vllm` overrides them."""

LATENT_FAMILIES = frozenset(
    ("axk1", "deepseek_v2", "deepseek_v3", "glm4_moe_lite", "kimi_k2", "kimi_linear", "longcat_flash")
)
"""model_type of those that vLLM 0.32 serves with latent attention (MLA), without the sparse ones, which it has for GPUs
alone."""
PLAIN_SIZE = 576
"""Values that vLLM's plain CPU kernels for it keep of a token in each layer: as many as DeepSeek's models have."""


KERNEL_CACHES = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")
"""On a CPU a matrix product of each number of tokens has a kernel of its own, which oneDNN and torch keep."""
KEPT_KERNELS = "32"
"""They keep 1024 unless told: a tiny model's engine grew by 640 MB over 3,000 requests of 5 to 600 tokens (2 cores),
and by 130 MB with these, at no lower speed."""

NO_COMPILER = "TORCHDYNAMO_DISABLE"
"""torch.compile leaves functions as they are."""

POOLING: dict[str, Any] = {"runner": "pooling", "enable_scale_out": None}
"""Of a model that scores: no tokens come out."""
IMAGES: dict[str, Any] = {"mm_processor_cache_gb": 0, "limit_mm_per_prompt": {"video": 0}}
"""With `model.vision`. vLLM keeps pixels twice, at the server and in the engine, and a new version empties both, one
after the other: a request on its way in between would name an image that the engine has no more."""


def build_argv(experiment: Experiment, *, device: Device, replica: int, port: int) -> list[str]:
    """vLLM's `serve` arguments of one replica.
    Raises ValueError: `inference.vllm` holds what vLLM does not know, or what is not to be stated there."""
    config = section(experiment)
    for refusal in not_passed_through(config.vllm):
        raise ValueError(f"{refusal.key}: {refusal.reason}; {refusal.remedy}")
    model = experiment.model
    options: dict[str, Any] = {
        "model": model.name,
        "served_model_name": list(dict.fromkeys([POLICY, model.name])),
        "host": config.server.host,
        "port": port,
        "dtype": model.dtype,
        "max_model_len": experiment.max_model_len,
        "seed": (experiment.seed + REPLICA_SEED_STRIDE * replica) % 2**32,  # NumPy takes no larger one
        "trust_remote_code": model.trust_remote_code or None,
        "generation_config": "vllm",
        "enable_scale_out": True,
        "logprobs_mode": "processed_logprobs",
        "worker_extension_cls": WORKER_EXTENSION,
        "disable_uvicorn_access_log": True,
        "uvicorn_log_level": "warning",
        "max_num_seqs": config.max_num_seqs,
        "enforce_eager": is_eager(config, device),
        "headless": config.headless or None,
        "enable_return_routed_experts": experiment.replays_routers or None,
    }
    distillation = experiment.trainer.loss.distillation
    if distillation is not None and distillation.top_k > MOST_LOGPROBS:
        options["max_logprobs"] = distillation.top_k
    if experiment.weights.transport in NETWORK_TRANSPORTS:
        options["weight_transfer_config"] = {"backend": TRANSFER_ENGINE}
        options["worker_extension_cls"] = RECEIVING_EXTENSION
    if model.vision is not None:
        options |= IMAGES
    options |= _parallel_options(config) | _adapter_options(experiment)
    if device == "cpu":
        options |= cpu_options(read_config(model.name) or {})
        options |= {"kv_cache_memory_bytes": round(config.cpu_kv_cache_gib * GIB), **CPU_DEFAULTS}
        scraped = experiment.prometheus is not None and experiment.prometheus.servers
        if scraped or experiment.orchestrator.adaptive_concurrency is not None:
            options["disable_log_stats"] = False
        if config.gpus_per_engine == 1:
            options["distributed_executor_backend"] = "uni"  # see build_env
    else:
        options["gpu_memory_utilization"] = config.gpu_memory_utilization
        options["enable_sleep_mode"] = config.sleep or None
        if config.kv_cache_gib is not None:
            options["kv_cache_memory_bytes"] = round(config.kv_cache_gib * GIB)
        options["kv_offloading_size"] = config.kv_offload_gib
    if scores(experiment):
        options |= POOLING
    options |= {key.replace("-", "_"): value for key, value in revealed(config.vllm).items()}
    if model.head_dtype == "float32":
        options["hf_overrides"] = {**(options.get("hf_overrides") or {}), "head_dtype": "float32"}
    if model.router_dtype == "float32":
        options["additional_config"] = {**(options.get("additional_config") or {}), "router_dtype": "float32"}
    return [token for key, value in options.items() for token in _flag(key, value)]


def build_env(experiment: Experiment, *, device: Device, scratch: Path) -> dict[str, str]:
    """Environment variables that vLLM must see before it is imported.
    `scratch`: this server's own folder for sockets and temporary files; its path must be short."""
    config = section(experiment)
    env = {
        "TMPDIR": str(scratch),
        "VLLM_RPC_BASE_PATH": str(scratch),
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        # Weight updates go through our own guarded routes; the dev routes would open far more.
        "VLLM_SERVER_DEV_MODE": "0",
        # `guard` stands before every route; vLLM's own check, of some of them, would only want the same key again.
        "VLLM_API_KEY": "",
        "TOKENIZERS_PARALLELISM": "false",
        # vLLM's own 5 s are shorter than clients keep a connection: a request would meet its end now and then.
        "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": str(SERVERS_KEEP_ALIVE_S),
    }
    if not config.headless and config.data_parallel_address is None:
        # All engines are on this node: what they listen on need not be seen from another.
        env["GLOO_SOCKET_IFNAME"] = "lo"
    if Path(experiment.model.name).is_dir():
        # A local model needs no hub: without this every start asks it, and waits where there is no route.
        env |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
    if config.batch_invariant:
        if device == "cpu":
            raise ValueError("inference.batch_invariant: vLLM has such kernels for GPUs alone; leave it out on a CPU")
        env["VLLM_BATCH_INVARIANT"] = "1"
    if experiment.replays_routers and device == "cuda":
        env["VLLM_USE_V2_MODEL_RUNNER"] = "1"  # the one that records experts
    if experiment.weights.transport == "nccl":
        env |= read_again(os.environ)
    if device == "cuda":
        env[NUM_WORKERS] = str(config.num_gpus)
        # Where nobody wants log-probabilities, as in evaluations, vLLM would draw by kernels of FlashInfer, which it
        # compiles then and there: the engine stands still for as long, and dies where there is no nvcc.
        env["VLLM_USE_FLASHINFER_SAMPLER"] = os.environ.get("VLLM_USE_FLASHINFER_SAMPLER", "0")
    if device == "cpu":
        env |= {
            # `auto` would pin every engine to the first cores.
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": str(config.cpu_threads),
            **{name: os.environ.get(name, KEPT_KERNELS) for name in KERNEL_CACHES},
        }
        if is_eager(config, device):
            # vLLM compiles parts of some models even so (Cohere's norms, linear attention), when a request first needs
            # them: nothing is answered until then, and where there is no g++ the engine dies of it.
            env[NO_COMPILER] = "1"
        if config.gpus_per_engine == 1:
            # Keeps the worker inside the engine's process: one process less a rank, no shared-memory hop a step.
            env["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    return env


def latent_size(config: Mapping[str, Any]) -> int | None:
    """Return how many values of a token a layer keeps by a model's config.json; None without latent attention."""
    own = with_text_part(config)
    rank, rotary = own.get("kv_lora_rank"), own.get("qk_rope_head_dim")
    if own.get("model_type") not in LATENT_FAMILIES or not isinstance(rank, int) or not isinstance(rotary, int):
        return None
    return rank + rotary


def cpu_options(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments by which an engine on a CPU can load new versions of a model.

    Where a CPU has AMX, vLLM 0.32 takes kernels that pack `kv_b_proj` of latent attention at the start and drop it: a
    new version finds nothing to be written into. Its plain ones keep it.
    """
    return {"attention_backend": "CPU_MLA"} if latent_size(config) == PLAIN_SIZE else {}


def _parallel_options(config: InferenceConfig) -> dict[str, Any]:
    """Tensor, pipeline and data parallelism; data-parallel placement only where there is more than one rank."""
    options: dict[str, Any] = {"tensor_parallel_size": config.tensor_parallel_size}
    if config.pipeline_parallel_size > 1:
        options["pipeline_parallel_size"] = config.pipeline_parallel_size
    if config.data_parallel_size > 1:
        options |= {
            "data_parallel_size": config.data_parallel_size,
            "data_parallel_size_local": config.data_parallel_size_local,
            "data_parallel_address": config.data_parallel_address,
            "data_parallel_rpc_port": config.data_parallel_rpc_port,
            "data_parallel_start_rank": config.data_parallel_start_rank,
        }
    return options


def is_eager(config: InferenceConfig, device: Device) -> bool:
    """Return whether no graphs are compiled: on a CPU, unless stated; of a pipeline's stages vLLM runs there compiled
    ones alone."""
    if config.enforce_eager is not None:
        return config.enforce_eager
    return device == "cpu" and config.pipeline_parallel_size == 1


def _adapter_options(experiment: Experiment) -> dict[str, Any]:
    """Room for the adapters of all runs that share the engines, each in the versions that may sample at once."""
    lora, num_names = experiment.model.lora, experiment.trainer.max_concurrent_runs
    if lora is None or not experiment.samples:
        return {}
    at_once = num_names * min(experiment.async_level + 1, MAX_VERSIONS_AT_ONCE)
    return {
        "enable_lora": True,
        "max_lora_rank": next(rank for rank in VLLM_RANKS if rank >= lora.rank),
        "max_loras": max(2, at_once),
        "max_cpu_loras": max(2, at_once) + num_names + SPARE_ADAPTERS,
    }


def _flag(name: str, value: Any) -> list[str]:
    """One option as command-line tokens. None is left out; False becomes `--no-...`.

    vLLM's `disable_...` switches are off unless given and mostly know no `--no-disable-...`: False leaves them out.
    """
    flag = "--" + name.replace("_", "-")
    if value is None or (value is False and name.startswith("disable_")):
        return []
    if isinstance(value, bool):
        return [flag] if value else ["--no-" + name.replace("_", "-")]
    if isinstance(value, dict) or (isinstance(value, list | tuple) and name in JSON.split()):
        return [flag, json.dumps(value)]
    if isinstance(value, list | tuple):
        return [flag, *map(str, value)]
    return [flag, str(value)]
