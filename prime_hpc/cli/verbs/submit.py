"""`prime-hpc submit FILE`: start an experiment as one job.

Exit codes: 0 submitted (or, followed, the run's own), 2 wrong config, 3 Slurm refused or cannot be reached.
"""

from prime_hpc.cli.common import load, take_flags

FOLLOW = ("--follow", "--no-follow")


def run(argv: list[str], program: str) -> int:
    """Submit; follows a local job's log unless told not to, a Slurm job's if told to."""
    from prime_hpc.launch import submit

    rest, given, _ = take_flags(argv, (*FOLLOW, "--dry-run", "--json"))
    loaded = load(rest, "submit", program)
    return submit(loaded, follow=following(given), dry_run="--dry-run" in given, as_json="--json" in given)


def following(given: set[str]) -> bool | None:
    """Return what was said about following: yes, no, or nothing."""
    return False if "--no-follow" in given else True if "--follow" in given else None
