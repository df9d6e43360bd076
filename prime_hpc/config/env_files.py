"""Files that the arguments of the environments `prompts` and `rows` name: rows, and files with reward functions."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

ROWS = "rows"
"""A user's own rows, scored by functions of the user's own."""
READERS = ("prompts", ROWS)
REWARDS = ("math", "exact", "contains")
"""Rewards of `rows` that have a name; others are functions of files and modules."""


def short_id(identifier: str) -> str:
    """Return the name by which a bundled environment is known, however it was written."""
    return identifier.replace("_", "-").lower()


def named_files(identifier: str, args: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the files that an environment is given, each with its argument; of rows also patterns and directories."""
    for argument in ("files", "reward") if short_id(identifier) in READERS else ():
        for text in _listed(args.get(argument)):
            if place := _place(argument, text):
                yield argument, place


def own_rewards(identifier: str, args: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the reward functions of a user's own that `rows` is given, each as where it is (a file of Python, or a
    module) and its name there."""
    for text in _listed(args.get("reward")) if short_id(identifier) == ROWS else ():
        place, _, function = text.rpartition(":")
        if place:
            yield place, function


def with_whole_paths(identifier: str, args: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of such an environment with its files named from the root, for a role may start elsewhere;
    others as they are."""
    found = dict(args)
    for argument in ("files", "reward") if short_id(identifier) in READERS else ():
        given = args.get(argument)
        if isinstance(given, str | list) and all(isinstance(text, str) for text in given):
            whole = [_whole(argument, text) for text in _listed(given)]
            found[argument] = whole if isinstance(given, list) else whole[0]
    return found


def _listed(given: Any) -> list[str]:
    return [given] if isinstance(given, str) else [str(text) for text in given or []]


def _place(argument: str, text: str) -> str:
    """Return the file that a text names; empty: none (a function of a module)."""
    if argument == "files":
        return text
    place = text.rpartition(":")[0]
    return place if place.endswith(".py") else ""


def _whole(argument: str, text: str) -> str:
    place = _place(argument, text)
    return f"{Path(place).expanduser().absolute()}{text[len(place) :]}" if place else text
