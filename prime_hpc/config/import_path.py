"""A user's own code by import path."""

from importlib import import_module
from typing import Any

from prime_hpc.config.errors import ConfigError, Problem


def import_object(name: str, key: str) -> Any:
    """Import the function or class at `module:attribute`.

    Raises:
        ConfigError: the import fails, or what is there cannot be called; names the key.
    """
    module, _, attribute = name.partition(":")
    try:
        found = getattr(import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ConfigError(Problem(f"cannot import {name!r}: {error}", key)) from error
    if not callable(found):
        raise ConfigError(Problem(f"{name!r} is a {type(found).__name__}, not a function or class", key))
    return found
