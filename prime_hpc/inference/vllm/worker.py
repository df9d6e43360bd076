"""Weight updates inside a vLLM worker. vLLM mixes `PolicyWorker` into its Worker class in every engine.

Two calls, so that no engine is touched before all of them can read the new version:
`policy_open` opens and checks the files while requests go on, `policy_apply` loads them while generation is paused.
Called through `collective_rpc` by `weight_updates`. Method names must not collide with the Worker's own
(`update_weights`, `reload_weights`, ... exist there).
"""

import logging
import os
import time
import weakref
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from prime_hpc.inference.check_version import says_nothing, server_scratch, weight_files
from prime_hpc.inference.tensor_file import TensorFile
from prime_hpc.inference.vllm import cpu_corrections, reloads, routing
from prime_hpc.inference.vllm.pinned import CopyWithoutWaiting, PinnedStage, most_bytes, pinned_memory, workers_of_node
from prime_hpc.runtime.process_memory import keep_freed_memory
from prime_hpc.store.messaging.listeners import shut_listeners
from prime_hpc.weight_transport.transport import VersionReader

if TYPE_CHECKING:
    from vllm.config import VllmConfig

_RELOADS = "vllm.model_executor.model_loader.reload.layerwise"
"""Logger of vLLM's reloads: warns of each layer for which nothing came."""

Prepacked = Mapping[torch.nn.Module, "weakref.ReferenceType[Any]"]


class PolicyWorker:
    """Mixed into vLLM's Worker; `self` is that worker."""

    # Class attributes: vLLM never calls a mixin's __init__.
    _policy_files: Sequence[TensorFile] | None = None
    """Of the version that is open."""
    _policy_reader: VersionReader | None = None
    _policy_stage: PinnedStage | None = None

    if TYPE_CHECKING:
        vllm_config: VllmConfig
        model_runner: Any
        rank: int

        def reload_weights(self, *, weights_iterator: Iterator[tuple[str, torch.Tensor]]) -> None:
            """Put weights in the place of those that are served (vLLM's own)."""

    def __new__(cls, *args: Any, **kwargs: Any) -> "PolicyWorker":
        """Make a worker, whose model is not built yet: the one place of a mixin before that, in every process."""
        if "vllm_config" in kwargs and _wants_float32_routers(kwargs["vllm_config"]):
            routing.use_float32_gates()
        cpu_corrections.rotate_heads()  # on other devices nobody calls it
        return super().__new__(cls)

    def policy_start(self) -> None:
        """Before anything is served: mend what vLLM gets wrong on CPU, and what makes its reloads there slow.
        Raises ValueError: the model's router cannot compute as `model.router_dtype` has it."""
        from vllm.platforms import current_platform

        logging.getLogger(_RELOADS).addFilter(_is_about_weights)
        reloads.check_every_reload()
        if self.vllm_config.quant_config is None and not self.vllm_config.parallel_config.enable_eplb:
            reloads.count_once()
        if _wants_float32_routers(self.vllm_config):
            routing.check_gates(self.model_runner.get_model())
        if not current_platform.is_cpu():
            return
        cpu_corrections.rank_at_once()
        cpu_corrections.heed_bias(self.model_runner.get_model())
        if self.vllm_config.aux_output_config.enabled:
            routing.record(self.model_runner, self.vllm_config)
        if self.vllm_config.lora_config is not None:
            cpu_corrections.multiply_adapters()
        if self.vllm_config.speculative_config is not None:
            cpu_corrections.speculate()
        if os.environ.get("GLOO_SOCKET_IFNAME") == "lo":  # no engine is on another node (`args.build_env`)
            shut_listeners()  # the engines are connected, and the HTTP server does not listen yet
        keep_freed_memory()
        _prepack_no_embeddings(self.model_runner.get_model())

    def policy_open(self, folder: str, transport: str) -> dict[str, Any]:
        """Open the files of the next version (memory-mapped: a node reads each byte once for all its workers).

        The server has fetched it for its own node; the workers of a further node do it here, the first of them for all.

        On CUDA the tensors then go into pinned memory, in a thread; `policy_staged` says when they are there.

        Returns:
            `{"rank", "num_tensors", "is_staged"}`, or `{"rank", "error", "may_pass"}` where a file cannot be read here,
            maybe only for now. Never raises for a bad file: the engine must survive it.
        """
        self._policy_close()
        if self._policy_reader is None:
            self._policy_reader = VersionReader(server_scratch())
        try:
            files = weight_files(self._policy_reader.fetch(Path(folder), transport))
            opened = [TensorFile(file) for file in files]
        except Exception as error:  # noqa: BLE001 - safetensors raises its own type, which pickles badly across processes
            told = f"{type(error).__name__}: {error}"
            return {"rank": self.policy_rank(), "error": told, "may_pass": says_nothing(error)}
        self._policy_files = opened
        stage = self._policy_stage = self._policy_stage or self._new_stage()
        if stage is not None:
            stage.begin(opened)
        num_tensors = sum(len(file.names) for file in opened)
        return {"rank": self.policy_rank(), "num_tensors": num_tensors, "is_staged": stage is None}

    def _new_stage(self) -> PinnedStage | None:
        from vllm.platforms import current_platform

        if not current_platform.is_cuda():
            return None
        config = self.vllm_config.parallel_config
        num_workers = workers_of_node(config.world_size * max(1, config.data_parallel_size_local))
        return PinnedStage(most_bytes(num_workers), pinned_memory(torch.device("cuda", torch.cuda.current_device())))

    def policy_staged(self) -> dict[str, Any]:
        """Return `{"rank", "is_staged"}`: whether all that fits is in pinned memory. At once: requests go on."""
        stage = self._policy_stage
        return {"rank": self.policy_rank(), "is_staged": stage is None or stage.is_done}

    def policy_apply(self) -> dict[str, Any]:
        """Load the opened version into the model. Generation must be paused. Returns `{"rank", "seconds"}`.
        Raises RuntimeError: nothing is open, or the load failed half-way: this engine's weights are undefined."""
        start = time.perf_counter()
        if self._policy_files is None:
            raise RuntimeError("policy_apply without policy_open")
        try:
            model = self.model_runner.get_model()
            prepacked = prepacked_copies(model)
            with reloads.writes_arrive(model):
                if (stage := self._policy_stage) is None:
                    self.reload_weights(weights_iterator=self._policy_tensors())
                else:
                    stage.wait()
                    with CopyWithoutWaiting(stage):
                        self.reload_weights(weights_iterator=self._policy_tensors())
                    torch.cuda.synchronize()  # before the stage may change, and anybody samples
            prepack_again(model, prepacked)
        finally:
            self._policy_close()
        return {"rank": self.policy_rank(), "seconds": round(time.perf_counter() - start, 4)}

    def _policy_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        tied = self.vllm_config.model_config.hf_text_config.tie_word_embeddings
        for file in self._policy_files or ():
            for name in file.names:
                if not (tied and name == "lm_head.weight"):
                    staged = None if self._policy_stage is None else self._policy_stage.tensor(name)
                    yield name, file.get_tensor(name) if staged is None else staged

    def _policy_close(self) -> None:
        if self._policy_stage is not None:
            self._policy_stage.wait()  # it reads the files
        self._policy_files = None

    def policy_rank(self) -> str:
        """Name this worker among those of all engines."""
        return f"dp{self.vllm_config.parallel_config.data_parallel_index}/rank{self.rank}"


