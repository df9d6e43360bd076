"""`python -m tests.faults.entry rl ARGUMENT ...`: a console script of the product as a module."""

import sys

from prime_hpc import cli

if __name__ == "__main__":
    program, *arguments = sys.argv[1:]
    sys.argv = [program, *arguments]
    sys.exit({"rl": cli.rl, "prime-hpc": cli.main}[program]())
