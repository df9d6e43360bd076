"""Shared by the verbs: own flags taken from a command line, and JSON on standard output."""

import json
import os
import sys
from typing import TYPE_CHECKING, Any

from prime_hpc.config.errors import ConfigError

if TYPE_CHECKING:
    from prime_hpc.config import Loaded


def take_flags(
    argv: list[str], switches: tuple[str, ...] = (), valued: tuple[str, ...] = ()
) -> tuple[list[str], set[str], dict[str, str]]:
    """Split a verb's own flags from the rest of its command line.

    Args:
        argv: after the verb.
        switches: flags without a value, e.g. `--json`.
        valued: flags with one, given as `--flag value` or `--flag=value`; the last wins.

    Returns:
        what is left in order, the switches that were given, the values by flag.

    Raises:
        ConfigError: a flag without its value.
    """
    rest: list[str] = []
    given: set[str] = set()
    values: dict[str, str] = {}
    tokens = iter(argv)
    for token in tokens:
        name, equals, value = token.partition("=")
        if token in switches:
            given.add(token)
        elif name in valued:
            if not equals:
                value = next(tokens, "")
                if not value:
                    raise ConfigError(f"{name} needs a value")
            values[name] = value
        else:
            rest.append(token)
    return rest, given, values


def refuse_unknown(rest: list[str], allowed: int, usage: str) -> None:
    """Raise a ConfigError for flags that the verb does not know, or for too many arguments."""
    unknown = [token for token in rest if token.startswith("-") and token != "-"]
    if unknown:
        raise ConfigError(f"unknown option {unknown[0]}; usage: {usage}")
    if len(rest) > allowed:
        raise ConfigError(f"too many arguments: {' '.join(rest)}; usage: {usage}")


def print_json(value: Any) -> None:
    """One JSON document on standard output."""
    print(json.dumps(value, indent=2, ensure_ascii=False, default=str))


def load(argv: list[str], verb: str, program: str) -> "Loaded":
    """Return the resolved experiment. Raises ConfigError."""
    # To look for plugins pydantic opens a file of every installed package: seconds on a cold shared file system.
    had_plugins = "PYDANTIC_DISABLE_PLUGINS" in os.environ
    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")
    try:
        from prime_hpc.config import load_experiment
    finally:
        if not had_plugins:
            del os.environ["PYDANTIC_DISABLE_PLUGINS"]
    loaded = load_experiment(argv, verb)
    for warning in loaded.warnings:
        print(f"{program}: warning: {warning}", file=sys.stderr)
    return loaded
