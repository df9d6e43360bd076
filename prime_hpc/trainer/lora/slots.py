"""The adapters of one model: sharded float32 parameters of every slot, whole tensors of the slot in use.

    slot i, sharded:   A [rank, in / ranks]  B [out / ranks, rank]  of every module, on every rank
         | one all-gather when `use` begins
    whole A and B in the linears: any number of micro-batches, forward and backward, no communication
         | one reduce-scatter of their gradients when it ends
    .grad of the sharded parameters -> the slot's optimizer

Adapters are small (rank x (in + out) a module), so a step moves them twice in one piece each, instead of block by block
and micro-batch by micro-batch as FSDP does with the weights. Slots that are not in use are not touched at all.
"""

import contextlib
import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from prime_hpc.config.sections.lora import LoraConfig
from prime_hpc.trainer.lora.linear import LoraLinear

PREFIX = "base_model.model."
"""Of a tensor's name in PEFT's format, before the module's."""
_DIMS = {"lora_A": 1, "lora_B": 0}
"""Dimension along which a tensor is sharded: never the rank's, which may be smaller than the number of ranks."""


class _Piece:
    """One matrix in the flat buffer of a slot: where this rank's (padded) shard lies, how wholes are put together."""

    def __init__(self, name: str, shape: tuple[int, int], dim: int, offset: int, world_size: int) -> None:
        self.name, self.shape, self.dim, self.offset = name, shape, dim, offset
        self.width = -(-shape[dim] // world_size)  # rows (or columns) of a full shard, as torch.chunk has it
        self.size = self.width * shape[1 - dim]

    def local_shape(self, rank: int) -> tuple[int, int]:
        """Shape of a rank's shard, without padding."""
        own = max(0, min(self.width, self.shape[self.dim] - rank * self.width))
        return (own, self.shape[1]) if self.dim == 0 else (self.shape[0], own)

    def put(self, flat: torch.Tensor, shard: torch.Tensor) -> None:
        """Write a shard into its place of one rank's flat buffer, the sharded dimension first."""
        flat[self.offset : self.offset + shard.numel()] = shard.movedim(self.dim, 0).reshape(-1)

    def take(self, flat: torch.Tensor, rank: int) -> torch.Tensor:
        """Return the shard of `rank` in its flat buffer; a copy."""
        rows, other = self.local_shape(rank)[self.dim], self.shape[1 - self.dim]
        part = flat[self.offset : self.offset + rows * other].view(rows, other)
        return part.movedim(0, self.dim).contiguous().clone()

    def whole(self, table: torch.Tensor) -> torch.Tensor:
        """Return the matrix from all ranks' flat buffers `[ranks, size]`."""
        parts = table[:, self.offset : self.offset + self.size].reshape(-1, self.shape[1 - self.dim])
        return parts[: self.shape[self.dim]].movedim(0, self.dim).contiguous()

    def split(self, table: torch.Tensor, whole: torch.Tensor) -> None:
        """Undo `whole`; padding stays as it is. At most two copies, however many ranks there are."""
        rows = whole.movedim(self.dim, 0)
        full = len(rows) // self.width
        table[:full, self.offset : self.offset + self.size] = rows[: full * self.width].reshape(full, self.size)
        if len(rest := rows[full * self.width :]):
            table[full, self.offset : self.offset + rest.numel()] = rest.reshape(-1)


class Adapters:
    """All slots of one model. Every method is collective over the mesh but where it says otherwise."""

    def __init__(self, hf: Any, config: LoraConfig, num_slots: int, mesh: DeviceMesh, device: torch.device) -> None:
        """Slots are zero, which is the base model, until `reset` or `load`. Not collective.

        Args:
            hf: model after `add_lora`, sharded or not.
            num_slots: adapters that there can be at once.
            mesh: one-dimensional, over all ranks whose losses are summed.
        """
        self.config = config
        self._mesh, self._device = mesh, device
        self._rank, self._world_size = mesh.get_local_rank(), mesh.size()
        self._linears = {name: m for name, m in hf.named_modules() if isinstance(m, LoraLinear)}
        self._pieces: list[_Piece] = []
        self._flat_size = 0
        for name, linear in self._linears.items():
            shapes = {"lora_A": (config.rank, linear.in_features), "lora_B": (linear.out_features, config.rank)}
            for kind, shape in shapes.items():
                piece = _Piece(f"{name}.{kind}", shape, _DIMS[kind], self._flat_size, self._world_size)
                self._pieces.append(piece)
                self._flat_size += piece.size
        self._slots = [[self._empty(piece) for piece in self._pieces] for _ in range(num_slots)]
        self._configs = [config] * num_slots
        self._in_use: int | None = None
        self.base_names: Mapping[str, str] = {}
        """Of the modules that the base's checkpoint calls otherwise: their names there, which engines know."""

    @property
    def modules(self) -> list[str]:
        """Names of the adapted modules."""
        return list(self._linears)

    @property
    def num_parameters(self) -> int:
        """Of one slot, over all ranks."""
        return sum(math.prod(piece.shape) for piece in self._pieces)

    def named_parameters(self, slot: int) -> dict[str, torch.nn.Parameter]:
        """`<module>.lora_A` and `<module>.lora_B` -> sharded float32 parameter of a slot. Not collective."""
        return {piece.name: p for piece, p in zip(self._pieces, self._slots[slot], strict=True)}

    def parameters(self, slot: int) -> list[torch.nn.Parameter]:
        """Return the sharded float32 parameters of a slot, for its optimizer. Not collective."""
        return self._slots[slot]

    def config_of(self, slot: int) -> LoraConfig:
        """Return the shape of a slot's adapter: of another rank only where `reset` was told so. Not collective."""
        return self._configs[slot]

    def reset(self, slot: int, seed: int, rank: int | None = None) -> None:
        """Draw A uniform in +-1 / sqrt(in) (Kaiming with a = sqrt(5), as PEFT has it), B zero. Not collective: every
        rank draws all of A and keeps its shard, so the result does not depend on their number.

        A lower LoRA `rank` than the config's is that adapter exactly, its scale included: the other rows of A and
        columns of B are zero, so are their gradients, and so they stay under any optimizer.
        """
        self._configs[slot] = self.config.model_copy(update={"rank": rank or self.config.rank})
        generator = torch.Generator().manual_seed(seed)
        for piece, parameter in zip(self._pieces, self._slots[slot], strict=True):
            whole = torch.zeros(piece.shape)
            if piece.dim == _DIMS["lora_A"]:
                bound = 1 / math.sqrt(piece.shape[1])
                whole[:rank].uniform_(-bound, bound, generator=generator)
            self._fill(piece, parameter, whole)

    def load(self, slot: int, tensors: Mapping[str, torch.Tensor]) -> None:
        """Fill a slot from whole tensors under PEFT's names. Not collective.
        Raises ValueError: other names or shapes than this model's adapters have."""
        expected = {self.peft_name(piece.name): piece for piece in self._pieces}
        absent, extra = sorted(expected.keys() - tensors.keys()), sorted(tensors.keys() - expected.keys())
        if absent or extra:
            parts = [f"lacks {absent[0]}"] if absent else []
            parts += [f"holds {extra[0]}, which is not wanted here"] if extra else []
            raise ValueError(f"another adapter: it {' and '.join(parts)} ({len(absent) + len(extra)} tensors differ)")
        for name, piece in expected.items():
            if tuple(tensors[name].shape) != piece.shape:
                raise ValueError(f"another adapter: {name} is {list(tensors[name].shape)}, not {list(piece.shape)}")
        for (name, piece), parameter in zip(expected.items(), self._slots[slot], strict=True):
            self._fill(piece, parameter, tensors[name])

    def weights(self, slot: int) -> dict[str, torch.Tensor]:
        """Return copies of a slot's whole float32 tensors on the CPU, under PEFT's names, on every rank."""
        wholes, rank = self._gather(slot), self._configs[slot].rank
        return {
            self.peft_name(p.name): w.detach().narrow(1 - p.dim, 0, rank).clone().cpu()
            for p, w in zip(self._pieces, wholes, strict=True)
        }

    def matrices(self, slot: int) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
        """Return of each module of a slot scale B and A, whole."""
        wholes, scale = self._gather(slot), self._configs[slot].scale
        return {name: (scale * b, a) for name, a, b in zip(self._linears, wholes[::2], wholes[1::2], strict=True)}

    @contextlib.contextmanager
    def use(self, slot: int) -> Iterator[None]:
        """Forward and backward passes in here go through this slot; at the end its parameters' `.grad` are the sums of
        all passes over all ranks (added to what they hold). Under `no_grad` nothing is reduced. An exception inside
        leaves the gradients as they were.
        """
        assert self._in_use is None, f"slot {self._in_use} is in use"
        with_grad = torch.is_grad_enabled()
        wholes = [whole.requires_grad_(with_grad) for whole in self._gather(slot)]
        self._in_use = slot
        for linear in self._linears.values():
            linear.lora_scale = self._configs[slot].scale
        try:
            with self._lent(wholes):
                yield
            if with_grad:
                self._reduce(slot, wholes)
        finally:
            self._in_use = None

    @contextlib.contextmanager
    def off(self) -> Iterator[None]:
        """Use the base model in here, also within `use`. Not collective."""
        with self._lent([None] * len(self._pieces)):
            yield

    def peft_name(self, name: str) -> str:
        """Return a parameter's name in `adapter_model.safetensors`."""
        module, _, kind = name.rpartition(".")
        return f"{PREFIX}{self.base_names.get(module, module)}.{kind}.weight"

    @contextlib.contextmanager
    def _lent(self, wholes: list[Any]) -> Iterator[None]:
        """Tensors in the linears' hands, and afterwards what they had before."""
        before = [(linear.lora_a, linear.lora_b) for linear in self._linears.values()]
        pairs = zip(wholes[::2], wholes[1::2], strict=True)
        for linear, pair in zip(self._linears.values(), pairs, strict=True):
            linear.lora_a, linear.lora_b = pair
        try:
            yield
        finally:
            for linear, pair in zip(self._linears.values(), before, strict=True):
                linear.lora_a, linear.lora_b = pair

    def _empty(self, piece: _Piece) -> torch.nn.Parameter:
        shard = torch.zeros(piece.local_shape(self._rank), device=self._device)
        return torch.nn.Parameter(self._sharded(piece, shard))

    def _sharded(self, piece: _Piece, shard: torch.Tensor) -> DTensor:
        shape, stride = torch.Size(piece.shape), (piece.shape[1], 1)
        return DTensor.from_local(shard, self._mesh, [Shard(piece.dim)], run_check=False, shape=shape, stride=stride)

    @torch.no_grad()
    def _fill(self, piece: _Piece, parameter: torch.nn.Parameter, whole: torch.Tensor) -> None:
        own = whole.narrow(piece.dim, *self._shard_range(piece))
        _local(parameter).copy_(own)

    def _shard_range(self, piece: _Piece) -> tuple[int, int]:
        """First row (or column) of this rank's shard, and how many."""
        num = piece.local_shape(self._rank)[piece.dim]
        return (self._rank * piece.width if num else 0), num

    @torch.no_grad()
    def _gather(self, slot: int) -> list[torch.Tensor]:
        """Whole tensors of a slot; on one rank the parameters' own memory."""
        shards = [_local(parameter) for parameter in self._slots[slot]]
        if self._world_size == 1:
            return [shard.detach() for shard in shards]
        flat = torch.zeros(self._flat_size, device=self._device)
        for piece, shard in zip(self._pieces, shards, strict=True):
            piece.put(flat, shard)
        table = torch.empty((self._world_size, self._flat_size), device=self._device)
        dist.all_gather_single(table, flat[None], group=self._mesh.get_group())
        return [piece.whole(table) for piece in self._pieces]

    @torch.no_grad()
    def _reduce(self, slot: int, wholes: list[torch.Tensor]) -> None:
        """Sum the whole tensors' gradients over the ranks into the shards'."""
        grads = [whole.grad if whole.grad is not None else torch.zeros_like(whole) for whole in wholes]
        if self._world_size > 1:
            table = torch.zeros((self._world_size, self._flat_size), device=self._device)
            for piece, grad in zip(self._pieces, grads, strict=True):
                piece.split(table, grad)
            flat = torch.empty((1, self._flat_size), device=self._device)
            dist.reduce_scatter_single(flat, table, group=self._mesh.get_group())
            grads = [piece.take(flat[0], self._rank) for piece in self._pieces]
        for piece, parameter, grad in zip(self._pieces, self._slots[slot], grads, strict=True):
            if parameter.grad is None:
                parameter.grad = self._sharded(piece, grad)
            else:
                _local(parameter.grad).add_(grad)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's shard; shares memory."""
    assert isinstance(tensor, DTensor)
    return tensor.to_local().detach()
