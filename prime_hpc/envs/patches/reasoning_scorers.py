"""reasoning-gym's scorers, kept from running what a model writes. Called in a process that can be killed.

Some of them take a right answer in another form for what it is worth by reading it with `eval`, or with sympy's
`parse_expr`, which is `eval` too. Here `eval` reads literals alone, and sympy gets what consists of numbers, signs and
known names; any other answer is an unreadable one, for which a scorer has its own score. (So is an `Integral` that is
not worked out, for which the scorers of integrals would give 1.)
"""

import ast
import functools
import json
import pickle
import re
import sys
from typing import Any

import reasoning_gym  # here: a package that is broken is no answer's fault
from reasoning_gym.factory import DATASETS

LITERALS = frozenset({"binary_matrix", "n_queens", "spiral_matrix", "string_insertion"})
"""Generators whose scorers call `eval` on the answer."""
ARITHMETIC = frozenset({"countdown", "puzzle24"})
"""Those that hand it to `parse_expr`: numbers and signs, without powers."""
EXPRESSIONS = frozenset({"intermediate_integration", "polynomial_multiplication", "simple_integration"})
"""Those that hand it to `parse_expr`: with variables and functions."""
MOST_CHARACTERS = 4000
_NUMBERS = r"(?:(?:\d++(?:\.\d*+)?|\.\d++)(?:[eE][-+]?\d{1,2}\b)?+|[-+*/(),\s]"
_ARITHMETIC = re.compile(rf"(?!.*\*\s*\*){_NUMBERS})*", re.DOTALL)
_NAMES = r"[a-zA-CE-MPRT-Z]|a?(?:sin|cos|tan|sec|csc|cot)h?|erf|exp|log|ln|sqrt|Abs|pi"
"""Of letters all but those that sympy has for functions of its own."""
_OWN = re.compile(r"[A-Za-z]+\d*")
"""A variable that a question may have of its own."""


def score(generator: str, parameters: str, entry: bytes, answer: str) -> float:
    """Return the score of an answer.
    `parameters`: those that the question was made with, as JSON: some scorers go by them."""
    question = pickle.loads(entry)
    source = question.get("metadata", {}).get("source_dataset", generator)  # of a composite, the one within
    return float(_scorer(generator, parameters)(answer=readable(source, answer, _variables(question)), entry=question))


def readable(generator: str, answer: str, variables: tuple[str, ...] = ()) -> str:
    """Return the answer as a scorer may have it: an empty one in place of one that could be a program."""
    alphabet = _ARITHMETIC if generator in ARITHMETIC else _expression(variables) if generator in EXPRESSIONS else None
    if alphabet is None or (len(answer) <= MOST_CHARACTERS and alphabet.fullmatch(answer)):
        return answer
    return ""


@functools.lru_cache(64)
def _expression(variables: tuple[str, ...]) -> re.Pattern[str]:
    names = "|".join([_NAMES, *variables])
    return re.compile(rf"{_NUMBERS}|\b(?:{names})\b)*")


def _variables(question: dict[str, Any]) -> tuple[str, ...]:
    data = question.get("metadata", {})
    named = [data["variable"]] if "variable" in data else data.get("variables") or ()
    return tuple(name for name in map(str, named) if _OWN.fullmatch(name))


@functools.lru_cache(64)
def _scorer(generator: str, parameters: str) -> Any:
    for name in LITERALS:
        vars(sys.modules[DATASETS[name][0].__module__])["eval"] = ast.literal_eval
    return reasoning_gym.create_dataset(generator, size=1, seed=0, **json.loads(parameters)).score_answer
