"""The arguments of vLLM that `inference.vllm` may hold: checked on a login node, where no vLLM is installed."""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from difflib import get_close_matches
from typing import Any

from prime_hpc.inference.backend import POLICY, Refusal

_OF_INFERENCE = """
max_model_len api_key data_parallel_size data_parallel_size_local data_parallel_address
data_parallel_rpc_port data_parallel_start_rank headless tensor_parallel_size pipeline_parallel_size
gpu_memory_utilization max_num_seqs enforce_eager
"""
"""Those that the section `inference` states under the same name."""
OWNED = {
    **{name: f"inference.{name}" for name in _OF_INFERENCE.split()},
    "model": "model.name",
    "trust_remote_code": "model.trust_remote_code",
    "dtype": "model.dtype",
    "seed": "seed",
    "host": "inference.server.host",
    "port": "inference.server.port",
    "device_memory_utilization": "inference.gpu_memory_utilization",
    "kv_cache_memory_bytes": "inference.kv_cache_gib (on a CPU inference.cpu_kv_cache_gib)",
    "kv_offloading_size": "inference.kv_offload_gib",
    "enable_sleep_mode": "inference.sleep",
    "enable_lora": "model.lora",
    "enable_return_routed_experts": "trainer.router_replay",
    "max_lora_rank": "model.lora.rank",
    "weight_transfer_config": "weights.transport",
}
"""vLLM arguments that the tree states elsewhere, and where."""

_PLACED = "the placement decides where engines run; inference.across_nodes says how those of several nodes are joined"

FIXED = {
    "served_model_name": f"clients ask for {POLICY!r}",
    "worker_extension_cls": "weight updates need it",
    "enable_scale_out": "token-in token-out generation needs it",
    "logprobs_mode": "the trainer's importance ratio needs log-probabilities after temperature",
    "generation_config": "a model's own defaults would change the sampling silently",
    "override_generation_config": "it would change the sampling; orchestrator.sampling states it",
    "logits_processors": "the trainer cannot compute the log-probabilities of what they make of the distribution",
    "config": "its file would state arguments that nothing here sees",
    "prefill_context_parallel_size": "its GPUs are not counted where roles are placed",
    **dict.fromkeys(("device_ids", "nnodes", "node_rank", "master_addr", "master_port"), _PLACED),
    **dict.fromkeys(("data_parallel_rank", "data_parallel_backend"), _PLACED),
    **dict.fromkeys(("data_parallel_hybrid_lb", "data_parallel_external_lb"), _PLACED),
    **dict.fromkeys(
        ("grpc", "uds", "ssl_keyfile", "ssl_certfile"), "our server speaks HTTP over TCP, and nothing else"
    ),
    "api_server_count": "one process holds the policy version; more HTTP processes are more inference.num_replicas",
}
"""vLLM arguments that cannot be chosen, and why."""

