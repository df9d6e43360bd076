"""A transformers model that computes some tokens of many sequences in one forward pass, over rows of a cache."""

import functools
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache, GenerationConfig

from prime_hpc.inference.check_version import BadVersionError
from prime_hpc.inference.tensor_file import TensorFile
from prime_hpc.inference.transformers.cache import LayerShape, RowCache, Window, layer_shapes
from prime_hpc.inference.transformers.limits import model_problem, step_bytes
from prime_hpc.moe.conversion import convert
from prime_hpc.moe.replay import install, replaying
from prime_hpc.moe.routers import moe_layers, use_float32_routers

GIB = 1 << 30
OVERHEAD_GIB = 1.0
"""On a GPU: its context, and the activations of a prefill."""
MOST_ROWS = 256
"""Sequences at once where `inference.max_num_seqs` does not say."""
TRIAL_TOKENS = (24, 9)
"""Lengths of the two sequences of the self-test."""
TRIAL_ERROR = {torch.float32: 1e-3, torch.float16: 0.1, torch.bfloat16: 0.5}
"""Largest difference of a log-probability that rounding explains."""
LM_HEAD = "lm_head.weight"


class BatchModel:
    """The model with its rows. Not thread-safe: belongs to the engine's thread."""

    def __init__(
        self,
        name: str,
        *,
        dtype: torch.dtype,
        device: torch.device,
        max_len: int,
        cache_gib: float | None,
        max_rows: int | None,
        gpu_share: float = 0.9,
        trust_remote_code: bool = False,
        float32_head: bool = False,
        float32_routers: bool = False,
        records_experts: bool = False,
    ) -> None:
        """Load a model and take the memory of its cache.

        Args:
            name: directory or hub name.
            dtype: of weights, products and cache.
            max_len: tokens of one sequence, at most.
            cache_gib: of keys and values; None: what `gpu_share` leaves beside the weights.
            max_rows: sequences at once; None: `MOST_ROWS`.
            gpu_share: of a GPU's memory that may be taken.
            float32_head: logits are products in float32 (`model.head_dtype`).
            float32_routers: routers multiply in float32 (`model.router_dtype`).
            records_experts: keep the experts that each pass sends its tokens to (`chosen`).

        Raises:
            ValueError: it cannot be served in a batch, not one sequence fits, or others hold memory of the share.
        """
        config = AutoConfig.from_pretrained(name, trust_remote_code=trust_remote_code)
        if problem := model_problem(config.to_dict(), max_len):
            raise ValueError(f"model.name: the transformers backend cannot serve {name}: {problem}")
        self.device, self.dtype, self.max_len = device, dtype, max_len
        self.hf: Any = AutoModelForCausalLM.from_pretrained(
            name, config=config, dtype=dtype, trust_remote_code=trust_remote_code
        )
        self.hf.eval().requires_grad_(False).to(device)
        self.eos = _eos(self.hf)
        self.vocab_size = int(config.get_text_config().vocab_size)
        self.tied = bool(config.get_text_config().tie_word_embeddings)
        self._picks: tuple[torch.Tensor, torch.Tensor] | None = None
        self._hook_head(float32_head)
        if float32_routers:
            use_float32_routers(self.hf)
        self.chosen: np.ndarray | None = None
        """uint8 or uint16 [rows, width, layers, k], the experts of the tokens of the last pass; None: not recorded."""
        self._choices: dict[int, torch.Tensor] | None = self._hook_experts() if records_experts else None
        shapes = self._shapes()
        self.token_bytes = sum(shape.num_values for shape in shapes) * dtype.itemsize
        beside = 0 if cache_gib is not None else bytes_of_step(config.get_text_config(), shapes, max_len, dtype)
        self.num_rows = self._count_rows(self._room(cache_gib, gpu_share), beside, max_rows)
        self.cache = RowCache(shapes, self.num_rows, max_len, dtype, device)

    def forward(
        self,
        first: int,
        ids: Sequence[Sequence[int]],
        starts: Sequence[int],
        width: int,
        picks: Sequence[tuple[int, int]],
    ) -> torch.Tensor:
        """Compute tokens of consecutive rows; their keys and values are in the cache afterwards.

        Args:
            ids: tokens of each row, at most `width`.
            starts: position of the first token of each row; one for all where `width` is above 1.
            width: tokens of the pass.
            picks: (row of the pass, token) whose logits are wanted.

        Returns:
            float32 [len(picks), V].
        """
        device = self.device
        positions = torch.tensor(starts, device=device)[:, None] + torch.arange(width, device=device)
        padded = torch.tensor([[*row, *[0] * (width - len(row))] for row in ids], device=device)
        length = max(starts) + width
        visible = torch.arange(length, device=device) <= positions[:, None, :, None]
        mask = torch.zeros(visible.shape, dtype=self.dtype, device=device)
        mask.masked_fill_(~visible, torch.finfo(self.dtype).min)
        self.cache.look_at(Window(first, len(ids), positions, length))
        # without any (a piece in the middle of a prompt) one row goes through the head all the same
        rows, columns = zip(*(picks or [(0, 0)]), strict=True)
        self._picks = torch.tensor(rows, device=device), torch.tensor(columns, device=device)
        try:
            out = self.hf(
                input_ids=padded,
                position_ids=positions,
                attention_mask=mask,
                past_key_values=self.cache,
                use_cache=True,
            )
        finally:
            self._picks = None
        if self._choices is not None:
            self.chosen = self._stack_choices(len(ids), width)
        return out.logits[:, 0].float()[: len(picks)]

    @torch.inference_mode()
    def self_test(self) -> float:
        """Compare pieces of prompts and decoding steps in one batch with the model's own forward pass of each sequence,
        by the same experts where they are recorded.
        Returns the largest difference of a log-probability.
        Raises ValueError: they differ by more than rounding: the model does not take the batch's masks or positions."""
        noise = torch.Generator().manual_seed(0)
        lengths = [min(n, self.max_len) for n in TRIAL_TOKENS][: self.num_rows]
        tokens = [torch.randint(0, self.vocab_size, (n,), generator=noise).tolist() for n in lengths]
        worst, split, routed = 0.0, max(1, lengths[-1] - 3), [dict[int, np.ndarray]() for _ in tokens]
        got = self.forward(
            0, [row[:split] for row in tokens], [0] * len(tokens), split, [(i, split - 1) for i in range(len(tokens))]
        )
        self._note_choices(routed, [0] * len(tokens))
        found = []
        for step in range(max(lengths) - split + 1):
            at = [min(split + step, len(row)) - 1 for row in tokens]  # the position that was computed last
            found.append((at, got))
            at = [min(i + 1, len(row) - 1) for i, row in zip(at, tokens, strict=True)]
            got = self.forward(
                0, [[row[i]] for row, i in zip(tokens, at, strict=True)], at, 1, [(i, 0) for i in range(len(tokens))]
            )
            self._note_choices(routed, at)
        own = [self._alone(row, choices) for row, choices in zip(tokens, routed, strict=True)]
        for at, got in found:
            want = torch.stack([logits[i] for logits, i in zip(own, at, strict=True)]).float()
            worst = max(worst, float((want.log_softmax(-1) - got.log_softmax(-1)).abs().max()))
        if not worst <= TRIAL_ERROR[self.dtype]:
            raise ValueError(
                f"{type(self.hf).__name__} computes other log-probabilities in a batch than alone (by {worst:.2g}): "
                "the transformers backend cannot serve it; use inference.backend = vllm"
            )
        return worst

    def _note_choices(self, routed: list[dict[int, np.ndarray]], starts: Sequence[int]) -> None:
        """Keep the experts of the last pass by row and position; those that are computed again stay as they were."""
        if self.chosen is None:
            return
        for known, start, rows in zip(routed, starts, self.chosen, strict=True):
            for offset, choices in enumerate(rows):
                known.setdefault(start + offset, choices)

    def _alone(self, ids: Sequence[int], routed: Mapping[int, np.ndarray]) -> torch.Tensor:
        """Compute the logits of one sequence by the model's own forward pass, and by these experts if there are any."""
        named = None
        if routed:
            named = torch.from_numpy(np.stack([routed[i] for i in range(len(ids))]).astype(np.int16)).to(self.device)
        with replaying(named):
            logits: torch.Tensor = self.hf(input_ids=torch.tensor([ids], device=self.device), use_cache=False).logits[0]
        return logits

    def open(self, files: Sequence[Path]) -> Mapping[str, torch.Tensor]:
        """Read the tensors of a version, under the names and in the forms of the model's parameters.
        Raises BadVersionError: a file cannot be read, or they are not this model's."""
        stored: dict[str, torch.Tensor] = {}
        try:
            for file in files:
                opened = TensorFile(file)
                stored |= {name: opened.get_tensor(name) for name in opened.names}
        except Exception as error:
            raise BadVersionError(f"{file} cannot be read: {type(error).__name__}: {error}") from error
        return self._as_own(stored, files[0].parent)

    def _as_own(self, stored: Mapping[str, torch.Tensor], folder: Path) -> Mapping[str, torch.Tensor]:
        own = self.hf.state_dict()
        try:
            made, unknown = convert(self.hf, own, stored)
        except ValueError as error:
            raise BadVersionError(f"{folder} is not this model's: {error}") from error
        kept = [self.hf._keys_to_ignore_on_load_missing, self.hf._keys_to_ignore_on_load_unexpected]
        unsaved, ignored = ("|".join(patterns or [r"$^"]) for patterns in kept)
        filled = {own[name].data_ptr() for name in made}  # a tied one has its values from the other name
        missing = [n for n in own if own[n].data_ptr() not in filled and not re.search(unsaved, n)]
        unknown = [name for name in unknown if not re.search(ignored, name)]
        misshapen = [name for name in made if made[name].shape != own[name].shape]
        if missing or unknown or misshapen:
            raise BadVersionError(
                f"{folder} is not this model's: missing {sorted(missing)[:3]}, unknown {sorted(unknown)[:3]}, of "
                f"another shape {sorted(misshapen)[:3]}"
            )
        return {name: made[name] for name in made if not (self.tied and name == LM_HEAD)}

    @torch.no_grad()
    def load(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Take the weights of a version, which `open` has read. Between steps only."""
        own = self.hf.state_dict()
        for name, tensor in tensors.items():
            own[name].copy_(tensor)

    def _hook_head(self, float32_head: bool) -> None:
        """Let the output head see only the hidden states whose logits are wanted."""
        head = self.hf.get_output_embeddings()
        if head is None:
            raise ValueError(f"{type(self.hf).__name__} has no output head: it is no causal language model")

        def pick(module: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...] | None:
            if self._picks is None:
                return None
            return (inputs[0][self._picks][:, None],)

        def in_float32(hidden: torch.Tensor) -> torch.Tensor:
            bias = getattr(head, "bias", None)
            return torch.nn.functional.linear(
                hidden.float(), head.weight.float(), None if bias is None else bias.float()
            )

        head.register_forward_pre_hook(pick)
        if float32_head:
            head.forward = in_float32

    def _hook_experts(self) -> dict[int, torch.Tensor]:
        """Keep what each layer's experts are given, by the layer's index.
        Raises ValueError: the model has no experts."""
        choices: dict[int, torch.Tensor] = {}
        layers = moe_layers(self.hf)
        if not layers:
            raise ValueError(f"trainer.router_replay: {type(self.hf).__name__} has no experts; leave it out")
        install(self.hf)  # for the self-test

        def keep(index: int, module: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
            choices[index] = inputs[1]

        for layer in layers:
            layer.experts.register_forward_pre_hook(functools.partial(keep, layer.number))
        self._num_experts = max(int(cast("int", layer.experts.num_experts)) for layer in layers)
        return choices

    def _stack_choices(self, num_rows: int, width: int) -> np.ndarray:
        assert self._choices is not None
        k = next(iter(self._choices.values())).shape[-1]
        kind = np.uint8 if self._num_experts <= 256 else np.uint16
        found = np.zeros((num_rows, width, self.hf.config.get_text_config().num_hidden_layers, k), kind)
        for index, chosen in self._choices.items():
            found[:, :, index] = chosen.reshape(num_rows, width, k).cpu().numpy()
        return found

    @torch.inference_mode()
    def _shapes(self) -> list[LayerShape]:
        kept = DynamicCache(config=self.hf.config)
        out = self.hf(input_ids=torch.zeros((1, 2), dtype=torch.int64, device=self.device), past_key_values=kept)
        if out.past_key_values is not kept:
            raise ValueError(f"{type(self.hf).__name__} keeps no keys and values as transformers' cache has them")
        return layer_shapes(kept)

    def _room(self, cache_gib: float | None, gpu_share: float) -> float:
        """Bytes for keys and values, and for what a step takes beside them unless the cache is stated.
        Raises ValueError: others hold memory of the share."""
        if cache_gib is not None:
            return cache_gib * GIB
        (free, total), overhead = torch.cuda.mem_get_info(self.device), OVERHEAD_GIB * GIB
        share = gpu_share * total
        if free + torch.cuda.memory_reserved(self.device) + overhead < share:
            raise ValueError(
                f"inference.gpu_memory_utilization: {gpu_share:g} of this GPU are {share / GIB:.1f} GiB, and others "
                f"leave {free / GIB:.1f} beside the weights (nvidia-smi names them): lower it, or end them"
            )
        # the allocator keeps what it has freed, for which others on this GPU would wait
        torch.cuda.set_per_process_memory_fraction(gpu_share, self.device)
        return share - torch.cuda.memory_allocated(self.device) - overhead

    def _count_rows(self, room: float, beside: float, max_rows: int | None) -> int:
        """Sequences that fit into `room`; `beside`: bytes of each besides its keys and values."""
        row_bytes = self.token_bytes * self.max_len
        fit = int(room // (row_bytes + beside))
        if fit < 1:
            key = "inference.cpu_kv_cache_gib" if self.device.type == "cpu" else "inference.kv_cache_gib"
            computing = f" and {beside / GIB:.2g} to compute with" if beside else ""
            raise ValueError(
                f"{key}: {room / GIB:.2g} GiB hold not one sequence of {self.max_len} tokens ({row_bytes / GIB:.2g} "
                f"GiB of keys and values{computing}); more, or a shorter inference.max_model_len"
            )
        return min(fit, max_rows or MOST_ROWS)


def bytes_of_step(config: Any, shapes: Sequence[LayerShape], max_len: int, dtype: torch.dtype) -> int:
    """Return `step_bytes` of a loaded model. `config`: of the (text) model."""
    heads = int(config.num_attention_heads)
    widths = [shape.key_width + shape.value_width for shape in shapes if shape.num_heads < heads]
    return step_bytes(
        num_heads=heads,
        shared_width=max(widths, default=0),
        vocab_size=int(config.vocab_size),
        max_len=max_len,
        width=dtype.itemsize,
    )


def _eos(hf: Any) -> frozenset[int]:
    """Token ids that end a completion: of the model's config and of its generation config."""
    found: set[int] = set()
    generation = getattr(hf, "generation_config", None) or GenerationConfig()
    for stated in (hf.config.get_text_config().eos_token_id, generation.eos_token_id):
        found |= set(stated) if isinstance(stated, list | tuple) else set() if stated is None else {int(stated)}
    return frozenset(found)
