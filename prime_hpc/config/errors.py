"""Errors of a config as a user is told them: where, which key, what is wrong, what was probably meant.

Raised by `sources`, `flags`, `files` and `snapshot`; printed by `prime_hpc.cli`, which then exits with code 2.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal


@dataclass(frozen=True)
class Origin:
    """The place at which a value was stated."""

    source: Literal["default", "environment", "file", "command line"]
    """One of the four sources, lowest precedence first."""
    where: str = ""
    """The file's name, the flag or the variable as it was typed."""
    line: int | None = None
    """Line in the file, counted from 1, where it is known."""

    def __str__(self) -> str:
        if self.source == "file":
            return self.where if self.line is None else f"{self.where}:{self.line}"
        return f"{self.source} ({self.where})" if self.where else self.source


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong."""

    message: str
    """The fault, and its remedy."""
    key: str | None = None
    origin: Origin | None = None
    """The place of its statement."""

    def __str__(self) -> str:
        return ": ".join(str(part) for part in (self.origin, self.key, self.message) if part)


class ConfigError(ValueError):
    """Everything that is wrong with a config, reported at once. The command line exits with `exit_code`."""

    exit_code = 2

    def __init__(self, problems: Problem | str | Iterable[Problem], key: str | None = None) -> None:
        """`key`: of a problem that is given by its message."""
        if isinstance(problems, str):
            problems = Problem(problems, key)
        self.problems = [problems] if isinstance(problems, Problem) else list(dict.fromkeys(problems))
        super().__init__("\n".join(str(problem) for problem in self.problems))

    def render(self) -> str:
        """Text for the terminal: a head line when there are several, then one problem a line."""
        if len(self.problems) == 1:
            return f"error: {self.problems[0]}"
        lines = [f"error: {len(self.problems)} problems in the configuration"]
        return "\n".join(lines + [f"  {problem}" for problem in self.problems])


def whole_number(flag: str, text: str | None, least: int) -> int | None:
    """Return a flag's whole number; None where it was not given. Raises a ConfigError for anything else."""
    if text is not None and (not text.isdecimal() or int(text) < least):
        raise ConfigError(f"{flag} {text}: must be a whole number of at least {least}")
    return None if text is None else int(text)


def nearest_path(path: str, candidates: Iterable[str]) -> str | None:
    """Return the dotted path that was probably meant by `path`, or None when nothing is near.

    Half of the score is the last name alone, so that `lr` finds `trainer.optim.lr`; a sibling wins a tie. A name that
    is merely somewhat alike is meant only where it is a sibling: `nope` is not `slurm.trainer.nodes`. A name that many
    sections have is meant where one of the two sections is part of the other, ends as it does, or is all but the same:
    `model.path` is not `sft.eval.path`, `actor.optim.lr` is `trainer.optim.lr`.
    """
    from difflib import SequenceMatcher

    parent, _, last = path.rpartition(".")
    known, best, best_score = list(candidates), None, 0.0
    is_common = sum(candidate.rpartition(".")[2] == last for candidate in known) > 1
    parents = set(parent.split(".")) - {""}
    whole, name = SequenceMatcher(b=path), SequenceMatcher(b=last)
    for candidate in known:
        candidate_parent, _, candidate_last = candidate.rpartition(".")
        name.set_seq1(candidate_last)
        begins_so = candidate_last.startswith(last) or last.startswith(candidate_last)
        least = 0.85 if candidate_parent != parent else 0.6 if begins_so else 0.7
        if name.quick_ratio() < least or name.ratio() < least:
            continue
        is_part = parents <= (others := set(candidate_parent.split(".")) - {""}) or others <= parents
        is_part = is_part or candidate_parent.rpartition(".")[2] == parent.rpartition(".")[2]
        whole.set_seq1(candidate)
        if is_common and candidate_last == last and not is_part and whole.ratio() < 0.9:
            continue
        score = 0.5 * name.ratio() + 0.5 * whole.ratio() + (0.1 if candidate_parent == parent else 0.0)
        score += 0.15 if candidate_last == last else 0.0
        if score > best_score:
            best, best_score = candidate, score
    return best if best_score >= 0.6 else None


def missing_file_message(path: Path) -> str:
    """Say that `path` cannot be read as a config file, and which files of like name are there."""
    from difflib import get_close_matches

    if path.is_dir():
        names = sorted(entry.name for entry in path.iterdir() if entry.suffix in (".yaml", ".yml", ".toml"))
        return f"is a directory, not a file{_listing(path, names)}"
    parent = path.parent
    while not parent.is_dir() and parent != parent.parent:
        parent = parent.parent
    if parent != path.parent:
        return f"no such file: the directory {path.parent} does not exist"
    names = sorted(entry.name for entry in parent.iterdir() if entry.is_file())
    stems = get_close_matches(path.stem, sorted({Path(name).stem for name in names}), n=3, cutoff=0.5)  # ends are alike
    near = [name for stem in stems for name in names if Path(name).stem == stem]
    return f"no such file{_listing(parent, near)}"


def _listing(directory: Path, names: list[str]) -> str:
    return f"; {directory}/ has {', '.join(names[:5])}" if names else ""
