"""The names that packages for the older verifiers interface import, answered with what this room has for them.

`import verifiers as vf; vf.Rubric`, `from verifiers.types import State` and the like work after `install`, which adds a
`__getattr__` to the (empty) root of verifiers 0.4 and a finder for the modules that it no longer has. What cannot be
played here is refused by name, with a reason, at the place that asks for it.
"""

import importlib
import importlib.util
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from prime_hpc.envs.errors import EnvError
from prime_hpc.envs.legacy import environments, failures, messages, parsers, rubrics

GONE = ("types", "envs", "parsers", "rubrics", "utils", "errors")
"""Modules (and all below them) that verifiers had at its root."""

_REMOTE = "it runs code in Prime's paid remote sandboxes, which a training job cannot reach"
REFUSED: dict[str, str] = {
    "SandboxEnv": _REMOTE,
    "PythonEnv": _REMOTE,
    "CliAgentEnv": _REMOTE,
    "ComposableEnv": _REMOTE,
    "HarborEnv": _REMOTE,
    "BrowserEnv": _REMOTE,
    "OpenCodeEnv": _REMOTE,
    "RLMEnv": "it nests model calls whose tokens it does not report",
    "GymEnv": "it plays gym environments over a protocol of its own",
    "MCPEnv": "it starts MCP servers by itself: write it as a v1 taskset with toolsets",
    "ReasoningGymEnv": "use prime-hpc's own `reasoning-gym` taskset: the same generators",
    "TextArenaEnv": "use verifiers' own v1 taskset `textarena`: the same games",
    "RLTrainer": "training is prime-hpc's: take load_environment alone from this package",
    "GRPOTrainer": "training is prime-hpc's: take load_environment alone from this package",
}
"""Names of the older interface that are not played, and why or what to use."""

_ROOMS: tuple[ModuleType, ...] = (environments, rubrics, parsers, messages, failures)
_OTHER_NAMES = {"convert_func_to_oai_tool": "tool_declaration", "convert_func_to_tool_def": "tool_declaration"}


def lookup(name: str, module: str = "verifiers") -> Any:
    """Look up what a name of the older interface stands for.

    Raises:
        EnvError: it is refused; says why.
        AttributeError: it is no name that is known here.
    """
    if name in REFUSED:
        raise EnvError(f"{module}.{name} is not played: {REFUSED[name]}")
    if name == "load_example_dataset":
        from prime_hpc.envs.benchmarks.rows import load_example_dataset

        return load_example_dataset
    if name == "load_environment":
        from prime_hpc.envs.legacy.loading import load_environment

        return load_environment
    wanted = _OTHER_NAMES.get(name, name)
    for room in _ROOMS:
        if not wanted.startswith("_") and wanted in vars(room):
            return vars(room)[wanted]
    raise AttributeError(
        f"module {module!r} has no attribute {name!r}: verifiers 0.4 left the older interface out, and prime-hpc's "
        "stand-in does not have this part of it"
    )


class _GoneModule(ModuleType):
    """A module that verifiers no longer has; every name of the older interface can be had from it."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lookup(name, self.__name__)


class _Finder(MetaPathFinder, Loader):
    """Makes the modules of `GONE`, where the installed verifiers has none of its own."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        parts = fullname.split(".")
        if len(parts) < 2 or parts[0] != "verifiers" or parts[1] not in GONE:
            return None
        return ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _GoneModule(spec.name, f"Stand-in for the module of the older interface: {__name__}.")

    def exec_module(self, module: ModuleType) -> None:
        """Nothing: names are looked up as they are asked for."""


def install() -> None:
    """Answer the older interface's names from now on, in this process. Idempotent; a verifiers that has them wins."""
    import verifiers

    if hasattr(verifiers, "__getattr__") or importlib.util.find_spec("verifiers.types") is not None:
        return
    sys.meta_path.append(_Finder())
    vars(verifiers)["__getattr__"] = _of_root


def _of_root(name: str) -> Any:
    if name.startswith("_"):
        raise AttributeError(f"module 'verifiers' has no attribute {name!r}")
    if name in GONE:
        return importlib.import_module(f"verifiers.{name}")
    return lookup(name)