def _is_about_weights(record: logging.LogRecord) -> bool:
    """Return whether a warning of a reload is of a layer with weights: a rotary one has a table that it computed
    itself, for which nothing comes with any version, and which vLLM puts back as it was."""
    layer = record.args[0] if isinstance(record.args, tuple) and record.args else ""
    return not str(layer).endswith("RotaryEmbedding")


def _wants_float32_routers(config: "VllmConfig") -> bool:
    stated = config.additional_config
    return isinstance(stated, dict) and stated.get(routing.ROUTER_DTYPE) == "float32"


def _prepack_no_embeddings(model: torch.nn.Module) -> None:
    """Spare vLLM's prepacked copies, for matrix products on CPU, of embeddings that are only looked up.

    It makes one of every embedding at every load. An output head is no plain embedding; and should a model multiply by
    one all the same, torch's own product does it with the weight itself.
    """
    from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod, VocabParallelEmbedding

    names = Counter(id(module) for _, module in model.named_modules(remove_duplicate=False))
    module: Any
    for module in model.modules():
        method: Any = getattr(module, "quant_method", None)
        is_plain = type(module) is VocabParallelEmbedding and type(method) is UnquantizedEmbeddingMethod
        is_head_too = names[id(module)] > 1
        if is_plain and not is_head_too and "cpu_linear" in vars(module):
            method.process_weights_after_loading = _leave_as_it_is
            module.cpu_linear = torch.nn.functional.linear


def _leave_as_it_is(layer: torch.nn.Module) -> None:
    """Instead of packing."""


def prepacked_copies(model: torch.nn.Module) -> Prepacked:
    """Return the prepacked copies of linear weights that vLLM's CPU kernels made. Weakly held: each may go as soon as
    there is a new one."""
    return {
        module: weakref.ref(vars(module)["cpu_linear"]) for module in model.modules() if "cpu_linear" in vars(module)
    }


def prepack_again(model: torch.nn.Module, prepacked: Prepacked) -> None:
    """Renew the prepacked copies of weights that vLLM's CPU kernels keep and its own reload forgets.

    Args:
        prepacked: their copies before that: where the reload made another, it is not made twice.

    Two cases, both silent without this: a tied output head has no tensor of its own in the checkpoint, so its prepacked
    copy stays that of the old version; and mixture-of-experts layers skip packing when they are loaded again.
    """
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

    for module in model.modules():
        kernel = getattr(getattr(module, "quant_method", None), "moe_kernel", None)
        if kernel is not None:
            kernel.fused_experts.process_weights_after_loading(module)
        elif _is_stale(module, prepacked) and _has_weight(module):
            dispatch_cpu_unquantized_gemm(module, remove_weight=False)


def _is_stale(module: torch.nn.Module, prepacked: Prepacked) -> bool:
    linear = vars(module).get("cpu_linear")
    return module in prepacked and linear is prepacked[module]() and linear is not torch.nn.functional.linear


def _has_weight(module: torch.nn.Module) -> bool:
    """Layers whose kernel dropped the plain weight were prepacked anew by the reload itself."""
    weight = getattr(module, "weight", None)
    return weight is not None and weight.numel() > 0
