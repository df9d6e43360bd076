"""`prime-hpc synthesize`: have a teacher play environments or answer prompts, in the foreground.

Exit codes: 0 done, 1 it failed, or no row passed the filters, or too many episodes failed (what was played is there),
2 wrong usage or config, 130 interrupted; started again, it goes on with the episodes that are missing.
"""

from prime_hpc.cli.verbs.experiment.eval import run_alone


def run(argv: list[str], program: str) -> int:
    """Do it; returns the exit code. Raises ConfigError."""
    return run_alone(argv, program, "synthesize")
