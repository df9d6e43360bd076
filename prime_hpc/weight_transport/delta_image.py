"""Versions as what changed, over files: the receiving side, and the way back to a whole version.

A server has on each of its nodes one whole version as files in its temporary directory, the image. To fetch a version
means to bring the image up to it, in place, while the engines sample: only the changes are read from the run directory
(their sums checked), and every chunk of the image is summed afterwards and compared with what the trainer published. So
what the engines map is the version to the bit, or it is refused. Engines and GPUs hold no further copy; the image is
file pages, which the kernel can write out and take back.

What the image is stands in `image.json`, which is not there while it is being changed: a process that is killed in the
middle leaves no image, and the next one copies the whole version with which the chain begins and applies the chain.
"""

import contextlib
import json
import os
import shutil
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from loguru import logger

from prime_hpc.store.artifact import hash_files
from prime_hpc.store.errors import ArtifactError, StoreError, failed_read
from prime_hpc.store.io import files
from prime_hpc.store.io.disk import disk_errors
from prime_hpc.store.io.files import FileEntry
from prime_hpc.store.manifest import Manifest, verify_artifact
from prime_hpc.store.weights import link_of, read_chain
from prime_hpc.weight_transport import delta_codec
from prime_hpc.weight_transport.transport import node_lock

IMAGE = "image"
STATE = "image.json"
MOST_THREADS = 8
_COPY_BYTES = 512 << 10  # stays in a core's cache until it is summed
Chain = Sequence[tuple[Path, Manifest]]


class DeltaReceiver:
    """Keeps the image of one server on one node; its processes there share it."""

    def __init__(self, scratch: Path) -> None:
        self._image, self._state = scratch / IMAGE, scratch / STATE
        self._scratch = scratch

    def fetch(self, folder: Path) -> Path:
        """Bring the image up to a version and return its folder.

        Raises:
            ArtifactError: a version of its chain is gone or damaged.
            StoreError: no room on this node, or no pyarrow.
        """
        manifest = verify_artifact(folder)
        with node_lock(self._scratch):
            found = self._digest()
            if found == manifest.digest:
                return self._image
            missing = self._missing(folder, manifest, found)
            if missing is not None:
                try:
                    return self._update_image(missing)
                except ArtifactError as error:
                    logger.warning(f"{self._image} cannot be brought up to date, it is made anew: {error}")
            return self._update_image(read_chain(folder), anew=True)

    def _missing(self, folder: Path, manifest: Manifest, found: str | None) -> Chain | None:
        """Return the changes between the image and a version, oldest first; None: it is none of its chain."""
        link = link_of(manifest)
        if link is not None and found == link.digest:  # as a rule; no other version is looked at
            return [(folder, manifest)]
        chain = read_chain(folder) if found is not None else []
        digests = [each.digest for _, each in chain]
        return chain[digests.index(found) + 1 :] if found in digests else None

    def _update_image(self, changes: Chain, *, anew: bool = False) -> Path:
        """Apply changes to the image, `anew` to a copy of the first version; it says what it is only when all is in."""
        self._state.unlink(missing_ok=True)
        if anew:
            copy_whole(*changes[0], self._image)
        for folder, manifest in changes[anew:]:
            apply_changes(folder, manifest, self._image)
        digest = changes[-1][1].digest
        files.write_atomic(self._state, json.dumps({"digest": digest}).encode(), sync=False)
        return self._image

    def _digest(self) -> str | None:
        """Return the version that the image is, None where it is none."""
        try:
            return str(json.loads(self._state.read_bytes())["digest"])
        except (OSError, ValueError, KeyError, TypeError):
            return None


def restore(folder: Path, target: Path) -> None:
    """Write the whole version that a folder of changes stands for, as Hugging Face loads it.

    Args:
        folder: of the version (a whole one is copied).
        target: made; must not exist.

    Raises:
        ArtifactError: a version of its chain is gone or damaged.
        StoreError: the target exists, disk full.
    """
    if target.exists():
        raise StoreError(f"{target} exists: name another directory, or remove it")
    part = target.with_name(f".part-{target.name}-{files.unique_suffix()}")
    chain = read_chain(folder)
    try:
        copy_whole(*chain[0], part)
        for changed, manifest in chain[1:]:
            apply_changes(changed, manifest, part)
        hash_files(part, chain[0][1].files)  # durable, and readable for others
        files.rename(part, target)
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise


