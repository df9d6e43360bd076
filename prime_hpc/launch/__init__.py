"""From a checked experiment to a running one: plan, prepare, run here or submit.

Nothing in this room imports torch, transformers, vllm or verifiers: a login node has none of them to spare. Names are
loaded on first use: a job imports this package too, and needs none of them.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from prime_hpc.launch.local import run, run_role
    from prime_hpc.launch.submission import submit

__all__ = ["run", "run_role", "submit"]

_HOMES = {"run": "local", "run_role": "local", "submit": "submission"}


def __getattr__(name: str) -> Any:
    """Load a public name from its module on first use (PEP 562)."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    value = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value
