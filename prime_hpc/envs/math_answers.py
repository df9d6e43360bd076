"""Comparison of two answers as mathematics (math-verify), from any thread.

It is made in a process that can be killed: `9^{9^{9}}` and `100000000!` are computed by one call of C, for hours. Where
no comparison can be made at all, `CallBroken` is raised and the episode fails: no answer is wrong for that.
"""

import asyncio
import inspect
import sys
from typing import Any, Protocol, runtime_checkable

from loguru import logger

from prime_hpc.envs.bounded.calls import CallBroken, CallFailed, begin, call, call_elsewhere, prepare
from prime_hpc.envs.errors import EnvError


@runtime_checkable
class ScoredElsewhere(Protocol):
    """A taskset that is scored by code of others: `rows` by a user's functions."""

    scored_by: set[str]
    """Names of their modules."""


_COMPARE = "prime_hpc.envs.bounded.math_comparison:compare"
_PATIENCE_S = 60.0


async def same_answer(gold: str, found: str) -> bool:
    r"""Return whether `found` is the number, expression or set that `gold` is; both without `\boxed{}`."""
    if gold.strip() == found.strip():
        return True
    try:
        return bool(await call_elsewhere(_COMPARE, f"\\boxed{{{gold}}}", f"\\boxed{{{found}}}"))
    except CallFailed:
        return False


def same_boxed(gold: str, found: str) -> bool:
    r"""Return whether two answers in `\boxed{}` are the same. Waits on the calling thread."""
    try:
        return bool(call(_COMPARE, gold, found))
    except CallFailed:
        return False


async def open_comparison() -> None:
    """Start what `same_answer` needs, before the first answer; what takes longer than `_PATIENCE_S` that one waits for.
    Raises EnvError: it cannot be started."""
    try:
        await asyncio.wait_for(prepare(_COMPARE), _PATIENCE_S)
    except TimeoutError:
        logger.info("math-verify is still being imported: the first answer waits for it")
    except CallBroken as error:
        raise EnvError(f"answers cannot be compared: {error}") from error


def begin_boxed() -> None:
    """Start what `same_boxed` needs: its first call would keep the thread, an event loop perhaps, for the import."""
    begin(_COMPARE)


def speaks_of(taskset: Any, name: str) -> bool:
    """Return whether a name is in the text of a taskset's package, unless that is verifiers or this very one; of `rows`
    in the text of the user's reward functions."""
    if isinstance(taskset, ScoredElsewhere):
        return any(name in _text_of(sys.modules.get(module)) for module in taskset.scored_by)
    module = str(getattr(taskset.config, "module", ""))  # of an older package's environment
    module = module if module in sys.modules else type(taskset).__module__
    if module.split(".")[0] in ("prime_hpc", "verifiers"):
        return False
    package = module.rpartition(".")[0] or module
    for known, found in list(sys.modules.items()):
        if (known in (module, package) or known.startswith(f"{package}.")) and name in _text_of(found):
            return True
    return False


def _text_of(module: Any) -> str:
    try:
        return inspect.getsource(module)
    except (OSError, TypeError):  # a program of C, an empty file
        return ""
