"""`python -m tests.faults.entry rl ARGUMENT ...`: a console script of the product as a module."""

import sys
from collections.abc import Callable

from prime_hpc import cli

if __name__ == "__main__":
    program, *arguments = sys.argv[1:]
    sys.argv = [program, *arguments]
    call: Callable[[], int] = cli.main if program == "prime-hpc" else getattr(cli, program)
    sys.exit(call())
