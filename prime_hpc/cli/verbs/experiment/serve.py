"""`prime-hpc serve --tinker`: a service for the `tinker` client, in the foreground, until it is interrupted.

As a job of a cluster it is an experiment like any other: `prime-hpc submit FILE --trainer.tinker`.
Exit codes: 0 it was told to stop, 1 it failed, 2 wrong usage or config, 130 interrupted.
"""

from prime_hpc.cli.common import load, parse
from prime_hpc.config.errors import ConfigError


def run(argv: list[str], program: str) -> int:
    """Serve; returns the exit code. Raises ConfigError."""
    from prime_hpc.launch.local import run as run_here

    given = parse("serve", argv)
    if "--tinker" not in given:
        raise ConfigError(f"state what to serve: --tinker; usage: {given.usage}")
    return run_here(load([*given.words, "--trainer.tinker"], "rl", program))
