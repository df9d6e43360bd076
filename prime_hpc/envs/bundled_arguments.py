"""Arguments of the bundled tasksets and fields of their tasks, as their sources say: verifiers, which would know, takes
seconds to import."""

import ast
import importlib.util
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from prime_hpc.envs.benchmarks.registry import find_benchmark
from prime_hpc.envs.env_config import BENCHMARK_TASKSETS, BUNDLED

_OF_EVERY_TASKSET = ("id", "task", "system_prompt")
"""Those that verifiers' own `TasksetConfig` has."""
_CONFIG = ("vf.TasksetConfig", "GeneratedConfig", "prime_hpc.envs.tasksets.generated")
_DATA = ("vf.TaskData", "IntegerData", "prime_hpc.envs.tasksets.integers")


@cache
def argument_names(taskset: str) -> tuple[str, ...] | None:
    """Return the names that `args` of an environment may have; None: it is not a bundled one.
    `taskset`: its short name, that of a benchmark too."""
    module = _module_of(taskset)
    return None if module is None else tuple(sorted({*_OF_EVERY_TASKSET, *_fields(module, *_CONFIG)}))


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
