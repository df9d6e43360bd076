"""What a batch script is told to run: the interpreter, and the experiment's files and overrides as absolute paths.

Called by `submit` and by the `render` verb, so that both make the same script.
"""

import sys
from pathlib import Path

from prime_hpc.config.secret import command_without_secrets
from prime_hpc.config.sources.flags import parse_flags


def interpreter() -> str:
    """This Python, not resolved: the one in a virtual environment is a link that must be called by its own name."""
    return sys.executable


def command_tail(argv: list[str]) -> list[str]:
    """An experiment's command line (without the verb and its own flags) with its config files as absolute paths.

    Values of keys stay as they are: the job starts in the directory in which sbatch was called. A secret is left out:
    the script, and the job's command line, are read by others (a run that `submit` sends has it in its run directory).
    """
    argv, _ = command_without_secrets(argv)
    tail = list(argv)
    for place, token in enumerate(argv):
        if token.startswith("@"):
            name = token[1:]
            tail[place] = f"@{_absolute(name)}" if name else token
        elif place and argv[place - 1] == "@":
            tail[place] = _absolute(token)
        elif not token.startswith("-"):
            absolute = _absolute(token)
            changed = [*tail[:place], absolute, *tail[place + 1 :]]
            # whether a bare word is a file or a flag's value, only the parser knows
            if _files(changed).count(Path(absolute)) > _files(tail).count(Path(absolute)):
                tail = changed
    return tail


def _files(argv: list[str]) -> list[Path]:
    return [file.path for file in parse_flags(argv, None, positional_files=True).files]


def _absolute(name: str) -> str:
    return str(Path(name).expanduser().absolute())
