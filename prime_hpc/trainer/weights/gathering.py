"""Tensors whose parts lie on several ranks come to the rank in whose file they stand, and to no other.

    round       every owner: its next tensors, or rows of a large one, up to `ROUND_BYTES`
    each rank   sends its parts of them to their owners, already in the published dtype, in one exchange of all ranks
    owner       puts the parts in their places, and hands the rows on

So each byte moves once (`full_tensor` brings all of them to all ranks), all owners receive at the same time, and no
rank holds more than three times `ROUND_BYTES` of other ranks' values. Of a tensor with several copies those of the
owner's own copy send.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from prime_hpc.trainer.model.conversions import Box
from prime_hpc.trainer.model.hf_checkpoint import inside, local_box
from prime_hpc.trainer.parallel.tensor import local

ROUND_BYTES = 128 << 20
"""For one owner."""
_ALIGNMENT = 8
"""Of a part's beginning, so that its bytes can be seen as values of any dtype."""


@dataclass(frozen=True)
class Wanted:
    """A tensor of which one rank wants the whole."""

    name: str
    owner: int
    shape: tuple[int, ...]
    """Of the whole."""
    dtype: torch.dtype
    """In which it is sent."""
    may_split: bool
    """True if its rows may come in several rounds."""


@dataclass(frozen=True)
class Rows:
    """Rows of a tensor that come in one round: all of them, where it is small."""

    index: int
    """Of the tensor among those wanted."""
    box: Box


class Gathering:
    """The way of some tensors to their owners; the same on all ranks, good for every version."""

    def __init__(
        self, wanted: Sequence[Wanted], tensors: Mapping[str, torch.Tensor], copies: Mapping[str, Sequence[int]]
    ) -> None:
        """Find out which rank holds what. Collective over the default process group.

        Args:
            wanted: the tensors, in an order on which all ranks agree.
            tensors: this rank's, by name, sharded or not.
            copies: by name the ranks that hold the parts of one copy together: this rank's copy.
        """
        self._rank, self._world_size = dist.get_rank(), dist.get_world_size()
        self._wanted = wanted
        self._rounds = _rounds(wanted, self._world_size)
        self._sent = {
            index: local_box(tensors[each.name]) for index, each in enumerate(wanted) if each.owner in copies[each.name]
        }
        """What this rank holds of a tensor whose owner wants it from here."""
        self._received = self._exchange_boxes(local(tensors[wanted[0].name]).device) if wanted else {}
        """By tensor of which this rank is the owner: the ranks that send parts, and what they hold."""

    def _exchange_boxes(self, device: torch.device) -> dict[int, list[tuple[int, Box]]]:
        width = 1 + 2 * max((len(each.shape) for each in self._wanted), default=0)
        rows: list[list[list[int]]] = [[] for _ in range(self._world_size)]
        for index, box in self._sent.items():
            row = [index, *(end for ends in box for end in ends)]
            rows[self._wanted[index].owner].append(row + [0] * (width - len(row)))
        counts = torch.tensor([len(each) for each in rows], dtype=torch.int64, device=device)
        others = torch.empty_like(counts)
        dist.all_to_all_single(others, counts)
        num_received: list[int] = others.tolist()
        sent = torch.tensor([row for each in rows for row in each], dtype=torch.int64, device=device)
        received = torch.empty(sum(num_received) * width, dtype=torch.int64, device=device)
        splits = [count * width for count in num_received]
        dist.all_to_all_single(received, sent.flatten(), splits, [len(each) * width for each in rows])
        senders = [rank for rank, count in enumerate(num_received) for _ in range(count)]
        found: dict[int, list[tuple[int, Box]]] = {}
        for rank, (index, *ends) in zip(senders, received.view(-1, width).tolist(), strict=True):
            box = tuple((ends[2 * d], ends[2 * d + 1]) for d in range(len(self._wanted[index].shape)))
            found.setdefault(index, []).append((rank, box))
        return found

    @torch.no_grad()
    def gather(self, tensors: Mapping[str, torch.Tensor]) -> Iterator[tuple[int, Box, torch.Tensor]]:
        """Return what this rank owns: index of the tensor among those wanted, place of the rows, and their values on
        the device, in the dtype that is wanted. Collective: every rank takes all of them."""
        for buckets in self._rounds:
            received = self._exchange(buckets, tensors)
            for rows in buckets[self._rank]:
                yield rows.index, rows.box, self._assemble(rows, received, tensors)

    def _exchange(
        self, buckets: Sequence[Sequence[Rows]], tensors: Mapping[str, torch.Tensor]
    ) -> dict[tuple[Rows, int], torch.Tensor]:
        """One round: bytes by what they belong to and who sent them."""
        parts: list[tuple[Rows, Box]] = []
        send_splits, recv_splits = [0] * self._world_size, [0] * self._world_size
        for owner, bucket in enumerate(buckets):
            for rows in bucket if owner != self._rank else ():
                part = _common(self._sent.get(rows.index), rows.box)
                if part is not None:
                    parts.append((rows, part))
                    send_splits[owner] += self._num_bytes(rows, part)
        coming: list[tuple[Rows, int, int]] = []
        for rows in buckets[self._rank]:
            for sender, box in self._received.get(rows.index, ()):
                part = _common(box, rows.box) if sender != self._rank else None
                if part is not None:
                    coming.append((rows, sender, self._num_bytes(rows, part)))
                    recv_splits[sender] += coming[-1][2]
        coming.sort(key=lambda each: each[1])  # stable: a sender's parts stay in the order in which it lays them out
        device = next((local(tensor).device for tensor in tensors.values()), torch.device("cpu"))
        outgoing = torch.empty(sum(send_splits), dtype=torch.uint8, device=device)
        begin = 0
        for rows, part in parts:
            wanted, held = self._wanted[rows.index], self._sent[rows.index]
            size = _volume(part) * wanted.dtype.itemsize
            room = outgoing[begin : begin + size].view(wanted.dtype).view([high - low for low, high in part])
            room.copy_(local(tensors[wanted.name].detach())[inside(part, held)])
            begin += self._num_bytes(rows, part)
        incoming = torch.empty(sum(recv_splits), dtype=torch.uint8, device=device)
        if self._world_size > 1:
            dist.all_to_all_single(incoming, outgoing, recv_splits, send_splits)
        found, begin = {}, 0
        for rows, sender, size in coming:
            found[rows, sender] = incoming[begin : begin + size]
            begin += size
        return found

    def _assemble(
        self, rows: Rows, received: Mapping[tuple[Rows, int], torch.Tensor], tensors: Mapping[str, torch.Tensor]
    ) -> torch.Tensor:
        """Put the parts of some rows in their places."""
        wanted = self._wanted[rows.index]
        own = local(tensors[wanted.name].detach())
        whole: torch.Tensor | None = None
        for rank, held in self._received[rows.index]:
            part = _common(held, rows.box)
            if part is None:
                continue
            shape = [high - low for low, high in part]
            if rank == self._rank:
                values = own[inside(part, held)]
            else:
                size = _volume(part) * wanted.dtype.itemsize
                values = received[rows, rank][:size].view(wanted.dtype).view(shape)
            if part == rows.box:
                return values.to(wanted.dtype)
            if whole is None:
                whole = torch.empty([high - low for low, high in rows.box], dtype=wanted.dtype, device=own.device)
            whole[inside(part, rows.box)] = values.to(wanted.dtype)
        if whole is None:  # no element at all
            return torch.empty([high - low for low, high in rows.box], dtype=wanted.dtype, device=own.device)
        return whole

    def _num_bytes(self, rows: Rows, part: Box) -> int:
        size = _volume(part) * self._wanted[rows.index].dtype.itemsize
        return size + -size % _ALIGNMENT


