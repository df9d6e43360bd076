"""Arguments of the bundled tasksets, as their sources say: verifiers, which would know, takes seconds to import."""

import ast
import importlib.util
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from prime_hpc.envs.benchmarks.registry import find_benchmark
from prime_hpc.envs.env_config import BENCHMARK_TASKSETS, BUNDLED

_OF_EVERY_TASKSET = ("id", "task", "system_prompt")
"""Those that verifiers' own `TasksetConfig` has."""
_GENERATED = "prime_hpc.envs.tasksets.generated"


@cache
def argument_names(taskset: str) -> tuple[str, ...] | None:
    """Return the names that `args` of an environment may have; None: it is not a bundled one.

    Args:
        taskset: its short name, that of a benchmark too.
    """
    benchmark = find_benchmark(taskset)
    module = BENCHMARK_TASKSETS[benchmark.kind] if benchmark is not None else BUNDLED.get(taskset)
    return None if module is None else tuple(sorted({*_OF_EVERY_TASKSET, *_fields(module)}))


def _fields(module: str) -> Iterator[str]:
    """Yield the fields of the taskset's config that a module defines, those that it inherits too."""
    spec = importlib.util.find_spec(module)
    assert spec is not None and spec.origin is not None
    for node in ast.parse(Path(spec.origin).read_text(encoding="utf-8")).body:
        bases = {ast.unparse(base) for base in node.bases} if isinstance(node, ast.ClassDef) else set()
        if isinstance(node, ast.ClassDef) and bases & {"vf.TasksetConfig", "GeneratedConfig"}:
            if "GeneratedConfig" in bases:
                yield from _fields(_GENERATED)
            yield from (ast.unparse(item.target) for item in node.body if isinstance(item, ast.AnnAssign))
