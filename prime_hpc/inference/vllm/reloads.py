"""vLLM's reloads made whole: what a model's code loads past them arrives, and no layer stays old unsaid.

A reload (vLLM 0.32) puts tensors without memory in the places of parameters, and the parameters' loaders note what
comes until a layer has all of it. Code that writes into a parameter by itself (`param.copy_`) writes nowhere then, in
silence, and the layer goes on with the weights of the version before.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MethodType
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from vllm.model_executor.layers.attention import is_deferred_attention_layer
from vllm.model_executor.model_loader.reload import inplace, layerwise
from vllm.model_executor.model_loader.reload.meta import SKIP_TENSORS
from vllm.model_executor.model_loader.reload.utils import get_layer_size, get_layer_tensors

WRITES_BY_ITSELF = frozenset({"GptOssForCausalLM"})
"""Classes whose code does so: with experts, their biases and the sinks of attention."""
SHOWN = 3
_PLAIN = (torch.Size, int, str, type(None))
_finalize = layerwise.finalize_layerwise_reload


class NotLoadedError(RuntimeError):
    """Layers of the model have got nothing of a version."""


def check_every_reload() -> None:
    """Let vLLM's own reloads end with `NotLoadedError` where a layer got nothing; does nothing a second time."""
    vars(inplace)["finalize_layerwise_reload"] = finish


def count_once() -> None:
    """Let vLLM's reloads remember how many elements each tensor fills; does nothing a second time.

    To count them it tries every loader on memory that is none, tensor by tensor, at each reload: with many small
    experts 40 % of it. Not where a tensor may go elsewhere the next time: experts that move, quantized weights.
    """
    counted = layerwise.get_numel_loaded
    if counted.__module__ != __name__:
        vars(layerwise)["get_numel_loaded"] = remembering(counted)


def remembering(count: Callable[..., tuple[int, object]]) -> Callable[..., tuple[int, object]]:
    """Return vLLM's `get_numel_loaded` with a memory: by the layer's own loader, the shapes and the plain arguments. A
    loader that calls another one, as that of shared memory, is called again: the other one notes what comes."""
    known: dict[tuple[Any, ...], tuple[int, object]] = {}
    num_calls = 0

    def get_numel_loaded(weight_loader: Callable[..., object], args: inspect.BoundArguments) -> tuple[int, object]:
        nonlocal num_calls
        num_calls += 1
        values = [value.shape if isinstance(value, torch.Tensor) else value for value in args.arguments.values()]
        if not isinstance(weight_loader, MethodType) or not all(isinstance(value, _PLAIN) for value in values):
            return count(weight_loader, args)  # what is made anew each time would stay here
        key = (weight_loader, *values)
        found = known.get(key)
        if found is None:
            before = num_calls
            found = count(weight_loader, args)
            if num_calls == before:
                known[key] = found
        return found

    return get_numel_loaded


def finish(model: torch.nn.Module, config: Any) -> None:
    """End a reload, as vLLM does. Raises NotLoadedError."""
    missing = not_loaded(model)
    if missing:
        named = ", ".join(missing[:SHOWN]) + (", ..." if len(missing) > SHOWN else "")
        raise NotLoadedError(
            f"of a new version {len(missing)} parameters of {type(model).__name__} got nothing ({named}): vLLM's code "
            "for this model loads them past its reloads, and they would keep the old weights. Train adapters "
            "(model.lora), or serve it with inference.backend: transformers"
        )
    _finalize(model, config)


def not_loaded(model: torch.nn.Module) -> list[str]:
    """Names of parameters for which nothing has come, once all of a version has. One that shares its memory with
    another parameter, as an output head with the embeddings, needs nothing."""
    missing, filled = dict[str, int](), set[int]()
    for name, layer in model.named_modules():
        info = layerwise.get_layerwise_info(layer)
        seen = {known for known, _ in info.loaded_weights} | SKIP_TENSORS
        parameters = dict(layer.named_parameters(recurse=False))
        if info.can_load() and info.kernel_tensors is not None and not is_deferred_attention_layer(layer):
            parameters = info.kernel_tensors[0]  # not all elements have come: none, or all but those that only pad
            missing |= {f"{name}.{own}": p.data_ptr() for own, p in parameters.items() if p.numel() and own not in seen}
            parameters = {own: parameter for own, parameter in parameters.items() if own in seen}
        filled |= {parameter.data_ptr() for parameter in parameters.values()}
    return [name for name, place in missing.items() if place not in filled]


@contextmanager
def writes_arrive(model: torch.nn.Module) -> Iterator[None]:
    """Note what the code of a model of `WRITES_BY_ITSELF` writes into its parameters while it is loaded again, as
    their loaders would."""
    if type(model).__name__ not in WRITES_BY_ITSELF:
        yield
        return
    counted = layerwise.get_numel_loaded
    mode = _Writes(model)

    def get_numel_loaded(*args: Any) -> Any:
        mode.num_loaders += 1  # that of shared memory calls another; vLLM tries them without memory, and notes them
        try:
            return counted(*args)
        finally:
            mode.num_loaders -= 1

    vars(layerwise)["get_numel_loaded"] = get_numel_loaded
    try:
        with mode:
            yield
    finally:
        vars(layerwise)["get_numel_loaded"] = counted


class _Writes(TorchDispatchMode):
    """Notes copies into parameters without memory."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.num_loaders = 0
        self._model = model
        self._places: dict[int, tuple[torch.nn.Module, str]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.aten.copy_.default and args[0].is_meta and not args[1].is_meta and not self.num_loaders:
            self._note(args[0], args[1])
            return args[0]
        return func(*args, **(kwargs or {}))

    def _note(self, target: torch.Tensor, values: torch.Tensor) -> None:
        key = target.untyped_storage()._cdata
        if key not in self._places:
            self._places = {
                tensor.untyped_storage()._cdata: (layer, name)
                for layer in self._model.modules()
                for name, tensor in get_layer_tensors(layer).items()
                if tensor.is_meta
            }
        layer, name = self._places[key]
        getattr(layer, name).weight_loader = _write
        where = (tuple(target.shape), target.stride(), target.storage_offset())
        info = layerwise.get_layerwise_info(layer)
        info.loaded_weights.append((name, inspect.signature(_write).bind(None, values, where)))
        info.load_numel += values.numel()
        if info.load_numel >= get_layer_size(layer):
            layerwise._layerwise_process(layer, info)


def _write(param: torch.Tensor, values: torch.Tensor, where: tuple[Any, Any, int]) -> None:
    """Do what was noted; vLLM calls it when all is there."""
    param.data.as_strided(*where).copy_(values)