def copy_whole(folder: Path, manifest: Manifest, target: Path) -> None:
    """Make `target` hold the files of a whole version and nothing else, over what was there: pages stay where they are.

    Raises:
        ArtifactError: a file is gone, or not what the manifest says: changes that follow would check no header, and
            neither config nor tokenizer.
        StoreError: no room.
    """
    files.make_dir(target)
    for stray in set(files.list_dir(target)) - set(manifest.files):
        files.remove_file(target / stray)
    with disk_errors(target), memoryview(bytearray(_COPY_BYTES)) as buffer:
        for name, entry in manifest.files.items():
            source = _open(folder / name, os.O_RDONLY, entry.size)
            copy = os.open(target / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                found = _copy(source, copy, buffer)
            finally:
                os.close(source)
                os.close(copy)
            if found != entry:
                raise ArtifactError(
                    folder / name, f"{entry.size} bytes, xxh3 {entry.xxh3}", f"{found.size} bytes, xxh3 {found.xxh3}"
                )


def _copy(source: int, copy: int, buffer: memoryview) -> FileEntry:
    """Copy a file over another one; returns its size and the sum of what was written."""
    digest, size = xxhash.xxh3_64(), 0
    while count := os.preadv(source, [buffer], size):
        with buffer[:count] as part:
            digest.update(part)
            _write_all(copy, part, size)
        size += count
    os.ftruncate(copy, size)
    return FileEntry(size, digest.hexdigest())


def _write_all(descriptor: int, data: memoryview, offset: int) -> None:
    """Write all of a buffer: a disk that fills up takes a part first, and says so only when asked for the rest."""
    written = 0
    while written < len(data):
        with data[written:] as rest:
            written += os.pwrite(descriptor, rest, offset + written)


def apply_changes(folder: Path, manifest: Manifest, image: Path) -> None:
    """Bring whole files from the base of a version to that version, in place.
    Raises ArtifactError: a file of changes is damaged, or the files were not the base."""
    threads = min(MOST_THREADS, len(os.sched_getaffinity(0)))
    with ThreadPoolExecutor(threads + 1, thread_name_prefix="delta") as pool:  # one more: it waits for the file system
        contents = _read_ahead(pool, [folder / name for name in manifest.files])
        for (name, entry), content in zip(manifest.files.items(), contents, strict=True):
            if files.hash_bytes(content) != entry:
                raise ArtifactError(folder / name, f"xxh3 {entry.xxh3}", "another sum")
            changes = delta_codec.parse(content, folder / name)
            wrong = _apply_all(pool, changes, image)
            if wrong:
                file, offset = changes.names[int(wrong[0]["file"])], int(wrong[0]["offset"])
                raise ArtifactError(
                    folder / name,
                    f"changes that lead to version {manifest.version}",
                    f"another content of {file} at byte {offset} ({len(wrong)} of {len(changes.table)} places)",
                )


def _read_ahead(pool: ThreadPoolExecutor, paths: Sequence[Path]) -> Iterator[bytes]:
    """Yield what the files hold; while the caller is busy with one, the next is read."""
    coming: deque[Future[bytes]] = deque()
    for path in paths:
        coming.append(pool.submit(_read, path))
        if len(coming) > 1:
            yield coming.popleft().result()
    for last in coming:
        yield last.result()


def _apply_all(pool: ThreadPoolExecutor, changes: delta_codec.DeltaFile, image: Path) -> list[Any]:
    """Apply one file's chunks; returns the rows of those that are not what they should be then.

    Returns, or raises, when no thread uses the descriptors any more: a number that is closed may soon be another file.
    """
    with contextlib.ExitStack() as stack:
        opened = [_open(image / file, os.O_RDWR) for file in changes.names]
        for descriptor in opened:
            stack.callback(os.close, descriptor)
        stack.enter_context(disk_errors(image))
        jobs = [pool.submit(_apply, opened, row, frame) for row, frame in changes.chunks()]
        try:
            return [row for job, row in zip(jobs, changes.table, strict=True) if not job.result()]
        finally:
            wait([job for job in jobs if not job.cancel()])


_memory = threading.local()


def _apply(opened: Sequence[int], row: Any, frame: memoryview) -> bool:
    """Read a chunk, change it, write it back; False where it is not what it should be then.

    Not mapped: each page would cost a fault on the way, and a full disk would be a signal instead of an error.
    """
    descriptor, offset, size = opened[int(row["file"])], int(row["offset"]), int(row["nbytes"])
    if not hasattr(_memory, "buffer") or len(_memory.buffer) < size:
        _memory.buffer = np.empty(size, np.uint8)
    content = _memory.buffer[:size]
    if os.preadv(descriptor, [content.data], offset) != size or not delta_codec.apply(content, row, frame):
        return False
    if int(row["changed"]):
        _write_all(descriptor, content.data, offset)
    return True


def _open(path: Path, flags: int, size: int | None = None) -> int:
    try:
        return os.open(path, flags | os.O_CLOEXEC)
    except OSError as error:
        raise failed_read(error, path, "a file" if size is None else f"{size} bytes") from error


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise failed_read(error, path, "changes of a weight version") from error
