"""The command line: `prime-hpc VERB ...` and the entrypoints `rl`, `sft`, `eval`, `trainer`, `orchestrator`, ...

Thin: it resolves the config, calls `prime_hpc.launch` and prints. Nothing heavy is imported, and what `--help`
does not need is imported late.

Exit codes:
    0    done, or help was asked for
    1    the run failed
    2    wrong usage or a wrong config (nothing was started)
    3    Slurm refused, or could not be asked
    66   the run directory was deleted or moved under the run
    74   a file cannot be read now, the start of an attempt's or another; a full disk took nothing until the deadline
    130  interrupted (Ctrl-C)
"""

import codecs
import errno
import io
import os
import sys
from collections.abc import Callable
from functools import partial

from prime_hpc import __version__
from prime_hpc.cli.verb_table import VERBS
from prime_hpc.runtime.process_memory import collect_seldom

OK, FAILED, USAGE, UNREADABLE, INTERRUPTED = 0, 1, 2, 74, 130
_OF_MACHINE = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.ESTALE)
"""Errors of a file or a disk, and of no program."""

HELP = ("-h", "--help", "help")
ROLES = ("trainer", "orchestrator", "inference")


def main(argv: list[str] | None = None) -> int:
    """`prime-hpc`: dispatch to a verb. Returns the exit code."""
    argv = sys.argv[1:] if argv is None else argv
    return _guarded("prime-hpc", lambda: _dispatch(argv))


def _console(verb: str) -> int:
    return _guarded(verb, lambda: run_verb(verb, sys.argv[1:], verb))


rl, sft, evaluate, synthesize = (partial(_console, verb) for verb in ("rl", "sft", "eval", "synthesize"))
trainer, orchestrator, inference = (partial(_console, role) for role in ROLES)
"""The console scripts beside `prime-hpc`."""


_AS_IT_CAME = "prime_hpc.as_it_came"


def _keep_bytes(error: UnicodeError) -> tuple[str | bytes, int]:
    """Write the bytes of a name that was no text as they came, for whoever reads it as a name, and escape the rest."""
    assert isinstance(error, UnicodeEncodeError)
    error.end = error.start + 1
    code = ord(error.object[error.start])
    return (bytes([code - 0xDC00]), error.end) if 0xDC80 <= code <= 0xDCFF else codecs.backslashreplace_errors(error)


def _guarded(program: str, call: Callable[[], int]) -> int:
    """Turn what ends a command early into its exit code."""
    collect_seldom()
    codecs.register_error(_AS_IT_CAME, _keep_bytes)
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # `>&-`: nobody listens, and no file of ours shall have its number
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_WRONLY), "w"))
    for stream in (sys.stdout, sys.stderr):
        # a locale without UTF-8 (C without PYTHONUTF8 has `surrogateescape`): curves, names in other scripts
        if isinstance(stream, io.TextIOWrapper) and (stream.errors == "strict" or stream.encoding == "ascii"):
            stream.reconfigure(errors=_AS_IT_CAME if stream.errors == "surrogateescape" else "backslashreplace")
    try:
        code = call()
        sys.stdout.flush()
    except KeyboardInterrupt:
        print(f"{program}: interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        _drop_output()  # `rl --help | head`: the reader has enough
        return OK
    except OSError as error:  # `status >FILE` on a full disk; of a file of the run's there is a name
        if error.filename is not None or error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EIO):
            raise
        _drop_output()
        print(f"{program}: error: its output cannot be written: {error.strerror}", file=sys.stderr)
        return FAILED
    return code


