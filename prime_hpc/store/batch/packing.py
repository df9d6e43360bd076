"""Samples into packed micro-batches: equal in number on every rank, within the token budget, balanced in tokens.

The orchestrator packs every batch here, SFT's data every step. All ranks run the same number M of micro-batches
(FSDP's collectives need it), and a micro-step lasts as long as the fullest rank's micro-batch. So M comes first, as
small as can be, and then all R * M micro-batches get as nearly the same number of tokens as can be.

How: samples go longest first into the least loaded micro-batch (LPT); where that overflows the budget, best-fit
decreasing fills densely instead; then a local search moves and swaps samples between the fullest micro-batch and the
others, each try one vectorised look at all samples. Micro-batches of similar load share a micro-step.

Samples of a group that have much in common (`sharing`) are better kept together: then groups, or parts of groups, are
dealt with in the same way instead of samples, in parts of several sizes, and of all these ways that one is taken whose
micro-steps together have the fewest tokens to compute on their fullest ranks.
"""

import bisect
import heapq
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from prime_hpc.store.batch.shared_prefixes import Sharing

Indices = npt.NDArray[np.int64]
_MAX_LOOKS = 6_000_000  # samples looked at by one local search; bounds its time (~0.1 s) whatever the batch
_GROUP_LOOKS = 100_000  # the same for one way of keeping groups together
_MAX_CANDIDATES = 4  # values of M that are tried
_MAX_PARTNERS = 4096  # samples looked at in one step
_BALANCED = 1.01  # fullest micro-batch over the mean at which balancing stops
_CHUNKS = (1, 2, 4, 8)  # parts of groups that a micro-batch of mean load holds
_LEAST_SHARED = 0.05  # of all tokens, below which groups need not stay together
_MORE = 1.25  # times as many micro-batches as needed, for whole groups that leave gaps
_STEP_COST = 0.1  # of a micro-step besides its tokens (collectives, launches), in budgets


