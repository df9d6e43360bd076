"""Tab completion: the words that could come next on a command line.

Verbs and their flags come from the table of verbs, the experiment's keys from the schema, read as source, as the help
pages are, so that pressing Tab does not import pydantic.
"""

import os
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from prime_hpc.cli.verb_table import VERBS, Verb


@dataclass
class Offer:
    """Words that a shell may offer for the word under the cursor."""

    words: list[tuple[str, str]] = field(default_factory=list)
    """(word, description)."""
    files: bool = False
    """Config files too; the shell knows best how to list them."""
    any_files: bool = False
    dirs: bool = False

    def text(self, prefix: str) -> str:
        """Return the text that the scripts read: a line of directives, then a word a line, a tab before its
        description."""
        kept = sorted({pair for pair in self.words if pair[0].startswith(prefix)})
        flags = {
            "files": self.files,
            "any": self.any_files,
            "dirs": self.dirs,
            "nospace": bool(kept) and all(word.endswith((".", "=")) for word, _ in kept),
        }
        lines = [" ".join(name for name, on in flags.items() if on)]
        lines += [f"{word}\t{description}" if description else word for word, description in kept]
        return "\n".join(lines) + "\n"


def split_line(line: str) -> list[str]:
    """Return the words of a line up to the cursor; the last one is under the cursor, empty after a space."""
    if (len(line) - len(line.rstrip("\\"))) % 2:
        line = line[:-1]  # what the backslash is to quote has not been typed yet
    for closing in ("", '"', "'"):  # the word may be in quotes that are still open
        try:
            words = shlex.split(line + closing)
        except ValueError:
            continue
        is_new = not closing and (not line or line[-1].isspace()) and not line.endswith("\\ ")
        return [*words, ""] if is_new else words
    return [""]


def complete(words: list[str], environ: Mapping[str, str] = os.environ) -> str:
    """List the words to offer for the last word.
    `words`: of the command line from the program's name to the word under the cursor, which may be empty."""
    if len(words) < 2:
        return Offer().text("")
    program, current = Path(words[0]).name, words[-1]
    if program in VERBS and VERBS[program].is_entrypoint:
        verb, rest = program, words[1:]
    elif len(words) == 2:
        verbs = [(name, spec.summary) for name, spec in VERBS.items()]
        return Offer([*verbs, ("--help", ""), ("--version", "")]).text(current)
    else:
        verb, rest = words[1], words[2:]
    spec = VERBS.get(verb)
    if spec is None:
        return Offer().text(current)
    if current.startswith("--") and "=" in current:
        flag = current.partition("=")[0]
        offer = _values(flag, verb, spec, rest, environ) or Offer()
        offer.words = [(f"{flag}={word}", text) for word, text in offer.words]
        return offer.text(current)
    previous = rest[-2] if len(rest) > 1 else ""
    if (values := _values(previous, verb, spec, rest, environ)) is not None:
        return values.text(current)
    if current.startswith("-"):
        return _flags(verb, spec, current).text(current)
    return _arguments(verb, spec, rest[:-1], environ).text(current)


def _values(flag: str, verb: str, spec: Verb, rest: list[str], environ: Mapping[str, str]) -> Offer | None:
    """Values of a flag; None where it takes none (or is no flag)."""
    if flag == "@":
        return Offer(files=True)
    if not flag.startswith("-"):
        return None
    own = next((known for known in spec.flags if flag in known.names), None)
    if own is not None:
        if not own.takes_value:
            return None
        if flag == "--role":
            from prime_hpc.launch.monitor.logs import ROLES

            return Offer([(role, "") for role in ROLES])
        if flag == "--attempt":
            return Offer([(str(number), "") for number in _attempts(rest, environ)])
        return Offer(dirs=own.metavar.startswith("DIR"), any_files=own.metavar == "FILE")
    if not spec.takes_experiment and verb != "sweep":
        return None
    from prime_hpc.config.help import choices

    key = flag.lstrip("-").replace("-", "_")
    if key == "slurm.site":
        return Offer([(name, "") for name in _sites()], files=True)
    annotation = dict(_keys(verb)).get(key, ("", ""))[0]
    if annotation in ("", "bool", "bool | None"):
        return None  # no key, or a switch
    return Offer(
        [(choice, "") for choice in choices(annotation)], any_files="Path" in annotation, dirs="Path" in annotation
    )


