"""Lint of what a job's nodes start from: the site's container (what the roles would not find inside, images that many
nodes make at once), and the packed Python environment (`slurm.env_pack`)."""

import platform
import sys
from collections.abc import Iterator
from pathlib import Path

from prime_hpc.config import ConfigError
from prime_hpc.launch.lint.lint_finding import EVERY, Finding, Subject, rule
from prime_hpc.slurm.containers import split_mount, stated_paths
from prime_hpc.slurm.packed_env.facts import PackFacts, environment_hash

_AGAIN = "`prime-hpc env pack` makes it anew"


@rule(*EVERY, slurm=True)
def image(subject: Subject) -> Iterator[Finding]:
    """Check the image, or the environment definition."""
    box = subject.site.container
    if box is None:
        return
    is_path = box.image.startswith((".", "/", "~")) or (box.runtime == "edf" and "/" in box.image)
    if is_path and not box.image.startswith("/"):
        yield Finding.error(
            "PH324",
            "slurm.site",
            f"container.image {box.image!r} of the profile {subject.site.name!r} is a relative path",
            "state it from the root: steps start in the run directory",
        )
    elif is_path and not Path(box.image).exists():
        yield Finding.warning(
            "PH324",
            "slurm.site",
            f"container.image {box.image} of the profile {subject.site.name!r} is not there",
            "mend the path; or it is seen on the compute nodes alone",
        )
    if box.runtime == "apptainer" and "://" in box.image and subject.num_nodes > 1:
        yield Finding.warning(
            "PH324",
            "slurm.site",
            f"each of {subject.num_nodes} nodes fetches and converts {box.image} for itself, at once",
            f"once: apptainer build prime-hpc.sif {box.image}; and state the file on the shared file system",
        )


@rule(*EVERY, slurm=True)
def paths(subject: Subject) -> Iterator[Finding]:
    """Paths of the experiment that something else covers inside."""
    box, experiment = subject.site.container, subject.experiment
    if box is None:
        return
    pairs = [split_mount(mount) for mount in box.mounts]
    for key, path in stated_paths(experiment, subject.site, experiment.run_dir.resolve()).items():
        # of those that hold the path the longest inside is what is seen there
        over = max((p for p in pairs if path.is_relative_to(p[1] or "/")), key=lambda p: len(p[1]), default=None)
        if over is not None and over[0] != over[1]:
            yield Finding.error(
                "PH325",
                None if key.startswith("site.") else key,
                f"{path}: in the container {over[1]} is the host's {over[0]}, so that the path means something else",
                f"mount {over[0]} at its own path too, or state a path that no mount covers",
            )


@rule(*EVERY, slurm=True)
def packed_environment(subject: Subject) -> Iterator[Finding]:
    """Refuse a pack that is not there, damaged, of another machine, or of an environment that has changed since."""
    pack = subject.experiment.slurm.env_pack or subject.site.env_pack
    if pack is None:
        return
    if not pack.is_absolute():
        yield Finding.error(
            "PH333", "slurm.env_pack", f"{pack} is not absolute", "nodes start elsewhere: from the root"
        )
        return
    if subject.site.container is not None:
        yield Finding.info("PH333", "slurm.env_pack", "the roles run in a container: the pack is not used", "")
        return
    try:
        facts = PackFacts.read(pack)
        size = pack.stat().st_size
    except (ConfigError, OSError) as error:
        yield Finding.error("PH333", "slurm.env_pack", str(error), _AGAIN)
        return
    if str(size) != facts.size:
        yield Finding.error("PH333", "slurm.env_pack", f"{pack} has {size} bytes, not {facts.size}", _AGAIN)
    elif facts.machine != platform.machine():
        what = f"{pack} was made for {facts.machine}, this machine is {platform.machine()}"
        yield Finding.warning("PH333", "slurm.env_pack", what, "nodes that differ start from shared storage")
    elif facts.hash != environment_hash(Path(sys.prefix)):
        same = facts.venv == str(Path(sys.prefix).absolute())
        why = "packages were changed since" if same else f"it was made of {facts.venv}"
        what = f"{pack} is of another environment than {sys.prefix} is now: {why}"
        yield Finding.error("PH333", "slurm.env_pack", what, _AGAIN)
