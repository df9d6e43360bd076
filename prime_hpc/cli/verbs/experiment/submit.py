"""`prime-hpc submit FILE [--best]`: start an experiment as one job, in the shape of `slurm.shapes` that starts first.

Exit codes: 0 submitted (or, followed, the run's own), 2 wrong config, 3 Slurm refused or cannot be reached.
"""

import sys
from typing import TYPE_CHECKING

from prime_hpc.cli.common import Given, load, parse
from prime_hpc.config.errors import ConfigError

if TYPE_CHECKING:
    from prime_hpc.config import Loaded


def run(argv: list[str], program: str) -> int:
    """Submit; follows a local job's log unless told not to, a Slurm job's if told to."""
    from prime_hpc.launch.submission import submit

    given = parse("submit", argv)
    loaded = load(given.words, "submit", program)
    if given.every("--from") and "--best" not in given:
        raise ConfigError("--from belongs to --best")
    if "--best" in given:
        return _submit_best(given, loaded)
    return submit(loaded, follow=following(given), dry_run="--dry-run" in given, as_json="--json" in given)


def _submit_best(given: Given, loaded: "Loaded") -> int:
    """Ask Slurm which shape starts first, and submit that one."""
    from prime_hpc.cli.verbs.experiment.plan import known_of_shapes
    from prime_hpc.launch.plan.when import best_shape, refuse_without_slurm
    from prime_hpc.launch.submission import submit

    refuse_without_slurm(loaded.experiment, "--best")
    words, loaded, step_of, notes = known_of_shapes(given, loaded)
    best, ranking = best_shape(words, loaded, step_of=step_of, notes=notes)
    as_json = "--json" in given
    print(ranking.choice(), file=sys.stderr if as_json else sys.stdout, flush=True)
    return submit(
        best.loaded,
        follow=following(given),
        dry_run="--dry-run" in given,
        as_json=as_json,
        ranking=ranking.as_dict(),
    )


def following(given: Given) -> bool | None:
    """Return what was said about following: yes, no, or nothing."""
    return False if "--no-follow" in given else True if "--follow" in given else None
