"""Ranks that are slower than the others for long: a throttled GPU, a node whose mount is slow.

All ranks wait for the slowest one in every collective, so that the times of a step are alike on all of them and say
nothing of whose fault they are. Compared here are times in which a rank waits for no other:

    product   a fixed matrix product on its device, every few steps, between the last backward pass and the update
    read      its part of the batch
    write     its own files of checkpoints and weight versions, or the changes in them; more bytes than the median
              rank's may take longer

Tokenising rows (SFT) is not compared, for rows differ, nor is writing adapters, which one rank does. The times go with
the collective that gathers the step's metrics. The product is timed by events of the device, which are
read at the next step, when they are long over: the host waits for nothing.
"""

import contextlib
import itertools
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from loguru import logger
from numpy.typing import NDArray

COLUMNS = ("product_s", "read_s", "write_s", "write_bytes")
EVERY = 4
"""Steps from one product to the next."""
IN_A_ROW = 4
"""Comparisons in which a rank is slow before the log says so."""
PRODUCT_SHARE = 1.25
"""A product is slow that takes so many times the median rank's."""
IO_SHARE = 2.0
"""So are reading and writing, where it is also `IO_S` more than the median rank's."""
IO_S = 0.2
_TRIES = 3
"""Products at a time; the shortest counts: it tells how fast the device is, not who else has it now and then."""
_MOUNT = "the mount of {} is slow on that node, or its network"
_WORDS = {
    "product": ("computes a matrix product", ""),
    "read": ("reads its part of a batch", _MOUNT.format("the run directory")),
    "write": ("writes its files of checkpoints and weights", _MOUNT.format("the run directory or ckpt.path")),
}
_DEVICES = {
    "cuda": "its GPU is throttled or faulty (nvidia-smi -q -d PERFORMANCE,TEMPERATURE)",
    "cpu": "its cores are throttled, or shared with other processes",
}


@dataclass(frozen=True)
class _HostMark:
    """A moment, as `torch.cuda.Event` has it."""

    at: float = field(default_factory=time.perf_counter)

    def elapsed_time(self, later: "_HostMark") -> float:
        """Milliseconds."""
        return 1000 * (later.at - self.at)


