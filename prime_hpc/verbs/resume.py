"""`prime-hpc resume RUN [--ckpt.resume-step N] [--KEY VALUE ...]`: go on from a checkpoint, in the same directory.

Exit codes: as of `submit`.
"""

import sys

from prime_hpc.config.errors import ConfigError
from prime_hpc.verbs.common import take_flags
from prime_hpc.verbs.submit import FOLLOW, following

USAGE = "prime-hpc resume RUN [--ckpt.resume-step N] [--KEY VALUE ...] [--follow] [--json]"


def run(argv: list[str], program: str) -> int:
    """Submit the run again."""
    from prime_hpc.launch import submit
    from prime_hpc.launch.control import load_to_resume
    from prime_hpc.launch.records import read_record
    from prime_hpc.launch.runs import find_run
    from prime_hpc.launch.slurm import refuse_if_queued

    rest, given, _ = take_flags(argv, (*FOLLOW, "--dry-run", "--json"))
    if not rest or rest[0].startswith("-"):
        raise ConfigError(f"the RUN comes first; usage: {USAGE}")
    run_dir = find_run(rest[0]).resolve()
    if (read_record(run_dir) or {}).get("state") != "sending":  # such a one `submit` settles
        refuse_if_queued(run_dir)  # before anything else is said about it
    loaded = load_to_resume(run_dir, rest[1:])
    for warning in loaded.warnings:
        print(f"{program}: warning: {warning}", file=sys.stderr)
    return submit(loaded, follow=following(given), dry_run="--dry-run" in given, as_json="--json" in given)
