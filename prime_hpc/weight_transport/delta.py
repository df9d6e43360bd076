"""Versions as what changed since the one before, over files: the trainer's side (`weights.transport: delta`).

Every rank keeps, in host memory, the values that it wrote last (its share of the published weights), compares, and
writes one file of its own with what changed (`delta_codec`). Whole versions (as `files` writes them) come first, every
`weights.whole_interval` versions, after a failure, and as long as so much changes from version to version that changes
would not be worth it: then nothing is kept and compared but samples, which cost next to nothing. So it is where a rank
finds too little free memory to keep its values, for as long as the attempt lasts.

    version  1      2      3      4    ...        first of an attempt: two whole ones, to see how much changes
             whole  whole  delta  delta     whole
"""

import contextlib
import os
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from loguru import logger

from prime_hpc.config.sections.inference import WeightsConfig
from prime_hpc.runtime.host_memory import HEADROOM, available_bytes
from prime_hpc.store.io import files as store_files
from prime_hpc.store.io.files import FileEntry
from prime_hpc.store.manifest import Manifest
from prime_hpc.store.weights import KEY, Link, link_of
from prime_hpc.weight_transport import delta_codec
from prime_hpc.weight_transport.delta_image import DeltaReceiver
from prime_hpc.weight_transport.files import FilesSender
from prime_hpc.weight_transport.transport import Place, Receiver, Sender, VersionForm, WholeFile

NAME = "delta"
MOST_CHANGED = 0.1
"""Share of elements above which versions are whole: a changed bfloat16 takes 0.6 to 0.9 bytes, so that a tenth is some
5 % of a version's bytes, and to find and compress them takes as long as a local disk does for all."""
SAMPLE = 1024
"""Elements of a place that are compared where whole versions are written, from its middle."""
MOST_THREADS = 8


