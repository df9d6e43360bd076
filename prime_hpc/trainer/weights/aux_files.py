"""Files beside the tensors of a weight version: config, index, tokenizer, code. The same in every version.

Written and made durable once in an attempt; later versions get hard links to the files of the one before, which nobody
changes any more. A tokenizer is some 10 MB in ten files: more than an adapter, and each file that is to be durable
waits for the disk.
"""

import errno
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from prime_hpc.store.io import files
from prime_hpc.store.io.disk import disk_errors
from prime_hpc.store.io.files import FileEntry

Content = Path | bytes | Callable[[], Iterable[bytes]]
"""The file to copy, or what stands in it: at once, or in parts for what is large."""


class AuxFiles:
    """The files of one publisher."""

    def __init__(self, sources: Mapping[str, Content]) -> None:
        self._sources = dict(sources)
        self._entries: dict[str, FileEntry] = {}
        self._last: Path | None = None
        """The version whose files can be linked."""

    def put(self, stage: Path) -> dict[str, FileEntry]:
        """Put the files into a version's stage; their entries. Raises StoreError: disk full, not writable."""
        return {name: self._linked(name, stage) or self._written(name, stage) for name in self._sources}

    def committed(self, version: Path) -> None:
        """Note that a version with these files has its name now."""
        self._last = version

    def _linked(self, name: str, stage: Path) -> FileEntry | None:
        """None where there is none to link, or no links at all."""
        if self._last is None or name not in self._entries:
            return None
        source, entry = self._last / name, self._entries[name]
        try:
            if source.stat().st_size != entry.size:  # damaged: not to be handed on
                return None
            files.link(source, stage / name)
        except OSError as error:
            if error.errno in (*files.NO_LINKS, errno.ENOENT, errno.ESTALE):  # ... or it was pruned
                return None
            with disk_errors(stage / name):
                raise
        return entry

    def _written(self, name: str, stage: Path) -> FileEntry:
        content = self._sources[name]
        if isinstance(content, Path):
            content = content.read_bytes()
        entry = files.write_file(stage / name, [content] if isinstance(content, bytes) else content())
        self._entries[name] = entry
        return entry
