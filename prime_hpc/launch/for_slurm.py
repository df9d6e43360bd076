"""Decide whether an experiment is meant for Slurm or for this machine."""

from prime_hpc.config import Experiment
from prime_hpc.config.sections.slurm import SiteConfig, SlurmConfig
from prime_hpc.config.site import GENERIC
from prime_hpc.slurm.client import why_not_in_force


def is_for_slurm(experiment: Experiment, site: SiteConfig) -> bool:
    """Return whether an experiment is meant for Slurm: it says so, or there is one, or it states what only Slurm
    has."""
    if experiment.launch != "auto":
        return experiment.launch == "slurm"
    return experiment.slurm != SlurmConfig() or site.name != GENERIC.name or why_not_in_force() is None