def pack(
    lengths: npt.ArrayLike, num_ranks: int, micro_batch_tokens: int, sharing: Sharing | None = None
) -> list[list[Indices]]:
    """Distribute samples over ranks and micro-batches.

    Args:
        lengths: [N] tokens of each sample, all in 1 .. micro_batch_tokens.
        sharing: what samples have in common, where the trainer computes that once.

    Returns:
        For each rank a list of M arrays of sample indices (ascending, possibly empty); every sample exactly once. M is
        as small as can be, or a little larger where that leaves less to compute.

    Raises:
        ValueError: no samples, or one that does not fit the budget (names it).
    """
    sizes = np.asarray(lengths, np.int64)
    _check(sizes, num_ranks, micro_batch_tokens)
    order = np.argsort(-sizes, kind="stable")
    dense = _best_fit(sizes, order, micro_batch_tokens)
    fewest = fewest_micro_batches(sizes, num_ranks, micro_batch_tokens)
    most = -(-(int(dense.max()) + 1) // num_ranks)
    bins = None
    for num_micro in np.unique(np.linspace(fewest, most, _MAX_CANDIDATES).round().astype(int)).tolist():
        bins = _balanced(sizes, order, dense, num_ranks * num_micro, micro_batch_tokens)
        if bins is not None:
            break
    assert bins is not None, "best-fit decreasing itself fits into `most` micro-batches a rank"
    if sharing is None or sharing.num_tokens < _LEAST_SHARED * sizes.sum():
        return _deal(bins, _loads(bins, sizes, num_ranks * num_micro), num_ranks)
    ways = [(bins, sharing.computed(sizes, bins, num_ranks * num_micro))]
    for number in np.unique(np.linspace(num_micro, num_micro * _MORE + 1, _MAX_CANDIDATES).astype(int)).tolist():
        ways += _together(sizes, sharing, num_ranks * number, micro_batch_tokens)
    best = min(ways, key=lambda way: _duration(way[1], num_ranks, micro_batch_tokens))
    return _deal(*best, num_ranks)


def pack_rows(lengths: npt.ArrayLike, num_ranks: int, micro_batch_tokens: int) -> list[list[Indices]]:
    """Distribute samples that take a row each, padded to the longest of their micro-batch.

    Samples of similar length share a micro-batch, so that little is padded, and micro-batches of similar length a
    micro-step. M is the smallest number that keeps every micro-batch (rows times the longest) within the budget; then
    the budget is lowered as far as M allows, so that the last micro-step is not an almost empty one.

    Args, Returns, Raises: see `pack`.
    """
    sizes = np.asarray(lengths, np.int64)
    _check(sizes, num_ranks, micro_batch_tokens)
    order = np.argsort(-sizes, kind="stable")
    descending = sizes[order]
    num_micro = -(-len(_row_counts(descending, micro_batch_tokens)) // num_ranks)
    low, high = int(descending[0]), micro_batch_tokens
    while low < high:
        middle = (low + high) // 2
        if len(_row_counts(descending, middle)) <= num_micro * num_ranks:
            high = middle
        else:
            low = middle + 1
    counts = _row_counts(descending, high)
    bins = np.empty(len(sizes), np.int64)
    bins[order] = np.repeat(np.arange(len(counts)), counts)
    cost = np.zeros(num_micro * num_ranks, np.int64)
    cost[: len(counts)] = counts * descending[np.cumsum(counts) - counts]
    return _deal(bins, cost, num_ranks)


def pack_by_number(lengths: npt.ArrayLike, num_ranks: int, number: int) -> list[list[Indices]]:
    """Distribute samples, `number` of them to a micro-batch: those of similar length share one.

    Args, Returns, Raises: see `pack`; the last micro-batches may hold fewer, and no sample is too long.
    """
    sizes = np.asarray(lengths, np.int64)
    _check(sizes, num_ranks, int(sizes.max(initial=1)))
    bins = np.empty(len(sizes), np.int64)
    bins[np.argsort(-sizes, kind="stable")] = np.arange(len(sizes)) // number
    num_micro = -(-(int(bins.max()) + 1) // num_ranks)
    return _deal(bins, _loads(bins, sizes, num_ranks * num_micro), num_ranks)


def _row_counts(descending: Indices, budget: int) -> Indices:
    """Rows of each micro-batch where samples, longest first, fill one after the other."""
    counts, at = [], 0
    while at < len(descending):
        counts.append(min(budget // int(descending[at]), len(descending) - at))
        at += counts[-1]
    return np.array(counts, np.int64)


def fill(assignment: Sequence[Sequence[Indices]], lengths: npt.ArrayLike, micro_batch_tokens: int) -> float:
    """Tokens over the budget of all micro-batches, R * M * micro_batch_tokens."""
    num_micro = len(assignment[0])
    return float(np.sum(lengths)) / (len(assignment) * num_micro * micro_batch_tokens)


def fewest_micro_batches(lengths: npt.ArrayLike, num_ranks: int, micro_batch_tokens: int) -> int:
    """Return a lower bound of M that no packing can beat: by tokens, and by how many long samples share a
    micro-batch."""
    sizes = np.asarray(lengths, np.int64)
    least = -(-int(sizes.sum()) // micro_batch_tokens)
    for share in range(1, 9):  # of samples above budget / (share + 1), at most `share` fit together
        num_long = int((sizes * (share + 1) > micro_batch_tokens).sum())
        least = max(least, -(-num_long // share))
    return -(-least // num_ranks)


def _check(sizes: Indices, num_ranks: int, budget: int) -> None:
    if num_ranks < 1 or budget < 1:
        raise ValueError(f"num_ranks ({num_ranks}) and micro_batch_tokens ({budget}) must be at least 1")
    if sizes.ndim != 1 or not len(sizes):
        raise ValueError("there is nothing to pack: lengths must be a vector of at least one sample")
    worst = int(np.argmax(sizes))
    if sizes[worst] > budget:
        raise ValueError(
            f"sample {worst} has {sizes[worst]} tokens and does not fit a micro-batch of {budget}: "
            "raise trainer.micro_batch_tokens or lower seq_len"
        )
    if (sizes < 1).any():
        raise ValueError(f"sample {int(np.argmin(sizes))} has no tokens")


def _best_fit(sizes: Indices, order: Indices, budget: int) -> Indices:
    """[N] micro-batch of each sample by best-fit decreasing, in as few micro-batches as it takes."""
    bins = np.empty(len(sizes), np.int64)
    rooms: list[tuple[int, int]] = []  # (room left, micro-batch), sorted
    num_bins = 0
    for sample, size in zip(order.tolist(), sizes[order].tolist(), strict=True):
        slot = bisect.bisect_left(rooms, (size, -1))
        if slot < len(rooms):
            room, target = rooms.pop(slot)
        else:
            room, target = budget, num_bins
            num_bins += 1
        bins[sample] = target
        bisect.insort(rooms, (room - size, target))
    return bins


def _least_loaded(sizes: Indices, order: Indices, num_bins: int) -> Indices:
    """[N] micro-batch of each sample, each in turn to the least loaded one; the budget may be exceeded."""
    bins = np.empty(len(sizes), np.int64)
    heap = [(0, b) for b in range(num_bins)]
    for sample, size in zip(order.tolist(), sizes[order].tolist(), strict=True):
        load, target = heap[0]
        bins[sample] = target
        heapq.heapreplace(heap, (load + size, target))
    return bins


def _balanced(sizes: Indices, order: Indices, dense: Indices, num_bins: int, budget: int) -> Indices | None:
    """[N] micro-batch of each sample among `num_bins`, within the budget and balanced; None where none was found."""
    bins = _Bins(sizes, _least_loaded(sizes, order, num_bins), num_bins)
    bins.level(budget)
    if bins.loads.max() <= budget:
        return bins.of_sample
    # Too tight for that: start dense, put what found no place on the emptiest micro-batches, and level from there.
    start = dense.copy()
    overflow = order[dense[order] >= num_bins]
    loads = _loads(dense[dense < num_bins], sizes[dense < num_bins], num_bins)
    for sample in overflow:
        target = int(np.argmin(loads))
        start[sample] = target
        loads[target] += sizes[sample]
    bins = _Bins(sizes, start, num_bins)
    bins.level(budget)
    return bins.of_sample if bins.loads.max() <= budget else None


class _Bins:
    """Micro-batches under local search."""

    def __init__(self, sizes: Indices, of_sample: Indices, num_bins: int) -> None:
        self.sizes = sizes
        self.of_sample = of_sample
        self.loads = _loads(of_sample, sizes, num_bins)

    def level(self, budget: int, max_looks: int = _MAX_LOOKS) -> None:
        """Move and swap samples out of the fullest micro-batches until all are about equal, or nothing helps."""
        target = min(budget, int(self.sizes.sum() / len(self.loads) * _BALANCED) + 1)
        stuck = np.zeros(len(self.loads), bool)  # e.g. one sample that fills the budget alone: the others go on
        changed = False
        for _ in range(max_looks // (len(self.sizes) + 1000)):
            fullest = int(np.argmax(np.where(stuck, -1, self.loads)))
            if stuck[fullest] or self.loads[fullest] <= target:
                if not changed:
                    return
                stuck[:] = False  # what was stuck may find partners now that others have changed
                changed = False
            elif self._relieve(fullest):
                changed = True
            else:
                stuck[fullest] = True

    def _relieve(self, full: int) -> bool:
        """Make the move or swap that leaves the two micro-batches involved at the lowest maximum; False: none helps."""
        members = np.flatnonzero(self.of_sample == full)
        load = self.loads[full]
        # Move: a member into the emptiest other micro-batch.
        emptiest = int(np.argmin(self.loads))
        moved = np.maximum(load - self.sizes[members], self.loads[emptiest] + self.sizes[members])
        best_move = int(np.argmin(moved))
        # Swap: a member against a sample of a less loaded micro-batch.
        partners = np.flatnonzero(self.loads[self.of_sample] < load)
        if len(partners) > _MAX_PARTNERS:
            least = np.argpartition(self.loads[self.of_sample[partners]], _MAX_PARTNERS)[:_MAX_PARTNERS]
            partners = partners[least]
        if len(partners):
            gain = self.sizes[members][:, None] - self.sizes[partners][None, :]
            after = np.maximum(load - gain, self.loads[self.of_sample[partners]][None, :] + gain)
            row, column = divmod(int(np.argmin(after)), len(partners))
            if after[row, column] < min(load, moved[best_move]):
                self._move(members[row], int(self.of_sample[partners[column]]))
                self._move(partners[column], full)
                return True
        if moved[best_move] < load:
            self._move(members[best_move], emptiest)
            return True
        return False

    def _move(self, sample: int, target: int) -> None:
        self.loads[self.of_sample[sample]] -= self.sizes[sample]
        self.loads[target] += self.sizes[sample]
        self.of_sample[sample] = target


def _together(sizes: Indices, sharing: Sharing, num_bins: int, budget: int) -> Iterator[tuple[Indices, Indices]]:
    """For every size of chunks that fits the budget: [N] micro-batch of each sample, no chunk split, and [num_bins]
    tokens that each computes."""
    for per_bin in _CHUNKS:
        chunk = sharing.chunks(sizes, min(sizes.sum() / num_bins, budget) / per_bin)
        num_chunks = int(chunk.max()) + 1
        raw = _loads(chunk, sizes, num_chunks)
        for measure in (sharing.computed(sizes, chunk, num_chunks), raw):
            bins = _Bins(measure, _least_loaded(measure, np.argsort(-measure, kind="stable"), num_bins), num_bins)
            bins.level(budget, _GROUP_LOOKS)
            if _loads(bins.of_sample, raw, num_bins).max() <= budget:
                of_sample = bins.of_sample[chunk]
                yield of_sample, sharing.computed(sizes, of_sample, num_bins)
                break


def _loads(bins: Indices, sizes: Indices, num_bins: int) -> Indices:
    return np.bincount(bins, weights=sizes, minlength=num_bins).astype(np.int64)


def _duration(cost: Indices, num_ranks: int, budget: int) -> float:
    """Tokens on the fullest rank of each micro-step, all micro-steps together, and what these take besides."""
    fullest = np.sort(cost)[::-1][::num_ranks]
    return float(fullest.sum() + len(fullest) * _STEP_COST * budget)


def _deal(bins: Indices, cost: Indices, num_ranks: int) -> list[list[Indices]]:
    """Micro-batches to ranks: similar ones share a micro-step, and each rank gets about the same in all.

    Args:
        bins: [N] micro-batch of each sample.
        cost: [R * M] of each micro-batch.
        num_ranks: R.
    """
    by_bin = np.split(np.argsort(bins, kind="stable"), np.cumsum(np.bincount(bins, minlength=len(cost)))[:-1])
    steps = np.argsort(-cost, kind="stable").reshape(-1, num_ranks)
    totals = np.zeros(num_ranks)
    ranks: list[list[Indices]] = [[] for _ in range(num_ranks)]
    for step in steps:  # the costliest micro-batch of the step to the rank that has least so far
        for rank, chosen in zip(np.argsort(totals, kind="stable"), step, strict=True):
            ranks[rank].append(by_bin[chosen])
            totals[rank] += cost[chosen]
    return ranks