class DeltaSender:
    """One rank's side."""

    def __init__(self, config: WeightsConfig, files: Sequence[WholeFile], rank: int) -> None:
        self._interval, self._rank = config.whole_interval, rank
        self._whole = FilesSender(files)
        self._names = [file.name for file in files]
        self._index = {name: number for number, name in enumerate(self._names)}
        self._local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        threads = min(MOST_THREADS, max(1, len(os.sched_getaffinity(0)) // self._local_ranks))
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="delta") if threads > 1 else None
        self._most_pending = 2 * threads
        self._pending: deque[tuple[Place, int, int, Future[delta_codec.Change]]] = deque()
        """Chunks that are being compared: their place, where in it they begin, and their bytes."""
        self._kept: dict[Place, delta_codec.Bytes] = {}
        """The values that this rank wrote last, where they are kept."""
        self._room, self._fits = 0.0, True
        """Bytes that may be kept yet; whether they were enough. On rank 0 whether every rank's were."""
        self._samples: dict[Place, delta_codec.Bytes] = {}
        """Where they are not."""
        self._form, self._stage = VersionForm(), Path()
        self._rows: list[tuple[int, ...]] = []
        self._frames: list[memoryview] = []
        self._counts = [0.0, 0.0]
        """Elements that changed, and elements, of this version."""
        # On rank 0 alone:
        self._last: Manifest | None = None
        """The version before, if it has its name and all ranks keep its values."""
        self._base: Manifest | None = None
        """Against which the version that is being written stands; None: it is whole."""
        self._changed: float | None = None
        """Share of elements that changed with it, once that was seen."""
        self._num_deltas = 0
        """Since the last whole version."""

    def plan(self, version: int, *, is_kept: bool = False) -> VersionForm:
        """Decide by what was seen of the versions before."""
        last, self._last = self._last, None  # until this one has its name
        is_worth_it = self._changed is None or self._changed <= MOST_CHANGED
        if last is None or self._changed is None or not is_worth_it or self._num_deltas + 1 >= self._interval:
            self._base = None
            return VersionForm(keeps_values=is_worth_it and self._fits)
        self._base = last
        return VersionForm(is_whole=False, keeps_values=True)

    def open(self, form: VersionForm, stage: Path, stack: contextlib.ExitStack) -> None:
        """Begin a version: open its whole files, or nothing yet."""
        self._form, self._stage = form, stage
        self._rows, self._frames, self._counts = [], [], [0.0, 0.0]
        self._pending.clear()
        if form.is_whole:
            self._whole.open(form, stage, stack)
        if not form.keeps_values:
            self._kept = {}
        elif not self._kept:  # before any rank takes some
            self._room = available_bytes() * HEADROOM / self._local_ranks

    def write(self, place: Place, values: Any) -> None:
        """Take a place: write it, or find what changed."""
        new = values if isinstance(values, np.ndarray) else np.frombuffer(values, np.uint8)
        if not self._form.is_whole:
            self._compare(place, new)
            return
        self._sample(place, new)
        if self._form.keeps_values:
            self._keep(place, new)
        self._whole.write(place, new)

    def _sample(self, place: Place, new: delta_codec.Bytes) -> None:
        """Of a whole version count what changed in the middle of a place; the count stands for all of it."""
        size = min(len(new), SAMPLE * place.itemsize)
        begin = (len(new) - size) // (2 * place.itemsize) * place.itemsize
        middle = slice(begin, begin + size)
        kept = self._kept.get(place)
        before = self._samples.get(place) if kept is None else kept[middle]
        num_elements = len(new) // place.itemsize
        if before is not None and size:
            num_changed = delta_codec.count_differing(before, new[middle], place.itemsize)
            self._counts[0] += num_changed * place.itemsize / size * num_elements
            self._counts[1] += num_elements
        if not self._form.keeps_values:
            self._samples[place] = new[middle].copy()

    def _keep(self, place: Place, new: delta_codec.Bytes) -> None:
        self._samples.pop(place, None)
        kept = self._kept.get(place)
        if kept is not None:
            kept[:] = new
        elif self._fits and len(new) <= self._room:
            self._room -= len(new)
            self._kept[place] = new.copy()
        elif self._fits:
            self._kept, self._fits = {}, False
            logger.warning(
                f"weights.transport = {NAME} keeps each rank's share of a version in host memory, and this node has "
                f"{available_bytes() / 2**30:.1f} GiB left for {self._local_ranks} rank(s): versions go as whole files"
            )

    def _compare(self, place: Place, new: delta_codec.Bytes) -> None:
        """Find what changed, chunk by chunk; the kept values become the new ones."""
        kept = self._kept[place]
        for begin in range(0, len(new), delta_codec.CHUNK_BYTES):
            old, part = (values[begin : begin + delta_codec.CHUNK_BYTES] for values in (kept, new))
            if self._pool is None:  # another thread would only wait for this one
                self._note(place, begin, len(part), delta_codec.encode(old, part, place.itemsize))
                continue
            job = self._pool.submit(delta_codec.encode, old, part, place.itemsize)
            self._pending.append((place, begin, len(part), job))
            self._collect(self._most_pending)

    def _collect(self, most_pending: int) -> None:
        """Take what was found, oldest first, until so many chunks are left."""
        while len(self._pending) > most_pending:
            place, begin, nbytes, job = self._pending.popleft()
            self._note(place, begin, nbytes, job.result())

    def _note(self, place: Place, begin: int, nbytes: int, change: delta_codec.Change) -> None:
        """Add a chunk to this rank's file."""
        file, offset = self._index[place.file], place.offset + begin
        self._rows.append((file, place.itemsize, offset, nbytes, change.num_changed, len(change.frame), change.xxh3))
        self._frames.append(change.frame)
        self._counts[0] += change.num_changed
        self._counts[1] += nbytes // place.itemsize

    def finalize(self) -> tuple[dict[str, FileEntry], dict[str, Any]]:
        """Make this rank's files durable."""
        self._collect(0)
        facts = {"changed": self._counts[0], "elements": self._counts[1], "fits": self._fits}
        if self._form.is_whole:
            return self._whole.finalize()[0], facts
        if not self._rows:
            return {}, facts
        name = f"delta-{self._rank:05d}.bin"
        head = delta_codec.file_head(self._names, self._rows)
        entry = store_files.write_file(self._stage / name, [head, *self._frames])
        self._rows, self._frames = [], []
        return {name: entry}, facts

    def meta(self, facts: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Say against what the version stands; remember how much changed."""
        elements = sum(fact["elements"] for fact in facts)
        self._fits = all(fact["fits"] for fact in facts)
        if elements:
            self._changed = sum(fact["changed"] for fact in facts) / elements
        if self._base is None:
            return {}
        base, link = self._base, link_of(self._base)
        assert base.version is not None
        own = Link(base.version, base.digest, base.version if link is None else link.whole)
        return {"transport": NAME, KEY: own.as_json(), "changed": round(self._changed or 0.0, 6)}

    def sent(self, manifest: Manifest) -> None:
        """Keep this version's values, where the next one may be compared with them."""
        self._num_deltas = self._num_deltas + 1 if self._base is not None else 0
        self._last = manifest if self._form.keeps_values and self._fits else None


class DeltaTransport:
    """`weights.transport: delta`."""

    gathers = False

    def sender(self, config: WeightsConfig, files: Sequence[WholeFile], rank: int) -> Sender:
        """Return what compares and writes."""
        return DeltaSender(config, files, rank)

    def receiver(self, scratch: Path) -> Receiver:
        """Return what brings a whole version up to date on this node."""
        return DeltaReceiver(scratch)


DELTA = DeltaTransport()
