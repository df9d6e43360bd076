"""`prime-hpc resume RUN [--ckpt.resume-step N] [--KEY VALUE ...]`: go on from a checkpoint, in the same directory.

Exit codes: as of `submit`.
"""

import sys

from prime_hpc.cli.common import parse
from prime_hpc.cli.verbs.experiment.submit import following
from prime_hpc.config.errors import ConfigError
from prime_hpc.launch.prepare import refuse_anothers
from prime_hpc.launch.resume import load_to_resume
from prime_hpc.slurm.queue import refuse_if_queued
from prime_hpc.store.run_dirs import find_run, read_record


def run(argv: list[str], program: str) -> int:
    """Submit the run again."""
    from prime_hpc.launch.submission import submit

    given = parse("resume", argv)
    rest = given.words
    if not rest or rest[0].startswith("-"):
        raise ConfigError(f"the RUN comes first; usage: {given.usage}")
    run_dir = find_run(rest[0]).resolve()
    refuse_anothers(run_dir)
    if (read_record(run_dir) or {}).get("state") != "sending":  # such a one `submit` settles
        refuse_if_queued(run_dir)  # before anything else is said about it
    loaded = load_to_resume(run_dir, rest[1:])
    for warning in loaded.warnings:
        print(f"{program}: warning: {warning}", file=sys.stderr)
    return submit(loaded, follow=following(given), dry_run="--dry-run" in given, as_json="--json" in given)