class SlowRanks:
    """One rank's own times, and what the times of all ranks say of each."""

    def __init__(self, device: torch.device, nodes: Sequence[str]) -> None:
        """`nodes`: name of each rank's."""
        self._device, self._nodes = device, nodes
        self._marks: list[Any] = []
        self._own = dict.fromkeys(COLUMNS, math.nan)
        self.figures: dict[str, float] = {}
        """Metrics of the last comparison: the slowest rank of each kind, and by how much it is slower than the median
        one; how many ranks have been slow `IN_A_ROW` times. Apart from the step's own, which are the same in a replay.
        """
        self._times_slow = {kind: np.zeros(len(nodes), np.int64) for kind in _WORDS}

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """Time the reading of this rank's part of the batch."""
        began = time.perf_counter()
        yield
        self._own["read_s"] = time.perf_counter() - began

    def wrote(self, seconds: float, num_bytes: int) -> None:
        """Take note of files that all ranks have written; all ranks do so between the same two steps."""
        if num_bytes:
            for column, value in (("write_s", seconds), ("write_bytes", float(num_bytes))):
                self._own[column] = value + (0.0 if math.isnan(self._own[column]) else self._own[column])

    def take(self, step: int) -> list[float]:
        """Return the values of `COLUMNS` since the last call, NaN where there is none; begins this step's product."""
        if self._marks:
            self._own["product_s"] = min(a.elapsed_time(b) for a, b in itertools.pairwise(self._marks)) / 1000
            self._marks = []
        taken, self._own = list(self._own.values()), dict.fromkeys(COLUMNS, math.nan)
        if step % EVERY == 0 and len(self._nodes) > 1:
            self._multiply()
        return taken

    @torch.no_grad()
    def _multiply(self) -> None:
        size, dtype = (4096, torch.bfloat16) if self._device.type == "cuda" else (256, torch.float32)
        factor = torch.ones(size, size, dtype=dtype, device=self._device)  # not random: no generator moves on
        threads = torch.get_num_threads()
        if self._device.type == "cpu":  # several wait for each other, and for whoever has their cores
            torch.set_num_threads(1)
        product = torch.mm(factor, factor)
        self._marks.append(self._mark())
        for _ in range(_TRIES):
            torch.mm(factor, factor, out=product)
            self._marks.append(self._mark())
        if self._device.type == "cpu":
            torch.set_num_threads(threads)

    def _mark(self) -> Any:
        if self._device.type != "cuda":
            return _HostMark()
        return torch.cuda.current_stream(self._device).record_event(torch.cuda.Event(enable_timing=True))

    def compare(self, step: int, table: NDArray[np.float64]) -> None:
        """Compare the ranks; rank 0's log tells of one that has been slow `IN_A_ROW` times, once until it is not.
        `table`: `[ranks, COLUMNS]`."""
        if len(self._nodes) < 2:
            return
        product, read, write, num_bytes = table.T
        more_bytes = np.maximum(1.0, num_bytes / _median(num_bytes))
        figures = self._slowest(step, "product", product, np.full_like(product, _median(product)))
        figures |= self._slowest(step, "read", read, np.full_like(read, _median(read)))
        figures |= self._slowest(step, "write", write, _median(write) * more_bytes)
        is_told = np.stack(list(self._times_slow.values())).max(0) >= IN_A_ROW
        self.figures = figures | {"ranks/slow": float(np.count_nonzero(is_told))}

    def _slowest(
        self, step: int, kind: str, times: NDArray[np.float64], usual: NDArray[np.float64]
    ) -> dict[str, float]:
        """Of one kind; `usual`: what each rank would take if it were as quick as the median one."""
        known = np.isfinite(times)
        if np.count_nonzero(known) < 2:
            return {}
        excess = times - usual
        worst = int(np.nanargmax(excess))
        if kind == "product":
            is_slow = times > PRODUCT_SHARE * usual
            figure = {"ranks/product_ratio": round(float(times[worst] / usual[worst]), 4)}
        else:
            is_slow = (times > IO_SHARE * usual) & (excess > IO_S)
            figure = {f"ranks/{kind}_excess_s": round(float(excess[worst]), 4)}
        count = self._times_slow[kind]
        count[known & ~is_slow] = 0
        count[is_slow] += 1
        news = np.flatnonzero(is_slow & (count == IN_A_ROW)).tolist()
        if dist.get_rank() == 0:
            for node in dict.fromkeys(self._nodes[rank] for rank in news):
                self._tell(step, kind, [rank for rank in news if self._nodes[rank] == node], times, usual)
        return {f"ranks/{kind}_rank": float(worst), **figure}

    def _tell(
        self, step: int, kind: str, ranks: list[int], times: NDArray[np.float64], usual: NDArray[np.float64]
    ) -> None:
        """Say of ranks of one node that they are slow."""
        worst, node = max(ranks, key=lambda rank: float(times[rank] / usual[rank])), self._nodes[ranks[0]]
        who = f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))} on node {node}"
        deed, cause = _WORDS[kind]
        remedy = cause or _DEVICES.get(self._device.type, "its device is slow")
        if len(set(self._nodes)) > 1:
            remedy += f"; to go on without that node: prime-hpc cancel, then resume with {node} added to slurm.exclude"
            remedy += " (slurm.trainer.exclude, where that is stated)"
        logger.warning(
            f"step {step}: the others wait for {who}, slow {IN_A_ROW} times in a row: rank {worst} {deed} in "
            f"{_in_words(times[worst])}, the median rank in {_in_words(usual[worst])}; {remedy}"
        )


def _median(values: NDArray[np.float64]) -> float:
    """Return the median of what is known, of an even number the smaller of the two: half of the ranks may be slow."""
    known = np.sort(values[np.isfinite(values)])
    return float(known[(len(known) - 1) // 2]) if len(known) else math.nan


def _in_words(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 0.1 else f"{1000 * seconds:.3g} ms"
