"""`prime-hpc submit FILE`: start an experiment as one job."""

from prime_hpc.verbs.common import load, take_flags


def run(argv: list[str], program: str) -> int:
    """Submit; follows a local job's log unless told not to."""
    from prime_hpc.launch import submit

    rest, given, _ = take_flags(argv, ("--follow", "--no-follow", "--dry-run", "--json"))
    loaded = load(rest, "submit", program)
    return submit(loaded, follow="--no-follow" not in given, dry_run="--dry-run" in given)
