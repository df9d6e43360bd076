"""Arguments of environments and fields of their tasks, as their sources say: verifiers, which would know, takes seconds
to import, and a package that somebody wrote may do anything then."""

import ast
import importlib.util
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from prime_hpc.config.env_files import short_id
from prime_hpc.envs.benchmarks.registry import find_benchmark
from prime_hpc.envs.env_config import BENCHMARK_TASKSETS, BUNDLED
from prime_hpc.envs.rows.reward_calls import written_signature

_OF_EVERY_TASKSET = ("id", "task", "system_prompt")
"""Those that verifiers' own `TasksetConfig` has."""
_OF_EVERY_ENV = ("id", "interception", "max_concurrent_agents", "retries", "timeout")
"""Those that verifiers' own `EnvConfig` has, which a config may state."""
_CONFIG = ("vf.TasksetConfig", "GeneratedConfig", "prime_hpc.envs.tasksets.generated")
_LOADS = "load_environment"
_MOST_MODULES = 3
"""Of a package, from one that imports that function from another to the one that defines it."""
_SEATS = ("vf.EnvConfig", "OneSeatConfig", "prime_hpc.envs.tasksets.generated")
_DATA = ("vf.TaskData", "IntegerData", "prime_hpc.envs.tasksets.integers")


@cache
def argument_names(identifier: str) -> tuple[str, ...] | None:
    """Return the names that `args` of an environment may have; None: it does not say so, or takes any.
    `identifier`: as in a config, of a benchmark too."""
    module = _module_of(short_id(identifier))
    if module is None:
        return _of_package(taskset_module(identifier))
    return tuple(sorted({*_OF_EVERY_TASKSET, *_fields(module, *_CONFIG)}))


@cache
def env_argument_names(identifier: str) -> tuple[str, ...] | None:
    """Return the names that `env_args` may have where these name no environment of their own (`id`); None: it is not a
    bundled one. `identifier`: as in a config, of a benchmark too."""
    module = _module_of(short_id(identifier))
    if module is None:
        return None
    return tuple(sorted({*_OF_EVERY_ENV, *(tuple(_fields(module, *_SEATS)) or ("agent",))}))


def taskset_module(identifier: str) -> str:
    """Name of the module in which verifiers would look for a taskset that is not bundled."""
    return identifier.split("/")[-1].split("@")[0].replace("-", "_").lower()


def _of_package(module: str) -> tuple[str, ...] | None:
    """Return the parameters of the `load_environment` of a package that is installed here; None: it has none, takes
    any, or is a taskset of its own."""
    is_name = module.isidentifier() and module != "__main__"  # of a dotted path some would be imported
    spec = importlib.util.find_spec(module) if is_name else None
    path = Path(spec.origin) if spec is not None and spec.origin is not None else None
    for number in range(_MOST_MODULES):
        if path is None or path.suffix != ".py":
            return None
        try:
            tree = ast.parse(path.read_text(encoding="utf-8"))
        except (OSError, ValueError, SyntaxError):
            return None
        if number == 0 and _exports_more(tree):
            return None
        if signature := written_signature(tree, _LOADS):
            takes_any = any(p.kind in (p.VAR_KEYWORD, p.POSITIONAL_ONLY) for p in signature.parameters.values())
            return None if takes_any else tuple(signature.parameters)
        path = next((path.parent.joinpath(*one).with_suffix(".py") for one in _re_exported(tree)), None)
    return None


def _exports_more(tree: ast.Module) -> bool:
    """Return whether a package may be a taskset of its own: verifiers looks for its class in `__all__`, and only where
    there is none for `load_environment`."""
    stated = [node for node in tree.body if ast.unparse(node).startswith("__all__")]
    names = {one.value for node in stated for one in ast.walk(node) if isinstance(one, ast.Constant)}
    return bool(stated) and names != {_LOADS}


def _re_exported(tree: ast.Module) -> Iterator[list[str]]:
    """Yield the module beside a package's `__init__` that its `load_environment` is imported from."""
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and node.level == 1 and node.module and _LOADS in map(_alias, node.names):
            yield node.module.split(".")


def _alias(node: ast.alias) -> str | None:
    return node.name if node.asname in (None, node.name) else None


@cache
def task_fields(taskset: str) -> tuple[str, ...] | None:
    """Return the fields that the data of its tasks has beside those of verifiers' own `TaskData`; None: it is not a
    bundled one. `taskset`: its short name, that of a benchmark too."""
    module = _module_of(taskset)
    return None if module is None else tuple(sorted({*_fields(module, *_DATA)}))


def _module_of(taskset: str) -> str | None:
    benchmark = find_benchmark(taskset)
    return BENCHMARK_TASKSETS[benchmark.kind] if benchmark is not None else BUNDLED.get(taskset)


def _fields(module: str, base: str, shared: str, home: str) -> Iterator[str]:
    """Yield the fields of a module's classes that extend `base` or `shared`; those of `shared`, of the module `home`,
    where the module names it."""
    spec = importlib.util.find_spec(module)
    assert spec is not None and spec.origin is not None
    for node in ast.parse(Path(spec.origin).read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ImportFrom) and node.module == home and shared in {one.name for one in node.names}:
            yield from _fields(home, base, shared, home)
        elif isinstance(node, ast.ClassDef) and {ast.unparse(one) for one in node.bases} & {base, shared}:
            yield from (
                item.target.id
                for item in node.body
                if isinstance(item, ast.AnnAssign)
                and isinstance(item.target, ast.Name)
                and not item.target.id.startswith("_")
            )