def _rounds(wanted: Sequence[Wanted], world_size: int) -> list[list[list[Rows]]]:
    """Return for each round what each owner gets."""
    buckets: list[list[list[Rows]]] = [[] for _ in range(world_size)]
    room = [0] * world_size
    for index, each in enumerate(wanted):
        for box in _boxes(each):
            size = _volume(box) * each.dtype.itemsize
            if not buckets[each.owner] or size > room[each.owner]:
                buckets[each.owner].append([])
                room[each.owner] = ROUND_BYTES
            buckets[each.owner][-1].append(Rows(index, box))
            room[each.owner] -= size
    num_rounds = max((len(each) for each in buckets), default=0)
    return [[each[r] if r < len(each) else [] for each in buckets] for r in range(num_rounds)]


def _boxes(wanted: Wanted) -> Iterator[Box]:
    """Cut a tensor into rows of at most `ROUND_BYTES`."""
    rest = tuple((0, size) for size in wanted.shape[1:])
    if not wanted.shape:
        yield ()
        return
    row_bytes = max(1, math.prod(wanted.shape[1:]) * wanted.dtype.itemsize)
    step = max(1, ROUND_BYTES // row_bytes) if wanted.may_split else max(1, wanted.shape[0])
    for begin in range(0, wanted.shape[0], step):
        yield ((begin, min(begin + step, wanted.shape[0])), *rest)


def _common(one: Box | None, other: Box) -> Box | None:
    """Return what two boxes share; None where that is no element."""
    if one is None:
        return None
    found = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(one, other, strict=True))
    return found if all(low < high for low, high in found) else None


def _volume(box: Box) -> int:
    return math.prod(high - low for low, high in box)