def _drop_output() -> None:
    """Keep the interpreter's own last flush of standard output from failing again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _dispatch(argv: list[str]) -> int:
    if not argv:
        print(_overview(), end="", file=sys.stderr)
        return USAGE
    if argv[0] in HELP:
        if argv[1:] and argv[1] not in HELP:
            return _dispatch([argv[1], "--help"])
        print(_overview(), end="")
        return OK
    if argv[0] in ("-V", "--version"):
        print(f"prime-hpc {__version__}")
        return OK
    verb, rest = argv[0], argv[1:]
    if verb not in VERBS:
        from difflib import get_close_matches

        near = get_close_matches(verb, VERBS, n=1)
        hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(VERBS)}"
        print(f"prime-hpc: error: no verb {verb!r}; {hint}", file=sys.stderr)
        return USAGE
    return run_verb(verb, rest, f"prime-hpc {verb}")


def _overview() -> str:
    lines = ["usage: prime-hpc VERB [FILE] [--KEY VALUE ...]", "", "Reinforcement learning of language models.", ""]
    lines += [f"  {name:<14}{verb.summary}" for name, verb in VERBS.items()]
    lines += ["", "`prime-hpc VERB --help` lists every key. `--version` prints the version."]
    lines += ["exit codes: 0 done, 1 the run failed, 2 wrong usage or config, 3 Slurm refused, 130 interrupted;"]
    lines += ["  66 the run directory is gone, 74 a file cannot be read or written now (try again), 75 it comes back"]
    return "\n".join(lines) + "\n"


def run_verb(verb: str, argv: list[str], program: str) -> int:
    """Resolve the config of a verb's command line and do what the verb says. Returns the exit code."""
    own = argv[: argv.index("--")] if "--" in argv else argv  # what follows is a command of the user's
    if "--help" in own or "-h" in own:
        print(_help(verb, program), end="")
        return OK
    from prime_hpc.config.errors import ConfigError

    try:
        module = VERBS[verb].module
        if module is not None:
            from importlib import import_module

            return int(import_module(f"prime_hpc.cli.verbs.{module}").run(argv, program))
        return _launch(verb, argv, program)
    except ConfigError as error:
        from prime_hpc.cli.common import with_own_flags

        text = with_own_flags(error, verb).render()
        if not argv and "usage: " not in text:
            text += f"; usage: {program} {VERBS[verb].usage}"
        print(f"{program}: {text}", file=sys.stderr)
        return error.exit_code
    except (RuntimeError, UnicodeEncodeError, OSError) as error:
        from prime_hpc.store.errors import StoreError, Unreadable

        is_of_store = isinstance(error, StoreError)
        if not (reason := str(error) if is_of_store else _of_this_machine(error)):
            raise
        print(f"{program}: error: {reason}", file=sys.stderr)
        return UNREADABLE if isinstance(error, Unreadable) else FAILED if is_of_store else USAGE


def _of_this_machine(error: Exception) -> str:
    """Say what of this machine is in the way: a path that cannot be one here, a disk that is full; empty where it is
    something else that went wrong."""
    if isinstance(error, UnicodeEncodeError):
        if error.reason != "surrogates not allowed":
            return ""
        before, after = error.object[: error.start], error.object[error.start :]
        around = before.rpartition('"')[2][-80:] + after.partition('"')[0][:40]
        return (
            f"{around!r} holds bytes that are no text in this locale ({sys.getfilesystemencoding()}): "
            "export LC_ALL=C.UTF-8, or rename the file or folder"
        )
    if isinstance(error, FileNotFoundError) and error.filename is None and _is_nowhere():
        return "the directory in which this was typed is gone: change to one that is there"
    if isinstance(error, OSError):
        return f"{error.filename}: {error.strerror}" if error.filename and error.errno in _OF_MACHINE else ""
    from prime_hpc.runtime.failures import missing_home

    return missing_home(error)


def _is_nowhere() -> bool:
    try:
        os.getcwd()  # noqa: PTH109 - asked, not used
    except FileNotFoundError:
        return True
    return False


def _launch(verb: str, argv: list[str], program: str) -> int:
    from prime_hpc.cli.common import load, parse

    given = parse(verb, [_as_torchrun_writes(word) for word in argv])
    words, nodes = given.words, None
    if VERBS[verb].flags:
        from prime_hpc.launch.by_hand import Nodes, ranks_of_all, run_trainer

        nodes, ranks = Nodes.of(given.flags), ranks_of_all(given.flags)
        words = words if ranks is None else [*words, "--trainer.num-ranks", str(ranks)]
    loaded = load(words, verb, program)
    from prime_hpc.config.errors import ConfigError
    from prime_hpc.launch.local import run, run_role, show_run

    if "--dry-run" in given and nodes is not None:
        raise ConfigError("--dry-run says what this machine alone would run: leave torchrun's flags of nodes out")
    if "--dry-run" in given:
        return show_run(loaded, as_json=False)
    if nodes is not None:
        run_trainer(loaded, nodes)
    return run_role(loaded, verb) if verb in ROLES else run(loaded)


def _as_torchrun_writes(word: str) -> str:
    """Return one of torchrun's flags in the spelling of `VERBS`: it takes `--rdzv_endpoint` too."""
    name, equals, value = word.partition("=")
    dashed = name.replace("_", "-")
    return f"{dashed}{equals}{value}" if any(dashed in flag.names for flag in VERBS["trainer"].flags) else word


def _help(verb: str, program: str) -> str:
    import textwrap

    from prime_hpc.config.help import flag_row, help_text, page_width

    spec = VERBS[verb]
    extra = "\n".join(flag_row(spelling, text) for spelling, text in spec.flag_rows if text)
    if not spec.takes_experiment:
        return f"usage: {program} {spec.usage}\n\n{textwrap.fill(spec.summary, page_width())}\n\n{extra}\n"
    return help_text(verb, f"{program} {spec.usage}", spec.summary, extra)


if __name__ == "__main__":
    sys.exit(main())