def _flags(verb: str, spec: Verb, current: str) -> Offer:
    """Return the verb's own flags and the experiment's keys, these a section at a time."""
    words = [(name, flag.text) for flag in spec.flags if flag.text for name in flag.names] + [("--help", "")]
    if spec.takes_experiment or verb == "sweep":
        typed = current.lstrip("-")
        style = (lambda key: key) if "_" in typed else (lambda key: key.replace("_", "-"))
        for key, (_, text) in _keys(verb):
            shown = style(key)
            if shown.startswith(typed):
                head, dot, _ = shown[len(typed) :].partition(".")
                words.append((f"--{typed}{head}{dot}", "" if dot else text))
    sections = {word[:-1] for word, _ in words if word.endswith(".")}
    # a section is offered with its dot; switched on as a whole it can still be typed
    return Offer([(word, text) for word, text in words if word not in sections])


def _arguments(verb: str, spec: Verb, before: list[str], environ: Mapping[str, str]) -> Offer:
    """Offer what is no flag: runs, config files, subcommands."""
    given = [word for word in before if not word.startswith("-")]
    if spec.usage.startswith(("RUN", "[RUN")):
        return Offer([(name, "") for name in run_names(environ)], dirs=True)
    if spec.actions and not given:
        return Offer([(name, "") for name in spec.actions])
    if verb == "site" and given[0] == "show":
        return Offer([(name, "") for name in _sites()])
    if verb == "runs":
        return Offer([(name, "") for name in run_names(environ)], files=True, dirs=True)
    if verb == "sweep":
        return Offer([(name, "") for name in _sweep_names(environ)], files=given[0] == "submit", dirs=True)
    takes_file = spec.usage.startswith("FILE")
    if spec.is_entrypoint or takes_file:
        return Offer([("@", "a config file follows")], files=takes_file)
    return Offer()


def run_names(environ: Mapping[str, str]) -> list[str]:
    """Return runs under the outputs folder."""
    from prime_hpc.store.run_dirs import list_runs, outputs_folder, run_name

    folder = outputs_folder(environ)
    return [run_name(path, folder) for path in list_runs(folder)]


def _sweep_names(environ: Mapping[str, str]) -> list[str]:
    from prime_hpc.store.run_dirs import POINTS, outputs_folder

    return sorted(path.parent.name for path in outputs_folder(environ).glob(f"*/{POINTS}"))


def _attempts(rest: list[str], environ: Mapping[str, str]) -> list[int]:
    from prime_hpc.config.errors import ConfigError
    from prime_hpc.launch.monitor.logs import attempts_with_logs
    from prime_hpc.store.run_dirs import find_run

    for word in rest:
        try:
            return attempts_with_logs(find_run(word, environ))
        except (ConfigError, OSError):  # not the run: another word of the line; or not ours to read
            continue
    return []


def _sites() -> list[str]:
    from prime_hpc.config.site import list_sites

    return list(list_sites())


@cache
def _keys(verb: str) -> tuple[tuple[str, tuple[str, str]], ...]:
    """(dotted key, (annotation, help)) of everything that a verb's command line may set."""
    from prime_hpc.config.help import OWN_SECTIONS, walk

    own = OWN_SECTIONS.get(verb, ())

    def all_of() -> Iterator[tuple[str, tuple[str, str]]]:
        for path, item, _ in walk():
            about = (item.annotation, item.doc)
            yield path, about
            for section in own:
                if path.startswith(f"{section}."):
                    yield path[len(section) + 1 :], about

    return tuple(all_of())
