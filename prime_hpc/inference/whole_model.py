"""The whole model that a server of any backend serves: its version, and how the next one comes onto this node."""

import asyncio
from pathlib import Path
from typing import Any

from prime_hpc.inference.check_version import BadVersionError, Received, digest_of, read_signature, receive_version
from prime_hpc.inference.policy import BASE_VERSION
from prime_hpc.weight_transport.transport import DEFAULT, VersionReader


class WholeModel:
    """The served version of a model; see `policy.Policy`. Whoever changes it holds the lock."""

    def __init__(self, name: str, base_path: Path | None, scratch: Path, *, tied: bool) -> None:
        """Args:
        base_path: folder of its safetensors; None where it has none on this node.
        scratch: directory on this node for what is fetched, deleted with the server.
        tied: see `receive_version`.
        """
        self._base_name, self._base_path, self._tied = str(base_path or name), base_path, tied
        self._signature = None if base_path is None else read_signature(base_path)
        self._reader = VersionReader(scratch)
        self._lock = asyncio.Lock()
        self.version, self.path = BASE_VERSION, self._base_name
        self._digest: str | None = None
        """Of the version that was loaded last."""

    async def _serves(self, path: str, version: int) -> bool:
        """Return whether a version is served already, as it lies there now. No other name is looked up: one that is not
        visible yet would be remembered as a miss."""
        is_named_so = (version, path) == (self.version, self.path)
        return is_named_so and await asyncio.to_thread(digest_of, Path(path)) in (None, self._digest)

    def _note(self, version: int, folder: Path, digest: str | None) -> None:
        """Remember the version that was just loaded. `digest`: from before it was, or another one that has taken its
        name meanwhile would be taken for it ever after."""
        self.version, self.path, self._digest = version, str(folder), digest

    def _folder(self, path: str, version: int) -> Path:
        """Return the folder of a version that is to be loaded. Raises BadVersionError: it cannot be one."""
        if not Path(path).is_absolute():
            raise BadVersionError(f"{path} is not an absolute path")
        if version == BASE_VERSION:
            raise BadVersionError(f"version {BASE_VERSION} is the base model: use /reload_weights")
        return Path(path)

    async def _receive(self, folder: Path, version: int) -> Received:
        """Bring a version onto this node; errors as of `receive_version`."""
        return await asyncio.to_thread(receive_version, self._reader, folder, version, self._signature, self._tied)

    def _base(self) -> Received:
        """Return the base model, to go back to. Raises BadVersionError: it has no safetensors on this node."""
        if self._base_path is None:
            raise BadVersionError(
                f"the base model {self._base_name} has no safetensors on this node: restart the server"
            )
        return Received(self._base_path, DEFAULT, self._base_path)

    def _answer(self, *, changed: bool, **seconds: float) -> dict[str, Any]:
        """Return what an update answers; `seconds` by phase, of one that loaded."""
        answer: dict[str, Any] = {"version": self.version, "path": self.path, "changed": changed}
        return answer | {"seconds": {key: round(value, 4) for key, value in seconds.items()}} if seconds else answer