SWITCHES = """
aggregate_engine_logging allow_credentials allow_deprecated_quantization async_scheduling
cohere_is_reasoning_model cudagraph_metrics data_parallel_multi_port_external_lb dcp_q_replicate
disable_cascade_attn disable_chunked_mm_input disable_custom_all_reduce disable_fastapi_docs
disable_hybrid_kv_cache_manager disable_log_stats disable_nccl_for_dp_synchronization disable_sliding_window
disable_uvicorn_access_log enable_auto_tool_choice enable_batch_sharded_sampling enable_chunked_prefill
enable_cumem_allocator enable_dbo enable_elastic_ep enable_ep_weight_filter enable_eplb enable_expert_parallel
enable_fault_tolerance enable_flash_late_interaction enable_flashinfer_autotune enable_force_include_usage
enable_hc_sp enable_layerwise_nvtx_tracing enable_log_deltas enable_log_outputs enable_log_requests
enable_logging_iteration_details enable_mamba_cache_stochastic_rounding enable_mamba_shared_prefix_checkpoint
enable_mfu_metrics enable_mixed_moe_lora_format enable_mm_embeds enable_moe_shared_loras
enable_nccl_comm_suspend enable_offline_docs enable_per_request_metrics enable_prefix_caching
enable_prompt_embeds enable_prompt_tokens_details enable_request_id_headers enable_server_load_tracking
enable_shm_tensor_arena enable_ssl_refresh enable_tokenizer_info_endpoint enable_tower_connector_lora
enable_trace_replay exclude_tools_when_tool_choice_none fail_on_environ_validation fully_sharded_loras
interleave_mm_strings jit_monitor_verbose kv_cache_metrics kv_sharing_fast_prefill language_model_only
log_error_stack long_prefill_token_threshold_adaptive mm_device_do_normalize mm_encoder_only numa_bind
ray_workers_use_nsight return_sampling_mask return_tokens_as_token_ids scheduler_reserve_full_isl
skip_mm_profiling skip_tokenizer_init sleep_mode_offload_cudagraph specialize_active_lora swa_bounded_replay
tokens_only trust_request_chat_template trust_request_mm_kwargs use_fp64_gumbel use_replayssm use_tqdm_on_load
"""
"""Arguments of `vllm serve` (0.32), but for those above, that take no value."""
TEXTS = """
additional_config allowed_local_media_path allowed_media_domains anthropic_disabled_thinking_effort
attention_backend chat_template chat_template_content_format code_revision cohere_format collect_detailed_traces
config_format convert cpu_offload_params cudagraph_capture_sizes dcp_comm_backend
disable_access_log_for_endpoints distributed_executor_backend download_dir fingerprint_mode fingerprint_value
gdn_prefill_backend hf_config_path hf_overrides hf_token ignore_patterns io_processor_plugin jit_monitor_mode
kda_decode_backend kda_prefill_backend kv_cache_dtype_skip_layers linear_backend load_format log_config_file
log_level lora_modules lora_target_modules mamba_backend mamba_ssu_algorithm middleware mm_encoder_attn_backend
mm_encoder_attn_dtype mm_encoder_fp8_scale_path mm_encoder_fp8_scale_save_path mm_encoder_tp_mode
mm_hasher_algorithm mm_processor_cache_type mm_processor_device mm_tensor_ipc model_impl
model_loader_extra_config moe_backend numa_bind_cpus numa_bind_nodes offload_backend offload_params
optimization_level otlp_traces_endpoint per_request_spec_decode_metrics pt_load_map_location quantization
reasoning_parser reasoning_parser_plugin response_role revision root_path runner safetensors_load_strategy
scheduler_cls show_hidden_metrics_for_version sleep_preserve_parameter_names sparse_indexer_topk_backend
spec_method spec_model ssl_ca_certs ssl_ciphers tokenizer tokenizer_mode tokenizer_revision tool_call_parser
tool_parser_plugin tool_server tool_strict_level video_pruning_method worker_cls
"""
"""Those that take a text or a list; `hf_token` may."""
INTEGERS = """
block_size cp_kv_cache_interleave_size cpu_distributed_timeout_seconds data_parallel_supervisor_port
dbo_decode_token_threshold dbo_prefill_token_threshold dcp_kv_cache_interleave_size decode_context_parallel_size
distributed_timeout_seconds dp_supervisor_probe_failure_threshold dp_sync_interval elastic_ep_max_dp_size grpc_port
h11_max_header_count h11_max_incomplete_event_size long_prefill_token_threshold mamba_block_size
mamba_cache_philox_rounds max_cpu_loras max_cudagraph_capture_size max_log_len max_logprobs max_lora_cls_labels
max_loras max_num_active_seqs max_num_queued_reqs max_parallel_loading_workers mm_shm_cache_max_object_size_mb
num_gpu_blocks_override offload_group_size offload_num_in_group offload_prefetch_step prefill_schedule_interval
prefix_cache_retention_interval prefix_match_unit renderer_num_workers replayssm_buffer_len
safetensors_prefetch_num_threads shutdown_timeout spec_tokens sse_keep_alive_interval ssl_cert_reqs stream_interval
ubatch_size
"""
"""Those that take a whole number."""
SIZES = """
max_num_batched_tokens max_num_queued_tokens max_num_scheduled_tokens safetensors_prefetch_block_size
"""
"""Likewise, which may also be written with a k (1000), K (1024) and the like behind it."""
NUMBERS = """
cpu_offload_gb dp_supervisor_probe_interval_s dp_supervisor_probe_timeout_s kv_cache_metrics_sample
mm_encoder_fp8_scale_save_margin mm_ipc_gpu_memory_gb mm_processor_cache_gb video_pruning_rate watermark
"""
"""Those that take any number."""
OBJECTS = """
attention_config aux_output_config compilation_config ec_manager_config ec_transfer_config engram_config eplb_config
fault_tolerance_config ir_op_priority kernel_config kv_events_config kv_transfer_config logging_config pooler_config
profiler_config quantization_config reasoning_config structured_outputs_config
"""
"""Those that take keys and values, as a mapping or as JSON."""
JSON = """
allowed_headers allowed_methods allowed_origins custom_histogram_buckets default_chat_template_kwargs
default_mm_loras diffusion_config limit_mm_per_prompt media_io_kwargs mm_processor_kwargs model_class_overrides
speculative_config watermark_config
"""
"""Those that take whatever JSON can say."""
CHOICES = {
    "all2all_backend": (
        "allgather_reducescatter deepep_high_throughput deepep_low_latency deepep_v2 flashinfer_all2allv "
        "flashinfer_nvlink_one_sided flashinfer_nvlink_two_sided moonep mori_high_throughput mori_low_latency "
        "naive nixl_ep pplx"
    ),
    "expert_placement_strategy": "linear round_robin",
    "kv_cache_dtype": (
        "auto bfloat16 float16 fp8 fp8_ds_mla fp8_e4m3 fp8_e5m2 fp8_inc fp8_per_token_head "
        "int4_per_token_head int8_per_token_head nvfp4 nvfp4_4over6 nvfp4_ds_mla turboquant_3bit_nc "
        "turboquant_4bit_nc turboquant_k3v4_nc turboquant_k8v4 ultraquant_4bit"
    ),
    "kv_offloading_backend": "lmcache native",
    "lora_dtype": "auto bfloat16 float16",
    "mamba_cache_dtype": "auto bfloat16 float16 float32",
    "mamba_cache_mode": "align none",
    "mamba_ssm_cache_dtype": "auto bfloat16 float16 float32",
    "performance_mode": "balanced interactivity throughput",
    "prefix_caching_hash_algo": "sha256 sha256_cbor xxhash xxhash_cbor",
    "scheduling_policy": "fcfs priority",
    "uvicorn_log_level": "critical debug error info trace warning",
}
"""Those that are often stated and take one of a few values: others vLLM refuses as an engine starts."""

