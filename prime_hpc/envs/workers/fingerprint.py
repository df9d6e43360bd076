"""The code and the tasks that an environment's process works with: two processes of one run must agree on them.

A worker that is started again hours later may find other files: an installed package that was upgraded, a checkout that
moved on. Its episodes would be of another environment than those before it, so it is refused.
"""

import hashlib
import importlib.metadata
import platform
import sys
from pathlib import Path
from typing import Any

from prime_hpc.envs.math_answers import ScoredElsewhere
from prime_hpc.envs.task_sources import EnvSource
from prime_hpc.store.code import digest_of, package_digest

_ROOMS = ("envs", "client", "config", "runtime")
"""Rooms of prime-hpc whose code plays episodes."""
_NUM_TASKS = 16
"""Tasks that are compared."""


def fingerprint(source: EnvSource) -> dict[str, str]:
    """Return what two processes that play this environment must have in common, by its name."""
    return {
        "Python": ".".join(platform.python_version_tuple()[:2]),
        "prime-hpc's code": package_digest(*_ROOMS),
        "verifiers": importlib.metadata.version("verifiers"),
        "the environment's code": _environment_code(source),
        "the environment's tasks": _tasks(source),
    }


def differences(expected: dict[str, str], found: Any) -> list[str]:
    """Return in words what `found` says otherwise, [] where nothing."""
    if not isinstance(found, dict):
        return ["it did not say which code it runs"]
    return [
        f"{name} ({value} here, {found.get(name, 'nothing')} there)"
        for name, value in expected.items()
        if found.get(name) != value
    ]


def _environment_code(source: EnvSource) -> str:
    """Digest of the files that define the taskset, its tasks, and the environment around it."""
    taskset = source.env.taskset
    modules = {type(source.env).__module__, type(taskset).__module__, type(taskset).task_type().__module__}
    modules |= {str(getattr(taskset.config, "module", ""))} - {""}  # of a `load_environment` package
    modules |= taskset.scored_by if isinstance(taskset, ScoredElsewhere) else set()
    files = [getattr(sys.modules.get(name), "__file__", None) for name in sorted(modules)]
    return digest_of([Path(file) for file in files if file])


def _tasks(source: EnvSource) -> str:
    """Digest of some of the tasks' prompts: those of a taskset whose order is another one in each process differ."""
    total = source.total_tasks
    numbers = range(_NUM_TASKS) if total is None else range(0, total, max(1, total // _NUM_TASKS))
    digest = hashlib.sha256(f"{total}\n".encode())
    for number in numbers:
        data = source.task_number(number).data
        digest.update(repr((data.id, data.name, data.prompt, data.system_prompt)).encode(errors="replace"))
    return digest.hexdigest()[:12]
