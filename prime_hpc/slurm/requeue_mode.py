"""Which way back a job has here: requeue, a successor, or none. Pure; `launch` renders by it, the job acts by it."""

from typing import Literal

from prime_hpc.config.sections.slurm import SiteConfig, SlurmConfig

Mode = Literal["requeue", "successor", "off"]


def resolve_mode(config: SlurmConfig, site: SiteConfig, partition: str | None) -> Mode:
    """What `slurm.survive.how` means here.

    Args:
        config: the experiment's Slurm section.
        site: the cluster.
        partition: of the batch component.
    """
    how = config.survive.how
    if how != "auto":
        return how
    facts = [site.partitions.get(name) for name in (partition or "").split(",")]
    cancels = any(part is not None and part.preempt == "cancel" for part in facts)
    return "requeue" if site.requeue and not cancels else "successor"
