"""A Python environment of the engines' own (`inference.python`): what is in it, asked by a process that runs in it.

`PYTHON -m prime_hpc.inference.environment BACKEND` prints a line of JSON. Both environments need the same prime-hpc:
trainer, orchestrator and servers speak to each other in words of one version.
"""

import json
import os
import subprocess
import sys
import sysconfig
from collections.abc import Mapping, MutableMapping
from functools import cache
from pathlib import Path
from typing import Any

from prime_hpc.runtime.failures import NodeError
from prime_hpc.store.code import package_digest

CODE = "PRIMEHPC_CODE"
"""The digest of the supervisor's prime-hpc, told to servers that run in another environment."""
TIMEOUT_S = 120.0
"""For its answer: the imports of a first use, from a shared file system, take long."""
_OWN_HOME = {"PYTHONHOME": ""}
"""A shell's PYTHONHOME, which modules of clusters set, is of another interpreter: this one would find no library."""


def told_to_servers(python: str | None) -> dict[str, str]:
    """Return environment variables for servers of a section whose `python` is given."""
    return {} if python is None else {CODE: package_digest(), **_OWN_HOME}


def enter(environ: MutableMapping[str, str] = os.environ) -> None:
    """Make this process one of its own environment, as activating it would: programs that its packages bring (ninja)
    are found first. Raises NodeError: its prime-hpc is another one, or another environment's torch hides its own."""
    require_same_code(environ)
    if hidden := _hidden(environ):
        raise NodeError(hidden)
    folder = str(Path(sys.executable).parent)
    environ["PATH"] = os.pathsep.join([folder, environ.get("PATH", os.defpath)])
    environ.pop("VIRTUAL_ENV", None)
    if sys.prefix != sys.base_prefix:
        environ["VIRTUAL_ENV"] = sys.prefix


def _hidden(environ: Mapping[str, str]) -> str:
    """Say whose torch PYTHONPATH puts before the environment's own, or ''."""
    own = Path(sysconfig.get_paths()["purelib"], "torch")
    for entry in environ.get("PYTHONPATH", "").split(os.pathsep):
        other = Path(entry, "torch")
        if entry and own.is_dir() and other.is_dir() and not other.samefile(own):
            return f"PYTHONPATH has {entry}, whose torch would be taken for that of {sys.prefix}: leave it out"
    return ""


def require_same_code(environ: Mapping[str, str] = os.environ) -> None:
    """Refuse to serve a supervisor whose prime-hpc is another one. Raises NodeError."""
    expected = environ.get(CODE)
    if expected is not None and expected != (found := package_digest()):
        raise NodeError(_other_code(sys.executable, Path(__file__).parents[1], found, expected))


def facts(backend: str) -> dict[str, Any]:
    """Return what is here: digest of the code, its folder, what a backend (`vllm`, ...) lacks or what hides it, or
    ''."""
    from prime_hpc.inference.backend import load_backend

    folder = str(Path(__file__).parents[1])
    missing = load_backend(backend).missing() or _hidden(os.environ)
    return {"code": package_digest(), "folder": folder, "missing": missing}


@cache
def problem_of(python: str, backend: str) -> str:
    """Ask the environment of an interpreter on this machine; return why engines could not run in it, or ''."""
    command = [python, "-P", "-m", __name__, backend]
    try:
        asked = subprocess.run(
            command,
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            timeout=TIMEOUT_S,
            check=False,
            env={**os.environ, **_OWN_HOME},
        )
    except OSError as error:
        return f"{python} cannot be started: {error.strerror}"
    except subprocess.TimeoutExpired:
        return f"{python} did not say within {TIMEOUT_S:g} s what is installed there"
    if asked.returncode:
        said = (asked.stderr.strip().splitlines() or ["it said nothing"])[-1]
        lacks = "No module named" in said
        way = f"; install it there, as it is here: {python} -m pip install ..." if lacks else ""
        if lacks and Path(python).is_symlink() and not Path(python).parent.with_name("pyvenv.cfg").exists():
            way += "; it is a link, through which Python sees no virtual environment: name that one's own bin/python"
        return f"{python} has no prime-hpc that runs: {said}{way}"
    try:
        found = json.loads(asked.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        return f"{python} is no interpreter of Python: asked what is installed there, it said {asked.stdout[:80]!r}"
    if found["code"] != package_digest():
        return _other_code(python, found["folder"], found["code"], package_digest())
    return f"in the environment of {python}: {found['missing']}" if found["missing"] else ""


def _other_code(python: str, folder: str | Path, found: str, expected: str) -> str:
    return (
        f"the prime-hpc of {python} (in {folder}, digest {found}) is not the one that runs the rest (digest "
        f"{expected}): install the same version, or the same checkout, in both environments"
    )


if __name__ == "__main__":
    print(json.dumps(facts(sys.argv[1])))