VALUES = " ".join((TEXTS, INTEGERS, SIZES, NUMBERS, OBJECTS, JSON, *CHOICES)).split()
"""All that take a value."""


def not_passed_through(extra: Mapping[str, Any]) -> Iterator[Refusal]:
    """Yield what of `inference.vllm` the tree states elsewhere, cannot be chosen, or would end vLLM's start."""
    switches = SWITCHES.split()
    for key, value in extra.items():
        where, name = f"inference.vllm.{key}", key.partition(".")[0].replace("-", "_")
        if name in OWNED:
            yield Refusal(where, f"the tree states this as {OWNED[name]}", "set it there")
        elif name in FIXED:
            yield Refusal(where, f"cannot be chosen: {FIXED[name]}", "leave it out")
        elif name not in switches and name not in VALUES:
            near = get_close_matches(name, [*OWNED, *FIXED, *switches, *VALUES], n=1)
            meant = OWNED.get(near[0], f"inference.vllm.{near[0]}") if near else ""
            yield Refusal(where, "vLLM 0.32 has no such argument", f"did you mean {meant}?" if near else "leave it out")
        elif value is not None and isinstance(value, bool) != (name in switches) and name != "hf_token":
            takes = "true or false" if name in switches else "a value"
            yield Refusal(where, f"vLLM's {name} takes {takes}, not {value!r}", f"give it {takes}")
        elif value is not None and "." not in key and (takes := _takes_other(name, value)):
            yield Refusal(where, f"vLLM's {name} takes {takes}, not {value!r}", "give it that")
        elif value is not None and name in CHOICES and value not in CHOICES[name].split():
            known = CHOICES[name].split()
            near = get_close_matches(str(value), known, n=1)
            meant = f"did you mean {near[0]}? There are" if near else "take one of"
            yield Refusal(where, f"vLLM's {name} cannot be {value!r}", f"{meant} {', '.join(known)}")


def _takes_other(name: str, value: Any) -> str:
    """Return what vLLM's argument takes, in words, where it cannot read this value; empty where it may."""
    if name in INTEGERS.split() and not re.fullmatch(r"[+-]?\d+", str(value)):
        return "a whole number"
    if name in SIZES.split() and not re.fullmatch(r"[+-]?\d+|\d+(\.\d+)?[kmgt]|\d+[KMGT]", str(value)):
        return "a whole number, such as 8192 or 8K"
    if name in NUMBERS.split() and not _is_read(float, value):
        return "a number"
    if name in OBJECTS.split() and not isinstance(_plain(value), Mapping):
        return "a mapping of its keys"
    if name in JSON.split() and isinstance(value, str) and not _is_read(json.loads, value):
        return "a mapping, a list or JSON"
    return ""


def _plain(value: Any) -> Any:
    return json.loads(value) if isinstance(value, str) and _is_read(json.loads, value) else value


def _is_read(read: Callable[[Any], Any], value: Any) -> bool:
    try:
        read(value)
    except (TypeError, ValueError):
        return False
    return True
