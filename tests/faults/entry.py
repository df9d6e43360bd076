"""`python -m tests.faults.entry rl ARGUMENT ...`: a console script of the product as a module."""

import sys
from collections.abc import Callable

from prime_hpc import cli

if __name__ == "__main__":
    program, *arguments = sys.argv[1:]
    sys.argv = [program, *arguments]
    programs: dict[str, Callable[[], int]] = {"rl": cli.rl, "prime-hpc": cli.main}
    sys.exit(programs[program]())
