"""Lint of the packed Python environment from which a job's nodes are to start (`slurm.env_pack`)."""

import platform
import sys
from collections.abc import Iterator
from pathlib import Path

from prime_hpc.config import ConfigError
from prime_hpc.launch.lint.lint_finding import Finding, Subject
from prime_hpc.slurm.packed_env.facts import PackFacts, environment_hash

_AGAIN = "`prime-hpc env pack` makes it anew"


def packed_environment(subject: Subject) -> Iterator[Finding]:
    """Refuse a pack that is not there, damaged, of another machine, or of an environment that has changed since."""
    pack = subject.experiment.slurm.env_pack or subject.site.env_pack
    if pack is None:
        return
    if not pack.is_absolute():
        yield Finding(
            "PH333", "error", "slurm.env_pack", f"{pack} is not absolute", "nodes start elsewhere: from the root"
        )
        return
    if subject.site.container is not None:
        yield Finding("PH333", "info", "slurm.env_pack", "the roles run in a container: the pack is not used", "")
        return
    try:
        facts = PackFacts.read(pack)
        size = pack.stat().st_size
    except (ConfigError, OSError) as error:
        yield Finding("PH333", "error", "slurm.env_pack", str(error), _AGAIN)
        return
    if str(size) != facts.size:
        yield Finding("PH333", "error", "slurm.env_pack", f"{pack} has {size} bytes, not {facts.size}", _AGAIN)
    elif facts.machine != platform.machine():
        what = f"{pack} was made for {facts.machine}, this machine is {platform.machine()}"
        yield Finding("PH333", "warning", "slurm.env_pack", what, "nodes that differ start from shared storage")
    elif facts.hash != environment_hash(Path(sys.prefix)):
        what = f"{pack} is of another environment than {sys.prefix} is now: packages were changed since"
        yield Finding("PH333", "error", "slurm.env_pack", what, _AGAIN)


CHECKS = (packed_environment,)
"""Of jobs."""
