"""Shared by the verbs: a command line taken apart, and JSON on standard output."""

import json
import os
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from math import inf, isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prime_hpc.cli.verb_table import VERBS
from prime_hpc.config.errors import ConfigError, Problem, whole_number
from prime_hpc.runtime.trees import with_leaves

if TYPE_CHECKING:
    from prime_hpc.config import Loaded


@dataclass(frozen=True)
class Given:
    """A verb's command line, taken apart by the verb's row of `VERBS`."""

    words: list[str]
    """All but the verb's own flags, in order: arguments, and for some verbs keys of the experiment."""
    flags: dict[str, str]
    """The verb's own flags by their long names, with their values; the last one wins."""
    usage: str
    repeated: dict[str, list[str]] = field(default_factory=dict)
    """All values of each flag, in order."""

    def __contains__(self, flag: str) -> bool:
        return flag in self.flags

    def get(self, flag: str) -> str | None:
        """Return a flag's value; None where it was not given."""
        return self.flags.get(flag)

    def every(self, flag: str) -> list[str]:
        """Return all values of a flag that may be given several times."""
        return self.repeated.get(flag, [])

    def tell(self, document: Callable[[], Any], text: Callable[[], str]) -> None:
        """Print what a verb found: with --json the document, else the text."""
        if "--json" in self:
            print_json(document())
        elif words := text():
            print(words.removesuffix("\n"))

    def arguments(self, most: int, *, least: int = 0) -> list[str]:
        """Return the arguments. Raises a ConfigError for other flags, and where there are too many or too few."""
        unknown = [word for word in self.words if word.startswith("-") and word != "-"]
        if unknown:
            near = get_close_matches(unknown[0].partition("=")[0], re.findall(r"--[\w-]+", self.usage), 1)
            meant = f" (did you mean {near[0]}?)" if near else ""
            raise ConfigError(f"unknown option {unknown[0]}{meant}; usage: {self.usage}")
        if len(self.words) > most:
            raise ConfigError(f"too many arguments: {' '.join(self.words)}; usage: {self.usage}")
        if len(self.words) < least:
            raise ConfigError(f"an argument is missing; usage: {self.usage}")
        return self.words

    def whole(self, flag: str, least: int = 0) -> int | None:
        """Return a flag's whole number; None where it was not given. Raises a ConfigError for anything else."""
        return whole_number(flag, self.get(flag), least)

    def path(self, flag: str) -> Path | None:
        """Return a flag's path; None where it was not given. Of `--flag=~/x` no shell replaces the ~."""
        text = self.get(flag)
        return Path(text).expanduser() if text else None

    def positive(self, flag: str, what: str = "seconds") -> float | None:
        """Return a flag's positive number of `what`; None where it was not given.

        Raises a ConfigError for anything else.
        """
        text = self.get(flag)
        try:
            number = float(text or 1)
        except ValueError:
            number = 0.0
        if not 0 < number < inf:
            raise ConfigError(f"{flag} {text}: must be a number of {what} above 0")
        return None if text is None else number


def parse(verb: str, argv: list[str], action: str = "") -> Given:
    """Take a verb's own flags from the rest of its command line, as its row of `VERBS` states them.
    `action`: its first word, where it has such; flags of other actions are not taken.
    Raises ConfigError: a flag without its value."""
    spec = VERBS[verb]
    known = [flag for flag in spec.flags if not action or flag.names[-1] in spec.actions[action]]
    optional = [flag for flag in known if flag.text and flag.names[-1] not in spec.usage.split()]
    shown = [f"[{'|'.join(flag.names)}{flag.metavar and ' '}{flag.metavar}]" for flag in optional]
    by_name = {name: flag for flag in known for name in flag.names}
    words: list[str] = []
    flags: dict[str, str] = {}
    repeated: dict[str, list[str]] = {}
    tokens = iter(argv)
    for token in tokens:
        name, equals, value = token.partition("=")
        flag = by_name.get(name)
        if flag is None or (equals and not flag.takes_value):
            words.append(token)
            continue
        if flag.takes_value and not equals:
            value = next(tokens, "")
            if not value:
                raise ConfigError(f"{name} needs a value")
        flags[flag.names[-1]] = value
        repeated.setdefault(flag.names[-1], []).append(value)
    return Given(words, flags, " ".join(["prime-hpc", verb, spec.usage, *shown]), repeated)


def step_range(text: str | None, there: Sequence[int]) -> tuple[int, int]:
    """Return the first and the last step of `--steps`: `A:B`, `A:`, `:B` or `A`; an open end is that of what is there.
    `there`: steps in order, at least one.
    Raises ConfigError: it is none of these."""
    match = re.fullmatch(r"(\d*)(:?)(\d*)", ":" if text is None else text)
    if match is None or not (match[1] or match[3] or text is None):
        raise ConfigError(f"--steps {text}: must be A:B, A:, :B or A")
    first = int(match[1] or there[0])
    return first, int(match[3] or (there[-1] if match[2] else first))


def say(text: str) -> None:
    """One line on standard error, at once: what goes on meanwhile."""
    print(text, file=sys.stderr, flush=True)


def print_json(value: Any) -> None:
    """One JSON document on standard output; figures that are not finite, which JSON has not, as text."""
    tree = with_leaves(value, lambda leaf, _: str(leaf) if isinstance(leaf, float) and not isfinite(leaf) else leaf)
    print(json.dumps(tree, indent=2, ensure_ascii=False, default=str))


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


def with_own_flags(error: ConfigError, verb: str) -> ConfigError:
    """Return the error with the verb's own flags where these were meant by what is no key (`--dryrun`)."""
    flags = [name for flag in VERBS[verb].flags for name in flag.names]
    return ConfigError(_with_flag(problem, flags) for problem in error.problems)


def _with_flag(problem: Problem, flags: list[str]) -> Problem:
    if problem.origin is None or not problem.message.startswith("unknown key"):
        return problem
    near = get_close_matches(problem.origin.where, flags, 1, 0.8)
    return replace(problem, message=f"unknown key; did you mean {near[0]}?") if near else problem
