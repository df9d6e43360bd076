"""Whole versions as files: every rank writes its places into the files themselves, engines map them as they lie."""

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from prime_hpc.config.sections.inference import WeightsConfig
from prime_hpc.store.io.files import FileEntry
from prime_hpc.store.io.shared_writer import RangeFile, open_ranges
from prime_hpc.store.manifest import Manifest
from prime_hpc.weight_transport.transport import Place, Receiver, Sender, VersionForm, WholeFile


class FilesSender:
    """Writes into files that all ranks of a node share."""

    def __init__(self, files: Sequence[WholeFile]) -> None:
        self._files = files
        self._opened: dict[str, RangeFile] = {}

    def plan(self, version: int, *, is_kept: bool = False) -> VersionForm:
        """Whole, always."""
        return VersionForm()

    def open(self, form: VersionForm, stage: Path, stack: contextlib.ExitStack) -> None:
        """Open the files into which this rank writes; its own get their headers."""
        self._opened = {file.name: stack.enter_context(open_ranges(stage / file.name)) for file in self._files}
        for file in self._files:
            if file.is_owned_here:
                self._opened[file.name].write_at(0, file.header)

    def write(self, place: Place, values: Any) -> None:
        """Write to the place."""
        self._opened[place.file].write_at(place.offset, values)

    def finalize(self) -> tuple[dict[str, FileEntry], dict[str, Any]]:
        """Make this rank's own files durable, and sum them."""
        return {
            file.name: self._opened[file.name].finalize(file.size) for file in self._files if file.is_owned_here
        }, {}

    def meta(self, facts: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Nothing: a version that says nothing is of this transport."""
        return {}

    def sent(self, manifest: Manifest) -> None:
        """Nothing is remembered."""


class FilesReceiver:
    """Reads versions where they are."""

    def fetch(self, folder: Path) -> Path:
        """Return the folder itself."""
        return folder


class FilesTransport:
    """`weights.transport: files`."""

    gathers = False

    def sender(self, config: WeightsConfig, files: Sequence[WholeFile], rank: int) -> Sender:
        """Return what writes whole files."""
        return FilesSender(files)

    def receiver(self, scratch: Path) -> Receiver:
        """Return what takes them as they lie."""
        return FilesReceiver()


FILES = FilesTransport()
