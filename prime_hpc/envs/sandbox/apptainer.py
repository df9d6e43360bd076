"""The command that begins a sandbox in an Apptainer image, for nodes without bubblewrap and for an image's own tools.

Apptainer mounts the image, in a user namespace, and nothing of the node but the paths that are shown; what else makes a
sandbox is made inside, by the image's Python (`enclose.py`). Its environment is ours alone: a site's APPTAINER_BIND
would show what it names.
"""

import functools
import json
import os
import re
import shutil
import socket
from pathlib import Path
from typing import Any

from prime_hpc.config.sections.orchestrator import SandboxConfig
from prime_hpc.envs.errors import EnvError, EnvNodeError
from prime_hpc.envs.sandbox.bubblewrap import ONE_THREAD, SHM_MIB, Stage, ask_version
from prime_hpc.runtime.slurm_warning import DEAF, is_led

LEAST_VERSION = (1, 1, 0)
"""The first that needs no help from root and evaluates nothing of the image."""
IMAGE, SHOWN = "image", "/.shown"
_UNWANTED = "home,cwd,tmp,sys,hostfs,bind-paths,devpts"


def find_apptainer() -> str:
    """Return the path of apptainer. Raises EnvError: it is not installed, too old, or does not answer."""
    path, node = shutil.which("apptainer"), socket.gethostname()
    if path is None:
        raise EnvNodeError(
            f"there is no apptainer on {node}: sandbox.runtime = apptainer needs it on every node that plays "
            "environments; bubblewrap needs no image"
        )
    told, version = ask_version(path)
    if not version:  # as for a user that the node does not know
        raise EnvNodeError(
            f"{path} on {node} does not work: {(told.stderr + told.stdout).strip() or 'it says nothing'}"
        )
    if version < LEAST_VERSION:
        least = ".".join(map(str, LEAST_VERSION))
        raise EnvNodeError(f"{path} on {node} is {told.stdout.strip()}; sandboxes need {least} or newer")
    return path


def shown_paths(config: SandboxConfig) -> list[str]:
    """Return what is read-only inside besides the image, the image last.
    Raises EnvError: a path that the config names is not there, or cannot be named to apptainer."""
    assert config.image is not None, "the config refuses it"
    for key, paths in (("read_only", config.read_only), ("image", [config.image])):
        for path in paths:
            if not Path(path).exists():
                raise EnvNodeError(f"sandbox.{key}: {path} is not there, or cannot be seen, on {socket.gethostname()}")
            if re.search(r"[,:\\]", path):
                raise EnvError(f"sandbox.{key}: {path}: apptainer takes no path with a comma, colon or backslash")
    return [*dict.fromkeys(config.read_only), config.image]


def environment(config: SandboxConfig) -> dict[str, str]:
    """Return the variables of a command's environment; PATH is the image's."""
    return {"HOME": "/work", "TMPDIR": "/tmp", "LANG": "C.UTF-8", **ONE_THREAD}


def own_environment() -> dict[str, str]:
    """Return the environment of apptainer itself."""
    path = os.environ.get("PATH", os.defpath)
    return {"PATH": path, "HOME": "/nonexistent", "APPTAINER_CONFIGDIR": "/nonexistent", "LANG": "C.UTF-8"}


@functools.cache
def _source(name: str) -> str:
    return Path(__file__).with_name(name).read_text(encoding="utf-8")


def guest_source() -> str:
    """Return the program of a sandbox's first process; the image's Python may be of another release than ours."""
    return _source("guest.py")


def command(apptainer: str, config: SandboxConfig, stage: Stage, boot: str) -> list[str]:
    """Return the whole command; `boot` is what process 1 runs."""
    assert config.image is not None
    argv = [*(DEAF if is_led() else ()), *stage.prefix, apptainer, "--silent", "exec", "--userns", "--contain"]
    argv += ["--cleanenv", "--no-eval", "--no-home", "--no-mount", _UNWANTED, "--cwd", "/"]
    shown = []
    for number, path in enumerate(dict.fromkeys(config.read_only)):
        argv += ["--bind", f"{stage.sources[path]}:{SHOWN}/{number}:ro"]
        shown.append([f"{SHOWN}/{number}", path])
    order: dict[str, Any] = {"network": config.network, "disk": config.disk_mib << 20, "shm": SHM_MIB << 20}
    order |= {"shown": shown, "boot": boot}
    python = ["python3", "-I"] if config.packages else ["python3", "-I", "-S"]
    return [*argv, stage.sources[config.image], *python, "-c", _source("enclose.py"), json.dumps(order)]


def explain_refusal(said: str) -> str:
    """Return why no sandbox was made, and what can be done."""
    if "executable file not found" in said or ("no such file or directory" in said and "python3" in said):
        return f"{said}: the image of sandbox.image has no python3 in its PATH"
    if "ModuleNotFoundError" in said or "SyntaxError" in said:
        return f"{said}: the Python of sandbox.image is older than 3.9, or lacks parts of the standard library"
    if "user namespace" in said or "unshare" in said:
        return f"{said}: this node gives users no namespaces inside of apptainer, and code runs in no sandbox without"
    return said or "it ended without a word"
