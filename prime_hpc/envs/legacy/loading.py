"""Find a package with a `load_environment` function, call it, and keep what it makes.

One environment is made for the same package and arguments, and one more where training and evaluation both play it:
their episodes are on event loops of their own, and a lock or a client that a package has made is of one loop.
"""

import difflib
import importlib
import json
import threading
from collections import Counter
from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any

from loguru import logger

from prime_hpc.config.named_code import signature_of
from prime_hpc.envs.errors import EnvError
from prime_hpc.envs.legacy.environments import EnvGroup, Environment, MultiTurnEnv
from prime_hpc.envs.legacy.messages import marked, maybe_await
from prime_hpc.envs.legacy.rubrics import parts_of

_LOCK = threading.RLock()
_MADE: dict[str, Environment] = {}
_MAKERS: dict[str, Callable[[], Environment]] = {}
_OWNERS: dict[str, str] = {}
"""The split that plays the environment of a key."""
_HOLDERS: Counter[str] = Counter()


def is_legacy(module: ModuleType) -> bool:
    """Return whether a module follows the older interface."""
    return callable(getattr(module, "load_environment", None))


def key_of(module_name: str, arguments: dict[str, Any]) -> str:
    """Name of an environment: its module and the arguments of `load_environment`, as JSON."""
    return json.dumps([module_name, arguments], sort_keys=True, default=str)


def environment(module: ModuleType, name: str, arguments: dict[str, Any]) -> Environment:
    """Return the environment that a package makes of these arguments; made once.
    Raises EnvError: the arguments do not fit, it cannot be made, or is of a kind that cannot be played here."""
    key = key_of(module.__name__, arguments)
    with _LOCK:
        if key not in _MADE:
            _MAKERS[key] = partial(_make, module, name, arguments)
            _MADE[key] = _MAKERS[key]()
        return _MADE[key]


def load_environment(env_id: str, **arguments: Any) -> Environment:
    """Make another package's environment: what a package that puts several together calls (`vf.load_environment`).

    Each call makes one, which the package may change; by threads too, while `environment` waits for the package.

    Raises:
        ModuleNotFoundError: there is no such package.
        EnvError: it cannot be played.
    """
    module = importlib.import_module(env_id.rsplit("/", 1)[-1].split("@", 1)[0].replace("-", "_"))
    if not is_legacy(module):
        raise EnvError(f"environment {env_id!r} has no load_environment(), so that it can join no other")
    return _make(module, env_id, arguments)


def made(key: str) -> Environment:
    """Return the environment of a key, which this process has made."""
    return _MADE[key]


def key_for(split: str, key: str) -> str:
    """Return the key of the environment that a split's episodes are played in: that which was made, for the split that
    comes first; for the other one more of it.
    Raises EnvError: it cannot be made again."""
    with _LOCK:
        if _OWNERS.setdefault(key, split) == split:
            return key
        other = f"{key} {split}"
        if other not in _MADE:
            _MADE[other] = _MAKERS[key]()
        return other


def hold(key: str) -> None:
    """Say that somebody plays an environment until `let_go`."""
    _HOLDERS[key] += 1


async def let_go(key: str) -> None:
    """Call the `vf.teardown` handlers of an environment and its rubrics if nobody plays it any more.

    The log names one that raises.
    """
    _HOLDERS[key] -= 1
    if _HOLDERS[key]:
        return
    env = made(key)
    members = (env, *getattr(env, "envs", ()))
    parts = [*members, *(rubric for member in members for rubric in parts_of(member.rubric))]
    for handler in [handler for part in parts for handler in marked(part, "teardown")]:
        try:
            await maybe_await(handler)
        except Exception as error:  # noqa: BLE001 - other people's code; the others are called all the same
            logger.warning("{} (vf.teardown): {}: {}", handler.__qualname__, type(error).__name__, error)


def _make(module: ModuleType, name: str, arguments: dict[str, Any]) -> Environment:
    _check_arguments(module, name, arguments)
    try:
        found = module.load_environment(**arguments)
    except EnvError as error:
        raise EnvError(f"environment {name!r}: {error}") from error
    except ModuleNotFoundError as error:
        raise EnvError(
            f"environment {name!r} needs the Python module {error.name!r}: pip install {error.name}"
        ) from error
    except (Exception, SystemExit) as error:  # other people's code: data that cannot be had, keys that are not set
        raise EnvError(
            f"environment {name!r}: its load_environment() failed: {type(error).__name__}: {error}"
        ) from error
    if not isinstance(found, MultiTurnEnv | EnvGroup):
        raise EnvError(
            f"environment {name!r}: its load_environment() returns a {type(found).__name__}; played are SingleTurnEnv, "
            "MultiTurnEnv, ToolEnv, StatefulToolEnv, EnvGroup and classes made from them"
        )
    try:
        found.check()
    except EnvError as error:
        raise EnvError(f"environment {name!r} cannot be played: {error}") from error
    return found


def _check_arguments(module: ModuleType, name: str, arguments: dict[str, Any]) -> None:
    parameters = signature_of(module.load_environment).parameters
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return
    for argument in arguments:
        if argument not in parameters:
            nearest = difflib.get_close_matches(argument, parameters, n=1)
            hint = f"; did you mean {nearest[0]!r}?" if nearest else ""
            known = ", ".join(parameters) or "none"
            raise EnvError(f"environment {name!r}: args.{argument}: no such argument{hint} (arguments: {known})")
