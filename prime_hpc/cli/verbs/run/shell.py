"""`prime-hpc shell RUN [-- COMMAND]`: a shell, or one command, on the node of a running role, with its environment.

Exit codes: the shell's or the command's own. 2 there is no such run, role or rank, or the command line is wrong; 3
nothing is there: the run is over or waits in the queue, the role does not run now, its node is lost, or Slurm cannot be
asked; 126 and 127 as of a shell, a command that cannot be started or is not found.
"""

import os
import sys

from prime_hpc.cli.common import parse
from prime_hpc.config.errors import ConfigError
from prime_hpc.launch.monitor.logs import parse_role
from prime_hpc.launch.monitor.where_to import NotThereError, way_to
from prime_hpc.launch.monitor.who_hangs import find_target, why_idle


def run(argv: list[str], program: str) -> int:
    """Open the shell: this process becomes the one that leads there."""
    place = argv.index("--") if "--" in argv else len(argv)
    command = argv[place + 1 :]
    given = parse("shell", argv[:place])
    (word,) = given.arguments(1, least=1)
    if place < len(argv) and not command:
        raise ConfigError("a command is missing after --")
    role, rank = parse_role(given.get("--role") or "supervisor", given.whole("--rank"))
    if role == "slurm":
        raise ConfigError("no role runs as 'slurm'; the batch script's process is the supervisor")
    target = find_target(word)
    if target.status is not None and (idle := why_idle(target.status)):
        raise NotThereError(idle)
    terminal = os.isatty(0) and os.isatty(1)
    way = way_to(target, role, rank, command, terminal=terminal, environ=os.environ)
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        os.execvpe(way.command[0], way.command, way.environment)
    except OSError as error:
        raise NotThereError(f"{way.command[0]}: {error.strerror}") from error
