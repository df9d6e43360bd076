"""The command line: `prime-hpc VERB ...` and the entrypoints `rl`, `sft`, `trainer`, `orchestrator`, `inference`.

Thin: it resolves the config, calls `prime_hpc.launch` and prints. Nothing heavy is imported, and what `--help`
does not need is imported late.

Exit codes:
    0    done, or help was asked for
    1    the run failed
    2    wrong usage or a wrong config (nothing was started)
    130  interrupted (Ctrl-C)
"""

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from prime_hpc import __version__

if TYPE_CHECKING:
    from prime_hpc.config import Loaded

OK, FAILED, USAGE, INTERRUPTED = 0, 1, 2, 130

ROLES = ("trainer", "orchestrator", "inference")


@dataclass(frozen=True)
class Verb:
    """One thing that the command line can do."""

    summary: str
    usage: str
    """What follows the verb."""
    own_flags: tuple[tuple[str, str], ...] = ()
    """Flags of the verb itself, which are no keys of the experiment, each with its help."""


VERBS = {
    "submit": Verb(
        "Start an experiment as one job: through Slurm where there is one, else on this machine.",
        "FILE [--KEY VALUE ...]",
        (
            ("--no-follow", "return once the job is submitted, instead of following its log"),
            ("--dry-run", "say what would be submitted; start nothing"),
        ),
    ),
    "plan": Verb("Print where each role of an experiment would run; start nothing.", "FILE [--KEY VALUE ...]"),
    "rl": Verb(
        "Train by reinforcement, in the foreground: orchestrator, trainer and, if named, inference servers.",
        "[@ FILE] [--trainer @ FILE] [--orchestrator @ FILE] [--inference @ FILE] [--KEY VALUE ...]",
    ),
    "sft": Verb("Supervised fine-tuning, in the foreground.", "[@ FILE ...] [--KEY VALUE ...]"),
    "trainer": Verb("The trainer alone.", "[@ FILE ...] [--KEY VALUE ...]"),
    "orchestrator": Verb("The orchestrator alone.", "[@ FILE ...] [--KEY VALUE ...]"),
    "inference": Verb("An inference server alone, kept until it is interrupted.", "[@ FILE ...] [--KEY VALUE ...]"),
}


def main(argv: list[str] | None = None) -> int:
    """`prime-hpc`: dispatch to a verb. Returns the exit code."""
    argv = sys.argv[1:] if argv is None else argv
    return _guarded("prime-hpc", lambda: _dispatch(argv))


def rl() -> int:
    """Console script `rl`."""
    return _console("rl")


def sft() -> int:
    """Console script `sft`."""
    return _console("sft")


def trainer() -> int:
    """Console script `trainer`."""
    return _console("trainer")


def orchestrator() -> int:
    """Console script `orchestrator`."""
    return _console("orchestrator")


def inference() -> int:
    """Console script `inference`."""
    return _console("inference")


def _console(verb: str) -> int:
    return _guarded(verb, lambda: run_verb(verb, sys.argv[1:], verb))


def _guarded(program: str, call: Callable[[], int]) -> int:
    """Turn what ends a command early into its exit code."""
    try:
        code = call()
        sys.stdout.flush()
    except KeyboardInterrupt:
        print(f"{program}: interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        # `rl --help | head`: the reader has enough. Keep the interpreter's own last flush from failing again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return OK
    return code


def _dispatch(argv: list[str]) -> int:
    if not argv:
        print(_overview(), end="", file=sys.stderr)
        return USAGE
    if argv[0] in ("-h", "--help", "help"):
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
    lines += ["exit codes: 0 done, 1 the run failed, 2 wrong usage or config, 130 interrupted"]
    return "\n".join(lines) + "\n"


def run_verb(verb: str, argv: list[str], program: str) -> int:
    """Resolve the config of a verb's command line and do what the verb says. Returns the exit code."""
    if "--help" in argv or "-h" in argv:
        print(_help(verb, program), end="")
        return OK
    from prime_hpc.config.errors import ConfigError

    own = {flag for flag, _ in VERBS[verb].own_flags}
    try:
        loaded = _load([token for token in argv if token not in own], verb, program)
        return _launch(verb, loaded, own.intersection(argv))
    except ConfigError as error:
        print(f"{program}: {error.render()}", file=sys.stderr)
        return USAGE


def _launch(verb: str, loaded: "Loaded", flags: set[str]) -> int:
    from prime_hpc import launch

    if verb == "submit":
        return launch.submit(loaded, follow="--no-follow" not in flags, dry_run="--dry-run" in flags)
    if verb == "plan":
        print(launch.plan_text(loaded).rstrip("\n"))
        return OK
    if verb in ROLES:
        return launch.run_role(loaded, verb)
    return launch.run(loaded)


def _help(verb: str, program: str) -> str:
    from prime_hpc.config.help import help_text

    spec = VERBS[verb]
    extra = "\n".join(f"  {flag:<30}{text}" for flag, text in spec.own_flags)
    return help_text(verb, f"{program} {spec.usage}", spec.summary, extra)


def _load(argv: list[str], verb: str, program: str) -> "Loaded":
    """The resolved experiment. Raises ConfigError."""
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


if __name__ == "__main__":
    sys.exit(main())
